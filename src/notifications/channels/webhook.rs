//! Notices by HTTP POST, signed after the Standard Webhooks specification.
//!
//! Headers: `Idempotency-Key` and `webhook-id` are the event's id; `webhook-signature` is `v1,` and the Base64 of the
//! HMAC-SHA256 of `id.timestamp.body`. Redirects are not followed: a notice goes where the setting says.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use hmac::{Hmac, Mac};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, RETRY_AFTER, USER_AGENT};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rustls::{ClientConfig, RootCertStore};
use sha2::Sha256;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc2822;

use super::{Notice, chain};
use crate::notifications::model::Fact;
use stockade_kernel::clock::{Clock, Timestamp};
use stockade_kernel::messaging::Message;
use stockade_kernel::messaging::outside::Answer;

/// A receiver that has not taken the connection by now has been sent nothing.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// How much of an answer is read, and for how long, so that the connection can be used again.
const ANSWER_BYTES_MAX: usize = 64 * 1024;
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// How much of a refusal an operator is shown.
const ANSWER_CHARS_SHOWN: usize = 200;
const SECRET_BYTES_MIN: usize = 16;

pub struct Webhook {
    uri: Uri,
    key: Key,
    clock: Clock,
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
}

impl Webhook {
    /// Connects to nobody yet; fails on a URL or secret that could never work.
    pub fn try_new(url: &str, secret: &str, timeout: Duration, clock: Clock) -> anyhow::Result<Self> {
        let uri = read_url(url).context("STOCKADE_WEBHOOK_URL takes `https://HOST/PATH` or `http://HOST/PATH`")?;
        let key = Key::read(secret).context("STOCKADE_WEBHOOK_SECRET cannot be used")?;
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if uri.scheme_str() == Some("https") && roots.is_empty() {
            bail!("STOCKADE_WEBHOOK_URL is https, and this system has no certificates to check it by");
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        // Sooner than the call is cut off: then it is known that nothing was sent.
        http.set_connect_timeout(Some(CONNECT_WITHIN.min(timeout / 2)));
        http.set_nodelay(true);
        let https =
            HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().wrap_connector(http);
        let client = Client::builder(TokioExecutor::new()).build(https);
        Ok(Self { uri, key, clock, client })
    }

    pub async fn send(&self, message: &Message<Fact>) -> Answer {
        let request = match self.request(message) {
            Ok(request) => request,
            Err(error) => return Answer::refused(format!("cannot be put into a request: {error}")),
        };
        match self.client.request(request).await {
            Ok(response) => read_answer(response, self.clock.now()).await,
            Err(error) if error.is_connect() => Answer::failed(format!("cannot connect: {}", chain(&error))),
            Err(error) => Answer::unknown(format!("the connection broke: {}", chain(&error))),
        }
    }

    fn request(&self, message: &Message<Fact>) -> anyhow::Result<Request<Full<Bytes>>> {
        let body = serde_json::to_vec(&Notice::from(message))?;
        let id = message.event.event_id.to_string();
        let timestamp = self.clock.now().millis() / 1000;
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(self.uri.clone())
            .header(CONTENT_TYPE, "application/json")
            .header(USER_AGENT, concat!("stockade/", env!("CARGO_PKG_VERSION")))
            .header("idempotency-key", &id)
            .header("webhook-id", &id)
            .header("webhook-timestamp", timestamp)
            .header("webhook-signature", self.key.sign(&id, timestamp, &body));
        if let Some(traceparent) = message.event.traceparent {
            request = request.header("traceparent", traceparent.to_string());
        }
        Ok(request.body(Full::new(body.into()))?)
    }
}

/// What webhooks are signed with.
pub struct Key(Vec<u8>);

impl Key {
    /// `whsec_` and Base64, as the specification has it, or any other text for its bytes.
    pub fn read(secret: &str) -> anyhow::Result<Self> {
        let bytes = match secret.strip_prefix("whsec_") {
            Some(encoded) => BASE64_STANDARD.decode(encoded).context("after `whsec_` comes Base64")?,
            None => secret.as_bytes().to_vec(),
        };
        if bytes.len() < SECRET_BYTES_MIN {
            bail!("it has {} bytes and must have {SECRET_BYTES_MIN}", bytes.len());
        }
        Ok(Self(bytes))
    }

    /// The value of `webhook-signature`.
    pub fn sign(&self, id: &str, timestamp: i64, body: &[u8]) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("a key of any length will do");
        mac.update(format!("{id}.{timestamp}.").as_bytes());
        mac.update(body);
        format!("v1,{}", BASE64_STANDARD.encode(mac.finalize().into_bytes()))
    }
}

fn read_url(url: &str) -> anyhow::Result<Uri> {
    let uri: Uri = url.parse()?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        bail!("it begins with neither https:// nor http://");
    }
    match uri.authority() {
        Some(authority) if authority.as_str().contains('@') => {
            bail!("it holds a user or a password, which are not sent")
        }
        Some(authority) if !authority.host().is_empty() => Ok(uri),
        _ => bail!("it names no host"),
    }
}

async fn read_answer(response: Response<Incoming>, now: Timestamp) -> Answer {
    let status = response.status();
    let after = response.headers().get(RETRY_AFTER).and_then(|value| retry_after(value.to_str().ok()?, now));
    // The status is the answer, whatever becomes of the rest.
    let rest =
        tokio::time::timeout(ANSWER_WITHIN, Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect()).await;
    let rest = rest.ok().and_then(Result::ok).map(|body| body.to_bytes()).unwrap_or_default();
    judge(status, after, &String::from_utf8_lossy(&rest))
}

/// What a status says of the notice.
fn judge(status: StatusCode, after: Option<Duration>, body: &str) -> Answer {
    let said: String = body.trim().chars().take(ANSWER_CHARS_SHOWN).collect();
    let error = if said.is_empty() { format!("answered {status}") } else { format!("answered {status}: {said}") };
    match status.as_u16() {
        200..=299 => Answer::Done,
        // A gateway that got no good answer from behind it: the notice may have arrived there.
        502 | 504 => Answer::unknown(error),
        // Too slow, too early, too many; or the same key is being worked on, which is a call of ours that was cut off.
        408 | 409 | 425 | 429 | 500..=599 => Answer::Failed { error, after: after.unwrap_or_default() },
        300..=399 => Answer::refused(format!("{error}; redirects are not followed")),
        _ => Answer::refused(error),
    }
}

/// Seconds, or a date, as a span from now.
fn retry_after(value: &str, now: Timestamp) -> Option<Duration> {
    if let Ok(seconds) = value.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    // HTTP's dates are those of mail, but for the name of the zone.
    let date = format!("{}+0000", value.trim().strip_suffix("GMT")?);
    Some(Timestamp::from(OffsetDateTime::parse(&date, &Rfc2822).ok()?).since(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_the_one_of_the_specification() {
        // The example of Standard Webhooks.
        let key = Key::read("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
        let signature = key.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, br#"{"test": 2432232314}"#);
        assert_eq!(signature, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn secrets_must_be_long_enough_and_urls_must_name_a_host() {
        assert!(Key::read("sixteen letters!").is_ok());
        assert!(Key::read("short").is_err());
        assert!(Key::read("whsec_???").is_err());
        assert!(read_url("https://example.com/hook?a=b").is_ok());
        for url in ["example.com/hook", "ftp://example.com", "http://", "/hook", "http://user:password@example.com/"] {
            assert!(read_url(url).is_err(), "{url}");
        }
    }

    #[test]
    fn each_status_has_its_meaning() {
        let meaning = |status: u16| judge(StatusCode::from_u16(status).unwrap(), None, "");
        for status in [200, 202, 204] {
            assert_eq!(meaning(status), Answer::Done);
        }
        for status in [408, 409, 425, 429, 500, 503] {
            assert!(matches!(meaning(status), Answer::Failed { .. }), "{status}");
        }
        for status in [301, 400, 401, 404, 410, 422] {
            assert!(matches!(meaning(status), Answer::Refused { .. }), "{status}");
        }
        for status in [502, 504] {
            assert!(matches!(meaning(status), Answer::Unknown { .. }), "{status}");
        }
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now = Timestamp::from_millis(1_445_412_420_000); // Wed, 21 Oct 2015 07:27:00 GMT
        assert_eq!(retry_after("120", now), Some(Duration::from_secs(120)));
        assert_eq!(retry_after("Wed, 21 Oct 2015 07:28:00 GMT", now), Some(Duration::from_secs(60)));
        assert_eq!(retry_after("soon", now), None);
    }
}
