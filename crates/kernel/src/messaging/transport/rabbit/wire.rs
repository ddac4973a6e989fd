//! Messages as AMQP has them: our columns to properties and headers on the way out, and back on the way in.
//!
//! Headers are JSON on our side and a typed table on theirs. What JSON can say goes out and comes back the same;
//! what only AMQP can say (a timestamp, bytes) comes in as text.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldArray, FieldTable, ShortString};
use serde_json::{Map, Number, Value};
use uuid::Uuid;

use super::shape::short;
use crate::clock::Timestamp;
use crate::messaging::outbox::{Claimed, X_ATTEMPTS};
use crate::messaging::transport::{Delivery, RawMessage, Tag};

const CONTENT_TYPE: &str = "application/json";
const PERSISTENT: u8 = 2;
const X_DELIVERY_COUNT: &str = "x-delivery-count";
const X_DEATH: &str = "x-death";
/// Where a redriven letter keeps the message id it came with.
const X_MESSAGE_ID: &str = "x-message-id";

/// The properties of an outbox row. A redrive sends what the letter came with and nothing that it did not have.
pub fn properties_of(row: &Claimed, key: &str) -> Result<BasicProperties, String> {
    let mut headers = BTreeMap::new();
    let message_id = if row.is_redrive() {
        add_headers(&mut headers, &row.headers)?;
        match headers.remove(X_MESSAGE_ID) {
            Some(AMQPValue::LongString(id)) => Some(short(&id.to_string())?),
            _ => None,
        }
    } else {
        add_labels(&mut headers, row);
        add_headers(&mut headers, &row.headers)?;
        Some(uuid_text(row.event_id))
    };
    let mut properties = BasicProperties::default()
        .with_content_type(CONTENT_TYPE.into())
        .with_delivery_mode(PERSISTENT)
        .with_timestamp(u64::try_from(row.created_at.millis() / 1000).unwrap_or(0))
        .with_type(short(key)?)
        .with_headers(headers.into());
    if let Some(message_id) = message_id {
        properties = properties.with_message_id(message_id);
    }
    Ok(with_correlation_id(properties, &row.correlation_id))
}

/// The properties of a message from the fault lab: what it was given, and no more.
pub fn properties_of_raw(message: &RawMessage) -> Result<BasicProperties, String> {
    let mut properties = BasicProperties::default()
        .with_content_type(CONTENT_TYPE.into())
        .with_delivery_mode(PERSISTENT)
        .with_headers(table_of(&message.headers)?);
    if !message.routing_key.is_empty() {
        properties = properties.with_type(short(&message.routing_key)?);
    }
    if let Some(id) = &message.message_id {
        properties = properties.with_message_id(short(id)?);
    }
    Ok(with_correlation_id(properties, message.correlation_id.as_deref().unwrap_or_default()))
}

/// Left out where it does not fit: the body has it anyway.
fn with_correlation_id(properties: BasicProperties, correlation_id: &str) -> BasicProperties {
    match short(correlation_id) {
        Ok(id) if !correlation_id.is_empty() => properties.with_correlation_id(id),
        _ => properties,
    }
}

fn add_labels(headers: &mut BTreeMap<ShortString, AMQPValue>, row: &Claimed) {
    let text = |text: &str| AMQPValue::LongString(text.into());
    headers.insert("x-event-id".into(), text(uuid_text(row.event_id).as_str()));
    headers.insert("x-aggregate-type".into(), text(&row.aggregate_type));
    headers.insert("x-aggregate-id".into(), text(&row.aggregate_id));
    headers.insert("x-event-type".into(), text(&row.event_type));
    headers.insert("x-group-id".into(), text(&row.group_id));
    if let Some(subsidiary_id) = &row.subsidiary_id {
        headers.insert("x-subsidiary-id".into(), text(subsidiary_id));
    }
    if let Some(traceparent) = &row.traceparent {
        headers.insert("traceparent".into(), text(traceparent));
    }
    headers.insert(X_ATTEMPTS.into(), AMQPValue::LongLongInt(0));
}

fn add_headers(headers: &mut BTreeMap<ShortString, AMQPValue>, json: &str) -> Result<(), String> {
    if json == "{}" || json.is_empty() {
        return Ok(());
    }
    let stored: Map<String, Value> = serde_json::from_str(json).map_err(|error| format!("its headers: {error}"))?;
    for (name, value) in &stored {
        headers.insert(short(name)?, amqp_of(value)?);
    }
    Ok(())
}

fn uuid_text(id: Uuid) -> ShortString {
    let mut buffer = Uuid::encode_buffer();
    ShortString::from(&*id.hyphenated().encode_lower(&mut buffer))
}

/// A delivery as consumers see it.
pub fn delivery_of(message: lapin::message::Delivery, token: Uuid) -> Delivery {
    let mut headers = message.properties.headers().as_ref().map(map_of).unwrap_or_default();
    let x_death = headers.remove(X_DEATH).unwrap_or_default();
    let counted = headers.remove(X_DELIVERY_COUNT).and_then(|count| count.as_u64()).unwrap_or(0);
    headers.retain(|name, _| !name.starts_with("x-first-death-") && !name.starts_with("x-last-death-"));
    let text = |text: &Option<ShortString>| text.as_ref().map(|text| text.as_str().to_owned());
    let deliveries = match message.redelivered {
        false => 1,
        true => u32::try_from(counted).unwrap_or(u32::MAX).max(1).saturating_add(1),
    };
    Delivery {
        tag: Tag { id: i64::try_from(message.delivery_tag).unwrap_or(i64::MAX), token },
        lasting_id: None,
        handed_over: false,
        written: None,
        message_id: text(message.properties.message_id()),
        routing_key: key_of(&message, &x_death),
        correlation_id: text(message.properties.correlation_id()),
        headers,
        body: message.data.into(),
        deliveries,
        x_death,
    }
}

/// The key a message was published under. One sent straight to its queue has none, and one that died was last routed by
/// the name of a queue: its `type` tells then, or the record of its death.
fn key_of(message: &lapin::message::Delivery, x_death: &Value) -> String {
    let has_died = !x_death.is_null();
    if !has_died && !message.exchange.as_str().is_empty() {
        return message.routing_key.as_str().to_owned();
    }
    let kind = message.properties.kind().as_ref().map(ShortString::as_str);
    let death = &x_death[0];
    let died_under = death["routing-keys"][0].as_str().filter(|_| death["exchange"] != "");
    kind.or(died_under).unwrap_or_default().to_owned()
}

fn map_of(table: &FieldTable) -> Map<String, Value> {
    table.into_iter().map(|(name, value)| (name.as_str().to_owned(), json_of(value))).collect()
}

fn json_of(value: &AMQPValue) -> Value {
    match value {
        AMQPValue::Boolean(value) => Value::Bool(*value),
        AMQPValue::ShortShortInt(value) => (*value).into(),
        AMQPValue::ShortShortUInt(value) => (*value).into(),
        AMQPValue::ShortInt(value) => (*value).into(),
        AMQPValue::ShortUInt(value) => (*value).into(),
        AMQPValue::LongInt(value) => (*value).into(),
        AMQPValue::LongUInt(value) => (*value).into(),
        AMQPValue::LongLongInt(value) => (*value).into(),
        AMQPValue::Float(value) => f64::from(*value).into(),
        AMQPValue::Double(value) => (*value).into(),
        AMQPValue::DecimalValue(value) => (f64::from(value.value) / 10f64.powi(i32::from(value.scale))).into(),
        AMQPValue::ShortString(text) => text.as_str().into(),
        AMQPValue::LongString(text) => text.to_string().into(),
        AMQPValue::FieldArray(values) => values.as_slice().iter().map(json_of).collect(),
        AMQPValue::Timestamp(seconds) => {
            Timestamp::from_millis(i64::try_from(*seconds).unwrap_or(i64::MAX).saturating_mul(1000)).to_string().into()
        }
        AMQPValue::FieldTable(table) => map_of(table).into(),
        AMQPValue::ByteArray(bytes) => STANDARD.encode(bytes.as_slice()).into(),
        AMQPValue::Void => Value::Null,
    }
}

fn table_of(map: &Map<String, Value>) -> Result<FieldTable, String> {
    let entries: Result<BTreeMap<ShortString, AMQPValue>, String> =
        map.iter().map(|(name, value)| Ok((short(name)?, amqp_of(value)?))).collect();
    Ok(entries?.into())
}

fn amqp_of(value: &Value) -> Result<AMQPValue, String> {
    Ok(match value {
        Value::Null => AMQPValue::Void,
        Value::Bool(value) => AMQPValue::Boolean(*value),
        Value::Number(number) => amqp_of_number(number),
        Value::String(text) => AMQPValue::LongString(text.as_str().into()),
        Value::Array(values) => {
            AMQPValue::FieldArray(FieldArray::from(values.iter().map(amqp_of).collect::<Result<Vec<_>, _>>()?))
        }
        Value::Object(map) => AMQPValue::FieldTable(table_of(map)?),
    })
}

fn amqp_of_number(number: &Number) -> AMQPValue {
    match number.as_i64() {
        Some(whole) => AMQPValue::LongLongInt(whole),
        None => AMQPValue::Double(number.as_f64().unwrap_or(f64::NAN)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row(kind: &str, headers: &Value) -> Claimed {
        Claimed {
            id: Uuid::from_u128(1),
            event_id: Uuid::from_u128(0x0abc_def0),
            kind: kind.to_owned(),
            group_id: "g".to_owned(),
            subsidiary_id: Some("s".to_owned()),
            aggregate_type: "order".to_owned(),
            aggregate_id: "a".to_owned(),
            event_type: "placed".to_owned(),
            correlation_id: "c".to_owned(),
            traceparent: Some("00-aa-bb-01".to_owned()),
            headers: headers.to_string(),
            body: b"{}"[..].into(),
            target: String::new(),
            attempts: 0,
            created_at: Timestamp::from_millis(1_800_000_000_999),
        }
    }

    #[test]
    fn a_row_carries_every_label() {
        let properties = properties_of(&row("event", &json!({})), "order.placed").unwrap();
        let id = "00000000-0000-0000-0000-00000abcdef0";
        assert_eq!(properties.message_id().as_ref().unwrap().as_str(), id);
        assert_eq!(properties.correlation_id().as_ref().unwrap().as_str(), "c");
        assert_eq!(properties.content_type().as_ref().unwrap().as_str(), "application/json");
        assert_eq!((*properties.delivery_mode(), *properties.timestamp()), (Some(2), Some(1_800_000_000)));
        assert_eq!(properties.kind().as_ref().unwrap().as_str(), "order.placed");
        let expected = json!({
            "x-event-id": id, "x-aggregate-type": "order", "x-aggregate-id": "a", "x-event-type": "placed",
            "x-group-id": "g", "x-subsidiary-id": "s", "traceparent": "00-aa-bb-01", "x-attempts": 0,
        });
        assert_eq!(Value::Object(map_of(properties.headers().as_ref().unwrap())), expected);
        let retry = properties_of(&row("retry", &json!({ "x-attempts": 3 })), "order.placed").unwrap();
        assert_eq!(map_of(retry.headers().as_ref().unwrap())["x-attempts"], 3);
    }

    #[test]
    fn a_redrive_carries_what_its_letter_came_with_and_no_more() {
        let foreign = json!({ "x-message-id": "theirs", "x-attempts": 0, "colour": "blue" });
        let properties = properties_of(&row("redrive", &foreign), "order.placed").unwrap();
        assert_eq!(properties.message_id().as_ref().unwrap().as_str(), "theirs");
        let headers = Value::Object(map_of(properties.headers().as_ref().unwrap()));
        assert_eq!(headers, json!({ "x-attempts": 0, "colour": "blue" }));
        let nameless = properties_of(&row("redrive", &json!({ "x-attempts": 0 })), "order.placed").unwrap();
        assert!(nameless.message_id().is_none(), "none is made up");
    }

    #[test]
    fn what_json_can_say_comes_back_the_same() {
        let said = json!({
            "text": "a\u{0}ü", "whole": -7, "large": i64::MAX, "broken": 1.5, "yes": true, "nothing": null,
            "list": [1, "two", null, { "three": 3 }], "table": { "empty": {} },
        });
        assert_eq!(Value::Object(map_of(&table_of(said.as_object().unwrap()).unwrap())), said);
    }

    #[test]
    fn what_only_amqp_can_say_comes_in_as_text() {
        assert_eq!(json_of(&AMQPValue::Timestamp(0)), json!("1970-01-01T00:00:00.000Z"));
        assert_eq!(json_of(&AMQPValue::ByteArray(vec![0xff].into())), json!("/w=="));
        assert_eq!(json_of(&AMQPValue::LongString(vec![0xff].into())), json!("\u{fffd}"));
    }

    #[test]
    fn what_does_not_fit_is_refused_or_left_out() {
        let long = "x".repeat(256);
        assert!(properties_of(&row("event", &json!({ &long: 1 })), "order.placed").is_err());
        assert!(properties_of(&row("event", &json!({})), &long).is_err());
        let properties = properties_of(&Claimed { correlation_id: long, ..row("event", &json!({})) }, "k").unwrap();
        assert!(properties.correlation_id().is_none());
    }
}
