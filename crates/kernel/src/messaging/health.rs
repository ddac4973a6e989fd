//! How each loop is doing, as it says itself: the source of `/v1/health` and of "paused" meaning "at rest".

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::clock::Timestamp;

#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum LoopState {
    Starting,
    Running,
    /// Paused, with nothing in hand.
    Paused,
    /// Cannot work just now and is backing off; see the error.
    Troubled,
    Stopped,
}

#[derive(Debug, Clone, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
pub struct LoopStatus {
    pub state: LoopState,
    /// When it last did its work or saw that there was none.
    pub last_success_at: Option<Timestamp>,
    pub last_error: Option<String>,
    pub last_error_at: Option<Timestamp>,
    #[serde(skip)]
    serves_requests: bool,
}

/// How long after its last failure a loop that serves requests counts as unable to; then traffic may try again.
const REFUSES_FOR: Duration = Duration::from_secs(5);

impl LoopStatus {
    /// Is it in trouble now? A loop that serves requests only learns of better times from the next request, so
    /// its trouble counts for a while only.
    pub fn is_troubled(&self, now: Timestamp) -> bool {
        self.state == LoopState::Troubled && (!self.serves_requests || self.refuses_requests(now))
    }

    /// Did a request just fail for lack of a usable database? Only loops that serve requests say so.
    pub fn refuses_requests(&self, now: Timestamp) -> bool {
        self.serves_requests
            && self.state == LoopState::Troubled
            && self.last_error_at.is_some_and(|at| now.since(at) < REFUSES_FOR)
    }
}

/// The loops of this process.
#[derive(Clone, Default)]
pub struct Health {
    loops: Arc<Mutex<BTreeMap<&'static str, Pulse>>>,
}

/// One loop's own handle on its status.
#[derive(Clone)]
pub struct Pulse {
    status: watch::Sender<LoopStatus>,
}

impl Health {
    pub fn register(&self, name: &'static str) -> Pulse {
        self.add(name, false)
    }

    /// Registers a loop whose trouble means that requests cannot be served.
    pub fn register_serving(&self, name: &'static str) -> Pulse {
        self.add(name, true)
    }

    fn add(&self, name: &'static str, serves_requests: bool) -> Pulse {
        let status = LoopStatus {
            state: LoopState::Starting,
            last_success_at: None,
            last_error: None,
            last_error_at: None,
            serves_requests,
        };
        let pulse = Pulse { status: watch::Sender::new(status) };
        self.loops.lock().unwrap_or_else(PoisonError::into_inner).insert(name, pulse.clone());
        pulse
    }

    pub fn statuses(&self) -> BTreeMap<&'static str, LoopStatus> {
        let loops = self.loops.lock().unwrap_or_else(PoisonError::into_inner);
        loops.iter().map(|(name, pulse)| (*name, pulse.status.borrow().clone())).collect()
    }

    /// Waits until the loop is (or is no longer) at rest; at once if this process has no such loop.
    pub async fn until_paused(&self, name: &str, paused: bool) {
        let pulse = self.loops.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned();
        if let Some(pulse) = pulse {
            let at_rest =
                |status: &LoopStatus| matches!(status.state, LoopState::Paused | LoopState::Stopped) == paused;
            // An error means that the loop is gone, which is rest enough.
            let _ = pulse.status.subscribe().wait_for(at_rest).await;
        }
    }
}

impl Pulse {
    pub fn running(&self, now: Timestamp) {
        self.status.send_modify(|status| {
            status.state = LoopState::Running;
            status.last_success_at = Some(now);
            status.last_error = None;
            status.last_error_at = None;
        });
    }

    /// There is nothing to do. Trouble that still counts stays until something has worked.
    pub fn idle(&self, now: Timestamp) {
        self.status.send_if_modified(|status| {
            let calm = !status.is_troubled(now);
            if calm {
                status.last_success_at = Some(now);
            }
            calm
        });
    }

    pub fn set(&self, state: LoopState) {
        self.status.send_modify(|status| status.state = state);
    }

    pub fn troubled(&self, error: String, now: Timestamp) {
        self.status.send_modify(|status| {
            status.state = LoopState::Troubled;
            status.last_error = Some(error);
            status.last_error_at = Some(now);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_that_serves_requests_beats_while_idle_but_for_trouble_that_still_counts() {
        let pulse = Health::default().register_serving("desk");
        let at = |seconds: i64| Timestamp::from_millis(seconds * 1000);
        let beaten_at = |seconds| {
            pulse.idle(at(seconds));
            pulse.status.borrow().last_success_at
        };
        pulse.running(at(1));
        assert_eq!(beaten_at(2), Some(at(2)));
        pulse.troubled("away".to_owned(), at(3));
        assert_eq!(beaten_at(4), Some(at(2)));
        assert_eq!(beaten_at(30), Some(at(30)));
    }
}
