//! A column of a batch, as a statement on Postgres takes it.
//!
//! Rows of a batch go as one array per column, and Postgres pays for every element of each of them: to read it, to store it
//! and to fetch it again. Most batches are of one tenant and one kind, so that many a column has the same value in every row.
//! That is sent once, beside an array that stays empty: `UNNEST` fills up with nulls what is shorter than the rest, and
//! `COALESCE(row.column, $shared)` puts it in. At least one array of an `UNNEST` must be sent in full, whatever is in it: the
//! ids, mostly.

/// The values of one column: each for itself, or what all rows share.
pub struct Column<T> {
    /// Empty if all rows share one value.
    pub each: Vec<T>,
    pub shared: Option<T>,
}

impl<T: PartialEq> Column<T> {
    pub fn of(values: impl Iterator<Item = T>) -> Self {
        let mut each: Vec<T> = values.collect();
        if each.windows(2).all(|pair| pair[0] == pair[1]) {
            Self { shared: each.pop(), each: Vec::new() }
        } else {
            Self { each, shared: None }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_rows_share_is_sent_once() {
        let shared = Column::of(["acme"; 3].into_iter());
        assert_eq!((shared.each, shared.shared), (vec![], Some("acme")));
        let absent = Column::of([None::<&str>; 3].into_iter());
        assert_eq!((absent.each, absent.shared), (vec![], Some(None)));
        let mixed = Column::of([Some("acme"), None].into_iter());
        assert_eq!((mixed.each, mixed.shared), (vec![Some("acme"), None], None));
        let none = Column::of(std::iter::empty::<i64>());
        assert_eq!((none.each, none.shared), (vec![], None));
    }
}
