//! A place of its own within somebody's Postgres, for a run that is to leave nothing behind: a schema, dropped
//! afterwards. Whoever opens [`ScratchSchema::url`] sees that schema and nothing else.

use anyhow::Context;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};

use crate::clock::mint_id;

pub struct ScratchSchema {
    database_url: String,
    name: String,
}

impl ScratchSchema {
    /// Names it. `prefix` is a plain word, for whoever finds the schema of a run that was killed.
    pub fn new(database_url: &str, prefix: &str) -> Self {
        Self { database_url: database_url.to_owned(), name: format!("{prefix}_{}", mint_id().simple()) }
    }

    pub async fn create(&self) -> anyhow::Result<()> {
        let create = self.execute(format!("CREATE SCHEMA {}", self.name));
        create.await.context("cannot create a schema in Postgres")
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The database's URL, with the schema as the one that unqualified names are looked up and created in.
    pub fn url(&self) -> String {
        let joint = if self.database_url.contains('?') { '&' } else { '?' };
        format!("{}{joint}options[search_path]={}", self.database_url, self.name)
    }

    /// Drops it with all that is in it, if it was created.
    pub async fn remove(self) -> anyhow::Result<()> {
        self.execute(format!("DROP SCHEMA IF EXISTS {} CASCADE", self.name))
            .await
            .with_context(|| format!("the schema {} could not be dropped; drop it by hand", self.name))
    }

    async fn execute(&self, sql: String) -> sqlx::Result<()> {
        let mut connection = PgConnection::connect(&self.database_url).await?;
        connection.execute(AssertSqlSafe(sql)).await?;
        connection.close().await
    }
}
