//! Keys, for admins: made, listed, revoked. An admin of one group deals with that group's keys alone.

use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::Operations;
use super::actions::{Why, acted};
use super::redrives::location;
use crate::access::store::{self, KeyRow};
use crate::access::{EVERY_GROUP, Key, Role, Secret, check_name};
use crate::http::caller::Caller;
use crate::http::extract::{Body, Params};
use crate::http::page::{Page, fetch_limit, limit, read_uuid_cursor};
use crate::http::problem::{FieldError, Problem};
use stockade_kernel::db::Tx;
use stockade_kernel::messaging::actions;

/// A key that lasts longer may as well last for ever.
const SECONDS_MAX: u64 = 10 * 365 * 24 * 3600;

pub fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(make_key, list_keys)).routes(routes!(revoke_key))
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"role": "admin", "group_id": "*", "name": "the-boss"}))]
pub struct MakeKey {
    role: Role,
    /// The group it is bound to; `*` is every group.
    group_id: String,
    /// Put on whatever is written with it.
    subsidiary_id: Option<String>,
    /// For people, and for the record of who did what.
    name: String,
    /// For how long it is good; for ever if not given.
    #[schema(minimum = 1)]
    expires_in_seconds: Option<u64>,
}

/// A new key: the only time that its secret is shown.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct NewKey {
    #[serde(flatten)]
    row: KeyRow,
    /// What its holder presents, as `Authorization: Bearer <key>`. It is not kept.
    key: String,
}

/// Make a key. Its secret is in the answer, and nowhere else ever again.
///
/// The first key of a server closes it to all without one, so it must be an admin for every group.
#[utoipa::path(post, path = "/v1/keys", tag = "access", security(("key" = ["admin"])), request_body = MakeKey, responses(
    (status = 201, body = NewKey),
    (status = 409, description = "The first key must be an admin for every group", body = Problem, content_type = "application/problem+json"),
))]
async fn make_key(
    State(operations): State<Operations>,
    caller: Caller,
    body: Body<MakeKey>,
) -> Result<Response, Problem> {
    let (key, secret) = read_key(&operations, &caller, body.value)?;
    let may_make_others = key.is_for_everything() && key.expires_at.is_none();
    if !operations.keys.exist() && !may_make_others {
        let detail = "the first key must be an admin for every group, for good: nobody could make another";
        return Err(Problem::new(409, "last-admin", detail));
    }
    let mut tx = operations.kernel.db.begin().await?;
    let id = store::insert(&mut tx, &key, &caller.operator).await?;
    let details = json!({ "name": key.name, "role": key.role, "group_id": key.group });
    actions::record(&mut tx, &acted(&caller, "key.new", id, None, details)).await?;
    let row = load(&mut tx, &caller, &id.to_string()).await?;
    tx.commit().await?;
    operations.keys.reread().await;
    let body = NewKey { row, key: secret.reveal().to_owned() };
    Ok((StatusCode::CREATED, location("/v1/keys", id), Json(body)).into_response())
}

fn read_key(operations: &Operations, caller: &Caller, asked: MakeKey) -> Result<(Key, Secret), Problem> {
    let wrong =
        |pointer: &str, detail: String| Problem::validation(vec![FieldError { pointer: pointer.to_owned(), detail }]);
    check_name("a name", &asked.name).map_err(|detail| wrong("/name", detail))?;
    if asked.group_id != EVERY_GROUP {
        check_name("a group", &asked.group_id).map_err(|detail| wrong("/group_id", detail))?;
    } else if asked.subsidiary_id.is_some() {
        return Err(wrong("/subsidiary_id", "a key for every group has no subsidiary".to_owned()));
    }
    if !caller.identity.platform && asked.group_id != caller.group_id {
        return Err(Problem::new(403, "role-insufficient", "an admin of one group makes keys for that group alone"));
    }
    if let Some(subsidiary) = &asked.subsidiary_id {
        check_name("a subsidiary", subsidiary).map_err(|detail| wrong("/subsidiary_id", detail))?;
    }
    let expires_at = match asked.expires_in_seconds {
        None => None,
        Some(seconds @ 1..=SECONDS_MAX) => Some(operations.keys.now().plus(Duration::from_secs(seconds))),
        Some(_) => return Err(wrong("/expires_in_seconds", format!("must be 1 to {SECONDS_MAX}"))),
    };
    let secret = Secret::random();
    let key = Key {
        name: asked.name,
        role: asked.role,
        group: asked.group_id,
        subsidiary: asked.subsidiary_id,
        hash: secret.hash(),
        expires_at,
    };
    Ok((key, secret))
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListKeys {
    /// 1 to 200; 50 if not given.
    limit: Option<i64>,
    cursor: Option<String>,
}

/// List keys, newest first, the revoked ones too. Those of the settings are not among them.
#[utoipa::path(get, path = "/v1/keys", tag = "access", security(("key" = ["admin"])), params(ListKeys), responses(
    (status = 200, body = Page<KeyRow>),
))]
async fn list_keys(
    State(operations): State<Operations>,
    caller: Caller,
    Params(params): Params<ListKeys>,
) -> Result<Page<KeyRow>, Problem> {
    let limit = limit(params.limit)?;
    let query = store::Query {
        id: None,
        group_id: caller.messages_of(),
        before: read_uuid_cursor(params.cursor.as_deref())?,
        limit: fetch_limit(limit),
    };
    let rows = store::list(&mut operations.kernel.db.read().await?, query).await?;
    Ok(Page::new(rows, limit, |row| row.id.to_string()))
}

/// Revoke a key. It stops working on every instance within two seconds, and its sessions with it.
#[utoipa::path(post, path = "/v1/keys/{id}/revoke", tag = "access", security(("key" = ["admin"])),
    params(("id" = String, Path)), request_body = Option<Why>,
    responses(
        (status = 200, body = KeyRow),
        (status = 409, description = "It is revoked already, or the last that could make another", body = Problem, content_type = "application/problem+json"),
    ))]
async fn revoke_key(
    State(operations): State<Operations>,
    caller: Caller,
    Path(id): Path<String>,
    body: Option<Body<Why>>,
) -> Result<Json<KeyRow>, Problem> {
    let why = Why::of(body)?;
    let mut tx = operations.kernel.db.begin().await?;
    let key = load(&mut tx, &caller, &id).await?;
    let id = key.id;
    if !store::revoke(&mut tx, id).await? {
        return Err(Problem::new(409, "already-revoked", "the key is revoked already"));
    }
    let made_others = key.role == Role::Admin && key.group_id == EVERY_GROUP;
    if made_others && !operations.keys.configure_an_admin() && !store::has_an_admin(&mut tx).await? {
        let detail = "it is the last key that could make others for every group; make one first";
        return Err(Problem::new(409, "last-admin", detail));
    }
    actions::record(&mut tx, &acted(&caller, "key.revoke", id, why, json!({}))).await?;
    let row = load(&mut tx, &caller, &id.to_string()).await?;
    tx.commit().await?;
    operations.keys.reread().await;
    Ok(Json(row))
}

async fn load(tx: &mut Tx, caller: &Caller, id: &str) -> Result<KeyRow, Problem> {
    let missing = || Problem::not_found(format!("there is no key {id}"));
    let uuid = Uuid::try_parse(id).map_err(|_| missing())?;
    let query = store::Query { id: Some(uuid), group_id: caller.messages_of(), before: None, limit: 1 };
    store::list(tx, query).await?.pop().ok_or_else(missing)
}
