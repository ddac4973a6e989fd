//! The API document, finished: what every operation has in common is said once, here.
//!
//! A handler says what it asks of its caller (`security`) and what it answers by itself. What the layers around it
//! answer follows from that: who is nobody gets a 401, who may not a 403, and any request may be malformed, too many or
//! at a bad moment.

use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::security::{ApiKey, ApiKeyValue, Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{ContentBuilder, OpenApi, Ref, RefOr, Response, ResponseBuilder};

use super::guard::COOKIE;

/// The scheme that handlers name in `security`.
pub const KEY_SCHEME: &str = "key";
/// What holds for an operation that says nothing.
const STRICTEST: [&str; 2] = ["admin", "platform"];
const SESSION_SCHEME: &str = "session";

/// Finishes a document; doing so again changes nothing.
pub fn complete(document: &mut OpenApi) {
    let components = document.components.get_or_insert_default();
    let key = Http::builder()
        .scheme(HttpAuthScheme::Bearer)
        .description(Some("An API key, as `stockade key new` makes it. Not needed on a server without keys."))
        .build();
    components.add_security_scheme(KEY_SCHEME, SecurityScheme::Http(key));
    let session = ApiKeyValue::with_description(COOKIE, "What a login with a key gives a browser.");
    components.add_security_scheme(SESSION_SCHEME, SecurityScheme::ApiKey(ApiKey::Cookie(session)));
    for (path, item) in &mut document.paths.paths {
        let takes_parameters = path.contains('{');
        for operation in operations(item) {
            complete_operation(operation, takes_parameters);
        }
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    let PathItem { get, put, post, delete, .. } = item;
    [get, put, post, delete].into_iter().flatten()
}

fn complete_operation(operation: &mut Operation, takes_path_parameters: bool) {
    let requirements = operation.security.get_or_insert_default();
    if requirements.is_empty() {
        requirements.push(SecurityRequirement::new(KEY_SCHEME, STRICTEST));
    }
    // A session may do what its key may.
    let alternatives: Vec<SecurityRequirement> = requirements.iter().filter_map(by_session).collect();
    for alternative in alternatives {
        if !requirements.contains(&alternative) {
            requirements.push(alternative);
        }
    }
    let guarded = !requirements.contains(&SecurityRequirement::default());
    let takes_body = operation.request_body.is_some();
    let mut answers = vec![
        ("400", "The request cannot be understood"),
        ("403", "The role of the key is not enough, or another site sent the request"),
        ("429", "More requests than this key may send; see Retry-After"),
        ("503", "Overloaded, or something behind is away; see Retry-After"),
    ];
    if guarded {
        answers.push(("401", "No key, or not a good one"));
    }
    if takes_path_parameters {
        answers.push(("404", "There is no such thing, or it is another tenant's"));
    }
    if takes_body {
        answers.extend([
            ("408", "The body did not come in time"),
            ("413", "The body is too large"),
            ("415", "The body is not JSON"),
            ("422", "A field is wrong; `errors` says which"),
        ]);
    }
    for (status, description) in answers {
        operation.responses.responses.entry(status.to_owned()).or_insert_with(|| RefOr::T(problem(description)));
    }
}

fn by_session(requirement: &SecurityRequirement) -> Option<SecurityRequirement> {
    let value = serde_json::to_value(requirement).ok()?;
    let words = value.get(KEY_SCHEME)?.as_array()?.iter().filter_map(serde_json::Value::as_str);
    Some(SecurityRequirement::new(SESSION_SCHEME, words.map(str::to_owned).collect::<Vec<_>>()))
}

fn problem(description: &str) -> Response {
    let content = ContentBuilder::new().schema(Some(Ref::from_schema_name("Problem"))).build();
    ResponseBuilder::new().description(description).content("application/problem+json", content).build()
}
