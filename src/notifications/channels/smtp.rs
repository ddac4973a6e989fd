//! Notices by mail, each over a connection of its own.
//!
//! `Message-ID` is the event's id, so that a repeat can be told from the first; few mail systems do so, which is why a
//! mail that may have gone out is not sent again unless the setting says so. Up to the server's word that it will take
//! the mail, nothing has been handed over, and whatever breaks is a plain failure.

use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, bail};
use lettre::message::Mailbox;
use lettre::message::header::{ContentType, HeaderName, HeaderValue};
use lettre::transport::smtp::Error;
use lettre::transport::smtp::authentication::{Credentials, DEFAULT_MECHANISMS};
use lettre::transport::smtp::client::{AsyncSmtpConnection, TlsParameters};
use lettre::transport::smtp::commands::{Data, Mail, Rcpt};
use lettre::transport::smtp::extension::ClientId;
use percent_encoding::percent_decode_str;
use url::Url;

use super::chain;
use crate::notifications::model::Fact;
use stockade_kernel::messaging::Message;
use stockade_kernel::messaging::outside::Answer;

const AUTO_SUBMITTED: HeaderName = HeaderName::new_from_ascii_str("Auto-Submitted");
/// A mail that was taken is sent, whether or not the server says goodbye.
const GOODBYE_WITHIN: Duration = Duration::from_secs(1);

pub struct Smtp {
    server: Server,
    hello: ClientId,
    from: Mailbox,
    to: Mailbox,
    /// How long a server may take to say that it will take a mail: less than the whole call may.
    ready_within: Duration,
}

impl Smtp {
    /// Connects to nobody yet; fails on settings that could never work.
    pub fn try_new(url: &str, from: &str, to: &str, timeout: Duration) -> anyhow::Result<Self> {
        Ok(Self {
            server: Server::read(url).context(
                "STOCKADE_SMTP_URL takes `smtps://USER:PASSWORD@HOST:PORT`, `smtp://HOST:PORT`, or with \
                 `?tls=required` for STARTTLS",
            )?,
            hello: ClientId::default(),
            from: read_mailbox(from).context("STOCKADE_SMTP_FROM must be a mail address")?,
            to: read_mailbox(to).context("STOCKADE_SMTP_TO must be a mail address")?,
            ready_within: timeout / 2,
        })
    }

    pub async fn send(&self, message: &Message<Fact>) -> Answer {
        let mail = match self.mail(message) {
            Ok(mail) => mail.formatted(),
            Err(error) => return Answer::refused(format!("cannot be put into a mail: {error}")),
        };
        let mut connection = match tokio::time::timeout(self.ready_within, self.server.connect(&self.hello)).await {
            Ok(Ok(connection)) => connection,
            // About the server, not about this mail: even a 5xx may be over the next time.
            Ok(Err(error)) => return Answer::failed(format!("cannot connect: {}", chain(&error))),
            Err(_) => return Answer::failed("the mail server does not answer"),
        };
        let offered = self.offer(&mut connection);
        match tokio::time::timeout(self.ready_within, offered).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) if error.is_permanent() => return Answer::refused(chain(&error)),
            Ok(Err(error)) => return Answer::failed(chain(&error)),
            Err(_) => return Answer::failed("the mail server does not answer"),
        }
        match connection.message(&mail).await {
            Ok(_) => {
                let _ = tokio::time::timeout(GOODBYE_WITHIN, connection.quit()).await;
                Answer::Done
            }
            Err(error) if error.is_permanent() => Answer::refused(chain(&error)),
            Err(error) if error.is_transient() => Answer::failed(chain(&error)),
            Err(error) => Answer::unknown(format!("the connection broke: {}", chain(&error))),
        }
    }

    /// Says whom the mail is from and to; the server is then ready for it.
    async fn offer(&self, connection: &mut AsyncSmtpConnection) -> Result<(), Error> {
        connection.command(Mail::new(Some(self.from.email.clone()), Vec::new())).await?;
        connection.command(Rcpt::new(self.to.email.clone(), Vec::new())).await?;
        connection.command(Data).await.map(drop)
    }

    fn mail(&self, message: &Message<Fact>) -> Result<lettre::Message, lettre::error::Error> {
        let (order_id, kind) = message.fact.notice();
        let event = &message.event;
        let occurred_at = Duration::from_millis(u64::try_from(event.occurred_at.millis()).unwrap_or(0));
        let text = message.fact.text();
        let mut mail = lettre::Message::builder()
            .from(self.from.clone())
            .to(self.to.clone())
            .date(UNIX_EPOCH + occurred_at)
            .message_id(Some(format!("<{}@stockade>", event.event_id)))
            .subject(format!("Order {order_id}: {}", kind.as_str()))
            .header(ContentType::TEXT_PLAIN)
            .body(format!("{text}.\r\n\r\nOrder: {order_id}\r\nCorrelation: {}\r\n", event.correlation_id))?;
        mail.headers_mut().insert_raw(HeaderValue::new(AUTO_SUBMITTED, "auto-generated".to_owned()));
        Ok(mail)
    }
}

/// A mail server, as its URL names it.
struct Server {
    host: String,
    port: u16,
    tls: Tls,
    credentials: Option<Credentials>,
}

enum Tls {
    None,
    /// From the first byte on.
    Wrapped(TlsParameters),
    /// Asked for by STARTTLS, and insisted on.
    Upgraded(TlsParameters),
}

impl Server {
    fn read(url: &str) -> anyhow::Result<Self> {
        let url = Url::parse(url)?;
        let host = url.host_str().filter(|host| !host.is_empty()).context("it names no host")?.to_owned();
        let asked = url.query_pairs().find(|(name, _)| name == "tls").map(|(_, value)| value.into_owned());
        let (tls, default_port) = match (url.scheme(), asked.as_deref()) {
            ("smtps", None) => (Tls::Wrapped(TlsParameters::new(host.clone())?), 465),
            ("smtp", Some("required")) => (Tls::Upgraded(TlsParameters::new(host.clone())?), 587),
            ("smtp", None) => (Tls::None, 25),
            (_, Some(_)) => bail!("`tls` can only be `required`, with smtp://"),
            (_, None) => bail!("it begins with neither smtps:// nor smtp://"),
        };
        let decoded = |text: &str| percent_decode_str(text).decode_utf8().map(String::from);
        let credentials = match url.password() {
            Some(password) => Some(Credentials::new(decoded(url.username())?, decoded(password)?)),
            None => None,
        };
        if credentials.is_some() && matches!(tls, Tls::None) {
            bail!("it would send the password for all to read: use smtps://, or ?tls=required");
        }
        Ok(Self { host, port: url.port().unwrap_or(default_port), tls, credentials })
    }

    async fn connect(&self, hello: &ClientId) -> Result<AsyncSmtpConnection, Error> {
        let wrap = if let Tls::Wrapped(tls) = &self.tls { Some(tls.clone()) } else { None };
        let address = (self.host.as_str(), self.port);
        let mut connection = AsyncSmtpConnection::connect_tokio1(address, None, hello, wrap, None).await?;
        if let Tls::Upgraded(tls) = &self.tls {
            connection.starttls(tls.clone(), hello).await?;
        }
        if let Some(credentials) = &self.credentials {
            connection.auth(DEFAULT_MECHANISMS, credentials).await?;
        }
        Ok(connection)
    }
}

/// An address in ASCII, which every server can take.
fn read_mailbox(text: &str) -> anyhow::Result<Mailbox> {
    let mailbox: Mailbox = text.parse()?;
    let address: &str = mailbox.email.as_ref();
    if !address.is_ascii() {
        bail!("{address} is not ASCII");
    }
    Ok(mailbox)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_say_how_the_server_is_reached() {
        let server = Server::read("smtps://user%40example.com:pass@mail.example.com").unwrap();
        assert_eq!((server.host.as_str(), server.port), ("mail.example.com", 465));
        assert_eq!(server.credentials, Some(Credentials::new("user@example.com".into(), "pass".into())));
        assert!(matches!(Server::read("smtp://localhost:2525").unwrap(), Server { tls: Tls::None, port: 2525, .. }));
        assert!(matches!(
            Server::read("smtp://h?tls=required").unwrap(),
            Server { tls: Tls::Upgraded(_), port: 587, .. }
        ));
        for url in ["mail.example.com", "http://h", "smtp://h?tls=maybe", "smtp://user:password@h", "smtp://"] {
            assert!(Server::read(url).is_err(), "{url}");
        }
    }

    #[test]
    fn addresses_are_ascii() {
        assert!(read_mailbox("Stockade <orders@example.com>").is_ok());
        assert!(read_mailbox("orders").is_err());
        assert!(read_mailbox("bestellung@übung.example").is_err());
    }
}
