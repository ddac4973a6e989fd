//! Extractors that answer with problems: bodies, queries, and the headers that several modules take.

use std::marker::PhantomData;

use axum::body::HttpBody;
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequest, FromRequestParts, OptionalFromRequest, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_path_to_error::Segment;
use sha2::{Digest, Sha256};

use super::problem::{FieldError, Problem};

const KEY_CHARS_MAX: usize = 255;

/// A JSON body, with the bytes it was read from.
#[derive(Debug)]
pub struct Body<T> {
    pub value: T,
    pub raw: Bytes,
}

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        if !is_json(request.headers()) {
            let detail = "the body must be JSON, sent with Content-Type: application/json";
            return Err(Problem::new(415, "media-type", detail));
        }
        let raw = Bytes::from_request(request, state).await.map_err(|rejection| match rejection.status().as_u16() {
            413 => Problem::new(413, "body-too-large", "the body is larger than this server takes"),
            _ => Problem::new(400, "malformed-body", "the body could not be read to its end"),
        })?;
        Ok(Self { value: parse(&raw)?, raw })
    }
}

/// `Option<Body<T>>`: a request may come without any body, whatever its headers say.
impl<T: DeserializeOwned, S: Send + Sync> OptionalFromRequest<S> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Option<Self>, Problem> {
        if request.body().is_end_stream() {
            return Ok(None);
        }
        <Self as FromRequest<S>>::from_request(request, state).await.map(Some)
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"))
}

/// Bad syntax is a 400; good JSON of the wrong shape is a 422 that points at the field.
fn parse<T: DeserializeOwned>(raw: &[u8]) -> Result<T, Problem> {
    // To note where one is while reading copies every key: only what is refused is read a second time for it.
    match serde_json::from_slice(raw) {
        Ok(Object(value)) => Ok(value),
        Err(_) => parse_noting_path(raw),
    }
}

fn parse_noting_path<T: DeserializeOwned>(raw: &[u8]) -> Result<T, Problem> {
    let mut json = serde_json::Deserializer::from_slice(raw);
    let Object(value) = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let pointer = pointer_of(error.path());
        let inner = error.into_inner();
        if inner.is_data() {
            Problem::validation(vec![FieldError { pointer, detail: in_words(&inner.to_string()) }])
        } else {
            malformed(&inner)
        }
    })?;
    json.end().map_err(|error| malformed(&error))?;
    Ok(value)
}

/// What serde says of a value, without where it stands in the text and how we would have kept it: the pointer says where, and
/// a program may have written the text.
fn in_words(error: &str) -> String {
    let said = error.rfind(" at line ").map_or(error, |end| &error[..end]);
    if let Some(number) = said.strip_prefix("invalid value: integer `").and_then(|rest| rest.split('`').next()) {
        return format!("{number} is out of range");
    }
    let whole = ["i64", "i32", "u64", "u32", "u8", "usize"].iter().find_map(|kept| {
        let wanted = said.strip_suffix(kept)?;
        wanted.ends_with("expected ").then(|| format!("{wanted}a whole number"))
    });
    whole.unwrap_or_else(|| said.to_owned())
}

/// A JSON object and nothing else: where serde expects a struct it would also take an array of its fields.
#[derive(Debug)]
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OnlyMaps<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for OnlyMaps<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }

        deserializer.deserialize_map(OnlyMaps(PhantomData))
    }
}

fn malformed(error: &serde_json::Error) -> Problem {
    Problem::new(400, "malformed-json", format!("the body is not JSON: {error}"))
}

fn pointer_of(path: &serde_path_to_error::Path) -> String {
    path.iter()
        .filter_map(|segment| match segment {
            Segment::Seq { index } => Some(format!("/{index}")),
            Segment::Map { key } => Some(format!("/{}", key.replace('~', "~0").replace('/', "~1"))),
            Segment::Enum { .. } | Segment::Unknown => None,
        })
        .collect()
}

/// A query string; an unknown or unreadable parameter is a 400.
#[derive(Debug)]
pub struct Params<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Params<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let Query(value) = Query::<T>::from_request_parts(parts, state)
            .await
            .map_err(|rejection: QueryRejection| bad_filter(said_of_query(&rejection.body_text())))?;
        Ok(Self(value))
    }
}

/// The name of the parameter, and what is wrong with it.
fn said_of_query(error: &str) -> String {
    let said = error.strip_prefix("Failed to deserialize query string: ").unwrap_or(error);
    said.replace("invalid digit found in string", "it must be a whole number, in range")
        .replace("number too large to fit in target type", "the number is too large")
}

pub fn bad_filter(detail: impl Into<String>) -> Problem {
    Problem::new(400, "bad-filter", detail)
}

/// `Idempotency-Key`: a structured string in quotes, or bare.
pub fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    let invalid = || {
        let rule = format!("Idempotency-Key must have 1 to {KEY_CHARS_MAX} visible ASCII characters");
        Problem::new(400, "idempotency-key-invalid", rule)
    };
    if headers.get_all("idempotency-key").iter().count() > 1 {
        return Err(Problem::new(400, "idempotency-key-invalid", "give one Idempotency-Key, not several"));
    }
    let text = value.to_str().map_err(|_| invalid())?.trim();
    let key = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(text);
    let visible = key.bytes().all(|byte| byte.is_ascii_graphic());
    if !(1..=KEY_CHARS_MAX).contains(&key.len()) || !visible {
        return Err(invalid());
    }
    Ok(Some(key.to_owned()))
}

/// What makes two requests the same request.
pub fn fingerprint(method: &str, path: &str, raw: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(method);
    hash.update([0]);
    hash.update(path);
    hash.update([0]);
    hash.update(raw);
    hash.finalize().into()
}

/// `Prefer: wait=N`: how many seconds to wait for the outcome. Anything else in the header is ignored, as RFC
/// 7240 asks.
pub fn prefer_wait(headers: &HeaderMap) -> Option<u64> {
    let preferences = headers.get_all("prefer").iter().filter_map(|value| value.to_str().ok());
    preferences.flat_map(|value| value.split([',', ';'])).find_map(|preference| {
        let (name, seconds) = preference.split_once('=')?;
        let seconds = seconds.trim().trim_matches('"').parse().ok()?;
        name.trim().eq_ignore_ascii_case("wait").then_some(seconds)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        headers
    }

    #[test]
    fn keys_may_be_quoted_or_bare_but_must_be_visible_ascii() {
        let key = |value| idempotency_key(&headers("idempotency-key", value));
        assert_eq!(key("abc").unwrap().as_deref(), Some("abc"));
        assert_eq!(key("\"abc\"").unwrap().as_deref(), Some("abc"));
        for bad in ["", "\"\"", "a b", &"x".repeat(256)] {
            assert!(key(bad).is_err(), "{bad:?}");
        }
        assert_eq!(idempotency_key(&HeaderMap::new()).unwrap(), None);
    }

    #[test]
    fn prefer_wait_is_found_among_other_preferences() {
        assert_eq!(prefer_wait(&headers("prefer", "respond-async, wait=10")), Some(10));
        assert_eq!(prefer_wait(&headers("prefer", "Wait = \"3\"")), Some(3));
        assert_eq!(prefer_wait(&headers("prefer", "wait=soon")), None);
        assert_eq!(prefer_wait(&HeaderMap::new()), None);
    }

    #[test]
    fn a_wrong_field_is_pointed_at() {
        #[derive(Debug, serde::Deserialize)]
        #[expect(dead_code, reason = "only its parsing matters")]
        struct Outer {
            list: Vec<Object<Inner>>,
        }
        #[derive(Debug, serde::Deserialize)]
        #[expect(dead_code, reason = "only its parsing matters")]
        struct Inner {
            n: u8,
        }
        let pointer = |body: &str| {
            let problem = parse::<Outer>(body.as_bytes()).unwrap_err();
            (problem.status, problem.errors[0].pointer.clone())
        };
        assert_eq!(pointer(r#"{"list":[{"n":1},{"n":"x"}]}"#), (422, "/list/1/n".to_owned()));
        assert_eq!(pointer(r#"{"list":[[1]]}"#), (422, "/list/0".to_owned()), "an array is no object");
        assert_eq!(pointer(r#"[[{"n":1}]]"#), (422, String::new()));
        let said = |body: &str| parse::<Outer>(body.as_bytes()).unwrap_err().errors[0].detail.clone();
        assert_eq!(said(r#"{"list":[{"n":"x"}]}"#), "invalid type: string \"x\", expected a whole number");
        assert_eq!(said(r#"{"list":[{"n":-1}]}"#), "-1 is out of range");
        assert_eq!(said(r#"{"list":[{}]}"#), "missing field `n`");
        assert_eq!(parse::<Outer>(b"{").unwrap_err().code, "malformed-json");
        assert_eq!(parse::<Outer>(br#"{"list":[]} {}"#).unwrap_err().code, "malformed-json");
    }
}
