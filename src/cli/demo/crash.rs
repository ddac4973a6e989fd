//! Crash: the process dies at the worst moment, with the effects of a message committed and the message not yet
//! acknowledged. It is started again, the message is delivered again, and the inbox dismisses it.

use std::collections::HashSet;
use std::os::unix::process::ExitStatusExt;

use clap::Args;
use futures_util::future::join_all;
use stockade_kernel::clock::mint_id;
use uuid::Uuid;

use super::shop::{Look, Order, Shop};
use super::stage::Stage;
use super::tell::{self, Live};
use super::{Place, Play};
use crate::cli::exit::Exit;

const INVENTORY: &str = "inventory";
const POINT: &str = "consumer.after_commit";
const SIGABRT: i32 = 6;
const ORDERS_USUAL: i64 = 10;
/// The embedded queue gives a dead process's messages to others after this long; a broker does it at once.
const LEASE: &str = "2s";

#[derive(Args)]
pub struct Crash {
    /// Orders placed at once; the process dies over the first of them.
    #[arg(long, default_value_t = ORDERS_USUAL, value_parser = clap::value_parser!(i64).range(1..=1000))]
    orders: i64,

    #[command(flatten)]
    place: Place,
}

impl Play for Crash {
    const NAME: &str = "crash";
    const TITLE: &str = "A crash between commit and acknowledgement";
    const ABOUT: &str = "Stock is reserved and committed, and before the message is acknowledged the process dies. So the\n\
                         message is delivered again, and must neither be lost nor be done twice.";

    fn place(&self) -> &Place {
        &self.place
    }

    async fn play(&self, stage: &mut Stage) -> anyhow::Result<()> {
        if self.place.url.is_some() {
            return Err(Exit::Usage.because(
                "this demo kills the server and starts it again, and the one at --url is not the demo's to kill: leave \
                 --url out, and it starts one of its own, on the same engines if you give it --database-url and \
                 --broker-url. To see that very server die, where something starts it again, POST to its /v1/lab/crash",
            ));
        }
        let shop = stage.open_own(&["all"], &["--lease", LEASE]).await?;
        shop.stock_up(self.orders).await?;
        let run = mint_id();
        self.die(stage, &shop, run).await?;

        stage.step("Starting it again", "customers who ask again get their order; each order reserved");
        stage.servers[0].start_again().await?;
        let shop = shop.at(&stage.servers[0].url)?;
        tell::note(&format!("process {} at {}", stage.servers[0].pid().unwrap_or_default(), shop.url()));
        let orders = self.ask_again(&shop, run).await?;

        stage.step(
            "Waiting for the message that was never acknowledged",
            "delivered again, recognised by its event id, counted as a duplicate",
        );
        let duplicates = self.watch_redelivery(&shop, &orders).await?;
        stage.report.prove_at_least("redelivered and dismissed", 1, duplicates);
        self.count(stage, &shop, &orders).await
    }
}

impl Crash {
    pub fn usual(place: Place) -> Self {
        Self { orders: ORDERS_USUAL, place }
    }

    /// Arms the crash and places the orders that set it off.
    async fn die(&self, stage: &mut Stage, shop: &Shop, run: Uuid) -> anyhow::Result<()> {
        let pid = stage.servers[0].pid().unwrap_or_default();
        stage.step(
            &format!("Placing {} orders; process {pid} is to die once inventory has committed", self.orders),
            "the process gone, killed by a signal",
        );
        shop.arm_crash(POINT, INVENTORY).await?;
        let answers = join_all((0..self.orders).map(|number| async move { place(shop, run, number).await })).await;
        let answered = answers.iter().filter(|answer| answer.is_ok()).count();
        let status = stage.servers[0].ended(self.place.patience).await?;
        let status = status.ok_or_else(|| Exit::Broken.because("the process did not reach the point to die at"))?;
        tell::note(&format!("process {pid} ended by {status}; {answered} of {} orders were answered", self.orders));
        stage.report.figure("answered_before_the_crash", answered);
        stage.report.prove("the signal that the process died of", SIGABRT, status.signal());
        Ok(())
    }

    /// Those who got no answer ask again under the same key, and so does everybody else.
    async fn ask_again(&self, shop: &Shop, run: Uuid) -> anyhow::Result<Vec<Order>> {
        let mut orders = Vec::new();
        for number in 0..self.orders {
            orders.push(place(shop, run, number).await?);
        }
        let mut live = Live::start();
        let reserved = shop
            .until("every order to be reserved", async || {
                let open = shop.orders().await?.iter().filter(|order| order.status == "placed").count();
                let (all, open) = (self.orders, i64::try_from(open)?);
                live.show(format!("reserved {}", tell::gauge(all - open, all)));
                Ok(if open == 0 { Look::There(()) } else { Look::NotYet(open) })
            })
            .await;
        live.end();
        reserved.map(|()| orders)
    }

    /// Waits until the queue is empty and something was dismissed; how many deliveries were.
    async fn watch_redelivery(&self, shop: &Shop, orders: &[Order]) -> anyhow::Result<i64> {
        let mut events = Vec::new();
        for order in orders {
            events.push(shop.placed_event(order.id).await?);
        }
        let mut live = Live::start();
        let dismissed = shop
            .until("the redelivery", async || {
                let mut duplicates = 0;
                for event in &events {
                    duplicates += shop.inbox(INVENTORY, *event).await?.map_or(0, |row| row.duplicates);
                }
                let left = shop.queue(INVENTORY).await?.waiting();
                live.show(format!("unacknowledged or waiting {left}  duplicates dismissed {duplicates}"));
                Ok(if duplicates > 0 && left == 0 { Look::There(duplicates) } else { Look::NotYet(duplicates - left) })
            })
            .await;
        live.end();
        dismissed
    }

    async fn count(&self, stage: &mut Stage, shop: &Shop, orders: &[Order]) -> anyhow::Result<()> {
        stage.step("Counting", "nothing lost, nothing done twice");
        let asked: HashSet<Uuid> = orders.iter().map(|order| order.id).collect();
        let (there, reservations) = (shop.orders().await?, shop.reservations().await?);
        let reserved_for: HashSet<Uuid> = reservations.iter().map(|reservation| reservation.order_id).collect();
        let mut notices = 0;
        for order in &asked {
            notices += shop
                .until("every customer to be told", async || {
                    let notices = shop.notices_of(*order).await?;
                    Ok(if notices > 0 { Look::There(notices) } else { Look::NotYet(0) })
                })
                .await?;
        }
        let report = &mut stage.report;
        report.figure("orders", self.orders);
        report.prove("orders that are there, one per customer", self.orders, there.len());
        report.prove("orders reserved", self.orders, there.iter().filter(|order| order.status == "reserved").count());
        report.prove("reservations", self.orders, reservations.len());
        report.prove("orders without a reservation", 0, asked.difference(&reserved_for).count());
        report.prove("units reserved, one per order", self.orders, shop.stock().await?.reserved);
        report.prove("notices, one per customer", self.orders, notices);
        Ok(())
    }
}

async fn place(shop: &Shop, run: Uuid, number: i64) -> anyhow::Result<Order> {
    shop.place(&format!("{run}-{number}"), 1).await
}
