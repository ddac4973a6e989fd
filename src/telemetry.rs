//! Logs: one line per event on stderr, pretty on a terminal and JSON otherwise.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

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
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let set = if pretty { builder.with_ansi(colour).try_init() } else { builder.json().try_init() };
    set.map_err(|error| anyhow::anyhow!("logging cannot be set up: {error}"))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Pretty on a terminal, JSON otherwise.
    Auto,
    Pretty,
    Json,
}
