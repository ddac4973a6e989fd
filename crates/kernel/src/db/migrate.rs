//! Brings a database to the schema that this binary needs.
//!
//! Each migration is one transaction, together with its record. On Postgres a lock within that transaction lets one of
//! several starting instances migrate while the others wait; a SQLite file has one server. A schema that a newer binary has
//! extended is served: migrations only add until no older binary runs.

use anyhow::{Context, bail};
use sha2::{Digest, Sha256};
use sqlx::AssertSqlSafe;

use super::{Conn, Db, Tx, sqlite};

/// The tables of one owner, which records its migrations in a table of its own.
#[derive(Debug, Clone, Copy)]
pub struct Schema {
    /// The table of applied migrations.
    pub table: &'static str,
    /// In the order in which they are applied. One that was released is never changed.
    pub migrations: &'static [Migration],
}

#[derive(Debug, Clone, Copy)]
pub struct Migration {
    pub version: i64,
    pub name: &'static str,
    pub postgres: &'static str,
    pub sqlite: &'static str,
}

/// The migrations of the given names, which begin with their versions, from `postgres/` and `sqlite/` in `folder`.
#[macro_export]
macro_rules! migrations {
    ($folder:literal: $($version:literal $name:literal),+ $(,)?) => {
        &[$($crate::db::Migration {
            version: $version,
            name: $name,
            postgres: include_str!(concat!($folder, "/postgres/", $name, ".sql")),
            sqlite: include_str!(concat!($folder, "/sqlite/", $name, ".sql")),
        }),+]
    };
}

pub const KERNEL: Schema =
    Schema { table: "messaging_migrations", migrations: migrations!("../../migrations": 1 "0001_messaging") };

impl Schema {
    /// Applies the missing migrations, each in its own transaction.
    pub(super) async fn migrate(&self, db: &Db) -> anyhow::Result<()> {
        loop {
            let mut tx = db.begin().await?;
            tx.lock_schema().await?;
            let create = format!(
                "CREATE TABLE IF NOT EXISTS {} (version bigint PRIMARY KEY, name text NOT NULL, checksum text NOT NULL)",
                self.table
            );
            tx.run_script(create).await?;
            let Some(next) = self.next(&self.applied(&mut tx).await?)? else { return Ok(()) };
            let sql = match tx.conn() {
                Conn::Postgres(_) => next.postgres,
                Conn::Sqlite(_) => next.sqlite,
            };
            tx.run_script(sql.to_owned()).await.with_context(|| format!("migration {}", next.name))?;
            let record = format!("INSERT INTO {} (version, name, checksum) VALUES ($1, $2, $3)", self.table);
            crate::on!(tx, c => {
                sqlx::query(AssertSqlSafe(record))
                    .bind(next.version)
                    .bind(next.name)
                    .bind(next.checksum())
                    .execute(c)
                    .await
                    .map(drop)
            })?;
            tx.commit().await?;
        }
    }

    /// How many migrations are not applied yet.
    pub(super) async fn count_missing(&self, tx: &mut Tx) -> sqlx::Result<usize> {
        let applied = self.applied(tx).await?;
        let is_missing = |migration: &&Migration| applied.iter().all(|(version, _)| *version != migration.version);
        Ok(self.migrations.iter().filter(is_missing).count())
    }

    /// Versions and checksums.
    async fn applied(&self, tx: &mut Tx) -> sqlx::Result<Vec<(i64, String)>> {
        let select = format!("SELECT version, checksum FROM {}", self.table);
        crate::on!(tx, c => sqlx::query_as(AssertSqlSafe(select)).fetch_all(c).await)
    }

    /// The first migration that is not applied. An error if one was changed after it had been.
    fn next(&self, applied: &[(i64, String)]) -> anyhow::Result<Option<&Migration>> {
        for migration in self.migrations {
            match applied.iter().find(|(version, _)| *version == migration.version) {
                None => return Ok(Some(migration)),
                Some((_, checksum)) if *checksum != migration.checksum() => {
                    bail!("migration {} was changed after it had been applied to this database", migration.name);
                }
                Some(_) => {}
            }
        }
        Ok(None)
    }
}

impl Migration {
    fn checksum(&self) -> String {
        let hash = Sha256::new().chain_update(self.postgres).chain_update([0]).chain_update(self.sqlite).finalize();
        format!("{hash:x}")
    }
}

impl Tx {
    /// On Postgres, lets one instance at a time change the schema, for as long as that takes.
    async fn lock_schema(&mut self) -> sqlx::Result<()> {
        const LOCK: i64 = 0x5354_4f43_4b41_4445;
        if let Conn::Postgres(c) = self.conn() {
            sqlx::raw_sql("SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = 0").execute(&mut **c).await?;
            sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(LOCK).execute(&mut **c).await?;
        }
        Ok(())
    }

    /// Runs any number of statements.
    async fn run_script(&mut self, sql: String) -> sqlx::Result<()> {
        match self.conn() {
            Conn::Postgres(c) => sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut **c).await.map(drop),
            Conn::Sqlite(c) => c.writing()?.execute_batch(&sql).map_err(sqlite::to_sqlx),
        }
    }
}

impl Db {
    /// Runs the schema of a module that brings its own, one instance at a time. `sql` leaves existing tables alone.
    pub async fn create(&self, sql: &'static str) -> sqlx::Result<()> {
        let mut tx = self.begin().await?;
        tx.lock_schema().await?;
        tx.run_script(sql.to_owned()).await?;
        tx.commit().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Migration = Migration { version: 1, name: "0001_one", postgres: "a", sqlite: "b" };
    const TWO: Migration = Migration { version: 2, name: "0002_two", postgres: "c", sqlite: "d" };
    const SCHEMA: Schema = Schema { table: "t", migrations: &[ONE, TWO] };

    #[test]
    fn the_next_migration_is_the_first_that_is_not_applied() {
        let record = |migration: Migration| (migration.version, migration.checksum());
        let next = |applied: &[(i64, String)]| SCHEMA.next(applied).map(|next| next.map(|next| next.version));
        assert_eq!(next(&[]).unwrap(), Some(1));
        assert_eq!(next(&[record(ONE)]).unwrap(), Some(2));
        assert_eq!(next(&[record(TWO)]).unwrap(), Some(1));
        assert_eq!(next(&[record(ONE), record(TWO), (3, "of a newer binary".to_owned())]).unwrap(), None);
        assert!(next(&[(1, TWO.checksum())]).unwrap_err().to_string().contains("0001_one"));
    }
}
