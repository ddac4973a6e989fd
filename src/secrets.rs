//! Secrets among the settings: they show themselves masked, may come from a file, and are struck out of whatever a panic
//! or a failed start has to say.
//!
//! A panic says what somebody formatted into it, and a library may format a connection with its password. So every
//! secret is remembered as its setting is read, and looked for in such texts. What callers present is not known
//! beforehand; keys and sessions of ours are known by how they begin.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{PoisonError, RwLock};

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, value_parser};
use percent_encoding::percent_decode_str;

/// What keys and sessions begin with, so that people and scanners know one when they see it.
pub const KEY_PREFIX: &str = "stk_";
const MASK: &str = "***";
/// What is under it in the manual was put there by [`with_files`].
const FILES_HEADING: &str = "Secrets from files";
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

/// Gives every setting that holds a secret a twin that names a file: `--x-file` and `X_FILE` beside `--x` and `X`.
pub fn with_files(command: Command) -> Command {
    let secrets = command.get_arguments().filter(|arg| holds_a_secret(arg)).map(|arg| {
        let name = arg.get_env().unwrap_or_default().to_string_lossy();
        let long = arg.get_long().unwrap_or_default();
        Arg::new(file_id(arg.get_id().as_str()))
            .long(format!("{long}-file"))
            .env(format!("{name}_FILE"))
            .value_name("PATH")
            .value_parser(value_parser!(PathBuf))
            .help(format!("A file that holds what --{long} would say"))
            .help_heading(FILES_HEADING)
    });
    let files: Vec<Arg> =
        secrets.filter(|file| command.get_arguments().all(|arg| arg.get_id() != file.get_id())).collect();
    command.args(files)
}

/// What `--help` does not show from the environment is what nobody should see anywhere.
pub fn holds_a_secret(arg: &Arg) -> bool {
    arg.is_hide_env_values_set()
}

/// What the file of a setting says, if it has one that counts: flags over environment, as ever; on the same level the
/// setting and its file exclude each other.
pub fn from_file(matches: &ArgMatches, command: &Command, id: &str) -> Result<Option<Masked>, clap::Error> {
    let file = file_id(id);
    let find = |id: &str| command.get_arguments().find(|arg| arg.get_id() == id);
    if find(&file).and_then(Arg::get_help_heading) != Some(FILES_HEADING) {
        return Ok(None);
    }
    let Some(path) = matches.get_one::<PathBuf>(&file) else { return Ok(None) };
    let name = |id: &str, source| {
        let arg = find(id);
        let name = match source {
            ValueSource::CommandLine => arg.and_then(Arg::get_long).map(|long| format!("--{long}")),
            _ => arg.and_then(Arg::get_env).map(|env| env.to_string_lossy().into_owned()),
        };
        name.unwrap_or_else(|| id.to_owned())
    };
    let source = matches.value_source(&file).unwrap_or(ValueSource::DefaultValue);
    let refuse = |why: String| clap::Error::raw(ErrorKind::ValueValidation, format!("{why}\n"));
    match matches.value_source(id) {
        Some(ValueSource::CommandLine) if source == ValueSource::EnvVariable => return Ok(None),
        Some(given) if given == source => {
            let (value, file) = (name(id, given), name(&file, source));
            return Err(refuse(format!("{value} and {file} are both given: leave one of them out")));
        }
        _ => {}
    }
    let name = name(&file, source);
    let text = std::fs::read_to_string(path)
        .map_err(|error| refuse(format!("{name}: cannot read {}: {error}", path.display())))?;
    // Editors and `echo` end the last line.
    match text.trim_end_matches(['\r', '\n']) {
        "" => Err(refuse(format!("{name}: {} is empty", path.display()))),
        text => Ok(Some(Masked::new(text))),
    }
}

fn file_id(id: &str) -> String {
    format!("{id}_file")
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
