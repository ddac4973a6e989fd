//! The fault lab: puts anything into a queue, lets consumers fail, dawdle and get messages twice, and the process die
//! at a named point. Only routed with `serve --demo` on a loopback address.

use std::time::Duration;

use axum::Json;
use axum::extract::{DefaultBodyLimit, State};
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
use stockade_kernel::messaging::event::is_plain_text;
use stockade_kernel::messaging::faults::{self, POINTS, Repeats};
use stockade_kernel::messaging::transport::RawMessage;

const TIMES_MAX: u32 = 1000;
/// How slow a consumer can be made: slower, and a shutdown would have to wait for it.
const SLOW_MS_MAX: u64 = 10_000;
/// Room for messages that are larger than any consumer takes.
pub const BODY_BYTES_MAX: usize = 4 * 1024 * 1024;

pub fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new()
        .routes(routes!(get_lab))
        .routes(routes!(publish))
        .routes(routes!(duplicate))
        .routes(routes!(slow))
        .routes(routes!(fail))
        .routes(routes!(crash))
        .routes(routes!(reset))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Lab {
    /// Where the process can be told to die.
    crash_points: Vec<CrashPoint>,
    armed: faults::Armed,
}

/// Look at the fault lab: what can be armed, and what is.
#[utoipa::path(get, path = "/v1/lab", tag = "operations", security(("key" = ["operator", "platform"])), responses((status = 200, body = Lab)))]
async fn get_lab(State(operations): State<Operations>) -> Json<Lab> {
    let points = POINTS.iter().map(|(point, meaning)| CrashPoint { point: (*point).to_owned(), meaning });
    Json(Lab { crash_points: points.collect(), armed: operations.kernel.faults.armed() })
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
#[utoipa::path(post, path = "/v1/lab/publish", tag = "operations", security(("key" = ["operator", "platform"])), request_body = Publish, responses(
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
pub struct CrashPoint {
    point: String,
    /// The moment at which the process will die.
    meaning: &'static str,
}

/// Arm a crash point: the process dies the next time it gets there.
#[utoipa::path(post, path = "/v1/lab/crash", tag = "operations", security(("key" = ["operator", "platform"])), request_body = Crash, responses(
    (status = 202, body = CrashPoint),
    (status = 422, body = Problem, content_type = "application/problem+json"),
))]
async fn crash(
    State(operations): State<Operations>,
    body: Body<Crash>,
) -> Result<(StatusCode, Json<CrashPoint>), Problem> {
    let Crash { point, consumer } = body.value;
    let Some((_, meaning)) = POINTS.iter().find(|(name, _)| *name == point) else {
        let names: Vec<&str> = POINTS.iter().map(|(name, _)| *name).collect();
        let detail = format!("must be one of {}", names.join(", "));
        return Err(Problem::validation(vec![FieldError { pointer: "/point".to_owned(), detail }]));
    };
    operations.kernel.faults.arm_crash(&point, consumer.as_deref());
    Ok((StatusCode::ACCEPTED, Json(CrashPoint { point, meaning })))
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
#[utoipa::path(post, path = "/v1/lab/fail", tag = "operations", security(("key" = ["operator", "platform"])), request_body = Fail, responses(
    (status = 202, body = Failing),
    (status = 404, description = "No such consumer", body = Problem, content_type = "application/problem+json"),
    (status = 422, body = Problem, content_type = "application/problem+json"),
))]
async fn fail(State(operations): State<Operations>, body: Body<Fail>) -> Result<(StatusCode, Json<Failing>), Problem> {
    let Fail { consumer, times } = body.value;
    operations.known_consumer(&consumer)?;
    let times = times.unwrap_or(1);
    operations.kernel.faults.arm_failures(&consumer, times as usize);
    Ok((StatusCode::ACCEPTED, Json(Failing { consumer, times })))
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"consumer": "inventory", "deliveries": 1, "copies": 2}))]
pub struct Duplicate {
    consumer: String,
    /// How many of the next deliveries come again; 1 if not given.
    deliveries: Option<u32>,
    /// How often each of them comes again; 1 if not given.
    copies: Option<u32>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Duplicating {
    consumer: String,
    deliveries: u32,
    copies: u32,
}

/// Let the next deliveries to a consumer come again, as a broker may: the inbox dismisses and counts each copy.
#[utoipa::path(post, path = "/v1/lab/duplicate", tag = "operations", security(("key" = ["operator", "platform"])), request_body = Duplicate, responses(
    (status = 202, body = Duplicating),
    (status = 404, description = "No such consumer", body = Problem, content_type = "application/problem+json"),
    (status = 422, body = Problem, content_type = "application/problem+json"),
))]
async fn duplicate(
    State(operations): State<Operations>,
    body: Body<Duplicate>,
) -> Result<(StatusCode, Json<Duplicating>), Problem> {
    let Duplicate { consumer, deliveries, copies } = body.value;
    operations.known_consumer(&consumer)?;
    let (deliveries, copies) = (deliveries.unwrap_or(1), copies.unwrap_or(1));
    for (pointer, count) in [("/deliveries", deliveries), ("/copies", copies)] {
        if !(1..=TIMES_MAX).contains(&count) {
            return Err(out_of_range(pointer, format!("must be 1 to {TIMES_MAX}")));
        }
    }
    operations.kernel.faults.arm_repeats(&consumer, Repeats { deliveries: deliveries as usize, copies });
    Ok((StatusCode::ACCEPTED, Json(Duplicating { consumer, deliveries, copies })))
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"consumer": "notifications", "ms": 200}))]
pub struct Slow {
    consumer: String,
    /// How long it takes over each event, up to ten seconds; 0 makes it fast again.
    ms: u64,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Slowed {
    consumer: String,
    ms: u64,
}

/// Let a consumer take its time over each event, one after the other.
#[utoipa::path(post, path = "/v1/lab/slow", tag = "operations", security(("key" = ["operator", "platform"])), request_body = Slow, responses(
    (status = 202, body = Slowed),
    (status = 404, description = "No such consumer", body = Problem, content_type = "application/problem+json"),
    (status = 422, body = Problem, content_type = "application/problem+json"),
))]
async fn slow(State(operations): State<Operations>, body: Body<Slow>) -> Result<(StatusCode, Json<Slowed>), Problem> {
    let Slow { consumer, ms } = body.value;
    operations.known_consumer(&consumer)?;
    if ms > SLOW_MS_MAX {
        return Err(out_of_range("/ms", format!("must be 0 to {SLOW_MS_MAX}")));
    }
    operations.kernel.faults.arm_delay(&consumer, Duration::from_millis(ms));
    Ok((StatusCode::ACCEPTED, Json(Slowed { consumer, ms })))
}

/// Take back every fault that is armed; answers with those.
#[utoipa::path(post, path = "/v1/lab/reset", tag = "operations", security(("key" = ["operator", "platform"])), responses((status = 200, body = faults::Armed)))]
async fn reset(State(operations): State<Operations>) -> Json<faults::Armed> {
    let armed = operations.kernel.faults.armed();
    operations.kernel.faults.disarm();
    Json(armed)
}

fn out_of_range(pointer: &str, detail: String) -> Problem {
    Problem::validation(vec![FieldError { pointer: pointer.to_owned(), detail }])
}

impl Operations {
    fn known_consumer(&self, name: &str) -> Result<(), Problem> {
        let known = self.topology.queues.iter().any(|binding| binding.consumer == name);
        if known { Ok(()) } else { Err(Problem::not_found(format!("there is no consumer {name}"))) }
    }
}
