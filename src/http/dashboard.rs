//! The dashboard: pages out of the binary, with nothing fetched from elsewhere.
//!
//! Every page is the same document; the scripts in `static/` read the path and draw. Texts that came from outside
//! are only ever inserted as text, and the policy below would stop a browser from running them even if one were not.

use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use rust_embed::{EmbeddedFile, RustEmbed};

use super::problem::Problem;

#[derive(RustEmbed)]
#[folder = "static/"]
struct Files;

/// The paths that the dashboard draws; any other that is no file and no API is a 404.
const PAGES: &[&str] = &[
    "/",
    "/orders",
    "/orders/{id}",
    "/reservations",
    "/stock",
    "/notifications",
    "/ledger",
    "/outbox",
    "/inbox",
    "/dead-letters",
    "/dead-letters/{id}",
    "/queues",
    "/redrives",
    "/replays",
    "/audit",
    "/actions",
    "/lab",
    "/settings",
];

/// Scripts and styles from here alone, none inline, and no text may become a script or markup.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
     trusted-types 'none'";

pub fn routes() -> Router {
    let pages = PAGES.iter().fold(Router::new(), |router, path| router.route(path, get(page)));
    pages.route("/login", get(login)).route("/static/{*path}", get(file))
}

async fn page(headers: HeaderMap) -> Response {
    document("index.html", &headers)
}

async fn login(headers: HeaderMap) -> Response {
    document("login.html", &headers)
}

fn document(path: &str, headers: &HeaderMap) -> Response {
    let mut response = answer(path, headers);
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    response
}

async fn file(Path(path): Path<String>, headers: HeaderMap) -> Response {
    answer(&path, &headers)
}

/// Files change with the binary only, so a browser asks whether its copy is still the one.
fn answer(path: &str, headers: &HeaderMap) -> Response {
    let Some(file) = Files::get(path) else {
        return Problem::not_found("there is no such file in this version; reload the page").into_response();
    };
    let tag = tag_of(&file);
    let known = headers.get(header::IF_NONE_MATCH).is_some_and(|known| *known == tag);
    let caching = [(header::ETAG, tag), (header::CACHE_CONTROL, HeaderValue::from_static("no-cache"))];
    if known {
        return (StatusCode::NOT_MODIFIED, caching).into_response();
    }
    let kind = match path.rsplit('.').next() {
        Some("html") => "text/html; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        _ => "application/octet-stream",
    };
    (caching, [(header::CONTENT_TYPE, kind)], file.data).into_response()
}

fn tag_of(file: &EmbeddedFile) -> HeaderValue {
    let hash = file.metadata.sha256_hash();
    let digits: String = hash[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    HeaderValue::from_str(&format!("\"{digits}\"")).expect("hexadecimal digits between quotes")
}
