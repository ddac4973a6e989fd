//! What a flood, slow senders and idle connections do to honest clients of a running server on this machine.
//!
//!     stockade serve &
//!     cargo run --release --example flood -- --url http://127.0.0.1:8080
//!
//! Three scenarios, one after the other or those that are named (`-- flood`, `-- slow idle`):
//! - **flood**: as many orders a second as the server can do with a few clients, then ten times as many wanted, on as many
//!   connections as it takes. Goodput is orders placed a second; it should stay at 90 % or more.
//! - **slow**: connections that send a byte of a header every second; an honest client's latencies should stay the same.
//! - **idle**: connections that say nothing at all; the same.
//!
//! Before each measurement the orders of the last one are worked off, so that no scenario pays for another; slow and
//! idle are each compared with a quiet run just before. A connection of the flood waits for its answer before it asks
//! again, so what is offered in fact is told, too. For a server with keys set STOCKADE_API_KEY to a client's key.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, ValueEnum};
use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Ten times as many orders as the server can do.
const FLOOD_FACTOR: f64 = 10.0;
/// How long the orders of a measurement may take to be worked off.
const SETTLE_MAX: Duration = Duration::from_secs(120);
/// Between two attempts to connect, to ask again whether all is done, and two bytes of a slow sender.
const RECONNECT_AFTER: Duration = Duration::from_millis(100);
const LOOK_EVERY: Duration = Duration::from_millis(200);
const TRICKLE_EVERY: Duration = Duration::from_secs(1);

#[derive(Parser)]
struct Flood {
    /// Which scenarios to run; all if none is named.
    scenarios: Vec<Scenario>,

    /// The server, on a loopback address: this is no tool against others.
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    url: String,

    /// How long each measurement takes, five minutes at most.
    #[arg(long, default_value = "10s", value_parser = read_lasting)]
    lasting: Duration,

    /// Clients that place orders one after the other, to find what the server can do.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1000))]
    clients: u16,

    /// Lines of each order. Where server and flood share a machine, ten times as many orders can only be offered if each
    /// is work enough.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=100))]
    lines: u16,

    /// Connections of the flood.
    #[arg(long, default_value_t = 900, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    flood: u16,

    /// Connections that trickle headers.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    slow: u16,

    /// Connections that say nothing.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    idle: u16,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scenario {
    Flood,
    Slow,
    Idle,
}

fn read_lasting(text: &str) -> Result<Duration, String> {
    let lasting = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    let range = Duration::from_millis(100)..=Duration::from_secs(300);
    if range.contains(&lasting) { Ok(lasting) } else { Err("give 100ms to 5m".to_owned()) }
}

/// The server, and what is asked of it.
struct Target {
    address: SocketAddr,
    order: Vec<u8>,
    /// Asks for orders that nobody has dealt with yet.
    unsettled: Vec<u8>,
}

impl Target {
    fn read(url: &str, lines: u16) -> anyhow::Result<Self> {
        let host = url.strip_prefix("http://").context("the URL must begin with http://")?.trim_end_matches('/');
        let address: SocketAddr =
            host.replace("localhost", "127.0.0.1").parse().context("the URL must be an address and a port")?;
        anyhow::ensure!(address.ip().is_loopback(), "{address} is not on this machine");
        let key = std::env::var("STOCKADE_API_KEY");
        let key = key.map(|key| format!("Authorization: Bearer {key}\r\n")).unwrap_or_default();
        let items: Vec<String> = (0..lines).map(|line| format!(r#"{{"sku":"FLOOD-{line}","quantity":1}}"#)).collect();
        let body = format!(r#"{{"customer_id":"flood","items":[{}]}}"#, items.join(","));
        let head = format!("HTTP/1.1\r\nHost: {host}\r\n{key}");
        let length = body.len();
        let order =
            format!("POST /v1/orders {head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}");
        let unsettled = format!("GET /v1/orders?status=placed&limit=1 {head}\r\n");
        Ok(Self { address, order: order.into_bytes(), unsettled: unsettled.into_bytes() })
    }

    /// Waits until every order has come to its outcome.
    async fn settle(&self) -> anyhow::Result<()> {
        let (deadline, mut stream) = (Instant::now() + SETTLE_MAX, None);
        loop {
            // A server that is still busy with the last of a flood may refuse even this.
            let (status, body) = ask(self.address, &mut stream, &self.unsettled).await?;
            anyhow::ensure!(
                [200, 429, 503].contains(&status),
                "asked for orders, the server answered {status}: {body}"
            );
            if status == 200 && body.starts_with(r#"{"data":[]"#) {
                return Ok(());
            }
            anyhow::ensure!(Instant::now() < deadline, "after {SETTLE_MAX:?} there are still orders to be dealt with");
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let flood = Flood::parse();
    let target = Target::read(&flood.url, flood.lines)?;
    let wanted = |scenario| flood.scenarios.is_empty() || flood.scenarios.contains(&scenario);
    target.settle().await?;
    if wanted(Scenario::Flood) {
        measure_flood(&flood, &target).await?;
    }
    for (scenario, name, count) in [(Scenario::Slow, "slow", flood.slow), (Scenario::Idle, "idle", flood.idle)] {
        if wanted(scenario) {
            println!("quiet       {}", latencies(&target, flood.lasting).await?);
            let held = Held::open(target.address, count, scenario == Scenario::Slow).await;
            println!("{name:<11} {}, beside {} connections", latencies(&target, flood.lasting).await?, held.count());
            held.close().await;
        }
    }
    Ok(())
}

async fn measure_flood(flood: &Flood, target: &Target) -> anyhow::Result<()> {
    let alone = place(target, flood.clients, flood.lasting, None).await;
    target.settle().await?;
    let capacity = alone.placed;
    println!("capacity    {capacity:.0} orders/s placed by {} clients, {}", flood.clients, alone.others());
    anyhow::ensure!(capacity > 0.0, "no order was placed");
    let wanted = capacity * FLOOD_FACTOR;
    let pace = Duration::from_secs_f64(f64::from(flood.flood) / wanted);
    let flooded = place(target, flood.flood, flood.lasting, Some(pace)).await;
    target.settle().await?;
    let (placed, offered) = (flooded.placed, flooded.offered());
    println!(
        "flood       {placed:.0} orders/s placed, {}: {offered:.0}/s offered of {wanted:.0}/s wanted by {} connections",
        flooded.others(),
        flood.flood
    );
    println!("goodput     {:.0} % of capacity", placed / capacity * 100.0);
    if offered < wanted * 0.9 {
        println!(
            "            less was offered than wanted: answers take too long; more connections (--flood) offer more"
        );
    }
    Ok(())
}

/// What came of orders, in each second.
struct Rates {
    placed: f64,
    refused: f64,
    failed: f64,
}

impl Rates {
    fn offered(&self) -> f64 {
        self.placed + self.refused + self.failed
    }

    fn others(&self) -> String {
        format!("{:.0}/s refused, {:.0}/s failed", self.refused, self.failed)
    }
}

/// `connections` that place one order after the other; with a pace, one each so often, early answer or not.
async fn place(target: &Target, connections: u16, lasting: Duration, pace: Option<Duration>) -> Rates {
    let [placed, refused, failed] = [const { AtomicU64::new(0) }; 3];
    let end = Instant::now() + lasting;
    join_all((0..connections).map(|_| async {
        let mut stream = None;
        while Instant::now() < end {
            let began = Instant::now();
            let asked = tokio::time::timeout_at(end, ask(target.address, &mut stream, &target.order)).await;
            let Ok(answer) = asked else { break };
            let count = match answer {
                Ok((201, _)) => &placed,
                Ok((429 | 503, _)) => &refused,
                _ => &failed,
            };
            count.fetch_add(1, Ordering::Relaxed);
            if let Some(pace) = pace {
                tokio::time::sleep_until((began + pace).min(end)).await;
            }
        }
    }))
    .await;
    let rate = |count: AtomicU64| count.into_inner() as f64 / lasting.as_secs_f64();
    Rates { placed: rate(placed), refused: rate(refused), failed: rate(failed) }
}

/// One request on a connection that is kept as long as it lasts; the status and the body of its answer.
async fn ask(address: SocketAddr, kept: &mut Option<TcpStream>, request: &[u8]) -> anyhow::Result<(u16, String)> {
    let mut stream = match kept.take() {
        Some(stream) => stream,
        None => TcpStream::connect(address).await?,
    };
    stream.write_all(request).await?;
    let mut answer = Vec::with_capacity(2048);
    loop {
        anyhow::ensure!(stream.read_buf(&mut answer).await? > 0, "closed");
        let text = String::from_utf8_lossy(&answer);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let lower = head.to_ascii_lowercase();
            let length = lower.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap_or("0");
            if body.len() >= length.trim().parse()? {
                let status = head.get(9..12).context("a status")?.parse()?;
                // One that the server is about to close is of no more use.
                *kept = (!lower.contains("connection: close")).then_some(stream);
                return Ok((status, body.to_owned()));
            }
        }
    }
}

/// What an honest client sees.
struct Latencies(Vec<Duration>);

impl fmt::Display for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |share: f64| self.0.get((self.0.len() as f64 * share) as usize).copied().unwrap_or_default();
        let worst = self.0.last().copied().unwrap_or_default();
        write!(f, "p50 {:.2?}, p99 {:.2?}, worst {worst:.2?} of {} orders", at(0.5), at(0.99), self.0.len())
    }
}

/// One client that places an order after the other, each of which must be taken.
async fn latencies(target: &Target, lasting: Duration) -> anyhow::Result<Latencies> {
    let (end, mut stream, mut seen) = (Instant::now() + lasting, None, Vec::new());
    while Instant::now() < end {
        let began = Instant::now();
        let (status, body) = ask(target.address, &mut stream, &target.order).await?;
        anyhow::ensure!(status == 201, "an honest client was answered {status}: {body}");
        seen.push(began.elapsed());
    }
    target.settle().await?;
    seen.sort();
    Ok(Latencies(seen))
}

/// Connections that want something and never say what, opened again when the server closes them.
struct Held {
    open: Arc<AtomicU64>,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Held {
    async fn open(address: SocketAddr, count: u16, trickle: bool) -> Self {
        let mut held = Self { open: Arc::default(), stop: CancellationToken::new(), tasks: JoinSet::new() };
        for _ in 0..count {
            let (open, stop) = (held.open.clone(), held.stop.clone());
            held.tasks.spawn(async move {
                stop.run_until_cancelled_owned(hold_for_ever(address, &open, trickle)).await;
            });
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        while held.count() < u64::from(count) && Instant::now() < deadline {
            tokio::time::sleep(RECONNECT_AFTER).await;
        }
        held
    }

    fn count(&self) -> u64 {
        self.open.load(Ordering::Relaxed)
    }

    /// Closes every one of them before anything else is measured.
    async fn close(self) {
        self.stop.cancel();
        self.tasks.join_all().await;
    }
}

async fn hold_for_ever(address: SocketAddr, open: &AtomicU64, trickle: bool) {
    loop {
        if let Ok(mut stream) = TcpStream::connect(address).await {
            open.fetch_add(1, Ordering::Relaxed);
            let _ = hold(&mut stream, trickle).await;
            open.fetch_sub(1, Ordering::Relaxed);
        }
        tokio::time::sleep(RECONNECT_AFTER).await;
    }
}

/// Until the server has enough of it.
async fn hold(stream: &mut TcpStream, trickle: bool) -> std::io::Result<()> {
    if trickle {
        stream.write_all(b"GET /v1/orders HTTP/1.1\r\nHost: slow\r\nX-Slow: ").await?;
    }
    let mut answer = [0; 256];
    loop {
        match tokio::time::timeout(TRICKLE_EVERY, stream.read(&mut answer)).await {
            Ok(Ok(0)) | Ok(Err(_)) => return Ok(()),
            Ok(Ok(_)) => {}
            Err(_) if trickle => stream.write_all(b"a").await?,
            Err(_) => {}
        }
    }
}
