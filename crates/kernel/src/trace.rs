//! Traces: the context that travels with requests and events, and spans where somebody collects them.
//!
//! A `traceparent` is accepted on requests, stored with the events they bring about, carried in message headers and
//! taken up by consumers, whether or not this process exports anything. With an exporter (set up by the standard
//! OTEL_* variables, see `telemetry.rs`) each request and each message handled is a span, and what it brings about
//! continues that span; without, the context passes through as it came. Off, it costs a header look-up per request.

use std::borrow::Cow;
use std::fmt;
use std::sync::OnceLock;

use opentelemetry::Context;
pub use opentelemetry::KeyValue;
pub use opentelemetry::trace::SpanKind;
use opentelemetry::trace::{
    Span as _, SpanContext, SpanId, Status, TraceContextExt, TraceFlags, TraceId, TraceState, Tracer,
};
use opentelemetry_sdk::trace::SdkTracer;

/// The W3C trace context of whatever brought something about.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Traceparent {
    trace_id: u128,
    span_id: u64,
    flags: u8,
}

impl Traceparent {
    /// Reads a header; `None` for what is no context, which is then ignored, as the standard asks.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().split('-');
        let (version, trace_id, span_id, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let hex = |part: &str, digits: usize| {
            let lower = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            part.len() == digits && part.bytes().all(lower)
        };
        // A later version may add parts, this one may not; version ff is none.
        let known = hex(version, 2) && version != "ff" && (version != "00" || parts.next().is_none());
        if !known || !hex(trace_id, 32) || !hex(span_id, 16) || !hex(flags, 2) {
            return None;
        }
        let read = Self {
            trace_id: u128::from_str_radix(trace_id, 16).ok()?,
            span_id: u64::from_str_radix(span_id, 16).ok()?,
            flags: u8::from_str_radix(flags, 16).ok()?,
        };
        (read.trace_id != 0 && read.span_id != 0).then_some(read)
    }

    fn of(context: &SpanContext) -> Self {
        Self {
            trace_id: u128::from_be_bytes(context.trace_id().to_bytes()),
            span_id: u64::from_be_bytes(context.span_id().to_bytes()),
            flags: context.trace_flags().to_u8(),
        }
    }

    fn context(self) -> Context {
        Context::new().with_remote_span_context(SpanContext::new(
            TraceId::from_bytes(self.trace_id.to_be_bytes()),
            SpanId::from_bytes(self.span_id.to_be_bytes()),
            TraceFlags::new(self.flags),
            true,
            TraceState::NONE,
        ))
    }
}

impl fmt::Display for Traceparent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace_id, self.span_id, self.flags)
    }
}

impl fmt::Debug for Traceparent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One for the process, like the log.
static TRACER: OnceLock<SdkTracer> = OnceLock::new();

/// Starts collecting spans; once per process.
pub fn install(tracer: SdkTracer) {
    // A second one changes nothing: the first stays.
    let _ = TRACER.set(tracer);
}

/// Does anybody collect spans?
pub fn is_on() -> bool {
    TRACER.get().is_some()
}

/// A piece of work, over when it is dropped. Nothing at all where nobody collects spans.
pub struct Span {
    span: Option<opentelemetry_sdk::trace::Span>,
    carried: Option<Traceparent>,
}

impl Span {
    /// Begins a span under `parent`, or a trace of its own. Its name and attributes are only made if there is one.
    pub fn begin(
        parent: Option<Traceparent>,
        kind: SpanKind,
        describe: impl FnOnce() -> (Cow<'static, str>, Vec<KeyValue>),
    ) -> Self {
        let span = TRACER.get().map(|tracer| {
            let (name, attributes) = describe();
            let builder = tracer.span_builder(name).with_kind(kind).with_attributes(attributes);
            let parent = parent.map_or_else(Context::new, Traceparent::context);
            tracer.build_with_context(builder, &parent)
        });
        let carried = match &span {
            Some(span) => Some(Traceparent::of(span.span_context())),
            None => parent,
        };
        Self { span, carried }
    }

    /// What work that this one brings about is to carry on.
    pub fn carried(&self) -> Option<Traceparent> {
        self.carried
    }

    pub fn set(&mut self, key: &'static str, value: i64) {
        if let Some(span) = &mut self.span {
            span.set_attribute(KeyValue::new(key, value));
        }
    }

    pub fn fail(&mut self, why: &'static str) {
        if let Some(span) = &mut self.span {
            span.set_status(Status::error(why));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_reads_back_as_it_was_written() {
        let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert_eq!(Traceparent::parse(text).unwrap().to_string(), text);
        let later = "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more";
        assert_eq!(Traceparent::parse(later).unwrap().to_string(), text);
    }

    #[test]
    fn what_is_no_context_is_ignored() {
        for text in [
            "",
            "00",
            "nonsense",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473\u{e9}-00f067aa0ba902b7-01",
        ] {
            assert_eq!(Traceparent::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn without_a_collector_the_context_passes_through() {
        let parent = Traceparent::parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
        let span = Span::begin(parent, SpanKind::Server, || unreachable!("nobody asks"));
        assert_eq!(span.carried(), parent);
    }
}
