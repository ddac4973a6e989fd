//! The operator's API: queues and consumers, inbox, outbox, dead letters, redrives and replays, who did what, and the
//! fault lab.

pub mod actions;
pub mod dead_letters;
pub mod inbox;
mod jobs;
pub mod lab;
pub mod outbox;
pub mod queues;
pub mod redrives;
pub mod replays;

use std::sync::Arc;

use utoipa_axum::router::OpenApiRouter;

use crate::messaging::Kernel;
use crate::messaging::transport::Topology;

#[derive(Clone)]
pub struct Operations {
    pub kernel: Kernel,
    pub topology: Arc<Topology>,
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
}
