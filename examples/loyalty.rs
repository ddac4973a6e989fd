//! A module of your own on the messaging kernel: customers earn one loyalty point per unit reserved.
//!
//! `cargo run --example loyalty`, place an order, and `GET /v1/loyalty/{its id}`. Adding points is not idempotent,
//! yet nothing here guards against an event that comes twice: the kernel's inbox row is in the transaction lent to
//! `react`. The queue, retries, dead letters, pausing and the operator's API come with the module's name.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::{Path, State};
use clap::Parser;
use serde_json::value::RawValue;
use stockade::app::Builder;
use stockade::config::Settings;
use stockade::http::caller::Caller;
use stockade::http::problem::Problem;
use stockade::inventory::events::{InventoryReserved, RESERVED};
use stockade_kernel::db::{Db, Tx};
use stockade_kernel::messaging::{Message, Outcome, Reaction};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

/// A table carries its module's name, and `group_id`, the tenant, is in every key.
const SCHEMA: &str = "CREATE TABLE IF NOT EXISTS loyalty_points (
    group_id TEXT NOT NULL, order_id TEXT NOT NULL, points BIGINT NOT NULL, PRIMARY KEY (group_id, order_id))";

struct Loyalty;

impl Reaction for Loyalty {
    const NAME: &'static str = "loyalty";
    const KEYS: &'static [&'static str] = &[RESERVED];
    type Fact = InventoryReserved;

    fn decode(_key: &str, payload: &RawValue) -> Result<InventoryReserved, serde_json::Error> {
        serde_json::from_str(payload.get())
    }

    /// Whatever has arrived is one batch, one transaction and, here, one statement. The map sums the events of one
    /// order, and its order of keys keeps two instances from deadlocking.
    async fn react(&self, tx: &mut Tx, batch: &[&Message<InventoryReserved>]) -> sqlx::Result<Vec<Outcome>> {
        let mut earned: BTreeMap<(&str, String), i64> = BTreeMap::new();
        for message in batch {
            let units: i64 = message.fact.lines.iter().map(|line| line.quantity.get()).sum();
            *earned.entry((&message.event.group_id, message.fact.order_id.to_string())).or_default() += units;
        }
        stockade_kernel::on!(tx, c => {
            sqlx::QueryBuilder::new("INSERT INTO loyalty_points (group_id, order_id, points) ")
                .push_values(&earned, |mut row, ((group_id, order_id), points)| {
                    row.push_bind(*group_id).push_bind(order_id).push_bind(points);
                })
                .push(" ON CONFLICT (group_id, order_id) DO UPDATE SET points = loyalty_points.points + excluded.points")
                .build()
                .execute(c)
                .await
                .map(drop)
        })?;
        Ok(vec![Outcome::Done; batch.len()])
    }
}

/// The points an order has earned.
#[utoipa::path(get, path = "/v1/loyalty/{order_id}", security(("key" = ["viewer"])),
    params(("order_id" = Uuid, Path)), responses((status = 200)))]
async fn get_points(
    State(db): State<Db>,
    caller: Caller,
    Path(order_id): Path<Uuid>,
) -> Result<Json<serde_json::Value>, Problem> {
    let mut tx = db.read().await?;
    let points: Option<i64> = stockade_kernel::on!(tx, c => {
        let query = sqlx::query_scalar("SELECT points FROM loyalty_points WHERE group_id = $1 AND order_id = $2");
        query.bind(&caller.group_id).bind(order_id.to_string()).fetch_optional(c).await?
    });
    Ok(Json(serde_json::json!({ "order_id": order_id, "points": points.unwrap_or(0) })))
}

/// Adds the module to an application: its table, its reaction, its routes.
pub fn add_to(builder: Builder) -> Builder {
    builder
        .with_schema(SCHEMA)
        .with(Loyalty)
        .with_routes(|db| OpenApiRouter::new().routes(routes!(get_points)).with_state(db.clone()))
}

/// Takes the settings of `stockade serve`.
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    settings: Settings,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let running = add_to(Builder::new(Cli::parse().settings)).start().await?;
    println!("Loyalty is served on http://{}", running.address);
    running.run_until(async { drop(stockade::lifecycle::asked_to_stop().await) }).await;
    Ok(())
}
