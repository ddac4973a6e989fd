//! The table of keys. A revoked key stays in it, for the record.

use uuid::Uuid;

use super::{BELL, EVERY_GROUP, Hash, Key, Role};
use stockade_kernel::clock::{Timestamp, mint_id};
use stockade_kernel::db::{Filter, Tx, fetch_page};

/// What the table says.
#[derive(Debug, Default)]
pub struct Table {
    /// Those not revoked.
    pub keys: Vec<Key>,
    pub ever_held_a_key: bool,
}

/// A key as it is listed; of its secret nothing is left to show.
#[derive(Debug, Clone, serde::Serialize, utoipa::ToSchema)]
pub struct KeyRow {
    pub id: Uuid,
    #[schema(example = "till-1")]
    pub name: String,
    pub role: Role,
    /// The group it is bound to; `*` is every group.
    #[schema(example = "acme")]
    pub group_id: String,
    pub subsidiary_id: Option<String>,
    pub created_by: String,
    pub created_at: Timestamp,
    pub expires_at: Option<Timestamp>,
    pub revoked_at: Option<Timestamp>,
}

type Columns = (Uuid, String, String, String, Option<String>, String, Timestamp, Option<Timestamp>, Option<Timestamp>);

const SELECT_ROWS: &str = "SELECT id, name, role, group_id, subsidiary_id, created_by, created_at, expires_at, \
     revoked_at FROM access_keys";

impl From<Columns> for KeyRow {
    fn from(columns: Columns) -> Self {
        let (id, name, role, group_id, subsidiary_id, created_by, created_at, expires_at, revoked_at) = columns;
        // A role that this version does not know may do the least.
        let role = Role::read(&role).unwrap_or(Role::Viewer);
        Self { id, name, role, group_id, subsidiary_id, created_by, created_at, expires_at, revoked_at }
    }
}

pub async fn load(tx: &mut Tx) -> sqlx::Result<Table> {
    type Row = (String, String, String, Option<String>, Vec<u8>, Option<Timestamp>, Option<Timestamp>);
    let rows: Vec<Row> = stockade_kernel::on!(tx, c => {
        sqlx::query_as("SELECT name, role, group_id, subsidiary_id, hash, expires_at, revoked_at FROM access_keys")
            .fetch_all(c)
            .await
    })?;
    let ever_held_a_key = !rows.is_empty();
    let key = |(name, role, group, subsidiary, hash, expires_at, revoked_at): Row| {
        let (role, hash) = (Role::read(&role)?, Hash::from_slice(&hash)?);
        revoked_at.is_none().then_some(Key { name, role, group, subsidiary, hash, expires_at })
    };
    Ok(Table { keys: rows.into_iter().filter_map(key).collect(), ever_held_a_key })
}

pub async fn insert(tx: &mut Tx, key: &Key, created_by: &str) -> sqlx::Result<Uuid> {
    let (id, now) = (mint_id(), tx.now());
    stockade_kernel::on!(tx, c => {
        sqlx::query(
            "INSERT INTO access_keys (id, name, role, group_id, subsidiary_id, hash, created_by, created_at, expires_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        )
        .bind(id)
        .bind(&key.name)
        .bind(key.role.as_str())
        .bind(&key.group)
        .bind(&key.subsidiary)
        .bind(key.hash.0.to_vec())
        .bind(created_by)
        .bind(now)
        .bind(key.expires_at)
        .execute(c)
        .await
        .map(drop)
    })?;
    tx.ring_on_commit(BELL);
    Ok(id)
}

#[derive(Debug, Default, Clone)]
pub struct Query {
    pub id: Option<Uuid>,
    /// Those bound to this group alone.
    pub group_id: Option<String>,
    pub before: Option<Uuid>,
    pub limit: i64,
}

/// Newest first, the revoked ones too.
pub async fn list(tx: &mut Tx, query: Query) -> sqlx::Result<Vec<KeyRow>> {
    let filter = Filter::new(SELECT_ROWS)
        .and_some("id = ?", query.id)
        .and_some("group_id = ?", query.group_id)
        .and_some("id < ?", query.before)
        .page("id DESC", query.limit);
    Ok(fetch_page!(tx, filter, Columns)?.into_iter().map(KeyRow::from).collect())
}

/// Revokes a key; `false` if it has been revoked already.
pub async fn revoke(tx: &mut Tx, id: Uuid) -> sqlx::Result<bool> {
    let now = tx.now();
    let revoked = stockade_kernel::on!(tx, c => {
        sqlx::query("UPDATE access_keys SET revoked_at = $2 WHERE id = $1 AND revoked_at IS NULL")
            .bind(id)
            .bind(now)
            .execute(c)
            .await
            .map(|done| done.rows_affected())
    })?;
    tx.ring_on_commit(BELL);
    Ok(revoked > 0)
}

/// Is there a key in the table, for good, that may do everything?
pub async fn has_an_admin(tx: &mut Tx) -> sqlx::Result<bool> {
    let found: Option<i32> = stockade_kernel::on!(tx, c => {
        sqlx::query_scalar(
            "SELECT 1 FROM access_keys
             WHERE group_id = $1 AND role = $2 AND revoked_at IS NULL AND expires_at IS NULL LIMIT 1",
        )
        .bind(EVERY_GROUP)
        .bind(Role::Admin.as_str())
        .fetch_optional(c)
        .await
    })?;
    Ok(found.is_some())
}
