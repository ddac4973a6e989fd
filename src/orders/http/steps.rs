//! What may be done to an order once it is placed: pay, cancel, fulfil.
//!
//! Each is one commit with its event, or a 409 that tells the state in the way. With an `Idempotency-Key` a repeat
//! answers as the first did; only what was done is remembered.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{OrderBody, OrdersApi, created, default_currency, note_replay, note_wait};
use crate::http::caller::Caller;
use crate::http::extract::{Body, fingerprint, idempotency_key, prefer_wait};
use crate::http::problem::Problem;
use crate::orders::error::OrderError;
use crate::orders::events::{Amount, Currency};
use crate::orders::model::{Order, Step};
use crate::orders::service::{IdempotencyKey, StepRequest, Stepped};
use stockade_kernel::messaging::event::is_plain_text;

const REASON_CHARS_MAX: usize = 200;

pub(super) fn routes() -> OpenApiRouter<Arc<OrdersApi>> {
    OpenApiRouter::new().routes(routes!(pay_order)).routes(routes!(cancel_order)).routes(routes!(fulfil_order))
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"amount_minor": 2500, "currency": "USD"}))]
pub struct PayOrder {
    /// The order's total, in minor units (cents).
    #[schema(value_type = i64, minimum = 0)]
    amount_minor: Amount,
    /// The order's currency.
    #[serde(default = "default_payment_currency")]
    #[schema(value_type = String, default = "USD")]
    currency: Currency,
}

fn default_payment_currency() -> Currency {
    default_currency().try_into().expect("three capital letters")
}

/// Pay an order that is reserved.
///
/// The amount must be the order's total, in its currency. The ledger books it moments later. An order that costs
/// nothing is paid with 0. Of a payment and the end of the hold, whichever is first wins.
#[utoipa::path(post, path = "/v1/orders/{id}/payments", tag = "orders", security(("key" = ["client"])), request_body = PayOrder,
    params(
        ("id" = String, Path, description = "The uuid or the ORD- number"),
        ("Idempotency-Key" = Option<String>, Header, description = "Makes a repeat of this request answer as the first one did"),
        ("Prefer" = Option<String>, Header, description = "`wait=N`: if the order is not reserved yet, wait for that, N seconds at most"),
    ),
    responses(
        (status = 201, description = "Paid", body = OrderBody, headers(
            ("Location" = String, description = "The order"),
            ("Idempotent-Replayed" = String, description = "`true` if an earlier request paid it"),
        )),
        (status = 400, description = "Malformed JSON, or a bad key", body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "The order is not reserved; `state` says what it is", body = Problem, content_type = "application/problem+json"),
        (status = 415, description = "The body is not JSON", body = Problem, content_type = "application/problem+json"),
        (status = 422, description = "Another amount or currency than the order's, or the key was used for another request", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database cannot be used just now", body = Problem, content_type = "application/problem+json"),
    ))]
async fn pay_order(
    State(api): State<Arc<OrdersApi>>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<String>,
    body: Body<PayOrder>,
) -> Result<Response, Problem> {
    let PayOrder { amount_minor: amount, currency } = body.value;
    let ask = Ask { path: "payments", raw: &body.raw, step: Step::Pay { amount, currency } };
    let (order, replayed) = api.step(&caller, &headers, &id, ask).await?;
    let mut response = created(order, replayed);
    note_wait(response.headers_mut(), prefer_wait(&headers), api.wait_max);
    Ok(response)
}

#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"reason": "ordered by mistake"}))]
pub struct CancelOrder {
    /// Why, for people; the order and its event carry it.
    #[serde(default)]
    reason: Option<String>,
}

/// Cancel an order that is placed or reserved. Its stock comes back moments later.
///
/// The body may be left out.
#[utoipa::path(post, path = "/v1/orders/{id}/cancel", tag = "orders", security(("key" = ["client"]), ("key" = ["operator"])), request_body = Option<CancelOrder>,
    params(
        ("id" = String, Path, description = "The uuid or the ORD- number"),
        ("Idempotency-Key" = Option<String>, Header, description = "Makes a repeat of this request answer as the first one did"),
        ("Prefer" = Option<String>, Header, description = "`wait=N` is taken and never needed: an order can be cancelled at once or not at all"),
    ),
    responses(
        (status = 200, description = "Cancelled", body = OrderBody, headers(
            ("Idempotent-Replayed" = String, description = "`true` if an earlier request cancelled it"),
        )),
        (status = 400, description = "Malformed JSON, or a bad key", body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "It is too late to cancel; `state` says why", body = Problem, content_type = "application/problem+json"),
        (status = 415, description = "The body is not JSON", body = Problem, content_type = "application/problem+json"),
        (status = 422, description = "A field is wrong, or the key was used for another request", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database cannot be used just now", body = Problem, content_type = "application/problem+json"),
    ))]
async fn cancel_order(
    State(api): State<Arc<OrdersApi>>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<String>,
    body: Option<Body<CancelOrder>>,
) -> Result<Response, Problem> {
    let (CancelOrder { reason }, raw) = body.map(|body| (body.value, body.raw)).unwrap_or_default();
    if reason.as_deref().is_some_and(|reason| !is_plain_text(reason, REASON_CHARS_MAX)) {
        let rule = format!("must have 1 to {REASON_CHARS_MAX} characters and no control characters");
        return Err(OrderError::invalid("/reason", rule).into());
    }
    let ask = Ask { path: "cancel", raw: &raw, step: Step::Cancel { reason } };
    api.answer_step(&caller, &headers, &id, ask).await
}

/// Fulfil an order that is paid: its goods leave the shelf moments later.
#[utoipa::path(post, path = "/v1/orders/{id}/fulfil", tag = "orders", security(("key" = ["client"]), ("key" = ["operator"])),
    params(
        ("id" = String, Path, description = "The uuid or the ORD- number"),
        ("Idempotency-Key" = Option<String>, Header, description = "Makes a repeat of this request answer as the first one did"),
        ("Prefer" = Option<String>, Header, description = "`wait=N`: if the order is not paid yet, wait for that, N seconds at most"),
    ),
    responses(
        (status = 200, description = "Fulfilled", body = OrderBody, headers(
            ("Idempotent-Replayed" = String, description = "`true` if an earlier request fulfilled it"),
        )),
        (status = 400, description = "A bad key", body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "The order is not paid; `state` says what it is", body = Problem, content_type = "application/problem+json"),
        (status = 422, description = "The key was used for another request", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database cannot be used just now", body = Problem, content_type = "application/problem+json"),
    ))]
async fn fulfil_order(
    State(api): State<Arc<OrdersApi>>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Result<Response, Problem> {
    api.answer_step(&caller, &headers, &id, Ask { path: "fulfil", raw: &[], step: Step::Fulfil }).await
}

/// A step as it was asked for.
struct Ask<'a> {
    /// What follows the order in the path.
    path: &'static str,
    raw: &'a [u8],
    step: Step,
}

impl OrdersApi {
    /// Takes an order a step on and returns it as it then is, and whether an earlier request had done it.
    async fn step(
        &self,
        caller: &Caller,
        headers: &HeaderMap,
        id: &str,
        ask: Ask<'_>,
    ) -> Result<(Order, bool), Problem> {
        let key = idempotency_key(headers)?;
        let order = self.load(caller, id).await?;
        let order = self.wait_while(caller, order, prefer_wait(headers), |status| ask.step.is_early(status)).await?;
        // The id rather than what was given: an order's uuid and its number are one path.
        let path = format!("/v1/orders/{}/{}", order.id.0, ask.path);
        let request = StepRequest {
            group_id: caller.group_id.clone(),
            order_id: order.id,
            step: ask.step,
            traceparent: caller.traceparent,
            key: key.map(|key| IdempotencyKey { key, fingerprint: fingerprint("POST", &path, ask.raw) }),
        };
        let replayed = match self.desk.step(request).await? {
            Stepped::Done => false,
            Stepped::Replay => true,
            Stepped::KeyReused { first_fingerprint } => return Err(OrderError::KeyReused { first_fingerprint }.into()),
            Stepped::Refused(refusal) => return Err(OrderError::from(refusal).into()),
            Stepped::Missing => return Err(OrderError::NotFound(id.to_owned()).into()),
        };
        Ok((self.load(caller, &order.id.0.to_string()).await?, replayed))
    }

    /// The same, as an answer of 200.
    async fn answer_step(
        &self,
        caller: &Caller,
        headers: &HeaderMap,
        id: &str,
        ask: Ask<'_>,
    ) -> Result<Response, Problem> {
        let (order, replayed) = self.step(caller, headers, id, ask).await?;
        let mut response = Json(OrderBody::from(order)).into_response();
        note_replay(response.headers_mut(), replayed);
        note_wait(response.headers_mut(), prefer_wait(headers), self.wait_max);
        Ok(response)
    }
}
