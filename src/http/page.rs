//! Lists: `{data, next_cursor}`, by keyset and never by offset, so that a page costs the same wherever it is.

use axum::Json;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Serialize;
use uuid::Uuid;

use super::extract::bad_filter;
use super::problem::Problem;

pub const LIMIT_DEFAULT: i64 = 50;
pub const LIMIT_MAX: i64 = 200;
/// Says how cursors are written, so that an old one is refused rather than misread.
const CURSOR_VERSION: &str = "1:";

/// One page of a list.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Page<T> {
    pub data: Vec<T>,
    /// Give it back as `cursor` for the next page; null on the last.
    pub next_cursor: Option<String>,
}

/// For the Link header.
#[derive(Debug, Clone)]
pub struct NextCursor(pub String);

impl<T> Page<T> {
    /// Makes a page of rows fetched with [`fetch_limit`], one more than asked for.
    pub fn new<R>(rows: Vec<R>, limit: i64, key: impl Fn(&R) -> String) -> Self
    where
        T: From<R>,
    {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let more = rows.len() > limit;
        let mut rows = rows;
        rows.truncate(limit);
        let next_cursor = rows.last().filter(|_| more).map(|row| write_cursor(&key(row)));
        Self { data: rows.into_iter().map(T::from).collect(), next_cursor }
    }
}

impl<T: Serialize> IntoResponse for Page<T> {
    fn into_response(self) -> Response {
        let next = self.next_cursor.clone().map(NextCursor);
        let mut response = Json(self).into_response();
        if let Some(next) = next {
            response.extensions_mut().insert(next);
        }
        response
    }
}

/// Checks the limit a caller asked for.
pub fn limit(asked: Option<i64>) -> Result<i64, Problem> {
    match asked.unwrap_or(LIMIT_DEFAULT) {
        limit @ 1..=LIMIT_MAX => Ok(limit),
        other => Err(bad_filter(format!("limit must be 1 to {LIMIT_MAX}, not {other}"))),
    }
}

/// One row more than the page holds tells whether there is a next page.
pub fn fetch_limit(limit: i64) -> i64 {
    limit + 1
}

fn write_cursor(key: &str) -> String {
    URL_SAFE_NO_PAD.encode(format!("{CURSOR_VERSION}{key}"))
}

pub fn read_cursor(cursor: Option<&str>) -> Result<Option<String>, Problem> {
    let Some(cursor) = cursor else { return Ok(None) };
    let read = || {
        let text = String::from_utf8(URL_SAFE_NO_PAD.decode(cursor).ok()?).ok()?;
        // We write no NUL, and Postgres takes none.
        text.strip_prefix(CURSOR_VERSION).filter(|key| !key.contains('\0')).map(str::to_owned)
    };
    read().map(Some).ok_or_else(bad_cursor)
}

pub fn read_uuid_cursor(cursor: Option<&str>) -> Result<Option<Uuid>, Problem> {
    read_cursor(cursor)?.map(|key| Uuid::try_parse(&key).map_err(|_| bad_cursor())).transpose()
}

pub fn bad_cursor() -> Problem {
    Problem::new(400, "bad-cursor", "the cursor is none that this server gave out; start again without it")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_full_page_has_a_cursor_and_the_last_has_none() {
        let page: Page<i64> = Page::new(vec![1, 2, 3], 2, i64::to_string);
        assert_eq!(page.data, [1, 2]);
        assert_eq!(read_cursor(page.next_cursor.as_deref()).unwrap().as_deref(), Some("2"));
        let last: Page<i64> = Page::new(vec![1, 2], 2, i64::to_string);
        assert_eq!(last.next_cursor, None);
    }

    #[test]
    fn limits_out_of_range_are_refused() {
        assert!(limit(Some(0)).is_err() && limit(Some(201)).is_err() && limit(Some(-5)).is_err());
        assert_eq!(limit(None).unwrap(), LIMIT_DEFAULT);
    }

    proptest! {
        #[test]
        fn no_cursor_breaks_the_reader(text in ".{0,80}") {
            let _ = read_cursor(Some(&text));
            let read = read_cursor(Some(&write_cursor(&text)));
            prop_assert_eq!(read.ok().flatten(), (!text.contains('\0')).then_some(text));
        }
    }
}
