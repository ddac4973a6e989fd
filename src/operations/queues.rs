//! Queues and consumers: how full, how old, and whether at rest.

use std::collections::HashMap;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use serde::Serialize;
use serde_json::json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Operations;
use super::actions::{Why, acted};
use crate::http::caller::Caller;
use crate::http::extract::Body;
use crate::http::page::Page;
use crate::http::problem::Problem;
use stockade_kernel::messaging::transport::{Binding, Depth, dlq_of};
use stockade_kernel::messaging::{actions, dead_letters, office, pause, relay};

/// How long a pause may take to finish the batch in hand before we answer that it is still under way.
const REST_TIMEOUT: Duration = Duration::from_secs(20);

pub fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new()
        .routes(routes!(list_queues))
        .routes(routes!(get_queue))
        .routes(routes!(pause_consumer))
        .routes(routes!(resume_consumer))
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Queue {
    #[schema(example = "stockade.inventory")]
    pub(super) name: String,
    /// Messages ready to be taken.
    pub(super) depth: i64,
    /// Messages taken and not settled yet; null where the transport cannot know.
    pub(super) in_flight: Option<i64>,
    /// Live consumers on this queue, over all instances.
    pub(super) consumers: Option<i64>,
    pub(super) paused: bool,
    /// Rejected messages that the dead-letter office has not filed yet.
    pub(super) dlq_depth: i64,
    /// Open dead letters.
    pub(super) dead_letters: i64,
    /// Age of the oldest message; null on an empty queue.
    pub(super) oldest_age_ms: Option<i64>,
    /// True while these are the last known values of a broker that cannot be reached.
    pub(super) stale: bool,
}

/// List queues with their depths.
#[utoipa::path(get, path = "/v1/queues", tag = "operations", security(("key" = ["viewer", "platform"])), responses((status = 200, body = Page<Queue>)))]
async fn list_queues(State(operations): State<Operations>) -> Result<Json<Page<Queue>>, Problem> {
    let bindings: Vec<&Binding> = operations.topology.queues.iter().collect();
    Ok(Json(Page { data: operations.look_at(&bindings).await?, next_cursor: None }))
}

/// Get a queue by its full or its short name.
#[utoipa::path(get, path = "/v1/queues/{name}", tag = "operations", security(("key" = ["viewer", "platform"])),
    params(("name" = String, Path, example = "inventory")),
    responses(
        (status = 200, body = Queue),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    ))]
async fn get_queue(State(operations): State<Operations>, Path(name): Path<String>) -> Result<Json<Queue>, Problem> {
    let binding = operations.binding(&name).ok_or_else(|| Problem::not_found(format!("there is no queue {name}")))?;
    let queue = operations.look_at(&[binding]).await?.pop();
    queue.map(Json).ok_or_else(|| Problem::internal("a queue without a depth"))
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ConsumerState {
    #[schema(example = "inventory")]
    name: String,
    paused: bool,
}

/// Pause a consumer, on all instances and across restarts.
///
/// Answers once this instance is at rest; others follow within two seconds. Names: the modules, `dead-letters`
/// and `relay`.
#[utoipa::path(post, path = "/v1/consumers/{name}/pause", tag = "operations", security(("key" = ["operator", "platform"])),
    params(("name" = String, Path, example = "inventory")), request_body = Option<Why>,
    responses(
        (status = 200, body = ConsumerState),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    ))]
async fn pause_consumer(
    State(operations): State<Operations>,
    caller: Caller,
    Path(name): Path<String>,
    body: Option<Body<Why>>,
) -> Result<Json<ConsumerState>, Problem> {
    operations.set_paused(&caller, name, Why::of(body)?, true).await
}

/// Resume a consumer, on all instances.
#[utoipa::path(post, path = "/v1/consumers/{name}/resume", tag = "operations", security(("key" = ["operator", "platform"])),
    params(("name" = String, Path, example = "inventory")), request_body = Option<Why>,
    responses(
        (status = 200, body = ConsumerState),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    ))]
async fn resume_consumer(
    State(operations): State<Operations>,
    caller: Caller,
    Path(name): Path<String>,
    body: Option<Body<Why>>,
) -> Result<Json<ConsumerState>, Problem> {
    operations.set_paused(&caller, name, Why::of(body)?, false).await
}

impl Operations {
    /// A queue by its full or its short name.
    pub(super) fn binding(&self, name: &str) -> Option<&Binding> {
        self.topology.queues.iter().find(|binding| binding.queue == name || binding.consumer == name)
    }

    /// The full name of a queue that may be given by its short one.
    pub(super) fn full_name(&self, name: String) -> String {
        self.binding(&name).map_or(name, |binding| binding.queue.clone())
    }

    pub(super) async fn look_at(&self, bindings: &[&Binding]) -> Result<Vec<Queue>, Problem> {
        let names: Vec<String> =
            bindings.iter().flat_map(|binding| [binding.queue.clone(), dlq_of(&binding.queue)]).collect();
        let depths: HashMap<String, Depth> =
            self.kernel.transport.depths(&names).await?.into_iter().map(|d| (d.queue.clone(), d)).collect();
        let mut tx = self.kernel.db.read().await?;
        let now = tx.now();
        let letters: HashMap<String, i64> = dead_letters::count_open(&mut tx).await?.into_iter().collect();
        let queue = |binding: &&Binding| {
            let depth = depths.get(&binding.queue);
            let oldest = depth.and_then(|depth| depth.oldest_enqueued_at);
            Queue {
                name: binding.queue.clone(),
                depth: depth.map_or(0, |depth| depth.ready),
                in_flight: depth.and_then(|depth| depth.in_flight),
                consumers: depth.and_then(|depth| depth.consumers),
                paused: self.kernel.pauses.is_paused(binding.consumer),
                dlq_depth: depths.get(&dlq_of(&binding.queue)).map_or(0, |d| d.ready + d.in_flight.unwrap_or(0)),
                dead_letters: letters.get(&binding.queue).copied().unwrap_or(0),
                oldest_age_ms: oldest.map(|oldest| stockade_kernel::clock::millis(now.since(oldest))),
                stale: depth.is_none_or(|depth| depth.stale),
            }
        };
        Ok(bindings.iter().map(queue).collect())
    }

    async fn set_paused(
        &self,
        caller: &Caller,
        name: String,
        why: Option<String>,
        paused: bool,
    ) -> Result<Json<ConsumerState>, Problem> {
        let known = self.topology.queues.iter().any(|binding| binding.consumer == name);
        if !known && ![relay::NAME, office::NAME].contains(&name.as_str()) {
            return Err(Problem::not_found(format!("there is no consumer {name}")));
        }
        let mut tx = self.kernel.db.begin().await?;
        pause::set(&mut tx, &name, paused).await?;
        let action = if paused { "consumer.pause" } else { "consumer.resume" };
        actions::record(&mut tx, &acted(caller, action, &name, why, json!({}))).await?;
        tx.commit().await?;
        self.kernel.pauses.reread().await;
        if tokio::time::timeout(REST_TIMEOUT, self.kernel.health.until_paused(&name, paused)).await.is_err() {
            let detail =
                format!("{name} is to {} but has not finished its batch yet", if paused { "rest" } else { "run" });
            return Err(Problem::new(503, "still-working", detail).retry_after(5));
        }
        Ok(Json(ConsumerState { name, paused }))
    }
}
