//! Replays: published events sent again under their own ids, from the outbox and its archive. The inbox dismisses what
//! was done, so a replay does only what was never done.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Due, Kind, Order, Progress, Step, insert, set_total};
use crate::clock::{Timestamp, mint_id};
use crate::db::{Filter, Tx, fetch_page};
use crate::messaging::event::routing_key;
use crate::messaging::outbox::{self, Entry};
use crate::messaging::transport::Topology;

/// Which published events to send again.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Events {
    pub aggregate_type: Option<String>,
    /// Written at this time or later.
    pub from: Timestamp,
    /// Written before this time.
    pub to: Timestamp,
    /// Only to this consumer, and only what it takes.
    pub consumer: Option<String>,
}

/// Where a replay goes.
struct Road {
    /// Empty: to every queue.
    target: String,
    /// Empty: any.
    keys: &'static [&'static str],
}

impl Events {
    /// `None` if there is no such consumer.
    fn road(&self, topology: &Topology) -> Option<Road> {
        let Some(consumer) = &self.consumer else { return Some(Road { target: String::new(), keys: &[] }) };
        let binding = topology.queues.iter().find(|binding| binding.consumer == consumer)?;
        Some(Road { target: binding.queue.clone(), keys: binding.keys })
    }

    fn narrow(&self, select: &'static str, road: &Road) -> Filter {
        Filter::new(select)
            .and("created_at >= ? AND created_at < ?", [self.from.into(), self.to.into()])
            .and_some("aggregate_type = ?", self.aggregate_type.clone())
            .and_any("aggregate_type || '.' || event_type", road.keys.iter().copied())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct TypeCount {
    #[schema(example = "order.placed")]
    pub event_type: String,
    pub count: i64,
}

/// How many events a replay would send, by their type; `None` if there is no such consumer.
pub async fn count_events(tx: &mut Tx, events: &Events, topology: &Topology) -> sqlx::Result<Option<Vec<TypeCount>>> {
    let Some(road) = events.road(topology) else { return Ok(None) };
    let outbox = "SELECT aggregate_type, event_type, count(*) FROM messaging_outbox";
    let archive = "SELECT aggregate_type, event_type, count(*) FROM messaging_outbox_archive";
    let filters = [
        events.narrow(outbox, &road).and("kind = 'event' AND status = 'published'", []),
        events.narrow(archive, &road),
    ];
    let mut counts: BTreeMap<String, i64> = BTreeMap::new();
    for filter in filters {
        let filter = filter.group("aggregate_type, event_type");
        for (aggregate_type, event_type, count) in fetch_page!(tx, filter, (String, String, i64))? {
            *counts.entry(routing_key(&aggregate_type, &event_type)).or_default() += count;
        }
    }
    Ok(Some(counts.into_iter().map(|(event_type, count)| TypeCount { event_type, count }).collect()))
}

/// Begins once this transaction commits. `total` is what [`count_events`] found.
pub async fn start_replay(tx: &mut Tx, events: &Events, total: i64, order: &Order) -> sqlx::Result<Uuid> {
    let id = insert(tx, Kind::Replay, &serde_json::json!(events), order).await?;
    set_total(tx, id, total).await?;
    Ok(id)
}

/// The next events of a replay, as outbox rows of their own.
pub(super) struct Batch {
    entries: Vec<Entry>,
    reached: Option<Uuid>,
    finished: bool,
}

type Columns = (Uuid, String, Option<String>, String, String, String, Vec<u8>, String, String, Option<Uuid>);

/// Reads the next batch, in a transaction that reads only: an event is in the outbox or in the archive, never in both.
pub(super) async fn read(tx: &mut Tx, due: &Due, topology: &Topology) -> Result<Batch, Unreadable> {
    let events: Events =
        serde_json::from_str(&due.criteria).map_err(|error| Unreadable::Criteria(error.to_string()))?;
    let consumer =
        || Unreadable::Criteria(format!("there is no consumer {}", events.consumer.as_deref().unwrap_or("")));
    let road = events.road(topology).ok_or_else(consumer)?;
    let outbox = "SELECT id, group_id, subsidiary_id, aggregate_type, aggregate_id, event_type, body, headers, \
         correlation_id, causation_id FROM messaging_outbox";
    let archive = "SELECT id, group_id, subsidiary_id, aggregate_type, aggregate_id, event_type, body, headers, \
         correlation_id, causation_id FROM messaging_outbox_archive";
    let filters = [
        events.narrow(outbox, &road).and("kind = 'event' AND status = 'published'", []),
        events.narrow(archive, &road),
    ];
    let mut rows: Vec<Columns> = Vec::new();
    for filter in filters {
        let filter = filter.and_some("id > ?", due.reached).page("id", due.batch());
        rows.extend(fetch_page!(tx, filter, Columns)?);
    }
    rows.sort_by_key(|row| row.0);
    let batch = usize::try_from(due.batch()).unwrap_or(usize::MAX);
    rows.truncate(batch);
    let (reached, finished) = (rows.last().map(|row| row.0), rows.len() < batch);
    let entries = rows.into_iter().map(|row| entry(row, &road.target)).collect();
    Ok(Batch { entries, reached, finished })
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Unreadable {
    #[error("{0}")]
    Criteria(String),
    #[error(transparent)]
    Database(#[from] sqlx::Error),
}

fn entry(columns: Columns, target: &str) -> Entry {
    let (event_id, group_id, subsidiary_id, aggregate_type, aggregate_id, ..) = columns;
    let (.., event_type, body, headers, correlation_id, causation_id) = columns;
    Entry {
        id: mint_id(),
        event_id,
        kind: outbox::Kind::Replay,
        group_id,
        subsidiary_id,
        aggregate_type: aggregate_type.into(),
        aggregate_id,
        event_type: event_type.into(),
        body: body.into(),
        headers: headers.into(),
        delay: std::time::Duration::ZERO,
        correlation_id,
        causation_id,
        // The headers carry the trace on.
        traceparent: None,
        target: target.to_owned(),
    }
}

/// Sends a batch that was read.
pub(super) async fn step(tx: &mut Tx, batch: &Batch) -> sqlx::Result<Step> {
    outbox::append_many(tx, &batch.entries).await?;
    let sent = i64::try_from(batch.entries.len()).unwrap_or(i64::MAX);
    let progress = Progress { sent, ..Progress::default() };
    Ok(Step { progress, reached: batch.reached, finished: batch.finished })
}
