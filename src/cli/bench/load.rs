//! The load: orders of 1 to 3 lines over 20 SKUs, each connection with one request under way.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Method, Request, header};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::TcpStream;
use tokio::time::Instant;
use uuid::Uuid;

const SKUS: usize = 20;
/// Ample: no order of a run is rejected.
const ON_HAND: i64 = 500_000_000;

pub struct Workload {
    run: Uuid,
    orders: usize,
    pub concurrency: usize,
    rate: Option<f64>,
    duration: Option<Duration>,
    next: AtomicUsize,
}

/// An order that the server has answered.
pub struct Placed {
    pub id: Uuid,
    /// When it was to be sent; the same as `sent_at` unless a rate was given.
    pub due_at: Instant,
    pub sent_at: Instant,
    pub answered_at: Instant,
}

/// The name of one of a run's SKUs.
pub fn sku(run: Uuid, index: usize) -> String {
    format!("BENCH-{}-{index:02}", run.simple())
}

impl Workload {
    pub fn new(run: Uuid, orders: usize, concurrency: usize, rate: Option<f64>, duration: Option<Duration>) -> Self {
        Self { run, orders, concurrency, rate, duration, next: AtomicUsize::new(0) }
    }

    pub async fn stock_up(&self, url: &str) -> anyhow::Result<()> {
        let mut connection = Connection::open(url).await?;
        for index in 0..SKUS {
            let path = format!("/v1/stock/{}", sku(self.run, index));
            connection.send(Method::PUT, &path, format!("{{\"on_hand\":{ON_HAND}}}")).await?;
        }
        Ok(())
    }

    /// One connection's share of the load.
    pub async fn work(&self, url: &str, start: Instant) -> anyhow::Result<Vec<Placed>> {
        let mut connection = Connection::open(url).await?;
        let mut placed = Vec::new();
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.orders || self.duration.is_some_and(|duration| start.elapsed() >= duration) {
                return Ok(placed);
            }
            let due_at = match self.rate {
                Some(rate) => {
                    let due_at = start + Duration::from_secs_f64(number as f64 / rate);
                    tokio::time::sleep_until(due_at).await;
                    due_at
                }
                None => Instant::now(),
            };
            let sent_at = Instant::now();
            let answer = connection.send(Method::POST, "/v1/orders", self.order(number)).await?;
            let answered_at = Instant::now();
            let PlacedId { id } = serde_json::from_slice(&answer)?;
            placed.push(Placed { id, due_at, sent_at, answered_at });
        }
    }

    /// The same order for the same number, whatever the run.
    fn order(&self, number: usize) -> String {
        let lines = 1 + number % 3;
        let items: Vec<String> = (0..lines)
            .map(|line| {
                let index = (number * 7 + line * 5) % SKUS;
                let quantity = 1 + (number + line) % 4;
                let sku = sku(self.run, index);
                format!("{{\"sku\":\"{sku}\",\"quantity\":{quantity},\"unit_price_minor\":{}}}", 199 + index * 50)
            })
            .collect();
        format!("{{\"customer_id\":\"customer-{:05}\",\"items\":[{}]}}", number % 10_000, items.join(","))
    }
}

#[derive(Deserialize)]
struct PlacedId {
    id: Uuid,
}

/// One kept-alive connection.
struct Connection {
    sender: SendRequest<Full<Bytes>>,
    host: String,
}

impl Connection {
    async fn open(url: &str) -> anyhow::Result<Self> {
        let host = url.strip_prefix("http://").context("--url must start with http://")?.trim_end_matches('/');
        let stream = TcpStream::connect(host).await.with_context(|| format!("cannot connect to {host}"))?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        #[expect(clippy::disallowed_methods, reason = "ends with the connection, whose sender is ours")]
        tokio::spawn(async move {
            // A broken connection shows up as an error on the sender.
            let _ = connection.await;
        });
        Ok(Self { sender, host: host.to_owned() })
    }

    async fn send(&mut self, method: Method, path: &str, body: String) -> anyhow::Result<Bytes> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, &self.host)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::from(body))?;
        self.sender.ready().await?;
        let response = self.sender.send_request(request).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        if !status.is_success() {
            bail!("{path} answered {status}: {}", String::from_utf8_lossy(&body));
        }
        Ok(body)
    }
}
