//! The event envelope: what goes over the wire, and the gate that everything from the wire passes.
//!
//! An event's id is minted once, when its outbox row is written, and every copy carries it. The gate checks in
//! order of cost: size, UTF-8, nesting, envelope, known type, payload. What fails is [`Unreadable`], with the
//! reason code its dead letter will show. Nothing is guessed: a message without an id is refused, not given one.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::clock::{Timestamp, mint_id};
use crate::trace::Traceparent;

/// Deeper nesting than any of our payloads needs, well below what would trouble a parser.
const DEPTH_MAX: usize = 64;
/// Ids and names in an envelope; columns and logs must stay readable.
const TEXT_CHARS_MAX: usize = 128;

/// Room for what is around a payload, as large as ids and names mostly make it.
const ENVELOPE_BYTES: usize = 512;

/// The reason code of an event that comes when the inbox may have forgotten it.
pub const TOO_OLD: &str = "too-old";
/// The reason code of a message that has another body than the first that came under its event id.
pub const ID_REUSED: &str = "id-reused";

/// What is wrong with such a message, in words.
pub fn id_reused(event_id: Uuid) -> String {
    format!("event {event_id} was first seen with another body; that one stands")
}

/// A fact, as producers write it and consumers read it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Event {
    pub event_id: Uuid,
    pub occurred_at: Timestamp,
    pub aggregate_type: Cow<'static, str>,
    pub aggregate_id: String,
    /// The bare word, `placed`; see [`Event::routing_key`].
    pub event_type: Cow<'static, str>,
    pub group_id: String,
    #[serde(default)]
    pub subsidiary_id: Option<String>,
    pub correlation_id: String,
    #[serde(default)]
    pub causation_id: Option<Uuid>,
    pub payload: Box<RawValue>,
    /// The trace it belongs to. Beside the envelope: it travels in the message's headers.
    #[serde(skip)]
    pub traceparent: Option<Traceparent>,
}

/// Who an event is about and what brought it about: everything of the envelope but the fact itself.
#[derive(Debug, Clone)]
pub struct Origin {
    pub group_id: String,
    pub subsidiary_id: Option<String>,
    pub correlation_id: String,
    pub causation_id: Option<Uuid>,
    pub traceparent: Option<Traceparent>,
}

impl Event {
    /// Mints a new fact. `key` is its routing key, as in `order.placed`.
    pub fn new(
        key: &'static str,
        aggregate_id: String,
        origin: Origin,
        occurred_at: Timestamp,
        payload: &impl Serialize,
    ) -> Self {
        let (aggregate_type, event_type) = key.split_once('.').expect("a routing key is aggregate.event");
        Self {
            event_id: mint_id(),
            occurred_at,
            aggregate_type: Cow::Borrowed(aggregate_type),
            aggregate_id,
            event_type: Cow::Borrowed(event_type),
            group_id: origin.group_id,
            subsidiary_id: origin.subsidiary_id,
            correlation_id: origin.correlation_id,
            causation_id: origin.causation_id,
            traceparent: origin.traceparent,
            payload: serde_json::value::to_raw_value(payload).expect("payloads are plain data with string keys"),
        }
    }

    /// `order.placed`: the routing key, the AMQP type, and what the API shows as `event_type`.
    pub fn routing_key(&self) -> String {
        routing_key(&self.aggregate_type, &self.event_type)
    }

    fn is_routed_by(&self, key: &str) -> bool {
        let rest = key.strip_prefix(&*self.aggregate_type).and_then(|rest| rest.strip_prefix('.'));
        rest == Some(&*self.event_type)
    }

    pub fn to_body(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(ENVELOPE_BYTES + self.payload.get().len());
        serde_json::to_writer(&mut body, self).expect("an envelope is plain data with string keys");
        body
    }

    /// The origin of an event that this one causes.
    pub fn begets(&self) -> Origin {
        Origin {
            group_id: self.group_id.clone(),
            subsidiary_id: self.subsidiary_id.clone(),
            correlation_id: self.correlation_id.clone(),
            causation_id: Some(self.event_id),
            traceparent: self.traceparent,
        }
    }
}

pub fn routing_key(aggregate_type: &str, event_type: &str) -> String {
    let mut key = String::with_capacity(aggregate_type.len() + 1 + event_type.len());
    key.push_str(aggregate_type);
    key.push('.');
    key.push_str(event_type);
    key
}

/// Identifies a body: an id that comes back with another one is a reused id.
pub type BodyHash = [u8; 32];

pub fn hash_of(body: &[u8]) -> BodyHash {
    Sha256::digest(body).into()
}

/// An event that passed the gate, with its payload decoded to what its consumer works on.
#[derive(Debug)]
pub struct Message<F> {
    pub event: Arc<Event>,
    /// Its routing key, as its consumer spells it.
    pub key: &'static str,
    pub fact: F,
    pub body: Bytes,
    pub body_hash: BodyHash,
}

impl<F> Message<F> {
    /// Has it belong to that trace from now on.
    pub fn trace(&mut self, traceparent: Option<Traceparent>) {
        // Other consumers may hold the same event, and do not follow.
        if self.event.traceparent != traceparent {
            Arc::make_mut(&mut self.event).traceparent = traceparent;
        }
    }
}

/// Why a message cannot be read. The code is stable and shown to people; the error says it in words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct Unreadable {
    pub code: &'static str,
    pub error: String,
}

impl Unreadable {
    fn new(code: &'static str, error: impl Into<String>) -> Self {
        Self { code, error: without_nul(&error.into()) }
    }
}

/// What the transport said about a message beside its body.
#[derive(Debug, Clone, Copy, Default)]
pub struct Label<'a> {
    pub message_id: Option<&'a str>,
    pub header_event_id: Option<&'a str>,
}

/// Reads the envelope: everything but the payload, which only its consumer can decode.
pub fn read_envelope(body: &[u8], label: Label<'_>, bytes_max: usize) -> Result<Event, Unreadable> {
    check_size(body, bytes_max)?;
    let text = std::str::from_utf8(body)
        .map_err(|error| Unreadable::new("not-utf8", format!("not UTF-8 at byte {}", error.valid_up_to())))?;
    check_depth(body)?;
    let event: Event = serde_json::from_str(text).map_err(|error| unreadable_envelope(text, &error))?;
    check_object(text)?;
    check_text(&event)?;
    check_label(&event, label)?;
    Ok(event)
}

/// Of an event that this process wrote: what [`read_envelope`] would say of its bytes, without parsing them. No label is
/// asked for, since it was made of the same event.
pub fn check_envelope(event: &Event, body: &[u8], bytes_max: usize) -> Result<(), Unreadable> {
    check_size(body, bytes_max)?;
    check_depth(body)?;
    check_text(event)
}

/// Takes an event whose envelope is read on to a consumer that knows `keys` and decodes payloads with `decode`.
pub fn open<F>(
    event: Arc<Event>,
    body: Bytes,
    keys: &[&'static str],
    decode: impl Fn(&str, &RawValue) -> Result<F, serde_json::Error>,
) -> Result<Message<F>, Unreadable> {
    let Some(key) = keys.iter().copied().find(|key| event.is_routed_by(key)) else {
        let error = format!("{} is none of {}", event.routing_key(), keys.join(", "));
        return Err(Unreadable::new("unknown-type", error));
    };
    let fact =
        decode(key, &event.payload).map_err(|error| Unreadable::new("schema", format!("payload of {key}: {error}")))?;
    let body_hash = hash_of(&body);
    Ok(Message { event, key, fact, body, body_hash })
}

/// Where serde expects a struct it would also take an array of its fields.
fn check_object(json: &str) -> Result<(), Unreadable> {
    if !json.trim_ascii_start().starts_with('{') {
        return Err(Unreadable::new("schema", "envelope: it must be an object"));
    }
    Ok(())
}

fn check_size(body: &[u8], bytes_max: usize) -> Result<(), Unreadable> {
    if body.len() > bytes_max {
        return Err(Unreadable::new("too-large", format!("{} bytes; the limit is {bytes_max}", body.len())));
    }
    Ok(())
}

fn check_depth(body: &[u8]) -> Result<(), Unreadable> {
    if nests_deeper_than(body, DEPTH_MAX) {
        return Err(Unreadable::new("too-deep", format!("nested deeper than {DEPTH_MAX}")));
    }
    Ok(())
}

/// Tells apart what is no JSON, what has no usable id, and what is JSON of another shape.
fn unreadable_envelope(text: &str, error: &serde_json::Error) -> Unreadable {
    match serde_json::from_str::<serde_json::Value>(text) {
        Err(error) => Unreadable::new("not-json", error.to_string()),
        Ok(value) if value.is_object() && value.get("event_id").is_none_or(serde_json::Value::is_null) => {
            Unreadable::new("no-id", "the envelope has no event_id")
        }
        Ok(_) => Unreadable::new("schema", format!("envelope: {error}")),
    }
}

fn check_text(event: &Event) -> Result<(), Unreadable> {
    let fields = [
        ("aggregate_type", Some(&*event.aggregate_type)),
        ("aggregate_id", Some(event.aggregate_id.as_str())),
        ("event_type", Some(&*event.event_type)),
        ("group_id", Some(event.group_id.as_str())),
        ("subsidiary_id", event.subsidiary_id.as_deref()),
        ("correlation_id", Some(event.correlation_id.as_str())),
    ];
    for (name, text) in fields {
        if let Some(text) = text
            && !is_plain_text(text, TEXT_CHARS_MAX)
        {
            let rule = format!("{name} must be 1 to {TEXT_CHARS_MAX} characters without control characters");
            return Err(Unreadable::new("schema", rule));
        }
    }
    Ok(())
}

/// The body's id rules; a label may leave it out but must not contradict it.
fn check_label(event: &Event, label: Label<'_>) -> Result<(), Unreadable> {
    for (name, id) in [("message_id", label.message_id), ("x-event-id", label.header_event_id)] {
        if let Some(id) = id
            && Uuid::parse_str(id).ok() != Some(event.event_id)
        {
            let error = format!("{name} {id:?} is not the envelope's event_id {}", event.event_id);
            return Err(Unreadable::new("id-mismatch", error));
        }
    }
    Ok(())
}

/// An error may quote what it is about, and text columns of Postgres take no NUL.
pub fn without_nul(text: &str) -> String {
    text.replace('\0', "\u{2400}")
}

/// Text that can stand in a column, a header and a log line as it is.
pub fn is_plain_text(text: &str, chars_max: usize) -> bool {
    let is_ascii = text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    let has_control = !is_ascii && text.chars().any(char::is_control);
    let length = if is_ascii { text.len() } else { text.chars().count() };
    !has_control && (1..=chars_max).contains(&length)
}

/// Counts brackets outside strings; says nothing on whether the JSON is well formed.
fn nests_deeper_than(json: &[u8], depth_max: usize) -> bool {
    // Nearly all have fewer than that, which is quickly seen.
    if json.iter().filter(|byte| matches!(byte, b'{' | b'[')).count() <= depth_max {
        return false;
    }
    let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
    for &byte in json {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'{' | b'[' => {
                depth += 1;
                if depth > depth_max {
                    return true;
                }
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: usize = 4096;

    fn sample() -> Event {
        let origin = Origin {
            group_id: "g".into(),
            subsidiary_id: None,
            correlation_id: "c".into(),
            causation_id: None,
            traceparent: None,
        };
        Event::new("order.placed", "a".into(), origin, Timestamp::from_millis(0), &serde_json::json!({"n": 1}))
    }

    fn code(body: &[u8]) -> &'static str {
        code_labelled(body, Label::default())
    }

    fn code_labelled(body: &[u8], label: Label<'_>) -> &'static str {
        let decode = |_: &str, payload: &RawValue| serde_json::from_str::<serde_json::Value>(payload.get());
        let body = Bytes::copy_from_slice(body);
        let read =
            read_envelope(&body, label, LIMIT).and_then(|event| open(event.into(), body, &["order.placed"], decode));
        match read {
            Ok(_) => "ok",
            Err(unreadable) => unreadable.code,
        }
    }

    fn changed(change: impl Fn(&mut serde_json::Value)) -> Vec<u8> {
        let mut value: serde_json::Value = serde_json::from_slice(&sample().to_body()).unwrap();
        change(&mut value);
        serde_json::to_vec(&value).unwrap()
    }

    #[test]
    fn an_envelope_reads_back_as_it_was_written() {
        let event = sample();
        let read = read_envelope(&event.to_body(), Label::default(), LIMIT).unwrap();
        assert_eq!(read.event_id, event.event_id);
        assert_eq!(read.routing_key(), "order.placed");
        assert_eq!(read.payload.get(), r#"{"n":1}"#);
        let odd = Event {
            aggregate_id: "\"ü\\ 漢".into(),
            subsidiary_id: Some("s".into()),
            causation_id: Some(mint_id()),
            payload: RawValue::from_string(r#"{ "n": 1e2, "text": "\u00fc\/" }"#.into()).unwrap(),
            ..event
        };
        assert_eq!(read_envelope(&odd.to_body(), Label::default(), LIMIT).unwrap().to_body(), odd.to_body());
    }

    #[test]
    fn each_kind_of_poison_has_its_own_reason() {
        assert_eq!(code(&sample().to_body()), "ok");
        assert_eq!(code(&vec![b' '; LIMIT + 1]), "too-large");
        assert_eq!(code(b"\xff\xfe"), "not-utf8");
        assert_eq!(code(b""), "not-json");
        assert_eq!(code(b"{\"event_id\":"), "not-json");
        assert_eq!(code(b"\xef\xbb\xbf{}"), "not-json");
        assert_eq!(code("[".repeat(1000).as_bytes()), "too-deep");
        assert_eq!(code(b"{}"), "no-id");
        assert_eq!(code(b"[1]"), "schema");
        let nameless = changed(|v| {
            let fields = ["event_id", "occurred_at", "aggregate_type", "aggregate_id", "event_type", "group_id"];
            let more = ["subsidiary_id", "correlation_id", "causation_id", "payload"];
            *v = fields.iter().chain(&more).map(|field| v[field].clone()).collect();
        });
        assert_eq!(code(&nameless), "schema", "all that it takes, without names");
        assert_eq!(code(&changed(|v| v["event_id"] = "nonsense".into())), "schema");
        assert_eq!(code(&changed(|v| v["event_type"] = "vanished".into())), "unknown-type");
        assert_eq!(code(&changed(|v| v["group_id"] = "a\u{0}b".into())), "schema");
        assert_eq!(code(&changed(|v| v["correlation_id"] = "".into())), "schema");
    }

    #[test]
    fn what_this_process_wrote_is_refused_for_what_its_bytes_would_be() {
        let checked = |event: &Event, bytes_max| {
            let body = event.to_body();
            let read = read_envelope(&body, Label::default(), bytes_max).map(drop);
            assert_eq!(check_envelope(event, &body, bytes_max), read);
            read.map_err(|unreadable| unreadable.code)
        };
        let nested = format!("{}{}", "[".repeat(DEPTH_MAX), "]".repeat(DEPTH_MAX));
        assert_eq!(checked(&sample(), LIMIT), Ok(()));
        assert_eq!(checked(&sample(), 10), Err("too-large"));
        assert_eq!(
            checked(&Event { payload: RawValue::from_string(nested).unwrap(), ..sample() }, LIMIT),
            Err("too-deep")
        );
        assert_eq!(checked(&Event { aggregate_id: "a\nb".into(), ..sample() }, LIMIT), Err("schema"));
    }

    #[test]
    fn the_bodys_id_rules_and_a_label_must_not_contradict_it() {
        let event = sample();
        let (body, id) = (event.to_body(), event.event_id.to_string());
        let other = mint_id().to_string();
        let label = |message_id, header_event_id| Label { message_id, header_event_id };
        assert_eq!(code_labelled(&body, label(Some(&id), Some(&id))), "ok");
        assert_eq!(code_labelled(&body, label(Some(&other), None)), "id-mismatch");
        assert_eq!(code_labelled(&body, label(None, Some("nonsense"))), "id-mismatch");
    }

    #[test]
    fn brackets_inside_strings_do_not_nest() {
        assert!(!nests_deeper_than(br#""[[[[\"[[[[""#, 1));
        assert!(nests_deeper_than(b"[[", 1));
    }
}
