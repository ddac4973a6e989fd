//! Talks to a running server: JSON over HTTP, and errors in words.
//!
//! A server that cannot be reached is [`Exit::Unavailable`]; one that answers with a problem is an error that quotes
//! it. No proxy is ever asked: a server is named by the address it listens on, or by that of what speaks TLS before it.
//! Its certificate must be one that this machine trusts.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::exit::Exit;
use super::table::printable;

/// Which server to ask.
#[derive(Args)]
pub struct At {
    /// The server to ask; if not given, the one on this machine.
    #[arg(long, env = "STOCKADE_URL")]
    url: Option<String>,

    /// Where the server on this machine listens.
    #[arg(long, env = "STOCKADE_LISTEN", default_value = "127.0.0.1:8080")]
    listen: SocketAddr,

    #[command(flatten)]
    credential: Credential,
}

/// What to present to a server with keys: the environment has the key itself, or a file does; never the command line,
/// which others on the machine can read.
#[derive(Debug, Clone, Default, Args)]
pub struct Credential {
    /// A file with the API key to present; STOCKADE_API_KEY may hold the key itself.
    #[arg(long, env = "STOCKADE_API_KEY_FILE", global = true, help_heading = "Server")]
    api_key_file: Option<PathBuf>,

    /// With a key for every group: the group to act in.
    #[arg(long, env = "STOCKADE_AS_GROUP", global = true, help_heading = "Server")]
    as_group: Option<String>,
}

impl Credential {
    /// Lets a client present it.
    pub fn given_to(&self, client: Client) -> anyhow::Result<Client> {
        Ok(Client { key: self.key()?, group: self.as_group.clone(), ..client })
    }

    /// The headers that present it.
    pub fn headers(&self) -> anyhow::Result<Vec<(&'static str, String)>> {
        let key = self.key()?.map(|key| ("authorization", format!("Bearer {key}")));
        Ok(key.into_iter().chain(self.as_group.clone().map(|group| ("x-group-id", group))).collect())
    }

    fn key(&self) -> anyhow::Result<Option<String>> {
        let key = match &self.api_key_file {
            Some(path) => Some(
                std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read the API key in {}", path.display()))?,
            ),
            None => std::env::var("STOCKADE_API_KEY").ok(),
        };
        Ok(key.map(|key| key.trim().to_owned()).filter(|key| !key.is_empty()))
    }
}

impl At {
    pub fn url(&self) -> String {
        self.url.clone().unwrap_or_else(|| format!("http://{}", reachable(self.listen)))
    }

    pub fn client(&self, timeout: Duration) -> anyhow::Result<Client> {
        self.credential.given_to(Client::new(&self.url(), timeout)?)
    }
}

/// The address to call a server that listens on all addresses.
pub fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

pub struct Client {
    http: reqwest::Client,
    url: String,
    operator: Option<String>,
    key: Option<String>,
    group: Option<String>,
}

/// The server's answer was no.
#[derive(Debug, thiserror::Error)]
#[error("{path} answered {status}: {detail}")]
struct Refused {
    status: StatusCode,
    path: String,
    detail: String,
}

impl Client {
    /// No request takes longer than `timeout`.
    pub fn new(url: &str, timeout: Duration) -> anyhow::Result<Self> {
        if !["http://", "https://"].iter().any(|scheme| url.starts_with(scheme)) {
            let why = "is no address of a server: it must start with http:// or https://";
            return Err(Exit::Usage.because(format!("{url} {why}")));
        }
        let http = reqwest::Client::builder().no_proxy().timeout(timeout).build()?;
        Ok(Self { http, url: url.trim_end_matches('/').to_owned(), operator: None, key: None, group: None })
    }

    /// Says with each request who asks.
    pub fn operated_by(self, name: &str) -> Self {
        Self { operator: Some(name.to_owned()), ..self }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        self.send(path, self.request(Method::GET, path)).await
    }

    /// GETs something that may not be there.
    pub async fn find<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<Option<T>> {
        match self.get(path).await {
            Ok(found) => Ok(Some(found)),
            Err(error) if is_missing(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// GETs every row of a list, page by page.
    pub async fn list<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<Vec<T>> {
        self.list_up_to(path, usize::MAX).await
    }

    /// The same, up to so many rows.
    pub async fn list_up_to<T: DeserializeOwned>(&self, path: &str, rows_max: usize) -> anyhow::Result<Vec<T>> {
        let first = format!("{path}{}limit={}", if path.contains('?') { '&' } else { '?' }, rows_max.clamp(1, 200));
        let mut rows = Vec::new();
        let mut next = first.clone();
        loop {
            let page: Page<T> = self.get(&next).await?;
            rows.extend(page.data);
            match page.next_cursor {
                Some(cursor) if rows.len() < rows_max => next = format!("{first}&cursor={cursor}"),
                _ => break,
            }
        }
        rows.truncate(rows_max);
        Ok(rows)
    }

    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &Value) -> anyhow::Result<T> {
        self.send(path, self.request(Method::POST, path).json(body)).await
    }

    pub async fn put<T: DeserializeOwned>(&self, path: &str, body: &Value) -> anyhow::Result<T> {
        self.send(path, self.request(Method::PUT, path).json(body)).await
    }

    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let mut request = self.http.request(method, format!("{}{path}", self.url));
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        for (name, value) in [("x-operator", &self.operator), ("x-group-id", &self.group)] {
            if let Some(value) = value {
                request = request.header(name, value);
            }
        }
        request
    }

    /// Sends a request that is to succeed and reads what it answers.
    pub async fn send<T: DeserializeOwned>(&self, path: &str, request: RequestBuilder) -> anyhow::Result<T> {
        let response = self.answer(request).await?;
        let status = response.status();
        let body = response.bytes().await.with_context(|| format!("{path} broke off its answer"))?;
        if !status.is_success() {
            let said = serde_json::from_slice::<Problem>(&body).map(|problem| problem.detail);
            let detail = said.unwrap_or_else(|_| "and not as Stockade would".to_owned());
            return Err(Refused { status, path: path.to_owned(), detail: printable(&detail) }.into());
        }
        serde_json::from_slice(&body).with_context(|| format!("{path} answered with something else than expected"))
    }

    /// Sends a request; any answer will do.
    pub async fn answer(&self, request: RequestBuilder) -> anyhow::Result<Response> {
        request.send().await.map_err(|error| {
            let why = if error.is_timeout() { "no answer in time".to_owned() } else { root_cause(&error) };
            Exit::Unavailable.because(format!("cannot reach {}: {why}", self.url))
        })
    }
}

/// Did the server say that there is no such thing?
pub fn is_missing(error: &anyhow::Error) -> bool {
    refusal(error) == Some(StatusCode::NOT_FOUND)
}

/// The status of an answer that was no.
pub fn refusal(error: &anyhow::Error) -> Option<StatusCode> {
    error.chain().find_map(|cause| cause.downcast_ref::<Refused>()).map(|refused| refused.status)
}

#[derive(Deserialize)]
struct Page<T> {
    data: Vec<T>,
    next_cursor: Option<String>,
}

#[derive(Deserialize)]
struct Problem {
    detail: String,
}

/// The innermost error says it best; those around it only that a request failed.
fn root_cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_listens_everywhere_is_asked_on_loopback() {
        for (listen, called) in
            [("0.0.0.0:80", "127.0.0.1:80"), ("[::]:80", "[::1]:80"), ("10.1.2.3:80", "10.1.2.3:80")]
        {
            assert_eq!(reachable(listen.parse().unwrap()).to_string(), called);
        }
    }
}
