//! Backlog and recovery: inventory is paused (or its process stopped) while orders come in. They are answered all the
//! same and wait in its queue; when it is back it works them off, each once.

use std::cell::Cell;
use std::collections::HashSet;
use std::time::Duration;

use clap::{Args, ValueEnum};
use futures_util::{StreamExt, TryStreamExt, stream};
use stockade::config::Part;
use stockade_kernel::clock::mint_id;
use tokio::time::{Instant, MissedTickBehavior};

use super::shop::{Look, Shop};
use super::stage::Stage;
use super::tell::{self, Live};
use super::{Place, Play};
use crate::cli::exit::Exit;

const INVENTORY: &str = "inventory";
/// How often the queue is looked at while figures move.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Orders that may be under way at once, so that a high rate can be kept.
const UNDER_WAY_MAX: usize = 32;
/// Quick to see; `--rate 1 --orders 60` is the classic one.
const ORDERS_USUAL: i64 = 60;
const RATE_USUAL: f64 = 20.0;
/// The most that can be asked for; keeps the counting at the end a matter of seconds.
const ORDERS_MAX: i64 = 100_000;

#[derive(Args)]
pub struct Backlog {
    /// Orders to place while inventory is away.
    #[arg(long, default_value_t = ORDERS_USUAL, value_parser = clap::value_parser!(i64).range(1..=ORDERS_MAX))]
    orders: i64,

    /// Orders per second.
    #[arg(long, default_value_t = RATE_USUAL, value_parser = positive)]
    rate: f64,

    /// Run inventory as a process of its own and stop that, rather than pause it. Needs a Postgres.
    #[arg(long)]
    stop: bool,

    #[command(flatten)]
    place: Place,
}

fn positive(text: &str) -> Result<f64, String> {
    let rate = text.parse::<f64>().map_err(|error| error.to_string())?;
    if rate.is_finite() && rate > 0.0 { Ok(rate) } else { Err("must be more than 0".to_owned()) }
}

impl Play for Backlog {
    const NAME: &str = "backlog";
    const TITLE: &str = "Backlog and recovery";
    const ABOUT: &str = "Inventory goes away while customers keep ordering. Every order is answered and waits in the queue;\n\
                         when inventory is back, the queue drains to 0 and each order is reserved once.";

    fn place(&self) -> &Place {
        &self.place
    }

    async fn play(&self, stage: &mut Stage) -> anyhow::Result<()> {
        let shop = self.open(stage).await?;
        shop.stock_up(self.orders).await?;
        self.send_away(stage, &shop).await?;
        let depth_before = shop.queue(INVENTORY).await?.depth;
        self.place_orders(stage, &shop).await?;
        let peak = self.watch_arrive(&shop, depth_before + self.orders).await?;
        stage.report.figure("depth_peak", peak);
        stage.report.prove_at_least("depth of the queue at its peak", depth_before + self.orders, peak);
        stage.report.prove("units reserved while inventory was away", 0, shop.stock().await?.reserved);
        let called_back_at = Instant::now();
        self.bring_back(stage, &shop).await?;
        self.watch_drain(stage, &shop, called_back_at).await?;
        self.count(stage, &shop).await
    }
}

impl Backlog {
    pub fn usual(place: Place) -> Self {
        Self { orders: ORDERS_USUAL, rate: RATE_USUAL, stop: false, place }
    }

    async fn open(&self, stage: &mut Stage) -> anyhow::Result<Shop> {
        if !self.stop {
            return stage.open().await;
        }
        if self.place.url.is_some() {
            return Err(Exit::Usage.because(
                "--stop stops a process, and the server at --url is not the demo's to stop: leave one of them out",
            ));
        }
        if self.place.postgres()?.is_none() {
            return Err(Exit::Usage.because(
                "--stop runs two processes on one database, and a SQLite file is served by one: \
                 give --database-url postgres://…, or leave --stop out to pause inventory instead",
            ));
        }
        stage.open_own(&[&all_but_inventory(), INVENTORY], &[]).await
    }

    async fn send_away(&self, stage: &mut Stage, shop: &Shop) -> anyhow::Result<()> {
        if self.stop {
            let pid = stage.servers[1].pid().unwrap_or_default();
            stage.step(&format!("Stopping the process of inventory ({pid})"), "its queue loses its only consumer");
            stage.servers[1].stop().await?;
        } else {
            if shop.queue(INVENTORY).await?.paused {
                return Err(Exit::Conflict.because("inventory is paused already; resume it first"));
            }
            stage.step("Pausing inventory", "its queue loses its consumers");
            if stage.servers.is_empty() {
                stage.to_resume = Some((shop.clone(), INVENTORY));
            }
            shop.pause(INVENTORY).await?;
        }
        // The other instances of a server given by its URL follow within two seconds.
        let queue = shop
            .until("the queue to have no consumer", async || {
                let queue = shop.queue(INVENTORY).await?;
                let consumers = queue.consumers.unwrap_or(0);
                Ok(if consumers == 0 { Look::There(queue) } else { Look::NotYet(consumers) })
            })
            .await?;
        tell::note(&format!("{}: depth {}, no consumer", queue.name, queue.depth));
        Ok(())
    }

    async fn place_orders(&self, stage: &mut Stage, shop: &Shop) -> anyhow::Result<()> {
        let (orders, rate) = (self.orders, self.rate);
        stage.step(
            &format!("Placing {orders} orders, {rate} a second"),
            "each answered at once, and the depth of the queue growing with them",
        );
        let (answered, slowest) = (Cell::new(0), Cell::new(Duration::ZERO));
        let (run, start) = (mint_id(), Instant::now());
        let (answered_ref, slowest_ref) = (&answered, &slowest);
        let placing = stream::iter(0..orders)
            .map(|number| async move {
                tokio::time::sleep_until(start + Duration::from_secs_f64(number as f64 / rate)).await;
                let sent_at = Instant::now();
                shop.place(&format!("{run}-{number}"), 1).await?;
                answered_ref.set(answered_ref.get() + 1);
                slowest_ref.set(slowest_ref.get().max(sent_at.elapsed()));
                anyhow::Ok(())
            })
            .buffer_unordered(UNDER_WAY_MAX)
            .try_collect::<()>();
        tokio::pin!(placing);
        let mut live = Live::start();
        let mut show = async || {
            let depth = shop.queue(INVENTORY).await?.depth;
            live.show(format!("depth {}  answered {}", tell::gauge(depth, orders), answered.get()));
            anyhow::Ok(())
        };
        let mut tick = tokio::time::interval(LOOK_EVERY);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                placed = &mut placing => break placed?,
                _ = tick.tick() => show().await?,
            }
        }
        show().await?;
        live.end();
        stage.report.figure("orders", orders);
        stage.report.figure("rate", rate);
        stage.report.figure("slowest_answer_ms", millis(slowest.get()));
        stage.report.prove("orders answered with 201 while inventory was away", orders, answered.get());
        Ok(())
    }

    /// Waits until all that was placed is in the queue; returns its depth.
    async fn watch_arrive(&self, shop: &Shop, depth_due: i64) -> anyhow::Result<i64> {
        let mut live = Live::start();
        let peak = shop
            .until("every order to be in the queue", async || {
                let depth = shop.queue(INVENTORY).await?.depth;
                live.show(format!("depth {}", tell::gauge(depth, depth_due)));
                Ok(if depth >= depth_due { Look::There(depth) } else { Look::NotYet(depth) })
            })
            .await;
        live.end();
        peak
    }

    async fn bring_back(&self, stage: &mut Stage, shop: &Shop) -> anyhow::Result<()> {
        let look_for = "the depth falling to 0";
        if self.stop {
            stage.step("Starting the process of inventory again", look_for);
            stage.servers[1].start_again().await
        } else {
            stage.step("Resuming inventory", look_for);
            shop.resume(INVENTORY).await?;
            stage.to_resume = None;
            Ok(())
        }
    }

    async fn watch_drain(&self, stage: &mut Stage, shop: &Shop, since: Instant) -> anyhow::Result<()> {
        let mut live = Live::start();
        let drained = shop
            .until("the queue to drain", async || {
                let (queue, stock) = (shop.queue(INVENTORY).await?, shop.stock().await?);
                let gauge = tell::gauge(queue.depth, self.orders);
                live.show(format!("depth {gauge}  units reserved {}", stock.reserved));
                // Counted by the stock as well: the queue of a server with other customers is never long empty.
                let left = queue.waiting() + stock.available;
                Ok(if left == 0 { Look::There(queue.waiting()) } else { Look::NotYet(left) })
            })
            .await;
        live.end();
        stage.report.prove("depth of the queue afterwards", 0, drained?);
        let took = since.elapsed();
        let per_second = (self.orders as f64 / took.as_secs_f64()).round();
        tell::note(&format!(
            "drained {} ms after inventory was called back: {per_second} orders a second",
            millis(took)
        ));
        stage.report.figure("drain_ms", millis(took));
        stage.report.figure("drained_per_second", per_second);
        Ok(())
    }

    async fn count(&self, stage: &mut Stage, shop: &Shop) -> anyhow::Result<()> {
        stage.step("Counting", "as many reservations as orders, each for another order");
        let orders = shop
            .until("every order to hear of its reservation", async || {
                let orders = shop.orders().await?;
                let open = orders.iter().filter(|order| order.status == "placed").count();
                Ok(if open == 0 { Look::There(orders) } else { Look::NotYet(i64::try_from(open)?) })
            })
            .await?;
        let reservations = shop.reservations().await?;
        let reserved_for: HashSet<_> = reservations.iter().map(|reservation| reservation.order_id).collect();
        let served = orders.iter().filter(|order| order.status == "reserved" && reserved_for.contains(&order.id));
        let report = &mut stage.report;
        report.prove("orders that are there", self.orders, orders.len());
        report.prove("orders reserved", self.orders, served.count());
        report.prove("reservations", self.orders, reservations.len());
        report.prove("units reserved, one per order", self.orders, shop.stock().await?.reserved);
        Ok(())
    }
}

/// As for STOCKADE_MODULES.
fn all_but_inventory() -> String {
    let parts = Part::value_variants().iter().filter(|part| ![Part::All, Part::Inventory].contains(part));
    let names = parts.filter_map(|part| Some(part.to_possible_value()?.get_name().to_owned()));
    names.collect::<Vec<_>>().join(",")
}

fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e4).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_process_runs_everything_else() {
        let modules = all_but_inventory();
        let parts: Vec<&str> = modules.split(',').collect();
        assert!(!parts.contains(&"inventory") && !parts.contains(&"all"), "{parts:?}");
        assert_eq!(parts.len(), Part::value_variants().len() - 2);
        assert!(["api", "relay", "orders", "dead-letters"].iter().all(|part| parts.contains(part)), "{parts:?}");
    }
}
