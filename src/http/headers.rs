//! What every answer tells a browser: run nothing, frame nothing, guess nothing, keep nothing that is a tenant's.

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};

/// An answer of the API is data, never a page.
const DATA_POLICY: &str = "default-src 'none'; frame-ancestors 'none'";
/// Swagger UI comes out of the binary; it sets styles from its scripts and draws its icons from `data:`.
const DOCS_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; \
     img-src 'self' data:; connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; \
     frame-ancestors 'none'";

const ALWAYS: [(HeaderName, &str); 6] = [
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("permissions-policy"), "camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
];

/// Adds what the handler of `path` has not said itself.
pub fn secure(path: &str, answer: &mut HeaderMap) {
    let policy = if path.starts_with("/docs") { DOCS_POLICY } else { DATA_POLICY };
    answer.reserve(ALWAYS.len() + 2);
    let caching = path.starts_with("/v1/").then_some((header::CACHE_CONTROL, "no-store"));
    for (name, value) in ALWAYS.into_iter().chain([(header::CONTENT_SECURITY_POLICY, policy)]).chain(caching) {
        answer.entry(name).or_insert(HeaderValue::from_static(value));
    }
}
