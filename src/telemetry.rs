//! Logs: one line per event on stderr, pretty on a terminal and JSON otherwise. Traces: over OTLP, by the standard
//! OTEL_* variables and none of our own.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{IsTerminal, Write};

use anyhow::Context;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::format::debug_fn;

use stockade_kernel::{secrets, trace};

/// Sets up logging for the process. `filter` is in the syntax of RUST_LOG. lapin's own lines repeat what the
/// transport says better, and would print messages with their bodies.
pub fn init(filter: &str, format: LogFormat) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(format!("sqlx=warn,lapin=off,{filter}"))
        .map_err(|error| anyhow::anyhow!("STOCKADE_LOG {filter:?} cannot be read: {error}"))?;
    let pretty = match format {
        LogFormat::Auto => std::io::stderr().is_terminal(),
        LogFormat::Pretty => true,
        LogFormat::Json => false,
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter);
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    // Whatever a field holds is shown and not obeyed: no line of a message forges another, none drives a terminal.
    let set = if pretty {
        let fields = debug_fn(|writer, field, value| {
            let text = without_controls(&format!("{value:?}"));
            if field.name() == "message" { write!(writer, "{text}") } else { write!(writer, "{}={text}", field.name()) }
        });
        builder.with_ansi(colour).fmt_fields(fields.delimited(" ")).with_writer(std::io::stderr).try_init()
    } else {
        builder.json().with_writer(|| Plain(std::io::stderr())).try_init()
    };
    set.map_err(|error| anyhow::anyhow!("logging cannot be set up: {error}"))
}

/// Lets panics be reported as everything else is: in the log if there is one, without secrets and control characters.
/// The backtrace follows RUST_BACKTRACE.
pub fn report_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let text = secrets::strike_from(panic.payload_as_str().unwrap_or("no message"));
        let at = panic.location().map(ToString::to_string).unwrap_or_default();
        let current = std::thread::current();
        let thread = current.name().unwrap_or_default();
        let backtrace = Backtrace::capture();
        let traced = (backtrace.status() == BacktraceStatus::Captured).then_some(&backtrace);
        if tracing::enabled!(tracing::Level::ERROR) {
            tracing::error!(thread, at, backtrace = traced.map(tracing::field::display), "panicked: {text}");
        } else {
            let trace = traced.map(|trace| format!("\n{trace}")).unwrap_or_default();
            // With stderr gone there is nobody left to tell.
            let _ = writeln!(std::io::stderr(), "panicked at {at}: {}{trace}", without_controls(&text));
        }
    }));
}

/// JSON escapes the control characters that it must; this the others, which some terminals obey too.
struct Plain<W>(W);

impl<W: Write> Write for Plain<W> {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        let (text, end) = text.strip_suffix('\n').map_or((&*text, ""), |text| (text, "\n"));
        let escaped: String =
            text.chars().map(|c| if c.is_control() { json_escape(c) } else { c.to_string() }).collect();
        self.0.write_all(escaped.as_bytes())?;
        self.0.write_all(end.as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

fn json_escape(c: char) -> String {
    format!("\\u{:04x}", u32::from(c))
}

fn without_controls(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() }).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Pretty on a terminal, JSON otherwise.
    Auto,
    Pretty,
    Json,
}

/// Exports spans while it lives; dropped at the end, it sends the last of them.
pub struct Exporting(Option<SdkTracerProvider>);

/// Begins to export spans if an endpoint is given: OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT.
/// Headers, timeout, sampler, resource and batching go by their standard variables too.
pub fn export_traces() -> anyhow::Result<Exporting> {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let endpoint = set("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").or_else(|| set("OTEL_EXPORTER_OTLP_ENDPOINT"));
    let disabled = set("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    if endpoint.is_none() || disabled || set("OTEL_TRACES_EXPORTER").is_some_and(|exporter| exporter == "none") {
        return Ok(Exporting(None));
    }
    let protocol = set("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL").or_else(|| set("OTEL_EXPORTER_OTLP_PROTOCOL"));
    if let Some(protocol) = protocol.filter(|protocol| protocol != "http/protobuf") {
        anyhow::bail!("OTEL_EXPORTER_OTLP_PROTOCOL takes http/protobuf, not {protocol}");
    }
    let exporter = SpanExporter::builder()
        .with_http()
        .with_protocol(Protocol::HttpBinary)
        .build()
        .context("traces cannot be exported: see the OTEL_EXPORTER_OTLP_* variables")?;
    let resource = match set("OTEL_SERVICE_NAME") {
        Some(name) => Resource::builder().with_service_name(name),
        None => Resource::builder().with_service_name("stockade"),
    };
    let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource.build()).build();
    trace::install(provider.tracer("stockade"));
    Ok(Exporting(Some(provider)))
}

impl Drop for Exporting {
    fn drop(&mut self) {
        if let Some(provider) = self.0.take()
            && let Err(error) = provider.shutdown()
        {
            tracing::warn!(%error, "the last traces were not exported");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_control_character_gets_to_a_log_raw() {
        assert_eq!(without_controls("a\u{1b}[2J\nb\u{9b}c"), "a\\u{1b}[2J\\nb\\u{9b}c");
        let mut written = Plain(Vec::new());
        written.write_all("{\"a\":\"\u{9b}ä\u{7f}\"}\n".as_bytes()).unwrap();
        assert_eq!(String::from_utf8(written.0).unwrap(), "{\"a\":\"\\u009bä\\u007f\"}\n");
    }
}
