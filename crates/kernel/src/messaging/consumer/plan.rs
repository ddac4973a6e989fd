//! The plan: what of a batch runs, by what the inbox knows of each event.
//!
//! New events get their row here, and the rows of known ones are locked, so what the plan says holds until its
//! transaction ends. What need not run is settled right here: a duplicate is dismissed, what is not due yet is sent
//! once more for later, and what is dead, has another body than the one known, or is so old that it may have been dealt
//! with and forgotten is rejected.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use uuid::Uuid;

use super::gate::Item;
use super::{Consumer, Settle};
use crate::clock::{Timestamp, in_words};
use crate::db::Tx;
use crate::messaging::event::{self, Event};
use crate::messaging::inbox::{self, Action, Arrival, Met, State};
use crate::messaging::outbox::{self, Entry};
use crate::messaging::tally::{self, Told};
use crate::messaging::transport::Tag;
use crate::messaging::{Outcome, Reaction, retention};

/// An event this young has not been forgotten by anybody.
const FRESH: Duration = Duration::from_secs(60);

/// May the events of a batch have been met before?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Meeting {
    /// Hardly: they are written down as new, and if one is not, the batch fails and is planned again.
    Unlikely,
    Possible,
}

impl Meeting {
    pub fn of<F>(items: &[Item<F>]) -> Self {
        if items.iter().all(|item| item.handed_over) { Self::Unlikely } else { Self::Possible }
    }
}

/// A batch, sorted by what the inbox says of each item.
#[derive(Default)]
pub(in crate::messaging) struct Plan {
    /// Items to run, with the inbox row they met if there was one.
    pub run: Vec<(usize, Option<Met>)>,
    /// Items under a claim whose lease ran out, with that row.
    pub stale: Vec<(usize, Met)>,
    repeats: Vec<usize>,
    pub(super) duplicates: Vec<Uuid>,
    /// What is to be told of those with another body than the one known.
    quarantined: Vec<Told>,
    pub settled: Vec<(Tag, Settle)>,
}

impl Plan {
    fn dismiss(&mut self, tag: Tag, event_id: Uuid) {
        self.duplicates.push(event_id);
        self.settled.push((tag, Settle::Ack));
    }

    fn quarantine<F>(&mut self, item: &Item<F>) {
        let event = &item.message.event;
        self.quarantined.push(Told::dead_letter(event, event::ID_REUSED, &event::id_reused(event.event_id)));
        self.settled.push((item.tag, Settle::Reject));
    }
}

impl<R: Reaction> Consumer<R> {
    /// Meets the inbox and sorts the batch into what runs and what is already decided.
    pub(super) async fn plan(&self, tx: &mut Tx, items: &[Item<R::Fact>], meeting: Meeting) -> sqlx::Result<Plan> {
        debug_assert!(items.is_sorted_by_key(|item| item.message.event.event_id), "copies stand together");
        let now = tx.now();
        let mut plan = Plan::default();
        let mut arrivals: Vec<(usize, Arrival<'_>)> = Vec::with_capacity(items.len());
        for (index, item) in items.iter().enumerate() {
            // They are in the order of their ids.
            match arrivals.last().filter(|(_, first)| first.event.event_id == item.message.event.event_id) {
                None => arrivals.push((index, Arrival::from(&item.message))),
                // A second copy within the batch goes by the first one's body, as if it had come later.
                Some((_, first)) if *first.body_hash != item.message.body_hash => plan.quarantine(item),
                Some(_) => plan.repeats.push(index),
            }
        }
        let rows: Vec<Arrival<'_>> = arrivals.iter().map(|(_, arrival)| arrival.clone()).collect();
        // What runs together was taken together. A clock that steps back must not have it end before it began.
        let taken_at = items.first().map_or(now, |item| item.taken_at.min(now));
        let known: Vec<Uuid> = match meeting {
            Meeting::Unlikely => {
                inbox::insert_all(tx, R::NAME, &rows, taken_at, now).await?;
                Vec::new()
            }
            Meeting::Possible => {
                let new = inbox::insert_new(tx, R::NAME, &rows, taken_at, now).await?;
                let new: HashSet<Uuid> = new.into_iter().collect();
                rows.iter().map(|row| row.event.event_id).filter(|id| !new.contains(id)).collect()
            }
        };
        let met: HashMap<Uuid, Met> = match known.as_slice() {
            [] => HashMap::new(),
            known => inbox::meet(tx, R::NAME, known, now).await?.into_iter().collect(),
        };
        let removed_until = removed_until(tx, items, now).await?;
        let (mut too_old, mut later) = (Vec::new(), Vec::new());
        for (index, arrival) in arrivals {
            let item = &items[index];
            let met = met.get(&arrival.event.event_id).map(|met| item.meets(met.clone()));
            match inbox::decide(met.as_ref(), arrival.body_hash) {
                Action::Run if self.may_have_forgotten(arrival.event, met.as_ref(), now, removed_until) => {
                    too_old.push((index, met));
                }
                Action::Run => plan.run.push((index, met)),
                Action::TakeOver => plan.stale.extend(met.map(|met| (index, met))),
                Action::Later => {
                    let delay = met.map(|met| met.due_in).unwrap_or_default();
                    later.push(Entry::again(arrival.event, item.message.body.clone(), &self.queue, delay));
                    plan.settled.push((item.tag, Settle::AckRetry));
                }
                Action::Dismiss => plan.dismiss(item.tag, arrival.event.event_id),
                Action::RejectAgain => plan.settled.push((item.tag, Settle::Reject)),
                Action::Quarantine => plan.quarantine(item),
            }
        }
        tally::quarantined_on_commit(tx, R::NAME, &plan.quarantined);
        outbox::append_many(tx, &later).await?;
        // A repeat shares the fate of the copy before it: dead stays dead, anything else is a duplicate.
        for index in std::mem::take(&mut plan.repeats) {
            let id = items[index].message.event.event_id;
            if met.get(&id).is_some_and(|met| met.state == State::Dead) {
                plan.settled.push((items[index].tag, Settle::Reject));
            } else {
                plan.dismiss(items[index].tag, id);
            }
        }
        if !too_old.is_empty() {
            let memory = in_words(self.kernel.tuning.keep.inbox);
            let error =
                format!("it is older than what the inbox remembers (by now {memory}): it may have been dealt with");
            let outcomes = vec![Outcome::Reject { reason: event::TOO_OLD, error }; too_old.len()];
            plan.settled.extend(self.keep_books(tx, items, &too_old, &outcomes).await?.0);
        }
        Ok(plan)
    }

    /// Is it an event we know nothing of, but so old that we may have dealt with it and forgotten? Rows may have been
    /// kept for a shorter time than they are now.
    fn may_have_forgotten(
        &self,
        event: &Event,
        met: Option<&Met>,
        now: Timestamp,
        removed_until: Option<Timestamp>,
    ) -> bool {
        let unknown = met.is_none_or(|met| met.state == State::Processing && met.attempts == 0);
        let is_old = now.since(event.occurred_at) > self.kernel.tuning.keep.inbox;
        unknown && (is_old || removed_until.is_some_and(|until| event.occurred_at < until))
    }
}

/// Until when inbox rows have been removed; not asked for a batch that is too young to be forgotten.
async fn removed_until<F>(tx: &mut Tx, items: &[Item<F>], now: Timestamp) -> sqlx::Result<Option<Timestamp>> {
    if items.iter().all(|item| now.since(item.message.event.occurred_at) < FRESH) {
        return Ok(None);
    }
    retention::verdicts_removed_until(tx).await
}
