//! What a flood, slow senders and idle connections do to honest clients of a running server.
//!
//!     stockade serve &
//!     cargo run --release --example flood -- --url http://127.0.0.1:8080
//!
//! Three measurements, each against a quiet baseline taken just before:
//! - **flood**: as many orders a second as the server can do with a few clients, then ten times as many offered, on as many
//!   connections as it takes. Goodput is orders placed a second; it should stay at 90 % or more.
//! - **slow**: connections that send a byte of a header every second; an honest client's latencies should stay the same.
//! - **idle**: connections that say nothing at all; the same.
//!
//! For a server with keys set STOCKADE_API_KEY to a client's key.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

#[derive(Parser)]
struct Flood {
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    url: String,

    /// How long each measurement takes.
    #[arg(long, default_value = "10s", value_parser = humantime::parse_duration)]
    lasting: Duration,

    /// Clients that place orders one after the other, to find what the server can do.
    #[arg(long, default_value_t = 64)]
    clients: usize,

    /// Connections of the flood.
    #[arg(long, default_value_t = 900)]
    flood: usize,

    /// Connections that trickle headers, and connections that say nothing.
    #[arg(long, default_value_t = 1000)]
    idle: usize,
}

/// What came of some requests.
#[derive(Default)]
struct Tally {
    placed: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
}

impl Tally {
    fn count(&self, status: Option<u16>) {
        let of = match status {
            Some(201) => &self.placed,
            Some(429 | 503) => &self.refused,
            _ => &self.failed,
        };
        of.fetch_add(1, Ordering::Relaxed);
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let flood = Flood::parse();
    let address = flood.url.strip_prefix("http://").context("the URL must begin with http://")?.trim_end_matches('/');
    let request = Arc::new(order_request(address));
    let seconds = flood.lasting.as_secs_f64();

    let alone = run(address, &request, flood.clients, flood.lasting, None).await;
    let capacity = alone.placed.load(Ordering::Relaxed) as f64 / seconds;
    println!("capacity    {capacity:>8.0} orders/s by {} clients", flood.clients);
    let offered = capacity * 10.0;
    let pace = Duration::from_secs_f64(flood.flood as f64 / offered);
    let flooded = run(address, &request, flood.flood, flood.lasting, Some(pace)).await;
    let [placed, refused, failed] =
        [&flooded.placed, &flooded.refused, &flooded.failed].map(|of| of.load(Ordering::Relaxed) as f64 / seconds);
    println!(
        "flood       {placed:>8.0} orders/s placed, {refused:.0}/s refused, {failed:.0}/s failed, of {offered:.0}/s wanted"
    );
    println!("goodput     {:>8.0} % of capacity", placed / capacity * 100.0);

    let quiet = latencies(address, &request, flood.lasting).await?;
    println!("quiet       {quiet}");
    let slow = Held::open(address, flood.idle / 2, true).await;
    println!(
        "slow        {}   with {} connections that trickle",
        latencies(address, &request, flood.lasting).await?,
        slow.count()
    );
    slow.close();
    let idle = Held::open(address, flood.idle, false).await;
    println!(
        "idle        {}   with {} connections that say nothing",
        latencies(address, &request, flood.lasting).await?,
        idle.count()
    );
    idle.close();
    Ok(())
}

fn order_request(address: &str) -> Vec<u8> {
    let body = r#"{"customer_id":"flood","items":[{"sku":"WIDGET-A","quantity":1}]}"#;
    let key =
        std::env::var("STOCKADE_API_KEY").map(|key| format!("Authorization: Bearer {key}\r\n")).unwrap_or_default();
    let head = format!("POST /v1/orders HTTP/1.1\r\nHost: {address}\r\n{key}Content-Type: application/json\r\n");
    format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// `connections` that send one request after the other; with a pace, one each so often, early answer or not.
async fn run(
    address: &str,
    request: &Arc<Vec<u8>>,
    connections: usize,
    lasting: Duration,
    pace: Option<Duration>,
) -> Tally {
    let (tally, end) = (Tally::default(), Instant::now() + lasting);
    join_all((0..connections).map(|_| async {
        let mut stream = None;
        while Instant::now() < end {
            let began = Instant::now();
            let status = tokio::time::timeout_at(end, ask(address, &mut stream, request)).await;
            match status {
                Ok(status) => tally.count(status.ok()),
                Err(_) => break,
            }
            if let Some(pace) = pace {
                tokio::time::sleep_until((began + pace).min(end)).await;
            }
        }
    }))
    .await;
    tally
}

/// One request on a connection that is kept as long as it lasts; the status of its answer.
async fn ask(address: &str, kept: &mut Option<TcpStream>, request: &[u8]) -> anyhow::Result<u16> {
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
                *kept = Some(stream);
                return Ok(status);
            }
        }
    }
}

/// What one honest client sees, a request after the other.
async fn latencies(address: &str, request: &[u8], lasting: Duration) -> anyhow::Result<String> {
    let (end, mut stream, mut seen) = (Instant::now() + lasting, None, Vec::new());
    while Instant::now() < end {
        let began = Instant::now();
        ask(address, &mut stream, request).await?;
        seen.push(began.elapsed());
    }
    seen.sort();
    let at = |share: f64| seen.get((seen.len() as f64 * share) as usize).copied().unwrap_or_default();
    Ok(format!("p50 {:.2?}, p99 {:.2?}, worst {:.2?}", at(0.5), at(0.99), seen.last().copied().unwrap_or_default()))
}

/// Connections that want something and never say what, opened again when the server closes them.
struct Held {
    open: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Held {
    async fn open(address: &str, count: usize, trickle: bool) -> Self {
        let held = Self { open: Arc::default(), stop: Arc::default() };
        for _ in 0..count {
            let (address, open, stop) = (address.to_owned(), held.open.clone(), held.stop.clone());
            #[expect(clippy::disallowed_methods, reason = "a program of its own, which ends with them")]
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let Ok(mut stream) = TcpStream::connect(&address).await else { continue };
                    open.fetch_add(1, Ordering::Relaxed);
                    let _ = hold(&mut stream, trickle, &stop).await;
                    open.fetch_sub(1, Ordering::Relaxed);
                }
            });
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        while held.count() < count as u64 && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        held
    }

    fn count(&self) -> u64 {
        self.open.load(Ordering::Relaxed)
    }

    fn close(self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

async fn hold(stream: &mut TcpStream, trickle: bool, stop: &AtomicBool) -> std::io::Result<()> {
    if trickle {
        stream.write_all(b"GET /v1/orders HTTP/1.1\r\nHost: slow\r\nX-Slow: ").await?;
    }
    let mut answer = [0; 256];
    while !stop.load(Ordering::Relaxed) {
        match tokio::time::timeout(Duration::from_secs(1), stream.read(&mut answer)).await {
            Ok(Ok(0)) | Ok(Err(_)) => break,
            Ok(Ok(_)) => {}
            Err(_) if trickle => stream.write_all(b"a").await?,
            Err(_) => {}
        }
    }
    Ok(())
}
