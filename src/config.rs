//! Every setting, its default and its meaning: flags over environment over defaults, secrets from files too if that is
//! wanted. `--help` is the manual.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use bytesize::ByteSize;
use clap::{ArgMatches, Args, Command, FromArgMatches, Parser, ValueEnum};

use crate::access::{self, Key};
use crate::http;
use crate::http::limits::RateLimit;
use crate::http::serve::Doorway;
use crate::schema::SCHEMAS;
use crate::secret_files;
use crate::telemetry::LogFormat;
use stockade_kernel::clock::in_words;
use stockade_kernel::db;
use stockade_kernel::messaging::Tuning;
use stockade_kernel::messaging::outside;
use stockade_kernel::messaging::retention::Keep;
use stockade_kernel::messaging::retry::Backoff;
use stockade_kernel::messaging::transport::rabbit::{self, ExtraQueue};
use stockade_kernel::secrets::Masked;

/// A part of the product that a process may run or leave to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    Api,
    Relay,
    Orders,
    Inventory,
    Notifications,
    Ledger,
    DeadLetters,
    /// Everything.
    All,
}

/// How customers are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NotifyChannel {
    Log,
    Webhook,
    Smtp,
}

/// What the flags, the environment, the files they name and the defaults say together.
#[derive(Debug, Clone)]
pub struct Settings(Values);

#[derive(Debug, Clone, Args)]
pub struct Values {
    /// Address to serve HTTP on; port 0 takes a free one.
    #[arg(long, env = "STOCKADE_LISTEN", default_value = "127.0.0.1:8080")]
    pub listen: SocketAddr,

    /// `sqlite:FILE` or `postgres://USER:PASSWORD@HOST/DATABASE`.
    #[arg(long, env = "STOCKADE_DATABASE_URL", default_value = "sqlite:stockade.db", hide_env_values = true)]
    pub database_url: Masked,

    /// `embedded`, a queue in the database; or RabbitMQ at `amqp://USER:PASSWORD@HOST:5672/VHOST` or `amqps://…`.
    #[arg(long, env = "STOCKADE_BROKER_URL", default_value = "embedded", hide_env_values = true)]
    pub broker_url: Masked,

    /// Which parts this process runs.
    #[arg(long, env = "STOCKADE_MODULES", value_enum, value_delimiter = ',', default_value = "all")]
    pub modules: Vec<Part>,

    /// What queue and exchange names begin with.
    #[arg(long, env = "STOCKADE_QUEUE_PREFIX", default_value = "stockade")]
    pub queue_prefix: String,

    /// On RabbitMQ, queues for other programs, each with its dead-letter queue: `NAME=PATTERN,PATTERN;NAME=PATTERN`, as
    /// in `analytics.ingest=#;erp.sync=order.*`.
    #[arg(long, env = "STOCKADE_EXTRA_QUEUES", default_value = "")]
    pub extra_queues: String,

    /// On RabbitMQ, messages that a consumer may hold unacknowledged.
    #[arg(long, env = "STOCKADE_PREFETCH", default_value_t = 1024)]
    pub prefetch: u16,

    /// On RabbitMQ, how often both sides say that they are there; a broker silent for twice as long is gone.
    #[arg(long, env = "STOCKADE_AMQP_HEARTBEAT", default_value = "10s", value_parser = humantime::parse_duration)]
    pub amqp_heartbeat: Duration,

    /// On RabbitMQ, how long to wait for the broker to confirm what was published.
    #[arg(long, env = "STOCKADE_AMQP_CONFIRM_TIMEOUT", default_value = "10s", value_parser = humantime::parse_duration)]
    pub amqp_confirm_timeout: Duration,

    /// Who may do what: `role:group:sha256` entries, apart by commas, as `stockade key new --offline` makes them. Roles:
    /// viewer, client, operator, admin. A group, `group/subsidiary`, or `*` for every group.
    #[arg(long, env = "STOCKADE_API_KEYS", default_value = "", hide_env_values = true, hide_default_value = true)]
    pub api_keys: Masked,

    /// A file of such entries, one a line; what follows a `#` is a comment.
    #[arg(long, env = "STOCKADE_API_KEYS_FILE")]
    pub api_keys_file: Option<PathBuf>,

    /// How long a browser stays logged in.
    #[arg(long, env = "STOCKADE_SESSION_TTL", default_value = "12h", value_parser = humantime::parse_duration)]
    pub session_ttl: Duration,

    /// Serve without API keys on an address that others can reach. Anyone who reaches it can do anything.
    #[arg(long, env = "STOCKADE_INSECURE_NO_AUTH")]
    pub insecure_no_auth: bool,

    /// What `/v1/metrics` asks of callers, as `x-metrics-token` or as a Bearer token; open to anybody if not set.
    #[arg(long, env = "METRICS_TOKEN", hide_env_values = true)]
    pub metrics_token: Option<Masked>,

    /// How often the promises are checked on what was written of late; the longer it takes, the less often.
    #[arg(long, env = "STOCKADE_AUDIT_EVERY", default_value = "60s", value_parser = humantime::parse_duration)]
    pub audit_every: Duration,

    /// Events in one window of that check; it rests after each.
    #[arg(long, env = "STOCKADE_AUDIT_WINDOW", default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub audit_window: u32,

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

    /// Orders are refused with 503 while more outbox rows than this wait to go out; 0 for no limit.
    #[arg(long, env = "STOCKADE_OUTBOX_MAX_PENDING", default_value_t = 1_000_000)]
    pub outbox_max_pending: u32,

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

    /// How long a call to the outside may take; then nobody knows whether it went through. Shorter than the lease.
    #[arg(long, env = "STOCKADE_HANDLER_TIMEOUT", default_value = "30s", value_parser = humantime::parse_duration)]
    pub handler_timeout: Duration,

    /// Calls to the outside that a consumer makes at once.
    #[arg(long, env = "STOCKADE_OUTSIDE_CALLS", default_value_t = 64)]
    pub outside_calls: usize,

    /// How customers are told: `log` writes the notice and no more, `webhook` posts it to a URL, `smtp` mails it.
    #[arg(long, env = "STOCKADE_NOTIFY_CHANNEL", value_enum, default_value = "log")]
    pub notify_channel: NotifyChannel,

    /// Whether a notice is sent again if nobody knows whether it went through. If not set: yes by webhook, whose receiver
    /// can tell a repeat by its Idempotency-Key; no by mail, which has none.
    #[arg(long, env = "STOCKADE_NOTIFY_REPEAT_UNKNOWN", action = clap::ArgAction::Set)]
    pub notify_repeat_unknown: Option<bool>,

    /// Where the webhook posts to, `https://…` or `http://…`.
    #[arg(long, env = "STOCKADE_WEBHOOK_URL", hide_env_values = true)]
    pub webhook_url: Option<Masked>,

    /// What webhooks are signed with: `whsec_` and Base64, or any text of 16 characters or more.
    #[arg(long, env = "STOCKADE_WEBHOOK_SECRET", hide_env_values = true)]
    pub webhook_secret: Option<Masked>,

    /// The mail server: `smtps://USER:PASSWORD@HOST`, or `smtp://HOST:PORT` with `?tls=required` for STARTTLS.
    #[arg(long, env = "STOCKADE_SMTP_URL", hide_env_values = true)]
    pub smtp_url: Option<Masked>,

    /// Whom mail is from, as in `Stockade <orders@example.com>`.
    #[arg(long, env = "STOCKADE_SMTP_FROM")]
    pub smtp_from: Option<String>,

    /// Whom mail goes to. Events name customers, not their addresses: this is a mailbox that knows them, or your own.
    #[arg(long, env = "STOCKADE_SMTP_TO")]
    pub smtp_to: Option<String>,

    /// How long an event may wait for its predecessor before it becomes a dead letter.
    #[arg(long, env = "STOCKADE_WAIT_DEADLINE", default_value = "15m", value_parser = humantime::parse_duration)]
    pub wait_deadline: Duration,

    /// How long stock is held for an order that is reserved and not paid.
    #[arg(long, env = "STOCKADE_HOLD_TIME", default_value = "15m", value_parser = humantime::parse_duration)]
    pub hold_time: Duration,

    /// How long published outbox rows stay where they are before they go to the archive.
    #[arg(long, env = "STOCKADE_OUTBOX_RETENTION", default_value = "30d", value_parser = humantime::parse_duration)]
    pub outbox_retention: Duration,

    /// How long published events can be replayed; then they leave the archive.
    #[arg(long, env = "STOCKADE_ARCHIVE_RETENTION", default_value = "45d", value_parser = humantime::parse_duration)]
    pub archive_retention: Duration,

    /// How long dead letters are kept once they are redriven or discarded. Open ones are kept.
    #[arg(long, env = "STOCKADE_DLQ_RETENTION", default_value = "30d", value_parser = humantime::parse_duration)]
    pub dlq_retention: Duration,

    /// How long consumers remember what they have dealt with. An event they may have forgotten is rejected as too old.
    #[arg(long, env = "STOCKADE_INBOX_RETENTION", default_value = "90d", value_parser = humantime::parse_duration)]
    pub inbox_retention: Duration,

    /// How long an Idempotency-Key is remembered.
    #[arg(long, env = "STOCKADE_IDEMPOTENCY_TTL", default_value = "24h", value_parser = humantime::parse_duration)]
    pub idempotency_ttl: Duration,

    /// How often to look for what is old.
    #[arg(long, env = "STOCKADE_RETENTION_EVERY", default_value = "1m", value_parser = humantime::parse_duration)]
    pub retention_every: Duration,

    /// The largest request body.
    #[arg(long, env = "STOCKADE_MAX_BODY", default_value = "256KiB")]
    pub max_body: ByteSize,

    /// The largest event; a larger message becomes a dead letter.
    #[arg(long, env = "STOCKADE_MAX_EVENT", default_value = "256KiB")]
    pub max_event: ByteSize,

    /// Items in one order.
    #[arg(long, env = "STOCKADE_MAX_ITEMS", default_value_t = 100)]
    pub max_items: usize,

    /// How long a connection may take to send a request's headers or the next part of its body, and a reader to read on.
    #[arg(long, env = "STOCKADE_HTTP_HEADER_TIMEOUT", default_value = "10s", value_parser = humantime::parse_duration)]
    pub http_header_timeout: Duration,

    /// Connections at once; more wait with the system until one closes.
    #[arg(long, env = "STOCKADE_HTTP_MAX_CONNECTIONS", default_value_t = 1024)]
    pub http_max_connections: usize,

    /// Requests in hand at once; more are told to come again.
    #[arg(long, env = "STOCKADE_HTTP_MAX_IN_FLIGHT", default_value_t = 512)]
    pub http_max_in_flight: usize,

    /// Requests a second that each key may send, or each address where there is no key; no limit if not set.
    #[arg(long, env = "STOCKADE_RATE_LIMIT")]
    pub rate_limit: Option<u32>,

    /// How many of them may come at once.
    #[arg(long, env = "STOCKADE_RATE_LIMIT_BURST", default_value_t = 400)]
    pub rate_limit_burst: u32,

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

impl std::ops::Deref for Settings {
    type Target = Values;

    fn deref(&self) -> &Values {
        &self.0
    }
}

impl std::ops::DerefMut for Settings {
    fn deref_mut(&mut self) -> &mut Values {
        &mut self.0
    }
}

impl Args for Settings {
    fn augment_args(command: Command) -> Command {
        secret_files::with_files(Values::augment_args(command))
    }

    fn augment_args_for_update(command: Command) -> Command {
        secret_files::with_files(Values::augment_args_for_update(command))
    }
}

impl FromArgMatches for Settings {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut values = Values::from_arg_matches(matches)?;
        let command = Self::augment_args(Command::new("stockade"));
        let file = |id: &str| secret_files::from_file(matches, &command, id);
        for (id, value) in [("database_url", &mut values.database_url), ("broker_url", &mut values.broker_url)] {
            *value = file(id)?.unwrap_or_else(|| value.clone());
        }
        for (id, value) in [
            ("metrics_token", &mut values.metrics_token),
            ("webhook_url", &mut values.webhook_url),
            ("webhook_secret", &mut values.webhook_secret),
            ("smtp_url", &mut values.smtp_url),
        ] {
            *value = file(id)?.or_else(|| value.take());
        }
        Ok(Self(values))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
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
        self.validate_broker()?;
        if self.batch == 0 || self.outbox_batch == 0 || self.db_max_connections < 4 {
            bail!(
                "STOCKADE_BATCH and STOCKADE_OUTBOX_BATCH must be at least 1, STOCKADE_DB_MAX_CONNECTIONS at least 4"
            );
        }
        if self.lease < Duration::from_secs(1) || self.lease <= self.poll {
            bail!("STOCKADE_LEASE must be at least 1s and longer than STOCKADE_POLL, or batches are taken over midway");
        }
        let calls_outside = self.notify_channel != NotifyChannel::Log;
        if self.handler_timeout.is_zero() || (calls_outside && self.lease <= self.handler_timeout) {
            bail!(
                "STOCKADE_HANDLER_TIMEOUT must be longer than nothing and shorter than STOCKADE_LEASE, or calls are taken \
                 over while they are made"
            );
        }
        if self.outside_calls == 0 {
            bail!("STOCKADE_OUTSIDE_CALLS must be at least 1");
        }
        if self.http_max_connections == 0 || self.http_max_in_flight == 0 || self.http_header_timeout.is_zero() {
            bail!(
                "STOCKADE_HTTP_MAX_CONNECTIONS and STOCKADE_HTTP_MAX_IN_FLIGHT must be at least 1, \
                 STOCKADE_HTTP_HEADER_TIMEOUT longer than nothing"
            );
        }
        if self.rate_limit == Some(0) || self.rate_limit_burst == 0 {
            bail!("STOCKADE_RATE_LIMIT and STOCKADE_RATE_LIMIT_BURST must be at least 1; leave the limit out for none");
        }
        if self.metrics_token.as_deref() == Some("") {
            bail!("METRICS_TOKEN is empty, so anybody could guess it: give it a value, or leave it out");
        }
        if self.retry_max == 0 || self.outbox_max_attempts == 0 {
            bail!("STOCKADE_RETRY_MAX and STOCKADE_OUTBOX_MAX_ATTEMPTS must be at least 1");
        }
        if self.hold_time.is_zero() {
            bail!("STOCKADE_HOLD_TIME must be longer than nothing, or orders expire before they can be paid");
        }
        let prefix_ok = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if self.queue_prefix.is_empty() || !self.queue_prefix.bytes().all(prefix_ok) {
            bail!("STOCKADE_QUEUE_PREFIX takes letters, digits, dots, dashes and underscores");
        }
        self.validate_retention()
    }

    /// A consumer must remember an event for as long as a copy of it may come back, or its effect happens twice.
    fn validate_retention(&self) -> anyhow::Result<()> {
        if self.retention_every.is_zero() {
            bail!("STOCKADE_RETENTION_EVERY must be longer than nothing");
        }
        if self.archive_retention < self.outbox_retention {
            bail!(
                "STOCKADE_ARCHIVE_RETENTION counts from when an event was written: it must be at least STOCKADE_OUTBOX_RETENTION"
            );
        }
        let tuning = self.tuning();
        // Only the webhook's receiver can ask for that.
        let put_off = match self.notify_channel {
            NotifyChannel::Webhook => outside::AFTER_MAX * self.retry_max,
            NotifyChannel::Log | NotifyChannel::Smtp => Duration::ZERO,
        };
        let horizons = [
            ("publishing, STOCKADE_OUTBOX_MAX_ATTEMPTS times", tuning.outbox_backoff.horizon()),
            ("retries, STOCKADE_RETRY_MAX times", tuning.retry.horizon()),
            ("receivers that put a retry off, STOCKADE_RETRY_MAX times", put_off),
            ("waiting for a predecessor, STOCKADE_WAIT_DEADLINE", self.wait_deadline),
            ("dead letters, STOCKADE_DLQ_RETENTION", self.dlq_retention),
            ("replays, STOCKADE_ARCHIVE_RETENTION", self.archive_retention),
        ];
        let horizons = horizons.into_iter().filter(|(_, horizon)| !horizon.is_zero()).collect::<Vec<_>>();
        let needed: Duration = horizons.iter().map(|(_, horizon)| *horizon).sum();
        if self.inbox_retention < needed {
            let terms: Vec<String> =
                horizons.iter().map(|(name, horizon)| format!("  {:>16}  {name}", in_words(*horizon))).collect();
            bail!(
                "STOCKADE_INBOX_RETENTION is {}, but a copy of an event may come back after\n{}\n= {:>16}\n\
                 Consumers would have forgotten it and do its work again: raise STOCKADE_INBOX_RETENTION to that or more, \
                 or lower what adds up to it",
                in_words(self.inbox_retention),
                terms.join("\n"),
                in_words(needed)
            );
        }
        Ok(())
    }

    /// The keys of the settings and of the file they name.
    pub fn keys(&self) -> anyhow::Result<Vec<Key>> {
        let read = |name: &str, text: &str| {
            access::read_keys(text).map_err(|error| anyhow::anyhow!("{name} cannot be read: {error}"))
        };
        let mut keys = read("STOCKADE_API_KEYS", &self.api_keys)?;
        if let Some(path) = &self.api_keys_file {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("STOCKADE_API_KEYS_FILE: cannot read {}", path.display()))?;
            keys.extend(read("STOCKADE_API_KEYS_FILE", &text)?);
        }
        Ok(keys)
    }

    /// May a server be open to anybody while it has no keys?
    pub fn may_be_open(&self) -> bool {
        self.listen.ip().is_loopback() || self.insecure_no_auth
    }

    fn validate_broker(&self) -> anyhow::Result<()> {
        let extra = ExtraQueue::read_many(&self.extra_queues)
            .map_err(|error| anyhow::anyhow!("STOCKADE_EXTRA_QUEUES cannot be read: {error}"))?;
        let Some(rabbit) = self.rabbit()? else {
            if !extra.is_empty() {
                bail!("STOCKADE_EXTRA_QUEUES needs RabbitMQ: set STOCKADE_BROKER_URL, or leave it out");
            }
            return Ok(());
        };
        rabbit.uri().map_err(|error| {
            anyhow::anyhow!(
                "STOCKADE_BROKER_URL takes `embedded`, `amqp://…` or `amqps://…`, and this cannot be read: {error}"
            )
        })?;
        let own = format!("{}.", self.queue_prefix);
        if let Some(queue) = extra.iter().map(|extra| &extra.queue).find(|queue| queue.starts_with(&own)) {
            bail!("STOCKADE_EXTRA_QUEUES: names that begin with {own} are Stockade's own, and {queue} does");
        }
        if usize::from(self.prefetch) < self.batch {
            bail!("STOCKADE_PREFETCH must be at least STOCKADE_BATCH, or no batch is ever full");
        }
        if self.amqp_heartbeat < Duration::from_secs(1) || self.amqp_confirm_timeout < Duration::from_secs(1) {
            bail!("STOCKADE_AMQP_HEARTBEAT and STOCKADE_AMQP_CONFIRM_TIMEOUT must be at least 1s");
        }
        Ok(())
    }

    /// How to reach RabbitMQ; `None` on the embedded queue.
    pub fn rabbit(&self) -> anyhow::Result<Option<rabbit::Options>> {
        if &*self.broker_url == "embedded" {
            return Ok(None);
        }
        Ok(Some(rabbit::Options {
            url: self.broker_url.to_string(),
            prefix: self.queue_prefix.clone(),
            extra_queues: ExtraQueue::read_many(&self.extra_queues).map_err(anyhow::Error::msg)?,
            prefetch: self.prefetch,
            heartbeat: self.amqp_heartbeat,
            confirm_timeout: self.amqp_confirm_timeout,
        }))
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
            url: self.database_url.to_string(),
            connections_max: self.db_max_connections,
            acquire_timeout: self.db_acquire_timeout,
            busy_timeout: self.sqlite_busy_timeout,
            pages_max: self.sqlite_max_pages,
            schemas: SCHEMAS,
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
            // Long enough for a pass that waits for its confirms to the last.
            outbox_lease: self.amqp_confirm_timeout * 3,
            batch: self.batch,
            poll: self.poll,
            retry: Backoff { base: self.retry_base, cap: self.retry_cap, attempts_max: self.retry_max },
            calls_max: self.outside_calls,
            call_timeout: self.handler_timeout,
            call_lease: self.lease,
            wait_deadline: self.wait_deadline,
            event_bytes_max: usize::try_from(self.max_event.as_u64()).unwrap_or(usize::MAX),
            keep: Keep {
                outbox: self.outbox_retention,
                archive: self.archive_retention,
                inbox: self.inbox_retention,
                dead_letters: self.dlq_retention,
                look_every: self.retention_every,
            },
        }
    }

    pub fn http_limits(&self) -> http::Limits {
        http::Limits {
            body_bytes_max: usize::try_from(self.max_body.as_u64()).unwrap_or(usize::MAX),
            buffer_bytes_max: usize::try_from(self.max_body.as_u64()).unwrap_or(usize::MAX),
            body_timeout: self.http_header_timeout,
            request_timeout: self.http_request_timeout,
            in_flight_max: self.http_max_in_flight,
            rate: self.rate_limit.map(|per_second| RateLimit { per_second, burst: self.rate_limit_burst }),
        }
    }

    pub fn doorway(&self) -> Doorway {
        Doorway { connections_max: self.http_max_connections, header_timeout: self.http_header_timeout }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_print_without_their_secrets() {
        let flags = ["--database-url", "postgres://me:canary@host/db", "--metrics-token", "canary"];
        assert!(!format!("{:?}", Settings::from_flags(flags).unwrap()).contains("canary"));
    }

    #[test]
    fn every_secret_can_come_from_a_file() {
        let command = Settings::augment_args(Command::new("stockade"));
        let secrets = command.get_arguments().filter(|arg| secret_files::holds_a_secret(arg));
        // Keys in a file are a list, and add to those of the setting.
        let longs: Vec<&str> = secrets.filter_map(|arg| arg.get_long()).filter(|long| *long != "api-keys").collect();
        assert!(longs.len() >= 6, "{longs:?}");
        let folder = tempfile::tempdir().unwrap();
        for long in longs {
            let path = folder.path().join(long);
            std::fs::write(&path, format!("secret-of-{long}\n")).unwrap();
            let settings = Settings::from_flags([&format!("--{long}-file"), path.to_str().unwrap()]).unwrap();
            let held = [Some(&settings.database_url), Some(&settings.broker_url), settings.metrics_token.as_ref()];
            let of_channels = [&settings.webhook_url, &settings.webhook_secret, &settings.smtp_url].map(Option::as_ref);
            let held = held.into_iter().chain(of_channels).flatten();
            assert_eq!(held.filter(|value| ***value == format!("secret-of-{long}")).count(), 1, "{long}");
        }
    }
}
