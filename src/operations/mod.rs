//! The operator's API: queues and consumers, inbox, outbox, dead letters, what the dashboard watches, and the fault lab.

pub mod dead_letters;
pub mod inbox;
pub mod lab;
pub mod live;
pub mod outbox;
pub mod queues;

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
}
