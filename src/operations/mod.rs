//! The operator's API: queues and consumers, inbox, outbox, dead letters, redrives and replays, timeline, audit, metrics,
//! who did what, keys, what the dashboard watches, and the fault lab. What belongs to one tenant is shown to its own
//! keys alone; what belongs to all, to keys for every group.

pub mod actions;
pub mod audit;
pub mod dead_letters;
pub mod inbox;
mod jobs;
pub mod keys;
pub mod lab;
pub mod live;
pub mod metrics;
pub mod outbox;
pub mod queues;
pub mod redrives;
pub mod replays;
pub mod timeline;

use std::sync::Arc;

use audit::Audits;
use utoipa_axum::router::OpenApiRouter;

use crate::access::Keys;
use stockade_kernel::messaging::Kernel;
use stockade_kernel::messaging::transport::Topology;

#[derive(Clone)]
pub struct Operations {
    pub kernel: Kernel,
    pub topology: Arc<Topology>,
    pub audits: Audits,
    pub keys: Keys,
}

pub fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new()
        .merge(queues::routes())
        .merge(inbox::routes())
        .merge(outbox::routes())
        .merge(dead_letters::routes())
        .merge(redrives::routes())
        .merge(replays::routes())
        .merge(actions::routes())
        .merge(timeline::routes())
        .merge(audit::routes())
        .merge(keys::routes())
}
