//! `stockade bench`: places orders over HTTP and measures until the last customer is notified.
//!
//! By itself it runs orders, inventory and notifications: what every order goes through. With `--mix` it runs all
//! modules and takes each order to an end: of ten, seven are paid, one is cancelled, one left to expire, one out of
//! stock.
//!
//! Everything is real: the server (its own, in this process, unless `--url` names another), the sockets, the
//! durable database. The end state is verified by SQL, and a run that fails it exits non-zero.

mod fill;
mod load;
mod usage;
mod verify;
mod watch;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use stockade::app::{Builder, Running};
use stockade::config::Settings;
use stockade::telemetry::{self, LogFormat};
use stockade_kernel::clock::{Clock, mint_id};
use stockade_kernel::db::{Db, Options};
use stockade_kernel::messaging::transport::{Transport, Way};
use stockade_kernel::secrets::Masked;

use super::client::Credential;
use super::out;
use super::scratch::Scratch;
use load::{Fate, Placed, Target, Workload};
use usage::Usage;

/// How long the broker may take to be there.
const BROKER_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Args)]
pub struct Bench {
    /// Orders to place in each round.
    #[arg(long, default_value_t = 20_000)]
    orders: usize,

    /// Connections, each with one order under way.
    #[arg(long, default_value_t = 64)]
    concurrency: usize,

    /// Stop placing after this long even if orders are left.
    #[arg(long, value_parser = humantime::parse_duration)]
    duration: Option<Duration>,

    /// Orders per second; as fast as they go if not given. Latencies then count from when each order was due.
    #[arg(long)]
    rate: Option<f64>,

    /// Rounds over the same database, each reported: shows whether the cost grows with the rows there.
    #[arg(long, default_value_t = 1)]
    rounds: usize,

    /// Take each order to its end: 70 % paid, 10 % cancelled, 10 % left to expire, 10 % out of stock. A server given by
    /// --url must hold orders for half a minute at most.
    #[arg(long)]
    mix: bool,

    /// Begin with so many outbox rows published a day ago, as after a busy day. Only with a server of its own.
    #[arg(long, default_value_t = 0, conflicts_with = "url")]
    published: i64,

    /// Hold a transaction open while it runs, as a forgotten session would. Postgres cuts it off after a minute.
    #[arg(long)]
    hold_snapshot: bool,

    /// A running server; without it, one is started in this process.
    #[arg(long)]
    url: Option<String>,

    /// What to present to it: the load fills shelves and places orders, so it takes an admin's key.
    #[command(flatten)]
    credential: Credential,

    /// The database to run on (with --url: the one that server uses); a temporary SQLite file if not given.
    #[arg(long, env = "STOCKADE_DATABASE_URL", hide_env_values = true)]
    database_url: Option<String>,

    /// The broker to run on, with queues of its own that are gone afterwards: `embedded` or `amqp://…`.
    #[arg(long, env = "STOCKADE_BROKER_URL", default_value = "embedded", hide_env_values = true)]
    broker_url: String,

    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

/// The parts that every order goes through.
const PIPELINE: &str = "api,relay,orders,inventory,notifications,dead-letters";
/// How long the mix holds stock, so that what is left to expire does within the run.
const MIX_HOLD: &str = "5s";

/// What a round measured. Latencies in milliseconds.
#[derive(Debug, Clone, Serialize)]
struct Report {
    orders: usize,
    orders_per_second: f64,
    place_ms: Percentiles,
    /// From sending the order to its first notice being readable.
    notified_ms: Percentiles,
    #[serde(skip_serializing_if = "Option::is_none")]
    mix: Option<MixReport>,
    /// Server and load generator, and the database server and the broker where they run on this machine; null with
    /// --url.
    cpu_seconds_per_1000: Option<f64>,
    peak_rss_bytes: Option<u64>,
    verified: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    violations: Vec<String>,
}

/// What became of the orders of a mixed round.
#[derive(Debug, Clone, Serialize)]
struct MixReport {
    paid: usize,
    cancelled: usize,
    expired: usize,
    rejected: usize,
    /// From the answer to the order to the answer to its payment: the wait for its reservation included.
    pay_ms: Percentiles,
}

impl MixReport {
    fn of(placed: &[Placed]) -> Self {
        let count = |fate| placed.iter().filter(|order| order.fate == fate).count();
        Self {
            paid: count(Fate::Paid),
            cancelled: count(Fate::Cancelled),
            expired: count(Fate::Expired),
            rejected: count(Fate::Rejected),
            pay_ms: Percentiles::of(placed.iter().filter_map(|order| order.paid_in).collect()),
        }
    }
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Percentiles {
    p50: f64,
    p90: f64,
    p99: f64,
}

impl Percentiles {
    fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let at = |share: f64| {
            let index = ((times.len() as f64 * share).ceil() as usize).clamp(1, times.len().max(1)) - 1;
            times.get(index).map_or(0.0, |time| (time.as_secs_f64() * 1e6).round() / 1e3)
        };
        Self { p50: at(0.50), p90: at(0.90), p99: at(0.99) }
    }
}

impl Bench {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        telemetry::init("warn", LogFormat::Auto)?;
        anyhow::ensure!(self.orders > 0 && self.concurrency > 0 && self.rounds > 0, "nothing to measure");
        let scratch = Scratch::new("bench")?;
        let database_url = match (&self.database_url, &self.url) {
            (Some(url), _) => url.clone(),
            (None, None) => format!("sqlite:{}", scratch.path().join("bench.db").display()),
            (None, Some(_)) => anyhow::bail!("give --database-url too: the end state is verified by SQL"),
        };
        let server = match &self.url {
            Some(_) => None,
            None => Some(self.start_server(&database_url).await?),
        };
        let target = match (&self.url, &server) {
            (Some(url), _) => Target::enter(url, self.credential.headers()?).await?,
            (None, Some(server)) => Target::enter(&format!("http://{}", server.address), Vec::new()).await?,
            (None, None) => unreachable!("a server is given or started"),
        };
        if let Some(server) = &server {
            fill::publish_yesterday(&server.kernel.db, self.published).await?;
            fill::tidy_up(&database_url, self.published).await?;
        }
        let db = Db::open_read_only(&Options::new(&database_url), Clock::System).await?;
        let held = if self.hold_snapshot { Some(fill::hold_snapshot(&db).await?) } else { None };
        let mut reports = Vec::new();
        for round in 1..=self.rounds {
            let report = self.round(&target, &db, server.is_some(), round).await?;
            if !self.json {
                out::print(&report.in_words(round, self.rounds))?;
            }
            reports.push(report);
        }
        drop(held);
        db.close().await;
        if let Some(server) = server {
            let transport = server.kernel.transport.clone();
            server.stop().await;
            if let Transport::Rabbit(rabbit) = transport {
                rabbit.remove().await.context("the run's queues are still on the broker")?;
            }
        }
        if self.json {
            out::print(&match reports.as_slice() {
                [only] => out::json(only)?,
                rounds => out::json(&rounds)?,
            })?;
        }
        let verified = reports.iter().all(|report| report.verified);
        Ok(if verified { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    async fn start_server(&self, database_url: &str) -> anyhow::Result<Running> {
        let mut flags =
            vec!["--listen", "127.0.0.1:0", "--database-url", database_url, "--broker-url", &self.broker_url];
        flags.extend(if self.mix { ["--hold-time", MIX_HOLD] } else { ["--modules", PIPELINE] });
        // Names of its own on a broker: a server that uses the usual ones would take the run's messages.
        let prefix = format!("bench-{}", mint_id().simple());
        if self.broker_url != "embedded" {
            flags.extend(["--queue-prefix", &prefix]);
        }
        // Keys are for whatever server they were set for; this one is the run's own.
        let mut settings = Settings::from_flags(flags)?;
        (settings.api_keys, settings.api_keys_file) = (Masked::new(""), None);
        let server = Builder::new(settings).alone(true).start().await?;
        let transport = &server.kernel.transport;
        let open = async { tokio::join!(transport.until_open(Way::Out), transport.until_open(Way::In)) };
        tokio::time::timeout(BROKER_TIMEOUT, open).await.context("the broker cannot be reached")?;
        Ok(server)
    }

    async fn round(&self, target: &Arc<Target>, db: &Db, own_server: bool, round: usize) -> anyhow::Result<Report> {
        let run = mint_id();
        // Ids that the server mints within the same millisecond may be lower than ours.
        tokio::time::sleep(Duration::from_millis(2)).await;
        let workload = Workload::new(run, self.orders, self.concurrency, self.rate, self.duration).mixed(self.mix);
        let workload = Arc::new(workload);
        workload.stock_up(target).await.context("cannot stock the shelves for the run")?;
        let bar = self.progress_bar(round);
        let before = Usage::begin(db, &self.broker_url).await?;
        let watcher = watch::Watcher::new(
            db.clone(),
            &target.group,
            run,
            self.rate.is_some() || self.concurrency == 1,
            own_server,
        );
        let (placed, notices) = watch::run(&workload, target, watcher, &bar).await?;
        let after = Usage::now(db, &self.broker_url).await?;
        bar.finish_and_clear();
        let first = placed.iter().map(|order| order.sent_at).min().context("no order was placed")?;
        // An order that is left to expire has been dealt with when it is reserved; the rest of its time is its hold.
        let end_of = |order: &Placed| match order.fate {
            Fate::Reserved | Fate::Expired => notices.first.get(&order.id).copied(),
            Fate::Paid | Fate::Cancelled | Fate::Rejected => notices.last.get(&order.id).copied(),
        };
        let last = placed.iter().filter_map(end_of).max().unwrap_or(first);
        let violations = verify::check(db, &target.group, run, &placed, self.mix).await?;
        let notified_in = placed
            .iter()
            .filter_map(|order| Some(notices.first.get(&order.id)?.saturating_duration_since(order.due_at)))
            .collect();
        Ok(Report {
            orders: placed.len(),
            orders_per_second: (placed.len() as f64 / (last - first).as_secs_f64() * 10.0).round() / 10.0,
            place_ms: Percentiles::of(placed.iter().map(|order| order.answered_at - order.due_at).collect()),
            notified_ms: Percentiles::of(notified_in),
            mix: self.mix.then(|| MixReport::of(&placed)),
            cpu_seconds_per_1000: own_server.then(|| after.cpu_per_1000(&before, placed.len())),
            peak_rss_bytes: own_server.then_some(after.peak_rss_bytes),
            verified: violations.is_empty(),
            violations,
        })
    }

    fn progress_bar(&self, round: usize) -> ProgressBar {
        let bar = ProgressBar::new(self.orders as u64);
        let style = ProgressStyle::with_template("{prefix} {bar:40} {pos}/{len} notified, {per_sec}, {elapsed}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_prefix(format!("round {round}/{}", self.rounds));
        bar
    }
}

impl Report {
    fn in_words(&self, round: usize, rounds: usize) -> String {
        let percentiles =
            |p: Percentiles| format!("p50 {:>8.1} ms   p90 {:>8.1} ms   p99 {:>8.1} ms", p.p50, p.p90, p.p99);
        let mut lines = vec![
            ("orders", format!("{} ({:.0}/s end to end)", self.orders, self.orders_per_second)),
            ("placing", percentiles(self.place_ms)),
            ("placed to notified", percentiles(self.notified_ms)),
        ];
        if let Some(mix) = &self.mix {
            let MixReport { paid, cancelled, expired, rejected, .. } = mix;
            lines.push(("paying", percentiles(mix.pay_ms)));
            lines.push((
                "ends",
                format!("{paid} paid, {cancelled} cancelled, {expired} expired, {rejected} out of stock"),
            ));
        }
        if let (Some(cpu), Some(rss)) = (self.cpu_seconds_per_1000, self.peak_rss_bytes) {
            lines.push(("CPU", format!("{cpu:.3} s per 1,000 orders")));
            lines.push(("peak memory", bytesize::ByteSize(rss).to_string()));
        }
        let verified = match self.violations.as_slice() {
            [] if self.mix.is_some() => "yes: stock, ledger and notices are those of the ends".to_owned(),
            [] => "yes: stock conserved, one reservation and one notice per order".to_owned(),
            violations => format!("NO: {}", violations.join("; ")),
        };
        lines.push(("verified", verified));
        let title = if rounds > 1 { format!("round {round} of {rounds}\n") } else { String::new() };
        lines.into_iter().fold(title, |text, (name, what)| text + &format!("  {name:<22} {what}\n"))
    }
}
