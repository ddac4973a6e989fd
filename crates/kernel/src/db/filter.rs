//! List queries: fixed SQL with the conditions a caller asked for, and nothing of the caller's in the text.

use sqlx::AssertSqlSafe;
use uuid::Uuid;

use crate::clock::Timestamp;

/// A SELECT under construction. Every piece of its text is `'static`; values are bound.
pub struct Filter {
    sql: String,
    values: Vec<Value>,
}

#[derive(Debug, Clone)]
pub enum Value {
    Text(String),
    Uuid(Uuid),
    Int(i64),
    Time(Timestamp),
}

macro_rules! value_from {
    ($($from:ty => $variant:ident),+) => {$(
        impl From<$from> for Value {
            fn from(value: $from) -> Self {
                Self::$variant(value.into())
            }
        }
    )+};
}
value_from!(String => Text, &str => Text, Uuid => Uuid, i64 => Int, i32 => Int, Timestamp => Time);

impl Filter {
    /// `select` must not have a WHERE clause of its own.
    pub fn new(select: &'static str) -> Self {
        Self { sql: format!("{select} WHERE 1 = 1"), values: Vec::new() }
    }

    /// Adds `AND condition`, where each `?` in the condition stands for one of `values`.
    #[must_use]
    pub fn and(mut self, condition: &'static str, values: impl IntoIterator<Item = Value>) -> Self {
        let mut values = values.into_iter();
        self.sql.push_str(" AND ");
        for (index, piece) in condition.split('?').enumerate() {
            if index > 0 {
                self.bind(values.next().expect("one value for each ? of a condition"));
            }
            self.sql.push_str(piece);
        }
        self
    }

    /// Adds the condition only if there is a value for it.
    #[must_use]
    pub fn and_some(self, condition: &'static str, value: Option<impl Into<Value>>) -> Self {
        match value {
            Some(value) => self.and(condition, [value.into()]),
            None => self,
        }
    }

    /// Adds `AND column IN (values)`, unless there are none.
    #[must_use]
    pub fn and_any(mut self, column: &'static str, values: impl IntoIterator<Item = impl Into<Value>>) -> Self {
        let mut values = values.into_iter().peekable();
        if values.peek().is_none() {
            return self;
        }
        self.sql.push_str(&format!(" AND {column} IN ("));
        for (index, value) in values.enumerate() {
            self.sql.push_str(if index > 0 { ", " } else { "" });
            self.bind(value.into());
        }
        self.sql.push(')');
        self
    }

    /// Gathers the rows that are alike in `columns`.
    #[must_use]
    pub fn group(mut self, columns: &'static str) -> Self {
        self.sql.push_str(" GROUP BY ");
        self.sql.push_str(columns);
        self
    }

    /// Ends with an order and a limit.
    #[must_use]
    pub fn page(mut self, order: &'static str, limit: i64) -> Self {
        self.sql.push_str(" ORDER BY ");
        self.sql.push_str(order);
        self.sql.push_str(" LIMIT ");
        self.bind(Value::Int(limit));
        self
    }

    fn bind(&mut self, value: Value) {
        self.values.push(value);
        self.sql.push_str(&format!("${}", self.values.len()));
    }

    /// For `fetch_page!`.
    pub fn into_parts(self) -> (AssertSqlSafe<String>, Vec<Value>) {
        (AssertSqlSafe(self.sql), self.values)
    }
}

/// Runs a [`Filter`] on either database and collects rows of the given tuple type.
#[macro_export]
macro_rules! fetch_page {
    ($tx:expr, $filter:expr, $row:ty) => {{
        let (sql, values) = $filter.into_parts();
        $crate::on!($tx, c => {
            let mut query = sqlx::query_as::<_, $row>(sql);
            for value in values {
                query = match value {
                    $crate::db::Value::Text(value) => query.bind(value),
                    $crate::db::Value::Uuid(value) => query.bind(value),
                    $crate::db::Value::Int(value) => query.bind(value),
                    $crate::db::Value::Time(value) => query.bind(value),
                };
            }
            query.fetch_all(c).await
        })
    }};
}
pub use fetch_page;
