//! The load: orders of 1 to 3 lines over 20 SKUs, each connection with one request under way. In the mix each order is
//! then taken to what is to become of it.

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use axum::http::HeaderValue;
use serde::Deserialize;
use stockade_kernel::clock::Timestamp;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;
use uuid::Uuid;

use crate::cli::exit::Exit;

const SKUS: usize = 20;
/// Ample: no order is rejected unless it asks for what there is nothing of.
const ON_HAND: i64 = 500_000_000;
/// How long a call may wait for the order to be ready for it.
const WAIT_SECONDS: u64 = 20;
/// A hold longer than this would have the mix wait for nothing but its end.
const HOLD_MAX: Duration = Duration::from_secs(30);
/// How late the runtime's timer may be: it counts whole milliseconds, and so does the kernel's wait beneath it.
const TIMER_LATE_MAX: Duration = Duration::from_millis(3);

pub struct Workload {
    /// Of which there is plenty, but for the last.
    skus: Vec<String>,
    orders: usize,
    pub concurrency: usize,
    rate: Option<f64>,
    duration: Option<Duration>,
    mix: bool,
    next: AtomicUsize,
}

/// What becomes of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Reserved and left at that, as all are outside the mix.
    Reserved,
    Paid,
    Cancelled,
    Expired,
    /// Out of stock.
    Rejected,
}

impl Fate {
    /// Of ten orders seven are paid, one is cancelled, one left to expire, and one asks for what is not there.
    fn of(number: usize) -> Self {
        match number % 10 {
            0..7 => Self::Paid,
            7 => Self::Cancelled,
            8 => Self::Expired,
            _ => Self::Rejected,
        }
    }
}

/// An order that the server has answered.
pub struct Placed {
    pub id: Uuid,
    /// When it was to be sent; the same as `sent_at` unless a rate was given.
    pub due_at: Instant,
    pub sent_at: Instant,
    pub answered_at: Instant,
    pub fate: Fate,
    /// How long its payment took, the wait for its reservation included.
    pub paid_in: Option<Duration>,
}

/// What the names of a run's SKUs begin with.
pub fn sku_prefix(run: Uuid) -> String {
    // The time in an id is at its beginning, and rounds follow each other closely.
    let id = run.simple().to_string();
    format!("BENCH-{}-", &id[id.len() - 12..])
}

impl Workload {
    pub fn new(run: Uuid, orders: usize, concurrency: usize, rate: Option<f64>, duration: Option<Duration>) -> Self {
        let prefix = sku_prefix(run);
        let skus = (0..=SKUS).map(|index| format!("{prefix}{index:02}")).collect();
        Self { skus, orders, concurrency, rate, duration, mix: false, next: AtomicUsize::new(0) }
    }

    /// Has each order taken to its fate.
    pub fn mixed(self, mix: bool) -> Self {
        Self { mix, ..self }
    }

    pub async fn stock_up(&self, target: &Arc<Target>) -> anyhow::Result<()> {
        let mut connection = Connection::open(target).await?;
        for (index, sku) in self.skus.iter().enumerate() {
            let path = format!("/v1/stock/{sku}");
            let on_hand = if index < SKUS { ON_HAND } else { 0 };
            connection.send("PUT", &path, &format!("{{\"on_hand\":{on_hand}}}"), false).await?;
        }
        Ok(())
    }

    /// One connection's share of the load.
    pub async fn work(self: Arc<Self>, target: Arc<Target>, start: Instant) -> anyhow::Result<Vec<Placed>> {
        let mut connection = Connection::open(&target).await?;
        let mut placed = Vec::new();
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.orders || self.duration.is_some_and(|duration| start.elapsed() >= duration) {
                return Ok(placed);
            }
            let due_at = match self.rate {
                Some(rate) => {
                    let due_at = start + Duration::from_secs_f64(number as f64 / rate);
                    wait_until(due_at).await?;
                    due_at
                }
                None => Instant::now(),
            };
            let fate = if self.mix { Fate::of(number) } else { Fate::Reserved };
            let sent_at = Instant::now();
            let answer = connection.send("POST", "/v1/orders", &self.order(number, fate), false).await?;
            let answered_at = Instant::now();
            let order: Order = serde_json::from_slice(answer)?;
            self.meet_fate(&mut connection, &order, number, fate).await?;
            let paid_in = (fate == Fate::Paid).then(|| answered_at.elapsed());
            placed.push(Placed { id: order.id, due_at, sent_at, answered_at, fate, paid_in });
        }
    }

    /// The same order for the same number, whatever the run.
    fn order(&self, number: usize, fate: Fate) -> String {
        let mut order = format!("{{\"customer_id\":\"customer-{:05}\",\"items\":[", number % 10_000);
        for line in 0..1 + number % 3 {
            let index = (number * 7 + line * 5) % SKUS;
            let quantity = 1 + (number + line) % 4;
            // One line that cannot be had is enough.
            let sku = &self.skus[if fate == Fate::Rejected && line == 0 { SKUS } else { index }];
            let (comma, price) = (if line == 0 { "" } else { "," }, 199 + index * 50);
            order += &format!("{comma}{{\"sku\":\"{sku}\",\"quantity\":{quantity},\"unit_price_minor\":{price}}}");
        }
        order + "]}"
    }

    async fn meet_fate(
        &self,
        connection: &mut Connection,
        order: &Order,
        number: usize,
        fate: Fate,
    ) -> anyhow::Result<()> {
        let path = format!("/v1/orders/{}", order.id);
        match fate {
            Fate::Reserved | Fate::Rejected => {}
            Fate::Paid => {
                let body = format!("{{\"amount_minor\":{},\"currency\":\"USD\"}}", order.total_minor);
                connection.send("POST", &format!("{path}/payments"), &body, true).await?;
            }
            Fate::Cancelled => {
                // Every other one before its stock is reserved, if the load generator is quick enough.
                if number % 20 < 10 {
                    connection.send("GET", &path, "", true).await?;
                }
                connection.send("POST", &format!("{path}/cancel"), "{}", false).await?;
            }
            Fate::Expired => {
                let held: Held = serde_json::from_slice(connection.send("GET", &path, "", true).await?)?;
                let hold = held.hold_expires_at.context("an order that is not held")?.since(held.updated_at);
                if hold > HOLD_MAX {
                    bail!(
                        "orders are held for {hold:?}: give the server --hold-time 5s, the mix waits for holds to end"
                    );
                }
            }
        }
        Ok(())
    }
}

/// Waits until then, and not a millisecond or two longer, which would count as the server's.
async fn wait_until(moment: Instant) -> anyhow::Result<()> {
    let left = move || moment.saturating_duration_since(Instant::now());
    let most = left().saturating_sub(TIMER_LATE_MAX);
    if !most.is_zero() {
        tokio::time::sleep(most).await;
    }
    if !left().is_zero() {
        tokio::task::spawn_blocking(move || std::thread::sleep(left())).await?;
    }
    Ok(())
}

#[derive(Deserialize)]
struct Order {
    id: Uuid,
    total_minor: i64,
}

/// What else there is to know of an order that is to expire.
#[derive(Deserialize)]
struct Held {
    updated_at: Timestamp,
    hold_expires_at: Option<Timestamp>,
}

/// The server under load.
pub struct Target {
    host: String,
    /// The group that the load is placed in.
    pub group: String,
    /// Sent with each request.
    headers: Vec<(&'static str, String)>,
}

impl Target {
    pub async fn enter(url: &str, headers: Vec<(&'static str, String)>) -> anyhow::Result<Arc<Self>> {
        let plain = "--url must start with http://: the load is measured without TLS";
        let host = url.strip_prefix("http://").ok_or_else(|| Exit::Usage.because(plain))?.trim_end_matches('/');
        if !headers.iter().all(|(_, value)| HeaderValue::from_str(value).is_ok()) {
            return Err(Exit::Usage.because("a key and a group are one line each"));
        }
        let target = Arc::new(Self { host: host.to_owned(), group: String::new(), headers: headers.clone() });
        let mut connection = Connection::open(&target).await?;
        let session = connection.send("GET", "/v1/session", "", false).await?;
        let Session { group_id } = serde_json::from_slice(session).context("that is no Stockade server")?;
        Ok(Arc::new(Self { host: host.to_owned(), group: group_id, headers }))
    }
}

#[derive(Deserialize)]
struct Session {
    group_id: String,
}

/// One kept-alive connection. It speaks just enough HTTP to place orders: what a client takes of the machine, the server does
/// not get.
struct Connection {
    stream: TcpStream,
    target: Arc<Target>,
    request: Vec<u8>,
    answer: Vec<u8>,
}

/// Room for an order, so that it is read in one go.
const ANSWER_BYTES: usize = 4096;
/// More headers than our answers have.
const HEADERS_MAX: usize = 64;

impl Connection {
    async fn open(target: &Arc<Target>) -> anyhow::Result<Self> {
        let host = &target.host;
        let stream = TcpStream::connect(host).await.with_context(|| format!("cannot connect to {host}"))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, target: target.clone(), request: Vec::new(), answer: Vec::with_capacity(ANSWER_BYTES) })
    }

    /// Sends a request and returns the body of its answer. `waits`: for the order to be ready for it.
    async fn send(&mut self, method: &str, path: &str, body: &str, waits: bool) -> anyhow::Result<&[u8]> {
        let (host, length) = (&self.target.host, body.len());
        self.request.clear();
        write!(
            self.request,
            "{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n"
        )?;
        for (name, value) in &self.target.headers {
            write!(self.request, "{name}: {value}\r\n")?;
        }
        if waits {
            write!(self.request, "prefer: wait={WAIT_SECONDS}\r\n")?;
        }
        write!(self.request, "\r\n{body}")?;
        let hung_up = || format!("{path}: the server hung up");
        self.stream.write_all(&self.request).await.with_context(hung_up)?;
        self.answer.clear();
        let mut head: Option<(u16, Range<usize>)> = None;
        let (status, body) = loop {
            if let Some((status, body)) = &head
                && self.answer.len() >= body.end
            {
                break (*status, body.clone());
            }
            if self.stream.read_buf(&mut self.answer).await.with_context(hung_up)? == 0 {
                bail!(hung_up());
            }
            if head.is_none() {
                head = read_head(&self.answer).with_context(|| format!("{path}: cannot read the answer"))?;
            }
        };
        let body = &self.answer[body];
        if !(200..300).contains(&status) {
            bail!("{path} answered {status}: {}", String::from_utf8_lossy(body));
        }
        Ok(body)
    }
}

/// The status of an answer and where its body is, once its head is there.
fn read_head(answer: &[u8]) -> anyhow::Result<Option<(u16, Range<usize>)>> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut head = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(begin) = head.parse(answer)? else { return Ok(None) };
    let length = head.headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"));
    let length = length.context("it does not say how long it is: is there a proxy in between?")?;
    let length: usize = std::str::from_utf8(length.value)?.parse()?;
    Ok(Some((head.code.context("it has no status")?, begin..begin + length)))
}
