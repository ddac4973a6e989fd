//! What inventory does, each in the caller's transaction.

use uuid::Uuid;

use super::error::InventoryError;
use super::events::{ADJUSTED, FAILED, InventoryFailed, InventoryReserved, RESERVED, ReservedLine, StockAdjusted};
use super::model::{Decision, Demand, Shelf};
use super::store::{self, Adjustment, NewReservation, Stock};
use crate::clock::{Timestamp, mint_id};
use crate::db::Tx;
use crate::messaging::{Event, Message, Origin, outbox};
use crate::numbers::Numbers;
use crate::orders::events::{OrderPlaced, QUANTITY_MAX, Quantity, Sku};

/// Holds stock for a batch of orders and says what came of each, in seven statements at most. An order that
/// already has a reservation (or the tombstone of a cancellation) is left as it is.
pub async fn reserve_many(tx: &mut Tx, batch: &[&Message<OrderPlaced>], numbers: &Numbers) -> sqlx::Result<()> {
    let now = tx.now();
    let orders: Vec<(&str, Uuid)> =
        batch.iter().map(|message| (message.event.group_id.as_str(), message.fact.order_id)).collect();
    let mut settled = store::reserved_already(tx, &orders).await?;
    let demands: Vec<(&Message<OrderPlaced>, Demand)> = batch
        .iter()
        // `insert`: of two different events on one order, only the first is heard
        .filter(|message| settled.insert((message.event.group_id.clone(), message.fact.order_id)))
        .map(|message| (*message, Demand::of(&message.fact.items)))
        .collect();
    let mut keys: Vec<(&str, &Sku)> = demands
        .iter()
        .flat_map(|(message, demand)| demand.lines().map(|(sku, _)| (message.event.group_id.as_str(), sku)))
        .collect();
    keys.sort_unstable();
    keys.dedup();
    let stock = store::lock_stock(tx, &keys).await?;
    let mut shelf = Shelf::new(stock.into_iter().map(|row| {
        let available = row.available();
        ((row.group_id, row.sku), available)
    }));
    let mut reservations = Vec::new();
    let mut events = Vec::with_capacity(demands.len());
    let mut told = Told::default();
    for (message, demand) in &demands {
        match shelf.reserve(&message.event.group_id, demand) {
            Decision::Reserved => {
                let reservation = NewReservation {
                    id: mint_id(),
                    number: numbers.mint(),
                    group_id: message.event.group_id.clone(),
                    order_id: message.fact.order_id,
                    cause_event_id: message.event.event_id,
                    lines: demand.lines().map(|(sku, quantity)| (sku.clone(), quantity)).collect(),
                };
                events.push(reserved_event(message, &reservation, now));
                told.push(message, || format!("RESERVED {} as {}", message.fact.order_number, reservation.number));
                reservations.push(reservation);
            }
            Decision::Failed { reason, shortages } => {
                told.push(message, || format!("REJECTED {}: {reason}", message.fact.order_number));
                let failed = InventoryFailed { order_id: message.fact.order_id, reason, shortages };
                let id = message.fact.order_id.to_string();
                events.push(Event::new(FAILED, id, message.event.begets(), now, &failed));
            }
        }
    }
    if !reservations.is_empty() {
        store::hold(tx, &shelf.into_taken(), &reservations, now).await?;
    }
    outbox::append_events(tx, &events).await?;
    tx.after_commit(move || told.tell());
    Ok(())
}

/// What the log is to say of orders once it is true: a line each that reads alone.
#[derive(Default)]
struct Told(Vec<(Uuid, Uuid, String, String)>);

impl Told {
    fn push(&mut self, message: &Message<OrderPlaced>, line: impl FnOnce() -> String) {
        if tracing::enabled!(tracing::Level::INFO) {
            let event = &message.event;
            self.0.push((message.fact.order_id, event.event_id, event.correlation_id.clone(), line()));
        }
    }

    fn tell(self) {
        for (order_id, event_id, correlation_id, line) in self.0 {
            tracing::info!(order.id = %order_id, event.id = %event_id, correlation.id = correlation_id, "{line}");
        }
    }
}

fn reserved_event(message: &Message<OrderPlaced>, reservation: &NewReservation, now: Timestamp) -> Event {
    // A sum past one line's limit is told as several lines, so that what we say can always be read.
    let lines = reservation.lines.iter().flat_map(|(sku, quantity)| {
        let (whole, rest) = (quantity / QUANTITY_MAX, quantity % QUANTITY_MAX);
        let parts = std::iter::repeat_n(QUANTITY_MAX, usize::try_from(whole).unwrap_or(0)).chain(Some(rest));
        parts.filter_map(|part| Some(ReservedLine { sku: sku.clone(), quantity: Quantity::try_from(part).ok()? }))
    });
    let reserved = InventoryReserved {
        order_id: reservation.order_id,
        reservation_id: reservation.id,
        reservation_number: reservation.number.clone(),
        lines: lines.collect(),
    };
    Event::new(RESERVED, reservation.order_id.to_string(), message.event.begets(), now, &reserved)
}

/// A change to what is on the shelf.
#[derive(Debug, Clone, Copy)]
pub enum Change {
    /// Set it to this, creating the SKU if need be.
    Set(i64),
    /// Change it by this.
    By(i64),
}

/// Changes what is on hand: the row, the adjustment that explains it and its event are one commit.
pub async fn adjust(
    tx: &mut Tx,
    origin: Origin,
    sku: &Sku,
    change: Change,
    reason: &str,
) -> Result<Stock, InventoryError> {
    let now = tx.now();
    if let Change::Set(_) = change {
        store::create_stock(tx, &origin.group_id, sku, now).await?;
    }
    let row = store::lock_stock(tx, &[(origin.group_id.as_str(), sku)]).await?.pop();
    let mut row = row.ok_or_else(|| InventoryError::NotFound { what: "SKU", id: sku.to_string() })?;
    let on_hand = match change {
        Change::Set(on_hand) => on_hand,
        Change::By(delta) => row.on_hand.saturating_add(delta),
    };
    if !(row.reserved.max(0)..=QUANTITY_MAX).contains(&on_hand) {
        if on_hand > QUANTITY_MAX {
            let rule = format!("on hand may be {QUANTITY_MAX} at most, not {on_hand}");
            return Err(InventoryError::Invalid { pointer: "", rule });
        }
        return Err(InventoryError::WouldGoNegative { on_hand, reserved: row.reserved });
    }
    let delta = on_hand - row.on_hand;
    if delta == 0 {
        return Ok(row);
    }
    let adjustment = Adjustment {
        id: mint_id(),
        group_id: origin.group_id.clone(),
        sku: sku.clone(),
        delta,
        reason: reason.to_owned(),
        on_hand,
    };
    store::adjust(tx, &adjustment, now).await?;
    let posted = StockAdjusted { sku: sku.clone(), delta, reason: reason.to_owned(), on_hand };
    let event = Event::new(ADJUSTED, adjustment.id.to_string(), origin, now, &posted);
    outbox::append_events(tx, &[event]).await?;
    (row.on_hand, row.updated_at) = (on_hand, now);
    Ok(row)
}
