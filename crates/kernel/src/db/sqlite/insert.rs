//! Inserting many rows: several to a statement, because opening a table's and its indexes' cursors costs about as much as
//! inserting a row does.
//!
//! A row that breaks a constraint rolls the whole transaction back (`OR ROLLBACK`). It would be given up anyway, and otherwise
//! SQLite keeps a copy of every page that a statement is about to change, to undo that statement alone.
//!
//! Ids are best given as their bytes (`id.as_bytes()`): of a `Uuid` rusqlite makes a copy on the heap.

use rusqlite::{CachedStatement, ToSql};

use super::{SqliteConnection, to_sqlx};

/// How many rows a statement inserts: as many as there are left, so that few go by one.
const HEIGHTS: [usize; 3] = [32, 8, 1];

/// The values of one row.
pub trait Values {
    const WIDTH: usize;

    /// Binds them to the parameters from `first` on.
    fn bind(&self, statement: &mut CachedStatement<'_>, first: usize) -> rusqlite::Result<()>;
}

macro_rules! values {
    ($($($value:ident)+;)+) => {$(
        impl<$($value: ToSql),+> Values for ($($value,)+) {
            const WIDTH: usize = [$(stringify!($value)),+].len();

            #[expect(non_snake_case, reason = "a value is named as its type is")]
            fn bind(&self, statement: &mut CachedStatement<'_>, first: usize) -> rusqlite::Result<()> {
                let ($($value,)+) = self;
                let mut values = [$($value as &dyn ToSql),+].into_iter().zip(first..);
                values.try_for_each(|(value, number)| statement.raw_bind_parameter(number, value))
            }
        }
    )+};
}
values! {
    A B;
    A B C;
    A B C D;
    A B C D E F;
    A B C D E F G H;
    A B C D E F G H I J K;
    A B C D E F G H I J K L M N O P Q R S;
}

impl SqliteConnection {
    /// Inserts rows: `into` says where, with the names of the columns, `after` what else.
    pub fn insert_each<V: Values>(
        &mut self,
        into: &str,
        rows: impl IntoIterator<Item = V>,
        after: &str,
    ) -> sqlx::Result<()> {
        self.insert_many(into, rows, after, |_| Ok(()))
    }

    /// As [`Self::insert_each`], for an insert that returns rows: all of them.
    pub fn insert_returning<V: Values, O>(
        &mut self,
        into: &str,
        rows: impl IntoIterator<Item = V>,
        after: &str,
    ) -> sqlx::Result<Vec<O>>
    where
        O: for<'r> TryFrom<&'r rusqlite::Row<'r>, Error = rusqlite::Error>,
    {
        let mut returned = Vec::new();
        self.insert_many(into, rows, after, |row| {
            returned.push(O::try_from(row)?);
            Ok(())
        })?;
        Ok(returned)
    }

    fn insert_many<V: Values>(
        &mut self,
        into: &str,
        rows: impl IntoIterator<Item = V>,
        after: &str,
        mut read: impl FnMut(&rusqlite::Row<'_>) -> rusqlite::Result<()>,
    ) -> sqlx::Result<()> {
        let connection = self.writing()?;
        let rows: Vec<V> = rows.into_iter().collect();
        let mut rest = rows.as_slice();
        for height in HEIGHTS {
            let whole;
            (whole, rest) = rest.split_at(rest.len() / height * height);
            if whole.is_empty() {
                continue;
            }
            let mut statement = connection.prepare_cached(&sql(into, V::WIDTH, height, after)).map_err(to_sqlx)?;
            for chunk in whole.chunks(height) {
                for (index, row) in chunk.iter().enumerate() {
                    row.bind(&mut statement, 1 + index * V::WIDTH).map_err(to_sqlx)?;
                }
                let mut returned = statement.raw_query();
                while let Some(row) = returned.next().map_err(to_sqlx)? {
                    read(row).map_err(to_sqlx)?;
                }
            }
        }
        Ok(())
    }
}

fn sql(into: &str, width: usize, height: usize, after: &str) -> String {
    let row = format!("({})", vec!["?"; width].join(","));
    format!("INSERT OR ROLLBACK INTO {into} VALUES {} {after}", vec![row.as_str(); height].join(","))
}
