//! The modules' tables.

use stockade_kernel::db::Schema;
use stockade_kernel::migrations;

pub const SCHEMAS: &[Schema] = &[Schema {
    table: "stockade_migrations",
    migrations: migrations!("../migrations":
        2 "0002_orders",
        3 "0003_inventory",
        4 "0004_notifications",
        5 "0005_ledger",
        6 "0006_access",
    ),
}];
