//! Every setting, its default and its meaning: flags over environment over defaults. `--help` is the manual.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::bail;
use bytesize::ByteSize;
use clap::{Args, Parser, ValueEnum};

use crate::messaging::Tuning;
use crate::messaging::retry::Backoff;
use crate::telemetry::LogFormat;
use crate::{db, http};

/// A part of the product that a process may run or leave to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    Api,
    Relay,
    Orders,
    Inventory,
    Notifications,
    DeadLetters,
    /// Everything.
    All,
}

#[derive(Debug, Clone, Args)]
pub struct Settings {
    /// Address to serve HTTP on; port 0 takes a free one.
    #[arg(long, env = "STOCKADE_LISTEN", default_value = "127.0.0.1:8080")]
    pub listen: SocketAddr,

    /// `sqlite:FILE` or `postgres://USER:PASSWORD@HOST/DATABASE`.
    #[arg(long, env = "STOCKADE_DATABASE_URL", default_value = "sqlite:stockade.db", hide_env_values = true)]
    pub database_url: String,

    /// `embedded`: a queue in the database.
    #[arg(long, env = "STOCKADE_BROKER_URL", default_value = "embedded", hide_env_values = true)]
    pub broker_url: String,

    /// Which parts this process runs.
    #[arg(long, env = "STOCKADE_MODULES", value_enum, value_delimiter = ',', default_value = "all")]
    pub modules: Vec<Part>,

    /// What queue names begin with.
    #[arg(long, env = "STOCKADE_QUEUE_PREFIX", default_value = "stockade")]
    pub queue_prefix: String,

    /// Serve without API keys on an address that others can reach. Anyone who reaches it can do anything.
    #[arg(long, env = "STOCKADE_INSECURE_NO_AUTH")]
    pub insecure_no_auth: bool,

    /// Connections to Postgres.
    #[arg(long, env = "STOCKADE_DB_MAX_CONNECTIONS", default_value_t = 20)]
    pub db_max_connections: u32,

    /// How long to wait for a database connection.
    #[arg(long, env = "STOCKADE_DB_ACQUIRE_TIMEOUT", default_value = "5s", value_parser = humantime::parse_duration)]
    pub db_acquire_timeout: Duration,

    /// How long to wait for a SQLite file that somebody else has locked.
    #[arg(long, env = "STOCKADE_SQLITE_BUSY_TIMEOUT", default_value = "5s", value_parser = humantime::parse_duration)]
    pub sqlite_busy_timeout: Duration,

    /// Pages a SQLite file may grow to before writes are refused as on a full disk; 0 is no limit.
    #[arg(long, env = "STOCKADE_SQLITE_MAX_PAGES", default_value_t = 0)]
    pub sqlite_max_pages: u32,

    /// Outbox rows published in one pass.
    #[arg(long, env = "STOCKADE_OUTBOX_BATCH", default_value_t = 1024)]
    pub outbox_batch: u32,

    /// How often the relay looks at the outbox even if nothing wakes it.
    #[arg(long, env = "STOCKADE_OUTBOX_POLL", default_value = "200ms", value_parser = humantime::parse_duration)]
    pub outbox_poll: Duration,

    /// Refusals by the broker before an outbox row is dead.
    #[arg(long, env = "STOCKADE_OUTBOX_MAX_ATTEMPTS", default_value_t = 10)]
    pub outbox_max_attempts: u32,

    /// After the nth refusal a row waits 2^n times this, less up to half at random.
    #[arg(long, env = "STOCKADE_OUTBOX_BACKOFF_BASE", default_value = "5s", value_parser = humantime::parse_duration)]
    pub outbox_backoff_base: Duration,

    /// The longest delay between refusals.
    #[arg(long, env = "STOCKADE_OUTBOX_BACKOFF_MAX", default_value = "15m", value_parser = humantime::parse_duration)]
    pub outbox_backoff_max: Duration,

    /// Events a consumer handles in one transaction.
    #[arg(long, env = "STOCKADE_BATCH", default_value_t = 512)]
    pub batch: usize,

    /// How often a consumer looks at its queue even if nothing wakes it.
    #[arg(long, env = "STOCKADE_POLL", default_value = "200ms", value_parser = humantime::parse_duration)]
    pub poll: Duration,

    /// How long a consumer may hold a message before another may take it over; renewed while it works.
    #[arg(long, env = "STOCKADE_LEASE", default_value = "60s", value_parser = humantime::parse_duration)]
    pub lease: Duration,

    /// Attempts at an event before it becomes a dead letter.
    #[arg(long, env = "STOCKADE_RETRY_MAX", default_value_t = 8)]
    pub retry_max: u32,

    /// After the nth failed attempt an event waits 2^n times this, less up to half at random.
    #[arg(long, env = "STOCKADE_RETRY_BASE", default_value = "200ms", value_parser = humantime::parse_duration)]
    pub retry_base: Duration,

    /// The longest delay between attempts.
    #[arg(long, env = "STOCKADE_RETRY_CAP", default_value = "60s", value_parser = humantime::parse_duration)]
    pub retry_cap: Duration,

    /// The largest request body.
    #[arg(long, env = "STOCKADE_MAX_BODY", default_value = "256KiB")]
    pub max_body: ByteSize,

    /// The largest event; a larger message becomes a dead letter.
    #[arg(long, env = "STOCKADE_MAX_EVENT", default_value = "256KiB")]
    pub max_event: ByteSize,

    /// Items in one order.
    #[arg(long, env = "STOCKADE_MAX_ITEMS", default_value_t = 100)]
    pub max_items: usize,

    /// How long a request may take.
    #[arg(long, env = "STOCKADE_HTTP_REQUEST_TIMEOUT", default_value = "30s", value_parser = humantime::parse_duration)]
    pub http_request_timeout: Duration,

    /// Pages that may watch the live stream at once; more are told to poll.
    #[arg(long, env = "STOCKADE_SSE_MAX_STREAMS", default_value_t = 256)]
    pub sse_max_streams: usize,

    /// How long shutdown may take to finish the work in hand.
    #[arg(long, env = "STOCKADE_SHUTDOWN_DRAIN", default_value = "25s", value_parser = humantime::parse_duration)]
    pub shutdown_drain: Duration,

    /// What to log, in the syntax of RUST_LOG.
    #[arg(long, env = "STOCKADE_LOG", default_value = "info")]
    pub log: String,

    #[arg(long, env = "STOCKADE_LOG_FORMAT", value_enum, default_value = "auto")]
    pub log_format: LogFormat,
}

/// Lets settings be read from flags alone.
#[derive(clap::Parser)]
struct Flags {
    #[command(flatten)]
    settings: Settings,
}

impl Settings {
    /// Reads flags as `serve` would, over the environment and the defaults.
    pub fn from_flags<'a>(flags: impl IntoIterator<Item = &'a str>) -> Result<Self, clap::Error> {
        let flags = Flags::try_parse_from(std::iter::once("stockade").chain(flags))?;
        Ok(flags.settings)
    }

    /// Checks what the settings say together; each sentence tells what to change.
    pub fn validate(&self) -> anyhow::Result<()> {
        if self.broker_url != "embedded" {
            bail!("STOCKADE_BROKER_URL takes `embedded`; other brokers are not supported yet");
        }
        if !self.listen.ip().is_loopback() && !self.insecure_no_auth {
            bail!(
                "{} can be reached by others and there are no API keys: listen on 127.0.0.1, or set \
                 STOCKADE_INSECURE_NO_AUTH=true if something in front guards it",
                self.listen
            );
        }
        if self.batch == 0 || self.outbox_batch == 0 || self.db_max_connections < 4 {
            bail!(
                "STOCKADE_BATCH and STOCKADE_OUTBOX_BATCH must be at least 1, STOCKADE_DB_MAX_CONNECTIONS at least 4"
            );
        }
        if self.lease < Duration::from_secs(1) || self.lease <= self.poll {
            bail!("STOCKADE_LEASE must be at least 1s and longer than STOCKADE_POLL, or batches are taken over midway");
        }
        if self.retry_max == 0 || self.outbox_max_attempts == 0 {
            bail!("STOCKADE_RETRY_MAX and STOCKADE_OUTBOX_MAX_ATTEMPTS must be at least 1");
        }
        let prefix_ok = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if self.queue_prefix.is_empty() || !self.queue_prefix.bytes().all(prefix_ok) {
            bail!("STOCKADE_QUEUE_PREFIX takes letters, digits, dots, dashes and underscores");
        }
        Ok(())
    }

    /// Does this process run that part?
    pub fn runs(&self, part: Part) -> bool {
        self.modules.contains(&Part::All) || self.modules.contains(&part)
    }

    /// Is everything in one file, with nothing else to run?
    pub fn is_embedded(&self) -> bool {
        self.database_url.starts_with("sqlite:")
    }

    pub fn database(&self) -> db::Options {
        db::Options {
            url: self.database_url.clone(),
            connections_max: self.db_max_connections,
            acquire_timeout: self.db_acquire_timeout,
            busy_timeout: self.sqlite_busy_timeout,
            pages_max: self.sqlite_max_pages,
        }
    }

    pub fn tuning(&self) -> Tuning {
        Tuning {
            queue_prefix: self.queue_prefix.clone(),
            outbox_batch: self.outbox_batch,
            outbox_poll: self.outbox_poll,
            outbox_backoff: Backoff {
                base: self.outbox_backoff_base,
                cap: self.outbox_backoff_max,
                attempts_max: self.outbox_max_attempts,
            },
            outbox_lease: self.lease,
            batch: self.batch,
            poll: self.poll,
            retry: Backoff { base: self.retry_base, cap: self.retry_cap, attempts_max: self.retry_max },
            event_bytes_max: usize::try_from(self.max_event.as_u64()).unwrap_or(usize::MAX),
        }
    }

    pub fn http_limits(&self) -> http::Limits {
        http::Limits {
            body_bytes_max: usize::try_from(self.max_body.as_u64()).unwrap_or(usize::MAX),
            request_timeout: self.http_request_timeout,
        }
    }
}
