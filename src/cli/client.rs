//! Talks to a running server. One that cannot be reached is [`Exit::Unavailable`]. No proxy is ever asked: a server
//! is named by the address it listens on.

use std::time::Duration;

use reqwest::{Method, RequestBuilder, Response};

use super::exit::Exit;

pub struct Client {
    http: reqwest::Client,
    url: String,
}

impl Client {
    /// No request takes longer than `timeout`.
    pub fn new(url: &str, timeout: Duration) -> anyhow::Result<Self> {
        anyhow::ensure!(url.starts_with("http://"), "{url} is no address of a server: it must start with http://");
        let http = reqwest::Client::builder().no_proxy().timeout(timeout).build()?;
        Ok(Self { http, url: url.trim_end_matches('/').to_owned() })
    }

    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}{path}", self.url))
    }

    /// Sends a request; any answer will do.
    pub async fn answer(&self, request: RequestBuilder) -> anyhow::Result<Response> {
        request.send().await.map_err(|error| {
            let why = if error.is_timeout() { "no answer in time".to_owned() } else { root_cause(&error) };
            Exit::Unavailable.because(format!("cannot reach {}: {why}", self.url))
        })
    }
}

/// The innermost error says it best; those around it only that a request failed.
fn root_cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
