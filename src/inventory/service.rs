//! What inventory does, each in the caller's transaction.

use std::collections::{BTreeMap, HashSet};

use uuid::Uuid;

use super::error::InventoryError;
use super::events::{ADJUSTED, FAILED, InventoryFailed, InventoryReserved, RESERVED, ReservedLine, StockAdjusted};
use super::model::{Advance, Decision, Demand, Move, Shelf, State};
use super::store::{self, Adjustment, Moved, NewReservation, Stock, Survey};
use crate::numbers::Numbers;
use crate::orders::events::{OrderPlaced, QUANTITY_MAX, Quantity, Sku};
use stockade_kernel::clock::{Timestamp, mint_id};
use stockade_kernel::db::Tx;
use stockade_kernel::messaging::{Event, Origin, Outcome, outbox};

/// An order that was placed, and the place of its event in the batch.
#[derive(Debug, Clone, Copy)]
pub struct Placed<'a> {
    pub place: usize,
    pub event: &'a Event,
    pub order: &'a OrderPlaced,
}

/// The stock that a batch of orders asks for, a key for each line.
fn shelves_of<'a>(batch: &[Placed<'a>]) -> Vec<(&'a str, &'a Sku)> {
    let of_order = |placed: &Placed<'a>| {
        let (event, order) = (placed.event, placed.order);
        order.items.iter().map(|item| (event.group_id.as_str(), &item.sku))
    };
    batch.iter().flat_map(of_order).collect()
}

/// Holds stock for a batch of orders and says what came of each, in three trips to the database at most. An order that
/// already has a reservation (or the tombstone of a cancellation) is left as it is.
pub async fn reserve_many(
    tx: &mut Tx,
    batch: &[Placed<'_>],
    numbers: &Numbers,
    outcomes: &mut [Outcome],
) -> sqlx::Result<()> {
    let now = tx.now();
    let orders: Vec<(&str, Uuid)> =
        batch.iter().map(|placed| (placed.event.group_id.as_str(), placed.order.order_id)).collect();
    let mut keys = shelves_of(batch);
    keys.sort_unstable();
    keys.dedup();
    let Survey { reserved: mut settled, stock } = store::survey(tx, &orders, &keys).await?;
    let mut shelf = Shelf::new(stock.into_iter().map(|row| {
        let available = row.available();
        ((row.group_id, row.sku), available)
    }));
    let mut reservations = Vec::new();
    let mut events = Vec::with_capacity(batch.len());
    let mut told = Told::default();
    for placed in batch {
        // `insert`: of two different events on one order, only the first is heard
        if !settled.insert((placed.event.group_id.clone(), placed.order.order_id)) {
            outcomes[placed.place] = Outcome::moot("the order has its reservation already");
            continue;
        }
        let demand = Demand::of(&placed.order.items);
        match shelf.reserve(&placed.event.group_id, &demand) {
            Decision::Reserved => {
                let reservation = NewReservation {
                    id: mint_id(),
                    number: numbers.mint(),
                    group_id: placed.event.group_id.clone(),
                    order_id: placed.order.order_id,
                    cause_event_id: placed.event.event_id,
                    lines: demand.lines().map(|(sku, quantity)| (sku.clone(), quantity)).collect(),
                };
                events.push(reserved_event(placed.event, &reservation, now));
                told.push(placed, || format!("RESERVED {} as {}", placed.order.order_number, reservation.number));
                reservations.push(reservation);
            }
            Decision::Failed { reason, shortages } => {
                told.push(placed, || format!("REJECTED {}: {reason}", placed.order.order_number));
                let failed = InventoryFailed { order_id: placed.order.order_id, reason, shortages };
                let id = placed.order.order_id.to_string();
                events.push(Event::new(FAILED, id, placed.event.begets(), now, &failed));
            }
        }
    }
    if !reservations.is_empty() {
        // In the order in which tombstones are written, or the two could wait for each other.
        reservations.sort_unstable_by(|a, b| (&a.group_id, a.order_id).cmp(&(&b.group_id, b.order_id)));
        store::hold(tx, &shelf.into_taken(), &reservations, now).await?;
    }
    outbox::append_events(tx, events).await?;
    tx.after_commit(move || told.tell());
    Ok(())
}

/// What the log is to say of orders once it is true: a line each that reads alone.
#[derive(Default)]
struct Told(Vec<(Uuid, Uuid, String, String)>);

impl Told {
    fn push(&mut self, placed: &Placed<'_>, line: impl FnOnce() -> String) {
        if tracing::enabled!(tracing::Level::INFO) {
            let event = placed.event;
            self.0.push((placed.order.order_id, event.event_id, event.correlation_id.clone(), line()));
        }
    }

    fn tell(self) {
        for (order_id, event_id, correlation_id, line) in self.0 {
            tracing::info!(order.id = %order_id, event.id = %event_id, correlation.id = correlation_id, "{line}");
        }
    }
}

fn reserved_event(cause: &Event, reservation: &NewReservation, now: Timestamp) -> Event {
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
    Event::new(RESERVED, reservation.order_id.to_string(), cause.begets(), now, &reserved)
}

/// A reservation that is asked to move, and the place of the event in the batch.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    pub place: usize,
    pub event: &'a Event,
    pub order_id: Uuid,
    pub step: Move,
}

impl<'a> Asked<'a> {
    fn order(&self) -> (&'a str, Uuid) {
        (&self.event.group_id, self.order_id)
    }
}

/// What is asked of each order's reservation, in the order of its life, until it is settled.
type Open<'a> = BTreeMap<(String, Uuid), Vec<Asked<'a>>>;

/// Moves reservations along as their orders are paid, fulfilled, cancelled or expire, and holds stock for orders
/// placed in the same batch. What stands moves first, so that stock given back can be held again. Stock is locked
/// before reservations, each in the order of its keys, as [`reserve_many`] does; but for a reservation that another instance
/// commits in between, whose stock is locked as it is let go.
pub async fn live_on(
    tx: &mut Tx,
    mut placed: Vec<Placed<'_>>,
    asked: &[Asked<'_>],
    numbers: &Numbers,
    outcomes: &mut [Outcome],
) -> sqlx::Result<()> {
    let mut open = Open::new();
    for asked in asked {
        open.entry((asked.event.group_id.clone(), asked.order_id)).or_default().push(*asked);
    }
    for asked in open.values_mut() {
        asked.sort_by_key(|asked| asked.step);
    }
    lock_shelves(tx, &placed, asked).await?;
    move_standing(tx, &mut open, outcomes).await?;
    let cancelled: HashSet<(&str, Uuid)> =
        asked.iter().filter(|asked| asked.step == Move::Release).map(Asked::order).collect();
    placed.retain(|placed| {
        let is_cancelled = cancelled.contains(&(placed.event.group_id.as_str(), placed.order.order_id));
        if is_cancelled {
            outcomes[placed.place] = Outcome::moot("the order is over already");
        }
        !is_cancelled
    });
    if !placed.is_empty() {
        reserve_many(tx, &placed, numbers, outcomes).await?;
        move_standing(tx, &mut open, outcomes).await?;
    }
    while !open.is_empty() {
        settle_absent(tx, &mut open, numbers, outcomes).await?;
        // What is left was written by another transaction while this one looked away.
        move_standing(tx, &mut open, outcomes).await?;
    }
    Ok(())
}

/// Locks all stock that this batch may change, in one go; payments alone change none.
async fn lock_shelves(tx: &mut Tx, placed: &[Placed<'_>], asked: &[Asked<'_>]) -> sqlx::Result<()> {
    let orders: Vec<(&str, Uuid)> = asked.iter().filter(|asked| asked.step.moves_stock()).map(Asked::order).collect();
    let skus = shelves_of(placed);
    if orders.is_empty() && skus.is_empty() { Ok(()) } else { store::lock_shelves(tx, &orders, &skus).await }
}

/// Moves the reservations that there are, and takes their orders off the list.
async fn move_standing(tx: &mut Tx, open: &mut Open<'_>, outcomes: &mut [Outcome]) -> sqlx::Result<()> {
    if open.is_empty() {
        return Ok(());
    }
    let now = tx.now();
    let orders: Vec<(&str, Uuid)> = open.keys().map(|(group_id, order_id)| (group_id.as_str(), *order_id)).collect();
    let standing = store::lock_reservations(tx, &orders).await?;
    let mut moved = Vec::new();
    for row in standing {
        let Some(asked) = open.remove(&(row.group_id.clone(), row.order_id)) else { continue };
        if let Some(to) = advance(Some(row.state), &asked, outcomes).filter(|to| *to != row.state) {
            moved.push(Moved { group_id: row.group_id, id: row.id, from: row.state, to });
        }
    }
    if moved.is_empty() { Ok(()) } else { store::move_many(tx, &moved, now).await }
}

/// Deals with orders that have no reservation. A tombstone is written for each, which keeps the order from being
/// placed until this transaction ends; where it is not one that was asked for, it goes again.
async fn settle_absent(
    tx: &mut Tx,
    open: &mut Open<'_>,
    numbers: &Numbers,
    outcomes: &mut [Outcome],
) -> sqlx::Result<()> {
    let now = tx.now();
    let tombstones: Vec<NewReservation> = open
        .iter()
        .map(|((group_id, order_id), asked)| NewReservation {
            id: mint_id(),
            number: numbers.mint(),
            group_id: group_id.clone(),
            order_id: *order_id,
            cause_event_id: asked[0].event.event_id,
            lines: Vec::new(),
        })
        .collect();
    let written = store::insert_tombstones(tx, &tombstones, now).await?;
    let mut needless = Vec::new();
    for tombstone in tombstones.iter().filter(|tombstone| written.contains(&tombstone.id)) {
        let Some(asked) = open.remove(&(tombstone.group_id.clone(), tombstone.order_id)) else { continue };
        if advance(None, &asked, outcomes).is_none() {
            needless.push((tombstone.group_id.as_str(), tombstone.id));
        }
    }
    if needless.is_empty() { Ok(()) } else { store::delete_tombstones(tx, &needless).await }
}

/// Takes a reservation as far as it is asked to go, and notes what came of each event.
fn advance(mut state: Option<State>, asked: &[Asked<'_>], outcomes: &mut [Outcome]) -> Option<State> {
    for asked in asked {
        outcomes[asked.place] = match asked.step.from(state) {
            Advance::To(next) => {
                state = Some(next);
                Outcome::Done
            }
            Advance::Already => Outcome::moot("the reservation is that far already"),
            Advance::Early { awaits } => Outcome::wait_for(awaits),
            Advance::Never => {
                let state = state.map_or("not there", State::as_str);
                Outcome::reject(format!(
                    "the reservation is {state}, and {} contradicts that",
                    asked.event.routing_key()
                ))
            }
        };
    }
    state
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
    outbox::append_events(tx, vec![event]).await?;
    (row.on_hand, row.updated_at) = (on_hand, now);
    Ok(row)
}
