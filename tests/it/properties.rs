//! Readers of what comes from outside: whatever it is, they answer, and what they let through keeps their promises.

use axum::http::{HeaderMap, HeaderValue, header};
use proptest::prelude::*;
use serde_json::json;
use stockade::access::read_keys;
use stockade::http::extract::{idempotency_key, prefer_wait};
use stockade::http::guard::{bearer, session_token};
use stockade_kernel::messaging::event::{Label, read_envelope};

const BYTES_MAX: usize = 64 * 1024;

fn headers(name: &'static str, value: &[u8]) -> HeaderMap {
    let value = HeaderValue::from_bytes(value).ok();
    value.into_iter().map(|value| (axum::http::HeaderName::from_static(name), value)).collect()
}

fn envelope(group: &str, correlation: &str, payload: &serde_json::Value) -> Vec<u8> {
    let id = "019a0000-0000-7000-8000-000000000001";
    json!({
        "event_id": id, "occurred_at": "2026-11-16T09:30:00Z", "aggregate_type": "order", "aggregate_id": id,
        "event_type": "placed", "group_id": group, "subsidiary_id": null, "correlation_id": correlation,
        "causation_id": null, "payload": payload,
    })
    .to_string()
    .into_bytes()
}

proptest! {
    #[test]
    fn no_bytes_break_the_reader_of_envelopes(body in prop::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(read_envelope(&body, Label::default(), BYTES_MAX).is_err());
    }

    #[test]
    fn an_envelope_with_one_byte_changed_is_read_or_refused_with_a_reason(at in 0usize..400, byte in any::<u8>()) {
        let mut body = envelope("acme", "c", &json!({ "a": [1, 2, 3] }));
        let at = at % body.len();
        body[at] = byte;
        if let Err(unreadable) = read_envelope(&body, Label::default(), BYTES_MAX) {
            prop_assert!(!unreadable.code.is_empty());
        }
    }

    #[test]
    fn what_is_read_of_an_envelope_is_safe_to_store_and_to_show(group in ".{0,80}", correlation in ".{0,80}") {
        let body = envelope(&group, &correlation, &json!({}));
        if let Ok(event) = read_envelope(&body, Label::default(), BYTES_MAX) {
            prop_assert_eq!(&event.group_id, &group);
            prop_assert!(!event.group_id.is_empty() && !event.group_id.chars().any(char::is_control));
            prop_assert!(!event.correlation_id.chars().any(char::is_control));
        }
    }

    #[test]
    fn an_id_in_a_header_that_is_not_the_bodys_is_refused(other in "[ -~]{0,60}") {
        let body = envelope("acme", "c", &json!({}));
        let label = Label { message_id: Some(&other), header_event_id: None };
        prop_assert!(read_envelope(&body, label, BYTES_MAX).is_err());
    }

    #[test]
    fn an_idempotency_key_is_short_and_visible_or_refused(value in prop::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(Some(key)) = idempotency_key(&headers("idempotency-key", &value)) {
            prop_assert!((1..=255).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic()));
        }
    }

    #[test]
    fn no_header_breaks_its_reader(value in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = prefer_wait(&headers("prefer", &value));
        let cookies = headers("cookie", &value);
        if let Some(token) = session_token(&cookies) {
            prop_assert!(!token.contains(';'));
        }
        let authorization = headers("authorization", &value);
        let text = authorization.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        if let Some(token) = text.and_then(bearer) {
            prop_assert!(!token.is_empty() && token.trim() == token);
        }
    }

    #[test]
    fn no_setting_of_keys_breaks_its_reader_or_is_quoted(text in "[ -~]{20,200}") {
        if let Err(error) = read_keys(&text) {
            prop_assert!(!error.contains(&text));
        }
    }
}
