//! Duplicates: one `order.placed`, published again under the same event id, as brokers and nervous producers do. The
//! stock is deducted once, and each copy is counted in the inbox.

use clap::Args;
use serde_json::json;
use stockade::orders::events::PLACED;
use stockade_kernel::clock::mint_id;
use uuid::Uuid;

use super::shop::{InboxRow, Look, Shop};
use super::stage::Stage;
use super::tell::{self, Live};
use super::{Place, Play};

const INVENTORY: &str = "inventory";
const ON_HAND: i64 = 100;
const QUANTITY: i64 = 5;
const TIMES_USUAL: i64 = 2;

#[derive(Args)]
pub struct Duplicates {
    /// How often the event is published in all.
    #[arg(long, default_value_t = TIMES_USUAL, value_parser = clap::value_parser!(i64).range(2..=1000))]
    times: i64,

    #[command(flatten)]
    place: Place,
}

impl Play for Duplicates {
    const NAME: &str = "duplicates";
    const TITLE: &str = "Duplicates";
    const ABOUT: &str = "A broker delivers at least once, so the same order.placed may come again. It carries the same event\n\
                         id, and its effect happens once: stock deducted, reservation made, customer told.";

    fn place(&self) -> &Place {
        &self.place
    }

    async fn play(&self, stage: &mut Stage) -> anyhow::Result<()> {
        let shop = stage.open_with_lab().await?;
        shop.stock_up(ON_HAND).await?;
        let (event_id, order_id) = (mint_id(), mint_id());
        let body = shop.order_placed(event_id, order_id, QUANTITY).to_string();

        stage.step(
            &format!("Publishing an order.placed for {QUANTITY} units, event {event_id}"),
            &format!("{QUANTITY} of {ON_HAND} units reserved"),
        );
        shop.publish(&json!({ "routing_key": PLACED, "message_id": event_id, "body": body })).await?;
        self.watch(&shop, event_id, 0).await?;
        let first = shop.stock().await?;
        stage.report.prove("units reserved after the first copy", QUANTITY, first.reserved);

        let copies = self.times - 1;
        let times = if copies == 1 { "once more".to_owned() } else { format!("{copies} times more") };
        stage.step(
            &format!("Publishing the same bytes {times}"),
            &format!("duplicates counted in the inbox: {copies}; still {QUANTITY} units reserved"),
        );
        shop.publish(&json!({ "routing_key": PLACED, "message_id": event_id, "body": body, "times": copies })).await?;
        let row = self.watch(&shop, event_id, copies).await?;

        stage.step("Counting", "one effect, however many copies");
        let notices = shop
            .until("the customer to be told", async || {
                let notices = shop.notices_of(order_id).await?;
                Ok(if notices > 0 { Look::There(notices) } else { Look::NotYet(0) })
            })
            .await?;
        let stock = shop.stock().await?;
        let report = &mut stage.report;
        report.figure("event_id", event_id.to_string());
        report.figure("published", self.times);
        report.prove("copies counted as duplicates in the inbox", copies, row.duplicates);
        report.prove("the event in the inbox", "processed", row.state);
        report.prove("units reserved after all copies", QUANTITY, stock.reserved);
        report.prove("units available", ON_HAND - QUANTITY, stock.available);
        report.prove("reservations", 1, shop.reservations().await?.len());
        report.prove("notices to the customer", 1, notices);
        Ok(())
    }
}

impl Duplicates {
    pub fn usual(place: Place) -> Self {
        Self { times: TIMES_USUAL, place }
    }

    /// Waits until inventory has dealt with the event and with `copies` more of it.
    async fn watch(&self, shop: &Shop, event_id: Uuid, copies: i64) -> anyhow::Result<InboxRow> {
        let mut live = Live::start();
        let row = shop
            .until("inventory to deal with the event", async || {
                let Some(row) = shop.inbox(INVENTORY, event_id).await? else { return Ok(Look::NotYet(-1)) };
                let reserved = shop.stock().await?.reserved;
                let gauge = tell::gauge(row.duplicates, self.times - 1);
                live.show(format!("{:<9}  duplicates {gauge}  units reserved {reserved}", row.state));
                Ok(if row.duplicates >= copies { Look::There(row) } else { Look::NotYet(row.duplicates) })
            })
            .await;
        live.end();
        row
    }
}
