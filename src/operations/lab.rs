//! The fault lab: puts anything into a queue, lets handlers fail and the process die at a named point. Only routed
//! with `serve --demo` on a loopback address.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Operations;
use crate::http::extract::Body;
use crate::http::problem::{FieldError, Problem};
use crate::messaging::event::is_plain_text;
use crate::messaging::faults::POINTS;
use crate::messaging::transport::RawMessage;

const TIMES_MAX: u32 = 1000;

pub fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(publish)).routes(routes!(crash)).routes(routes!(fail))
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"queue": "inventory", "body": "this is no JSON"}))]
pub struct Publish {
    /// The full or the short name of a queue; or give a routing key.
    queue: Option<String>,
    #[schema(example = "order.placed")]
    routing_key: Option<String>,
    /// The bytes, as text; or give `body_base64`.
    body: Option<String>,
    body_base64: Option<String>,
    message_id: Option<String>,
    #[schema(value_type = Option<Object>)]
    headers: Option<serde_json::Map<String, serde_json::Value>>,
    /// How many copies; 1 if not given.
    times: Option<u32>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Published {
    published: u32,
}

/// Put raw bytes into a queue, past the outbox, as a foreign program could.
#[utoipa::path(post, path = "/v1/lab/publish", tag = "operations", request_body = Publish, responses(
    (status = 202, body = Published),
    (status = 404, description = "No such queue", body = Problem, content_type = "application/problem+json"),
    (status = 422, body = Problem, content_type = "application/problem+json"),
))]
async fn publish(
    State(operations): State<Operations>,
    body: Body<Publish>,
) -> Result<(StatusCode, Json<Published>), Problem> {
    let (message, times) = read_publish(&operations, body.value)?;
    operations.kernel.transport.publish_raw(&message, times).await?;
    Ok((StatusCode::ACCEPTED, Json(Published { published: times })))
}

fn read_publish(operations: &Operations, publish: Publish) -> Result<(RawMessage, u32), Problem> {
    let wrong =
        |pointer: &str, detail: String| Problem::validation(vec![FieldError { pointer: pointer.to_owned(), detail }]);
    let (queue, routing_key) = match (publish.queue, publish.routing_key) {
        (Some(name), None) => {
            let binding = operations.binding(&name);
            let binding = binding.ok_or_else(|| Problem::not_found(format!("there is no queue {name}")))?;
            (binding.queue.clone(), String::new())
        }
        (None, Some(key)) if is_plain_text(&key, 255) => (String::new(), key),
        (None, Some(_)) => return Err(wrong("/routing_key", "must be plain text".to_owned())),
        _ => return Err(wrong("", "give either queue or routing_key".to_owned())),
    };
    let body = match (publish.body, publish.body_base64) {
        (Some(text), None) => Bytes::from(text),
        (None, Some(text)) => {
            Bytes::from(STANDARD.decode(text).map_err(|error| wrong("/body_base64", error.to_string()))?)
        }
        _ => return Err(wrong("", "give either body or body_base64".to_owned())),
    };
    if publish.message_id.as_deref().is_some_and(|id| !is_plain_text(id, 255)) {
        return Err(wrong("/message_id", "must be plain text of 255 characters at most".to_owned()));
    }
    let times = publish.times.unwrap_or(1);
    if !(1..=TIMES_MAX).contains(&times) {
        return Err(wrong("/times", format!("must be 1 to {TIMES_MAX}")));
    }
    let message = RawMessage {
        queue,
        routing_key,
        message_id: publish.message_id,
        correlation_id: None,
        headers: publish.headers.unwrap_or_default(),
        body,
    };
    Ok((message, times))
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"point": "consumer.after_commit", "consumer": "inventory"}))]
pub struct Crash {
    point: String,
    /// Only when this consumer reaches the point; any if not given.
    consumer: Option<String>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Armed {
    point: String,
    /// The moment at which the process will die.
    meaning: &'static str,
}

/// Arm a crash point: the process dies the next time it gets there.
#[utoipa::path(post, path = "/v1/lab/crash", tag = "operations", request_body = Crash, responses(
    (status = 202, body = Armed),
    (status = 422, body = Problem, content_type = "application/problem+json"),
))]
async fn crash(State(operations): State<Operations>, body: Body<Crash>) -> Result<(StatusCode, Json<Armed>), Problem> {
    let Crash { point, consumer } = body.value;
    let Some((_, meaning)) = POINTS.iter().find(|(name, _)| *name == point) else {
        let names: Vec<&str> = POINTS.iter().map(|(name, _)| *name).collect();
        let detail = format!("must be one of {}", names.join(", "));
        return Err(Problem::validation(vec![FieldError { pointer: "/point".to_owned(), detail }]));
    };
    operations.kernel.faults.arm_crash(&point, consumer.as_deref());
    Ok((StatusCode::ACCEPTED, Json(Armed { point, meaning })))
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"consumer": "notifications", "times": 1}))]
pub struct Fail {
    consumer: String,
    /// How many events; 1 if not given.
    times: Option<u32>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Failing {
    consumer: String,
    times: u32,
}

/// Let the next events of a consumer fail: each is retried, and dead once its attempts are used up.
#[utoipa::path(post, path = "/v1/lab/fail", tag = "operations", request_body = Fail, responses(
    (status = 202, body = Failing),
    (status = 404, description = "No such consumer", body = Problem, content_type = "application/problem+json"),
    (status = 422, body = Problem, content_type = "application/problem+json"),
))]
async fn fail(State(operations): State<Operations>, body: Body<Fail>) -> Result<(StatusCode, Json<Failing>), Problem> {
    let Fail { consumer, times } = body.value;
    if !operations.topology.queues.iter().any(|binding| binding.consumer == consumer) {
        return Err(Problem::not_found(format!("there is no consumer {consumer}")));
    }
    let times = times.unwrap_or(1);
    operations.kernel.faults.arm_failures(&consumer, times as usize);
    Ok((StatusCode::ACCEPTED, Json(Failing { consumer, times })))
}
