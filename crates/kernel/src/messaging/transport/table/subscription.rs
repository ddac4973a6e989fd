//! One consumer's hold on a table queue.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use super::{Leaving, Look, Owed, Places, Row, TableQueue, bell_of};
use super::{beat, claim, delete, give_back, move_to, renew, take_out, unpack};
use crate::clock::{Timestamp, mint_id};
use crate::db::{Bell, Hatch, Parcel, Part, Place, Tx};
use crate::messaging::transport::{Delivery, Tag, TransportError, death_record, dlq_of};

/// How often it says that it is there.
const HEARTBEAT_EVERY: Duration = Duration::from_secs(5);

/// Acknowledged rows leave dead entries at the low end of Postgres' index, and while any transaction is held open they
/// cannot be cleared: a claim that began at the very start would wade through all of them. So most claims begin this
/// far below the newest message taken, which covers what was committed late, and one a second begins at the start.
const LOOK_BACK: i64 = 10_000;
const LOOK_FROM_START_EVERY: Duration = Duration::from_secs(1);

/// How long acknowledged rows may wait to be deleted by a look into the queue, and how many.
const OWED_FOR_MAX: Duration = Duration::from_millis(50);
const OWED_MAX: usize = 2048;

pub struct TableSubscription {
    table: TableQueue,
    id: Uuid,
    queue: String,
    bell: Bell,
    hatch: Option<Hatch<Parcel>>,
    /// When to look into the queue, should neither the bell nor what is owed call for it sooner.
    look_again_at: Option<Instant>,
    winding_down: bool,
    newest_taken: i64,
    looked_from_start: Option<Timestamp>,
    last_beat: Option<Timestamp>,
    /// What is held, by the ids of the tags it was handed out under.
    taken: HashMap<i64, Taken>,
    /// How many messages from bundles were handed out: their tags count downwards, where no row is.
    parts_taken: i64,
    /// Acknowledged, to be deleted by the next look.
    owed: Owed,
    owed_since: Option<Instant>,
}

/// A message that is held.
struct Taken {
    place: Place,
    /// For the record of a rejection, with the deaths before it.
    routing_key: String,
    x_death: serde_json::Value,
}

/// The rows and parts behind tags.
#[derive(Default)]
struct Sorted {
    rows: HashMap<Uuid, Vec<i64>>,
    /// By the row of their bundle, each with its tag.
    parts: BTreeMap<i64, Vec<(Part, Tag)>>,
}

impl TableSubscription {
    pub(super) fn new(table: TableQueue, queue: &str) -> Self {
        Self {
            id: mint_id(),
            queue: queue.to_owned(),
            bell: table.db.wakes().bell(&bell_of(queue)),
            table,
            hatch: None,
            look_again_at: Some(Instant::now()),
            winding_down: false,
            newest_taken: 0,
            looked_from_start: None,
            last_beat: None,
            taken: HashMap::new(),
            parts_taken: 0,
            owed: Owed::default(),
            owed_since: None,
        }
    }

    pub fn open_hatch(&mut self) {
        self.hatch = Some(self.table.db.hatches().queues.open(&self.queue, self.table.lease));
    }

    pub async fn ready(&mut self, poll: Duration) {
        let look_again_at = *self.look_again_at.get_or_insert_with(|| Instant::now() + poll);
        let look_at = self.owed_due_at().map_or(look_again_at, |due| due.min(look_again_at));
        let handed = async {
            match &mut self.hatch {
                Some(hatch) => hatch.filled().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = handed => {}
            () = self.bell.rung() => self.look_again_at = Some(Instant::now()),
            () = tokio::time::sleep_until(look_at) => {}
        }
    }

    /// When what is owed is to be paid, if there is anything.
    fn owed_due_at(&self) -> Option<Instant> {
        let since = self.owed_since?;
        Some(if self.owed.places.len() < OWED_MAX { since + OWED_FOR_MAX } else { since })
    }

    pub async fn take(&mut self, max: usize) -> Result<Vec<Delivery>, TransportError> {
        if self.winding_down {
            return Ok(Vec::new());
        }
        let is_past = |at: Option<Instant>| at.is_some_and(|at| at <= Instant::now());
        let is_due = self.bell.is_rung() || is_past(self.look_again_at) || is_past(self.owed_due_at());
        // The queue before the hatch: what is handed over never keeps others waiting, and a look that fails has left it
        // where it was.
        let mut deliveries = match is_due || self.hatch.is_none() {
            true => self.look(max).await?,
            false => Vec::new(),
        };
        if let Some(hatch) = &mut self.hatch {
            let handed = hatch.take(max, max - deliveries.len());
            deliveries.extend(handed.fresh.into_iter().map(|parcel| self.deliver_parcel(parcel)));
            self.put_back(handed.stale).await;
        }
        Ok(deliveries)
    }

    /// Looks into the queue: pays what is owed, claims what is free.
    async fn look(&mut self, max: usize) -> Result<Vec<Delivery>, TransportError> {
        // Before the look: a ring from now on is news.
        self.bell.hush();
        let mut tx = self.table.db.begin_relaxed().await?;
        let now = tx.now();
        let token = mint_id();
        if self.last_beat.is_none_or(|last| now.since(last) >= HEARTBEAT_EVERY) {
            beat(&mut tx, self.id, &self.queue, now).await?;
            self.last_beat = Some(now);
        }
        let limit = i64::try_from(max).unwrap_or(i64::MAX);
        let from_start = self.looked_from_start.is_none_or(|last| now.since(last) >= LOOK_FROM_START_EVERY);
        // What is done with first, or a bundle of ours that has lain too long would come back whole.
        let settled = delete(&mut tx, &self.owed).await?;
        if from_start {
            unpack(&mut tx, &self.queue, now).await?;
        }
        let after = if from_start { i64::MIN } else { self.newest_taken - LOOK_BACK };
        let look = Look { queue: &self.queue, after, limit, token, lease: self.table.lease };
        let mut rows = claim(&mut tx, &look, now).await?;
        tx.commit().await?;
        self.owed_since = None;
        let paid = std::mem::take(&mut self.owed);
        self.note_lost(paid.places.len(), settled);
        if from_start {
            self.looked_from_start = Some(now);
        }
        self.newest_taken = rows.iter().map(|row| row.id).fold(self.newest_taken, i64::max);
        // A look that found all it asked for may leave more behind.
        self.look_again_at = (rows.len() == max).then(Instant::now);
        rows.sort_unstable_by_key(|row| row.id);
        Ok(rows
            .into_iter()
            .map(|row| {
                let id = row.id;
                self.deliver(row, Tag { id, token }, Place::Row(id))
            })
            .collect())
    }

    /// Puts what was handed over into the queue, for whoever comes first.
    async fn put_back(&mut self, parcels: Vec<Parcel>) {
        let tags: Vec<Tag> = parcels.into_iter().map(|parcel| self.deliver_parcel(parcel).tag).collect();
        if tags.is_empty() {
            return;
        }
        match self.free(&tags).await {
            // Nobody has begun on them: what has gone to another meanwhile is no loss.
            Ok((sorted, _)) => self.let_go(&tags, sorted),
            Err(error) => {
                tags.iter().for_each(|tag| drop(self.taken.remove(&tag.id)));
                tracing::debug!(%error, queue = self.queue, "could not give messages back; their lease will");
            }
        }
    }

    fn deliver_parcel(&mut self, parcel: Parcel) -> Delivery {
        let token = self.table.db.hatches().token();
        let id = match &parcel.place {
            Place::Row(row) => *row,
            Place::Bundle(_) => {
                self.parts_taken += 1;
                -self.parts_taken
            }
        };
        let row = Row {
            id,
            message_id: Some(parcel.message_id.to_string()),
            routing_key: parcel.routing_key,
            correlation_id: Some(parcel.correlation_id),
            headers: parcel.headers,
            body: parcel.body,
            x_death: None,
            deliveries: 1,
        };
        let written = parcel.written.and_then(|written| written.downcast().ok());
        Delivery { handed_over: true, written, ..self.deliver(row, Tag { id, token }, parcel.place) }
    }

    fn deliver(&mut self, row: Row, tag: Tag, place: Place) -> Delivery {
        let x_death = row.x_death.as_deref().and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let delivery = Delivery {
            tag,
            lasting_id: matches!(place, Place::Row(_)).then_some(row.id),
            handed_over: false,
            written: None,
            message_id: row.message_id,
            routing_key: row.routing_key,
            correlation_id: row.correlation_id,
            headers: serde_json::from_str(&row.headers).unwrap_or_default(),
            body: row.body,
            deliveries: u32::try_from(row.deliveries).unwrap_or(u32::MAX),
            x_death,
        };
        let (routing_key, x_death) = (delivery.routing_key.clone(), delivery.x_death.clone());
        self.taken.insert(tag.id, Taken { place, routing_key, x_death });
        delivery
    }

    pub async fn ack(&mut self, tags: &[Tag]) -> Result<(), TransportError> {
        let mut owed = Owed::default();
        self.owe(&mut owed, tags);
        if owed.places.len() > 0 {
            let mut tx = self.table.db.begin_relaxed().await?;
            let settled = delete(&mut tx, &owed).await?;
            tx.commit().await?;
            self.note_lost(owed.places.len(), settled);
        }
        Ok(())
    }

    /// Acknowledges with one of the next looks, whose transaction it shares, or on closing. Until then a crash brings
    /// the messages back, as it does before any acknowledgement.
    pub fn ack_soon(&mut self, tags: &[Tag]) {
        let mut owed = std::mem::take(&mut self.owed);
        self.owe(&mut owed, tags);
        if owed.places.len() > 0 {
            self.owed_since.get_or_insert_with(Instant::now);
        }
        self.owed = owed;
    }

    /// Adds the rows of what is done with, and the bundles of which it was the last.
    fn owe(&mut self, owed: &mut Owed, tags: &[Tag]) {
        for tag in tags {
            match self.taken.remove(&tag.id).map(|taken| taken.place) {
                Some(Place::Bundle(part)) if !part.settle() => continue,
                Some(Place::Bundle(part)) => owed.places.bundles.push(part.bundle.row),
                Some(Place::Row(_)) | None => owed.places.rows.push(tag.id),
            }
            if !owed.tokens.contains(&tag.token) {
                owed.tokens.push(tag.token);
            }
        }
    }

    pub async fn reject(&mut self, tags: &[Tag]) -> Result<(), TransportError> {
        let sorted = self.sort(tags);
        let mut tx = self.table.db.begin().await?;
        let now = tx.now();
        let dlq = dlq_of(&self.queue);
        let mut settled = 0;
        for (token, ids) in &sorted.rows {
            let deaths: Vec<String> = ids.iter().map(|id| self.death_of(*id, now)).collect();
            settled += move_to(&mut tx, ids, *token, &dlq, &deaths, now).await?;
        }
        let death = |tag: &Tag| Some(self.death_of(tag.id, now));
        settled += take_out_all(&mut tx, &sorted.parts, &dlq, death).await?;
        tx.ring_on_commit(&bell_of(&dlq));
        tx.commit().await?;
        self.let_go(tags, sorted);
        self.note_lost(tags.len(), settled);
        Ok(())
    }

    pub async fn release(&mut self, tags: &[Tag]) -> Result<(), TransportError> {
        let (sorted, settled) = self.free(tags).await?;
        self.let_go(tags, sorted);
        self.note_lost(tags.len(), settled);
        Ok(())
    }

    /// Makes the rows behind tags free for all; how many were still ours.
    async fn free(&self, tags: &[Tag]) -> sqlx::Result<(Sorted, u64)> {
        let sorted = self.sort(tags);
        let mut tx = self.table.db.begin_relaxed().await?;
        let mut settled = 0;
        for (token, ids) in &sorted.rows {
            settled += give_back(&mut tx, ids, *token).await?;
        }
        settled += take_out_all(&mut tx, &sorted.parts, &self.queue, |_| None).await?;
        tx.ring_on_commit(&bell_of(&self.queue));
        tx.commit().await?;
        Ok((sorted, settled))
    }

    /// Everything behind the tags has a row elsewhere, or is another's: the bundles that were emptied are owed.
    fn let_go(&mut self, tags: &[Tag], sorted: Sorted) {
        for tag in tags {
            self.taken.remove(&tag.id);
        }
        let emptied = sorted.parts.into_values().flatten().filter(|(part, _)| part.settle());
        for (part, tag) in emptied {
            self.owed.places.bundles.push(part.bundle.row);
            self.owed.tokens.push(tag.token);
            self.owed_since.get_or_insert_with(Instant::now);
        }
    }

    pub async fn keep(&self, tags: &[Tag]) {
        loop {
            tokio::time::sleep(self.table.lease / 3).await;
            if let Err(error) = self.renew(tags).await {
                tracing::warn!(%error, queue = self.queue, "cannot renew the lease of a running batch");
            }
        }
    }

    async fn renew(&self, tags: &[Tag]) -> sqlx::Result<()> {
        let Sorted { rows, parts } = self.sort(tags);
        let mut places: HashMap<Uuid, Places> = HashMap::new();
        for (token, rows) in rows {
            places.entry(token).or_default().rows = rows;
        }
        for (bundle, parts) in parts {
            places.entry(parts[0].1.token).or_default().bundles.push(bundle);
        }
        let mut tx = self.table.db.begin_relaxed().await?;
        let now = tx.now();
        for (token, places) in places {
            renew(&mut tx, &places, token, self.table.lease, now).await?;
        }
        tx.commit().await
    }

    pub fn wind_down(&mut self) {
        self.winding_down = true;
    }

    pub async fn close(mut self) {
        if let Some(hatch) = self.hatch.take() {
            self.put_back(hatch.close().await).await;
        }
        let goodbye = async {
            let mut tx = self.table.db.begin_relaxed().await?;
            delete(&mut tx, &self.owed).await?;
            crate::on!(tx, c => {
                sqlx::query("DELETE FROM messaging_subscriptions WHERE id = $1").bind(self.id).execute(c).await.map(drop)
            })?;
            tx.commit().await
        };
        // Best effort: without it, what is owed comes back as duplicates and the entry goes stale by itself.
        if let Err(error) = goodbye.await {
            tracing::debug!(%error, queue = self.queue, "left the queue without a goodbye");
        }
    }

    fn death_of(&self, id: i64, now: Timestamp) -> String {
        let taken = self.taken.get(&id);
        let routing_key = taken.map_or("", |taken| taken.routing_key.as_str());
        let mut deaths = vec![death_record(&self.queue, routing_key, "rejected", now)];
        deaths.extend(taken.and_then(|taken| taken.x_death.as_array()).cloned().unwrap_or_default());
        serde_json::Value::Array(deaths).to_string()
    }

    fn sort(&self, tags: &[Tag]) -> Sorted {
        let mut sorted = Sorted::default();
        for tag in tags {
            match self.taken.get(&tag.id).map(|taken| &taken.place) {
                Some(Place::Bundle(part)) => {
                    sorted.parts.entry(part.bundle.row).or_default().push((part.clone(), *tag));
                }
                Some(Place::Row(_)) | None => sorted.rows.entry(tag.token).or_default().push(tag.id),
            }
        }
        sorted
    }

    fn note_lost(&self, expected: usize, settled: u64) {
        if settled < expected as u64 {
            let lost = expected as u64 - settled;
            self.table.db.metrics().fenced_writes.inc_by(lost);
            tracing::warn!(lost, queue = self.queue, "a lease ran out: messages have gone to another consumer");
        }
    }
}

/// Makes parts rows of `queue`, each with its death if it died.
async fn take_out_all(
    tx: &mut Tx,
    parts: &BTreeMap<i64, Vec<(Part, Tag)>>,
    queue: &str,
    death: impl Fn(&Tag) -> Option<String>,
) -> sqlx::Result<u64> {
    let now = tx.now();
    let mut taken_out = 0;
    for (bundle, parts) in parts {
        let numbers: Vec<i64> = parts.iter().map(|(part, _)| i64::try_from(part.number).unwrap_or(i64::MAX)).collect();
        let deaths: Vec<Option<String>> = parts.iter().map(|(_, tag)| death(tag)).collect();
        let token = parts[0].1.token;
        let leaving = Leaving { bundle: *bundle, token, numbers: &numbers, queue, deaths: &deaths };
        taken_out += take_out(tx, &leaving, now).await?;
    }
    Ok(taken_out)
}
