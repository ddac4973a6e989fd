//! Receivers of notices: an HTTP server and a mail server that do as they are told.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::eventually;

/// What a receiver does with a notice.
#[derive(Debug, Clone, Copy)]
pub enum Reply {
    Status(u16),
    /// With a `Retry-After` of so many seconds.
    Later(u16, u64),
    /// Answers with 200 once [`Webhooks::let_go`] is called, and not before.
    Hold,
}

/// A request that came.
#[derive(Debug, Clone)]
pub struct Posted {
    pub at: Instant,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Posted {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).unwrap_or_else(|| panic!("no {name}")).to_str().unwrap()
    }

    pub fn key(&self) -> &str {
        self.header("idempotency-key")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// An HTTP receiver on a port of its own. Replies come from its script, then are all 200.
pub struct Webhooks {
    pub url: String,
    desk: Arc<Desk>,
    _serving: JoinSet<()>,
}

struct Desk {
    script: Mutex<VecDeque<Reply>>,
    posted: Mutex<Vec<Posted>>,
    /// Under way now, and the most there ever were.
    open: Mutex<(usize, usize)>,
    gate: watch::Sender<bool>,
}

impl Webhooks {
    pub async fn open(script: impl IntoIterator<Item = Reply>) -> Self {
        let desk = Arc::new(Desk {
            script: Mutex::new(script.into_iter().collect()),
            posted: Mutex::default(),
            open: Mutex::default(),
            gate: watch::Sender::new(false),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/notices", listener.local_addr().unwrap());
        let router = Router::new().route("/notices", post(receive)).with_state(desk.clone());
        let mut serving = JoinSet::new();
        serving.spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { url, desk, _serving: serving }
    }

    pub fn posted(&self) -> Vec<Posted> {
        self.desk.posted.lock().unwrap().clone()
    }

    /// Waits until so many requests have come; there must be no more.
    pub async fn until_posted(&self, count: usize) -> Vec<Posted> {
        let posted = eventually(&format!("{count} requests"), async || {
            let posted = self.posted();
            (posted.len() >= count).then_some(posted)
        })
        .await;
        assert_eq!(posted.len(), count);
        posted
    }

    /// The most requests that were under way at once.
    pub fn most_at_once(&self) -> usize {
        self.desk.open.lock().unwrap().1
    }

    /// Answers what is held, and what comes to be.
    pub fn let_go(&self) {
        self.desk.gate.send_replace(true);
    }
}

async fn receive(State(desk): State<Arc<Desk>>, headers: HeaderMap, body: Bytes) -> Response {
    desk.posted.lock().unwrap().push(Posted { at: Instant::now(), headers, body });
    let _open = Open::enter(&desk);
    let reply = desk.script.lock().unwrap().pop_front().unwrap_or(Reply::Status(200));
    match reply {
        Reply::Status(status) => (StatusCode::from_u16(status).unwrap(), "said the receiver").into_response(),
        Reply::Later(status, seconds) => {
            (StatusCode::from_u16(status).unwrap(), [("retry-after", seconds.to_string())]).into_response()
        }
        Reply::Hold => {
            desk.gate.subscribe().wait_for(|open| *open).await.unwrap();
            StatusCode::OK.into_response()
        }
    }
}

/// Counts a request for as long as it is under way, also if the caller hangs up.
struct Open<'a>(&'a Desk);

impl<'a> Open<'a> {
    fn enter(desk: &'a Desk) -> Self {
        let mut open = desk.open.lock().unwrap();
        open.0 += 1;
        open.1 = open.1.max(open.0);
        drop(open);
        Self(desk)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.open.lock().unwrap().0 -= 1;
    }
}

/// What a mail server does with a mail.
#[derive(Debug, Clone, Copy)]
pub enum Taking {
    Takes,
    /// Says so when the mail has been sent.
    Refuses(u16),
    /// Says so when it hears the recipient.
    RefusesRecipient(u16),
    /// Hangs up once it has the mail, without a word.
    HangsUp,
}

/// A mail server on a port of its own. What it does comes from its script, then it takes everything.
pub struct Mails {
    pub url: String,
    mails: Arc<Mutex<Vec<String>>>,
    _serving: JoinSet<()>,
}

impl Mails {
    pub async fn open(script: impl IntoIterator<Item = Taking>) -> Self {
        Self::serve(TcpListener::bind("127.0.0.1:0").await.unwrap(), script)
    }

    pub fn serve(listener: TcpListener, script: impl IntoIterator<Item = Taking>) -> Self {
        let url = format!("smtp://{}", listener.local_addr().unwrap());
        let script: Arc<Mutex<VecDeque<Taking>>> = Arc::new(Mutex::new(script.into_iter().collect()));
        let mails: Arc<Mutex<Vec<String>>> = Arc::default();
        let (filled, mut serving) = (mails.clone(), JoinSet::new());
        serving.spawn(async move {
            let mut talks = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                talks.spawn(talk(stream, script.clone(), filled.clone()));
            }
        });
        Self { url, mails, _serving: serving }
    }

    /// The mails that were sent, whatever was said to them.
    pub fn mails(&self) -> Vec<String> {
        self.mails.lock().unwrap().clone()
    }

    pub async fn until_mailed(&self, count: usize) -> Vec<String> {
        let mails = eventually(&format!("{count} mails"), async || {
            let mails = self.mails();
            (mails.len() >= count).then_some(mails)
        })
        .await;
        assert_eq!(mails.len(), count);
        mails
    }
}

/// One client's mails, as far as SMTP is needed here.
async fn talk(stream: TcpStream, script: Arc<Mutex<VecDeque<Taking>>>, filled: Arc<Mutex<Vec<String>>>) {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read).lines();
    let mut taking = Taking::Takes;
    let _ = write.write_all(b"220 mail.test\r\n").await;
    while let Ok(Some(line)) = lines.next_line().await {
        let verb = line.get(..4).unwrap_or_default().to_ascii_uppercase();
        let answer = match verb.as_str() {
            "EHLO" => "250 mail.test".to_owned(),
            "MAIL" => {
                taking = script.lock().unwrap().pop_front().unwrap_or(Taking::Takes);
                "250 go on".to_owned()
            }
            "RCPT" => match taking {
                Taking::RefusesRecipient(code) => format!("{code} not this one"),
                _ => "250 go on".to_owned(),
            },
            "DATA" => {
                let _ = write.write_all(b"354 go on\r\n").await;
                let mut mail = String::new();
                while let Ok(Some(line)) = lines.next_line().await {
                    if line == "." {
                        break;
                    }
                    mail.push_str(&line);
                    mail.push('\n');
                }
                filled.lock().unwrap().push(mail);
                match taking {
                    Taking::HangsUp => return,
                    Taking::Refuses(code) => format!("{code} not that"),
                    _ => "250 taken".to_owned(),
                }
            }
            "QUIT" => "221 bye".to_owned(),
            _ => "502 what?".to_owned(),
        };
        if write.write_all(format!("{answer}\r\n").as_bytes()).await.is_err() || verb == "QUIT" {
            return;
        }
    }
}
