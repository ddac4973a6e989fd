//! The hops of an order, each a line that reads alone.

use std::time::Duration;

use serde::Serialize;
use uuid::Uuid;

use super::{Letter, Sent, Story, Verdict};
use stockade_kernel::clock::{Timestamp, minted_at};

/// No request takes this long; an older id is somebody's own.
const REQUEST_MAX: Duration = Duration::from_secs(600);

/// One step of an order's way.
#[derive(Debug, Clone, Default, Serialize, utoipa::ToSchema)]
pub struct Hop {
    pub at: Option<Timestamp>,
    /// When it was over; null for a moment, and for what still goes on.
    pub until: Option<Timestamp>,
    /// `request` (until its commit), `outbox`, `retry`, `redrive`, `replay` (rows until they are taken to be sent),
    /// `publish` (until the broker has confirmed), `queue` (until a consumer begins), `handling`, `effect` or
    /// `dead_letter`.
    #[schema(example = "handling")]
    pub kind: String,
    /// `api`, `outbox`, a consumer or `dead-letters`.
    #[schema(example = "inventory")]
    pub who: String,
    #[schema(example = "dealt with order.placed")]
    pub text: String,
    pub event_id: Option<Uuid>,
    #[schema(example = "order.placed")]
    pub event_type: Option<String>,
    /// The state of the row behind it.
    #[schema(example = "processed")]
    pub state: Option<String>,
    pub attempts: Option<i32>,
    /// Further deliveries of the event that were dismissed.
    pub duplicates: Option<i32>,
    pub error: Option<String>,
}

/// Every hop, oldest first.
pub fn of(story: &Story) -> Vec<Hop> {
    let mut hops = vec![request(story)];
    hops.extend(story.sent.iter().filter_map(step));
    hops.extend(story.sent.iter().map(outbox));
    hops.extend(story.sent.iter().filter_map(publish));
    for verdict in &story.verdicts {
        hops.extend(queue(story, verdict));
        hops.push(handling(verdict));
    }
    hops.extend(story.letters.iter().flat_map(letter));
    hops.extend(story.effects.iter().map(|effect| Hop {
        at: Some(effect.at),
        kind: "effect".to_owned(),
        who: effect.who.to_owned(),
        text: effect.text.clone(),
        event_id: effect.event_id,
        ..Hop::default()
    }));
    // What happens in one millisecond is told in the order of the way.
    let place = |hop: &Hop| {
        let kinds = [
            "request",
            "outbox",
            "retry",
            "redrive",
            "replay",
            "publish",
            "queue",
            "handling",
            "effect",
            "dead_letter",
        ];
        kinds.iter().position(|kind| *kind == hop.kind)
    };
    hops.sort_by_key(|hop| (hop.at, place(hop)));
    hops
}

/// From the request to its commit. An id that was minted for a request tells when it came; a caller's own need not.
fn request(story: &Story) -> Hop {
    let order = &story.order;
    let came_at = Uuid::try_parse(&order.correlation_id).ok().and_then(|id| minted_at(&id));
    let came_at = came_at.filter(|at| *at <= order.created_at && order.created_at.since(*at) < REQUEST_MAX);
    Hop {
        at: came_at.or(Some(order.created_at)),
        until: Some(order.created_at),
        kind: "request".to_owned(),
        who: "api".to_owned(),
        text: format!("took the order and committed it as {}", order.number),
        state: Some("placed".to_owned()),
        ..Hop::default()
    }
}

/// A step that an order took: its event is written in the commit of the step.
fn step(row: &Sent) -> Option<Hop> {
    let (who, text, state) = match (row.kind.as_str(), row.key.as_str()) {
        ("event", "order.paid") => ("api", "took the payment", "paid"),
        ("event", "order.cancelled") => ("api", "cancelled the order", "cancelled"),
        ("event", "order.fulfilled") => ("api", "fulfilled the order", "fulfilled"),
        ("event", "order.expired") => ("orders", "let the order expire, as it was not paid in time", "expired"),
        _ => return None,
    };
    Some(Hop {
        at: Some(row.created_at),
        kind: "request".to_owned(),
        who: who.to_owned(),
        text: text.to_owned(),
        event_id: Some(row.event_id),
        event_type: Some(row.key.clone()),
        state: Some(state.to_owned()),
        ..Hop::default()
    })
}

fn outbox(row: &Sent) -> Hop {
    let to = if row.target.is_empty() { "everybody" } else { &row.target };
    let what = match (row.kind.as_str(), row.status.as_str()) {
        ("event", "published") => format!("published {}", row.key),
        ("event", "dead") => format!("gave up publishing {}", row.key),
        ("event", _) => format!("keeps {} to be published", row.key),
        (kind, "published") => format!("sent {} to {to} again ({kind})", row.key),
        (kind, "dead") => format!("gave up sending {} to {to} again ({kind})", row.key),
        (kind, _) => format!("keeps {} to be sent to {to} again ({kind})", row.key),
    };
    Hop {
        at: Some(row.created_at),
        until: row.published_at.and(row.claimed_at).or(row.published_at),
        kind: if row.kind == "event" { "outbox".to_owned() } else { row.kind.clone() },
        who: "outbox".to_owned(),
        text: what,
        event_id: Some(row.event_id),
        event_type: Some(row.key.clone()),
        state: Some(row.status.clone()),
        attempts: Some(row.attempts),
        error: row.last_error.clone(),
        ..Hop::default()
    }
}

/// The time that a broker took to confirm a row.
fn publish(row: &Sent) -> Option<Hop> {
    let (claimed_at, published_at) = (row.claimed_at?, row.published_at?);
    Some(Hop {
        at: Some(claimed_at),
        until: Some(published_at),
        kind: "publish".to_owned(),
        who: "outbox".to_owned(),
        text: format!("sent {} to the broker, which confirmed it", row.key),
        event_id: Some(row.event_id),
        event_type: Some(row.key.clone()),
        ..Hop::default()
    })
}

/// The time between publishing an event and its consumer beginning on it.
fn queue(story: &Story, verdict: &Verdict) -> Option<Hop> {
    let published = |row: &&Sent| row.event_id == verdict.event_id && row.published_at <= Some(verdict.started_at);
    let published_at = story.sent.iter().filter(published).filter_map(|row| row.published_at).max()?;
    Some(Hop {
        at: Some(published_at),
        until: Some(verdict.started_at),
        kind: "queue".to_owned(),
        who: verdict.consumer.clone(),
        text: format!("{} waited for {}", verdict.key, verdict.consumer),
        event_id: Some(verdict.event_id),
        event_type: Some(verdict.key.clone()),
        ..Hop::default()
    })
}

fn handling(verdict: &Verdict) -> Hop {
    let did = match verdict.state.as_str() {
        "processed" => "dealt with",
        "retrying" => "is to try again",
        "waiting" => "keeps for later",
        "dead" => "gave up on",
        _ => "is at work on",
    };
    let tries = if verdict.attempts > 1 { format!(", at attempt {}", verdict.attempts) } else { String::new() };
    let repeats = match verdict.duplicates {
        0 => String::new(),
        1 => ", and dismissed 1 duplicate".to_owned(),
        count => format!(", and dismissed {count} duplicates"),
    };
    Hop {
        at: Some(verdict.started_at),
        until: verdict.finished_at,
        kind: "handling".to_owned(),
        who: verdict.consumer.clone(),
        text: format!("{did} {}{tries}{repeats}", verdict.key),
        event_id: Some(verdict.event_id),
        event_type: Some(verdict.key.clone()),
        state: Some(verdict.state.clone()),
        attempts: Some(verdict.attempts),
        duplicates: Some(verdict.duplicates),
        error: verdict.last_error.clone(),
    }
}

/// The filing of a letter and, if it came to that, what was done with it.
fn letter(letter: &Letter) -> impl Iterator<Item = Hop> {
    let hop = |at, text: String, state: &str| Hop {
        at: Some(at),
        kind: "dead_letter".to_owned(),
        who: "dead-letters".to_owned(),
        text,
        event_id: Some(letter.event_id),
        event_type: Some(letter.key.clone()),
        state: Some(state.to_owned()),
        error: Some(letter.error.clone()),
        ..Hop::default()
    };
    let filed = format!("filed {} of {} as dead letter {} ({})", letter.key, letter.consumer, letter.id, letter.reason);
    let resolved =
        letter.resolved_at.map(|at| hop(at, format!("dead letter {} was {}", letter.id, letter.state), &letter.state));
    std::iter::once(hop(letter.created_at, filed, "open")).chain(resolved)
}
