//! Statements as sqlx spells them, over SQLite: text, values by number, and what comes back.

use std::marker::PhantomData;

use rusqlite::types::{FromSql, Value};
use rusqlite::{CachedStatement, Connection, Row};
use serde::Serialize;
use sqlx::types::Json;
use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};
use uuid::Uuid;

use super::SqliteConnection;
use crate::clock::Timestamp;

/// A statement with its values.
pub struct Query {
    sql: SqlStr,
    values: Vec<Value>,
}

/// A statement whose rows are tuples.
pub struct QueryAs<D, O> {
    query: Query,
    rows: PhantomData<fn() -> (D, O)>,
}

/// A statement whose rows have one column.
pub struct QueryScalar<D, O> {
    query: Query,
    rows: PhantomData<fn() -> (D, O)>,
}

/// The database that [`QueryAs`] and [`QueryScalar`] are for; sqlx names one there.
pub enum Here {}

pub fn query(sql: impl SqlSafeStr) -> Query {
    Query { sql: sql.into_sql_str(), values: Vec::new() }
}

pub fn query_as<D, O>(sql: impl SqlSafeStr) -> QueryAs<D, O> {
    QueryAs { query: query(sql), rows: PhantomData }
}

pub fn query_scalar<D, O>(sql: impl SqlSafeStr) -> QueryScalar<D, O> {
    QueryScalar { query: query(sql), rows: PhantomData }
}

/// What a statement has done.
pub struct Done {
    changed: u64,
}

impl Done {
    pub fn rows_affected(&self) -> u64 {
        self.changed
    }
}

impl Query {
    #[must_use]
    pub fn bind(mut self, value: impl Bind) -> Self {
        self.values.push(value.to_value());
        self
    }

    pub async fn execute(self, c: &mut SqliteConnection) -> sqlx::Result<Done> {
        c.run(move |connection| {
            let mut statement = self.prepare(connection)?;
            let mut rows = statement.raw_query();
            while rows.next()?.is_some() {}
            drop(rows);
            Ok(Done { changed: connection.changes() })
        })
        .await
    }

    /// The statement with its values bound: `$2` is the second, wherever it stands.
    fn prepare<'c>(&self, connection: &'c Connection) -> rusqlite::Result<CachedStatement<'c>> {
        let mut statement = connection.prepare_cached(self.sql.as_str())?;
        for index in 1..=statement.parameter_count() {
            let number = statement.parameter_name(index).and_then(|name| name.get(1..)?.parse::<usize>().ok());
            let value = number.and_then(|number| self.values.get(number.checked_sub(1)?));
            let value = value.ok_or_else(|| {
                let name = statement.parameter_name(index).unwrap_or_default();
                rusqlite::Error::InvalidParameterName(name.to_owned())
            })?;
            statement.raw_bind_parameter(index, value)?;
        }
        Ok(statement)
    }

    async fn fetch<O: Send + 'static>(
        self,
        c: &mut SqliteConnection,
        limit: usize,
        read: fn(&Row<'_>) -> rusqlite::Result<O>,
    ) -> sqlx::Result<Vec<O>> {
        c.run(move |connection| {
            let mut statement = self.prepare(connection)?;
            let mut rows = statement.raw_query();
            let mut found = Vec::new();
            while found.len() < limit
                && let Some(row) = rows.next()?
            {
                found.push(read(row)?);
            }
            Ok(found)
        })
        .await
    }
}

macro_rules! fetching {
    ($query:ident, $read:expr, $($bound:tt)+) => {
        impl<O: Send + 'static> $query<Here, O>
        where
            $($bound)+
        {
            #[must_use]
            pub fn bind(mut self, value: impl Bind) -> Self {
                self.query = self.query.bind(value);
                self
            }

            pub async fn fetch_all(self, c: &mut SqliteConnection) -> sqlx::Result<Vec<O>> {
                self.query.fetch(c, usize::MAX, $read).await
            }

            pub async fn fetch_optional(self, c: &mut SqliteConnection) -> sqlx::Result<Option<O>> {
                Ok(self.query.fetch(c, 1, $read).await?.pop())
            }

            pub async fn fetch_one(self, c: &mut SqliteConnection) -> sqlx::Result<O> {
                self.fetch_optional(c).await?.ok_or(sqlx::Error::RowNotFound)
            }
        }
    };
}
fetching!(QueryAs, |row| O::try_from(row), O: for<'r> TryFrom<&'r Row<'r>, Error = rusqlite::Error>);
fetching!(QueryScalar, |row| row.get(0), O: FromSql);

/// A statement put together from pieces of text, for as many rows as there are.
pub struct QueryBuilder {
    sql: String,
    values: Vec<Value>,
}

/// One row of values.
pub struct Separated<'b> {
    builder: &'b mut QueryBuilder,
    is_first: bool,
}

impl QueryBuilder {
    pub fn new(sql: &'static str) -> Self {
        Self { sql: sql.to_owned(), values: Vec::new() }
    }

    pub fn push(&mut self, sql: &'static str) -> &mut Self {
        self.sql.push_str(sql);
        self
    }

    /// `VALUES (…), (…)`, each row as `fill` fills it.
    pub fn push_values<T>(
        &mut self,
        rows: impl IntoIterator<Item = T>,
        mut fill: impl FnMut(Separated<'_>, T),
    ) -> &mut Self {
        for (index, row) in rows.into_iter().enumerate() {
            self.sql.push_str(if index == 0 { "VALUES (" } else { "), (" });
            fill(Separated { builder: self, is_first: true }, row);
        }
        self.sql.push(')');
        self
    }

    pub fn build(&mut self) -> Query {
        let sql = AssertSqlSafe(std::mem::take(&mut self.sql)).into_sql_str();
        Query { sql, values: std::mem::take(&mut self.values) }
    }
}

impl Separated<'_> {
    pub fn push_bind(&mut self, value: impl Bind) -> &mut Self {
        self.builder.values.push(value.to_value());
        let comma = if std::mem::take(&mut self.is_first) { "" } else { ", " };
        self.builder.sql.push_str(&format!("{comma}${}", self.builder.values.len()));
        self
    }
}

/// What can be bound to a statement.
pub trait Bind {
    fn to_value(&self) -> Value;
}

macro_rules! bind {
    ($($from:ty => |$value:ident| $into:expr),+ $(,)?) => {$(
        impl Bind for $from {
            fn to_value(&self) -> Value {
                let $value = self;
                $into
            }
        }
    )+};
}
bind!(
    i64 => |value| Value::Integer(*value),
    i32 => |value| Value::Integer((*value).into()),
    bool => |value| Value::Integer((*value).into()),
    str => |value| Value::Text(value.to_owned()),
    String => |value| Value::Text(value.clone()),
    [u8] => |value| Value::Blob(value.to_vec()),
    Vec<u8> => |value| Value::Blob(value.clone()),
    Uuid => |value| Value::Blob(value.as_bytes().to_vec()),
    Timestamp => |value| Value::Integer(value.millis()),
);

impl<T: Bind + ?Sized> Bind for &T {
    fn to_value(&self) -> Value {
        (**self).to_value()
    }
}

impl<T: Bind> Bind for Option<T> {
    fn to_value(&self) -> Value {
        self.as_ref().map_or(Value::Null, Bind::to_value)
    }
}

impl<T: Serialize> Bind for Json<T> {
    fn to_value(&self) -> Value {
        Value::Text(serde_json::to_string(&self.0).expect("rows of texts and numbers are JSON"))
    }
}
