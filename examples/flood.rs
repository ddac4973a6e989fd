//! What a flood, slow senders and idle connections do to honest clients of a running server on this machine.
//!
//!     stockade serve &
//!     cargo run --release --example flood -- --url http://127.0.0.1:8080
//!
//! Four scenarios, one after the other or those that are named (`-- flood`, `-- slow idle`):
//! - **flood**: as many orders a second as the server can do with a few clients, then ten times as many, sent at that pace
//!   whether answers come or not. Goodput is orders placed a second; it should stay at 90 % or more.
//! - **fresh**: the same flood with a new connection for each order, as many as can be under way at once.
//! - **slow**: connections that send a byte of a header every second; an honest client's latencies should stay the same.
//! - **idle**: connections that say nothing at all; the same.
//!
//! Before each measurement the orders of the last one are worked off, so that no scenario pays for another; slow and
//! idle are each compared with a quiet run just before. For a server with keys set STOCKADE_API_KEY to a client's key.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context;
use bytes::BytesMut;
use clap::{Parser, ValueEnum};
use futures_util::future::join_all;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
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
    Fresh,
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
            let Answer { status, body, .. } = ask(self.address, &mut stream, &self.unsettled).await?;
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
    for (scenario, is_fresh) in [(Scenario::Flood, false), (Scenario::Fresh, true)] {
        if wanted(scenario) {
            measure_flood(&flood, &target, is_fresh).await?;
        }
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

async fn measure_flood(flood: &Flood, target: &Target, is_fresh: bool) -> anyhow::Result<()> {
    let alone = place(target, flood.clients, flood.lasting).await;
    target.settle().await?;
    let capacity = alone.rate(&alone.placed);
    println!("capacity    {capacity:.0} orders/s placed by {} clients, {}", flood.clients, alone.others());
    anyhow::ensure!(capacity > 0.0, "no order was placed");
    let wanted = capacity * FLOOD_FACTOR;
    let flooded = match is_fresh {
        true => knock(target, flood.flood, flood.lasting, wanted).await,
        false => send(target, flood.flood, flood.lasting, wanted).await,
    };
    target.settle().await?;
    let (placed, sent) = (flooded.rate(&flooded.placed), flooded.rate(&flooded.sent));
    println!(
        "{:<11} {sent:.0} orders/s sent by {} connections{}, {:.1} times as many: {placed:.0}/s placed, {}",
        if is_fresh { "fresh" } else { "flood" },
        flood.flood,
        if is_fresh { " at a time, each for one order" } else { "" },
        sent / capacity,
        flooded.others()
    );
    println!("goodput     {:.0} % of capacity", placed / capacity * 100.0);
    if sent < wanted * 0.9 {
        println!("            the server's sockets took no more: {wanted:.0}/s were to be sent");
    }
    Ok(())
}

/// What came of orders.
struct Counts {
    lasting: Duration,
    sent: AtomicU64,
    placed: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
}

impl Counts {
    fn new(lasting: Duration) -> Self {
        let [sent, placed, refused, failed] = [const { AtomicU64::new(0) }; 4];
        Self { lasting, sent, placed, refused, failed }
    }

    fn add(&self, status: u16) {
        let count = match status {
            201 => &self.placed,
            429 | 503 => &self.refused,
            _ => &self.failed,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// In each second.
    fn rate(&self, count: &AtomicU64) -> f64 {
        count.load(Ordering::Relaxed) as f64 / self.lasting.as_secs_f64()
    }

    fn others(&self) -> String {
        format!("{:.0}/s refused, {:.0}/s failed", self.rate(&self.refused), self.rate(&self.failed))
    }
}

/// `connections` that place one order after the other.
async fn place(target: &Target, connections: u16, lasting: Duration) -> Counts {
    let (counts, end) = (Counts::new(lasting), Instant::now() + lasting);
    let client = async || {
        let mut stream = None;
        while let Ok(answer) = tokio::time::timeout_at(end, ask(target.address, &mut stream, &target.order)).await {
            counts.add(answer.map_or(0, |answer| answer.status));
        }
    };
    join_all((0..connections).map(|_| client())).await;
    counts
}

/// `connections` that together send `wanted` orders a second, answered or not.
async fn send(target: &Target, connections: u16, lasting: Duration, wanted: f64) -> Counts {
    let (counts, start) = (Counts::new(lasting), Instant::now());
    let pace = f64::from(connections) / wanted;
    let flood = async |number: u16| {
        // Not all of them at one moment.
        let mut due = start + Duration::from_secs_f64(pace * f64::from(number) / f64::from(connections));
        loop {
            let Ok(mut stream) = TcpStream::connect(target.address).await else {
                tokio::time::sleep(RECONNECT_AFTER).await;
                continue;
            };
            let (mut from, mut to) = stream.split();
            let sending = async {
                loop {
                    tokio::time::sleep_until(due).await;
                    if to.write_all(&target.order).await.is_err() {
                        break;
                    }
                    counts.sent.fetch_add(1, Ordering::Relaxed);
                    due += Duration::from_secs_f64(pace);
                }
            };
            let reading = async {
                let mut buffer = BytesMut::with_capacity(16 * 1024);
                while let Ok(answer) = Answer::read(&mut from, &mut buffer).await {
                    counts.add(answer.status);
                }
            };
            tokio::select! { () = sending => {}, () = reading => {} }
        }
    };
    let _ = tokio::time::timeout(lasting, join_all((0..connections).map(flood))).await;
    counts
}

/// Up to `connections` at a time that each place one order, together `wanted` of them a second.
async fn knock(target: &Target, connections: u16, lasting: Duration, wanted: f64) -> Counts {
    let (counts, start) = (Counts::new(lasting), Instant::now());
    let pace = f64::from(connections) / wanted;
    let flood = async |number: u16| {
        let mut due = start + Duration::from_secs_f64(pace * f64::from(number) / f64::from(connections));
        loop {
            tokio::time::sleep_until(due).await;
            counts.sent.fetch_add(1, Ordering::Relaxed);
            let answer = ask(target.address, &mut None, &target.order).await;
            counts.add(answer.map_or(0, |answer| answer.status));
            due = (due + Duration::from_secs_f64(pace)).max(Instant::now());
        }
    };
    let _ = tokio::time::timeout(lasting, join_all((0..connections).map(flood))).await;
    counts
}

/// What the server said.
struct Answer {
    status: u16,
    body: String,
    /// The server closes the connection.
    is_last: bool,
}

impl Answer {
    /// The next one; what comes after it stays in the buffer.
    async fn read(stream: &mut (impl AsyncRead + Unpin), buffer: &mut BytesMut) -> anyhow::Result<Self> {
        loop {
            if let Some(end) = buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                let head = String::from_utf8_lossy(&buffer[..end]).to_ascii_lowercase();
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap_or("0");
                let whole = end + 4 + length.trim().parse::<usize>()?;
                if buffer.len() >= whole {
                    let body = String::from_utf8_lossy(&buffer.split_to(whole)[end + 4..]).into_owned();
                    let status = head.get(9..12).context("a status")?.parse()?;
                    return Ok(Self { status, body, is_last: head.contains("connection: close") });
                }
            }
            anyhow::ensure!(stream.read_buf(buffer).await? > 0, "closed");
        }
    }
}

/// One request on a connection that is kept as long as it lasts.
async fn ask(address: SocketAddr, kept: &mut Option<TcpStream>, request: &[u8]) -> anyhow::Result<Answer> {
    let mut stream = match kept.take() {
        Some(stream) => stream,
        None => TcpStream::connect(address).await?,
    };
    stream.write_all(request).await?;
    let answer = Answer::read(&mut stream, &mut BytesMut::with_capacity(2048)).await?;
    *kept = (!answer.is_last).then_some(stream);
    Ok(answer)
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
        let Answer { status, body, .. } = ask(target.address, &mut stream, &target.order).await?;
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
