//! Servers on a schema that another version has migrated.

use crate::support::{Server, TestDb, each_database};

async fn a_schema_that_a_newer_binary_has_extended_is_served(db: TestDb) {
    for table in ["messaging_migrations", "stockade_migrations"] {
        db.execute(insert_newer(table), &[]).await;
    }
    assert!(Server::start(&db, &[]).terminate().await);
}

fn insert_newer(table: &str) -> &'static str {
    format!("INSERT INTO {table} (version, name, checksum) VALUES (9999, 'newer', 'unknown')").leak()
}

async fn a_migration_that_was_changed_after_it_was_applied_is_refused(db: TestDb) {
    db.execute("UPDATE stockade_migrations SET checksum = 'of another text' WHERE version = 3", &[]).await;
    let refused = Server::command(&db, &[]).output().unwrap();
    let error = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{error}");
    assert!(error.contains("migration 0003_inventory was changed after it had been applied"), "{error}");
}

each_database!(
    a_schema_that_a_newer_binary_has_extended_is_served,
    a_migration_that_was_changed_after_it_was_applied_is_refused,
);
