//! The pages that the `type` of a problem leads to: what the code means and what to do, as `static/problems.md` says it.

use axum::Router;
use axum::extract::Path;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::problem::Problem;

const TABLE: &str = include_str!("../../static/problems.md");

pub fn routes() -> Router {
    Router::new().route("/problems", get(all)).route("/problems/{code}", get(one))
}

async fn all() -> Response {
    text(TABLE.to_owned())
}

async fn one(Path(code): Path<String>) -> Response {
    match find(&code) {
        Some([status, happened, to_do]) => text(format!(
            "{code} ({status})\n\nWhat happened: {happened}\nWhat to do: {to_do}\n\nAll codes: /problems\n"
        )),
        None => Problem::not_found("there is no such problem; see /problems").into_response(),
    }
}

fn text(text: String) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response()
}

/// What the table says of a code: its status, what happened, what to do.
pub(super) fn find(code: &str) -> Option<[&'static str; 3]> {
    TABLE.lines().find_map(|line| {
        let mut cells = line.strip_prefix("| `")?.strip_suffix(" |")?.split(" | ");
        (cells.next()?.strip_suffix('`')? == code).then_some([cells.next()?, cells.next()?, cells.next()?])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_can_be_found_and_is_whole() {
        let rows: Vec<&str> = TABLE.lines().filter(|line| line.starts_with("| `")).collect();
        assert!(rows.len() > 30);
        for row in rows {
            let code = row.split('`').nth(1).unwrap();
            let [status, happened, to_do] = find(code).unwrap_or_else(|| panic!("{row}"));
            assert!((400..600).contains(&status.parse::<u16>().unwrap()), "{row}");
            assert!(!happened.contains('|') && !to_do.contains('|') && to_do.ends_with('.'), "{row}");
        }
        assert_eq!(find("no-such-code"), None);
    }
}
