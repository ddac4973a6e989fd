//! Secrets among the settings: they are masked when shown, and struck out of panic and start-up messages.
//!
//! A panic says what somebody formatted into it, and a library may format a connection with its password. So every
//! secret is remembered as its setting is read, and looked for in such texts. What callers present is not known
//! beforehand; keys and sessions of ours are known by how they begin.

use std::collections::BTreeSet;
use std::sync::{PoisonError, RwLock};

use percent_encoding::percent_decode_str;

/// What keys and sessions begin with, so that people and scanners know one when they see it.
pub const KEY_PREFIX: &str = "stk_";
const MASK: &str = "***";
/// Shorter ones are looked for in vain: they are in every other word.
const CHARS_MIN: usize = 4;

/// Those of this process.
static KNOWN: RwLock<BTreeSet<String>> = RwLock::new(BTreeSet::new());

/// A setting that holds a secret, or may: it is used as the text it is, and shows itself masked.
#[derive(Clone, PartialEq, Eq)]
pub struct Masked(String);

impl Masked {
    pub fn new(text: &str) -> Self {
        let mut known = KNOWN.write().unwrap_or_else(PoisonError::into_inner);
        // What may be shown of it anyway, as a password that is also the user's name, would only make texts unreadable.
        let shown = mask(text);
        known.extend(hidden(text).into_iter().filter(|part| part.len() >= CHARS_MIN && !shown.contains(part.as_str())));
        Self(text.to_owned())
    }
}

impl std::str::FromStr for Masked {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self::new(text))
    }
}

impl std::ops::Deref for Masked {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Masked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&mask(&self.0))
    }
}

/// A text without its secret: of a URL everything but the password and the query, which may hold one too; of what is no
/// URL nothing.
pub fn mask(text: &str) -> String {
    let Some(url) = Url::read(text) else {
        return if is_no_secret(text) { text.to_owned() } else { MASK.to_owned() };
    };
    let user = url.user.map(|user| format!("{user}:{MASK}@")).unwrap_or_default();
    let query = if url.query.is_empty() { "" } else { "?***" };
    format!("{}://{user}{}{query}", url.scheme, url.rest.unwrap_or(MASK))
}

/// What [`mask`] leaves out, as it is written and as it is meant.
fn hidden(text: &str) -> Vec<String> {
    let Some(url) = Url::read(text) else {
        return if is_no_secret(text) { Vec::new() } else { vec![text.to_owned()] };
    };
    let values = url.query.split('&').map(|pair| pair.split_once('=').map_or(pair, |(_, value)| value));
    let parts = values.chain([url.password]);
    parts.flat_map(|part| [part.to_owned(), percent_decode_str(part).decode_utf8_lossy().into_owned()]).collect()
}

fn is_no_secret(text: &str) -> bool {
    text.is_empty() || text == "embedded" || text.starts_with("sqlite:")
}

/// A URL as whoever wrote it meant it: passwords hold characters that they should not, and come without a host.
struct Url<'a> {
    scheme: &'a str,
    user: Option<&'a str>,
    password: &'a str,
    /// Host and path; none if it cannot be told from a password.
    rest: Option<&'a str>,
    query: &'a str,
}

impl<'a> Url<'a> {
    fn read(text: &'a str) -> Option<Self> {
        let (scheme, all) = text.split_once("://")?;
        let (before, query) = all.split_once('?').unwrap_or((all, ""));
        if let Some((login, rest)) = before.rsplit_once('@') {
            let (user, password) = login.split_once(':').unwrap_or((login, ""));
            return Some(Self { scheme, user: Some(user), password, rest: Some(rest), query });
        }
        // A question mark within a password, or a password where the port should be.
        let (host, port) = before.split('/').next().unwrap_or_default().rsplit_once(':').unwrap_or_default();
        let is_port = port.bytes().all(|byte| byte.is_ascii_digit()) || host.starts_with('[');
        if query.contains('@') || !is_port {
            return Some(Self { scheme, user: None, password: all, rest: None, query: "" });
        }
        Some(Self { scheme, user: None, password: "", rest: Some(before), query })
    }
}

/// The text without any secret of this process, and without keys that callers have presented.
pub fn strike_from(text: &str) -> String {
    let known = KNOWN.read().unwrap_or_else(PoisonError::into_inner);
    // The longest first: one secret may be part of another.
    let mut secrets: Vec<&str> = known.iter().map(String::as_str).collect();
    secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
    let struck = secrets.iter().fold(text.to_owned(), |text, secret| text.replace(secret, MASK));
    let mut parts = struck.split(KEY_PREFIX);
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| {
        let key = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        format!("{text}{KEY_PREFIX}{MASK}{}", part.trim_start_matches(key).trim_start_matches(MASK))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_show_themselves_masked() {
        for (text, shown) in [
            ("postgres://me:pa:ss@word@host:5432/db?password=x", "postgres://me:***@host:5432/db?***"),
            ("postgres://me@host/db", "postgres://me:***@host/db"),
            ("postgres://me:pass?word@host/db", "postgres://***"),
            ("postgres://me:forgot-the-host", "postgres://***"),
            ("postgres://[::1]:5432/db", "postgres://[::1]:5432/db"),
            ("amqp://host:5672/vhost", "amqp://host:5672/vhost"),
            ("amqp://host/vhost", "amqp://host/vhost"),
            ("sqlite:stockade.db", "sqlite:stockade.db"),
            ("embedded", "embedded"),
            ("token", "***"),
            ("", ""),
        ] {
            assert_eq!(mask(text), shown);
            assert_eq!(format!("{:?}", Masked::new(text)), shown);
        }
    }

    #[test]
    fn what_is_masked_is_struck_from_any_text_as_written_and_as_meant() {
        Masked::new("amqp://someone:can%40ry-one@host/x?token=canary-two");
        Masked::new("canary-three-and-canary");
        Masked::new("canary-three");
        let said = "Login { password: \"can@ry-one\" } can%40ry-one canary-two canary-three-and-canary canary-three";
        assert_eq!(strike_from(said), "Login { password: \"***\" } *** *** *** ***");
        assert_eq!(strike_from("of stk_Zm9v-_x9, and stk_"), "of stk_***, and stk_***");
    }

    #[test]
    fn what_is_no_secret_stays_readable() {
        Masked::new("postgres://stockade:stockade@host/stockade");
        Masked::new("no");
        let said = "database \"stockade\" does not know you";
        assert_eq!(strike_from(said), said);
    }
}
