//! How each loop is doing, as it says itself: the source of `/v1/health` and of "paused" meaning "at rest".

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

use crate::clock::Timestamp;

#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, utoipa::ToSchema)]
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

#[derive(Debug, Clone, serde::Serialize, utoipa::ToSchema)]
pub struct LoopStatus {
    pub state: LoopState,
    /// When it last did its work or saw that there was none.
    pub last_success_at: Option<Timestamp>,
    pub last_error: Option<String>,
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
        let status = LoopStatus { state: LoopState::Starting, last_success_at: None, last_error: None };
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
        });
    }

    pub fn set(&self, state: LoopState) {
        self.status.send_modify(|status| status.state = state);
    }

    pub fn troubled(&self, error: String) {
        self.status.send_modify(|status| {
            status.state = LoopState::Troubled;
            status.last_error = Some(error);
        });
    }
}
