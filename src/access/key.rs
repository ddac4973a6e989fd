//! A key: its secret, which only its holder has, and what is kept of it.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rand::RngExt;
use sha2::{Digest, Sha256};

use super::Role;
use stockade_kernel::clock::Timestamp;
use stockade_kernel::secrets::KEY_PREFIX;

/// What a key is bound to that is bound to no one group.
pub const EVERY_GROUP: &str = "*";
const NAME_CHARS_MAX: usize = 64;
const SECRET_BYTES: usize = 32;

/// What the holder of a key presents. It prints as nothing at all: only [`Secret::reveal`] shows it.
#[derive(Clone)]
pub struct Secret(String);

impl Secret {
    /// 256 bits from the operating system's generator.
    pub fn random() -> Self {
        let bits: [u8; SECRET_BYTES] = rand::rng().random();
        Self(format!("{KEY_PREFIX}{}", URL_SAFE_NO_PAD.encode(bits)))
    }

    /// Does a text look like one? If not, nobody needs to be asked whose it is.
    pub fn may_be(text: &str) -> bool {
        let encoded = text.strip_prefix(KEY_PREFIX);
        encoded.and_then(|encoded| URL_SAFE_NO_PAD.decode(encoded).ok()).is_some_and(|bits| bits.len() == SECRET_BYTES)
    }

    pub fn reveal(&self) -> &str {
        &self.0
    }

    pub fn hash(&self) -> Hash {
        Hash::of(&self.0)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// The SHA-256 of a secret. Secrets are random, so nothing slower is needed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Hash(pub [u8; 32]);

impl Hash {
    pub fn of(secret: &str) -> Self {
        Self(Sha256::digest(secret).into())
    }

    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    fn read(hex: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        if hex.len() != 64 || !hex.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        for (byte, digits) in bytes.iter_mut().zip(0..) {
            *byte = u8::from_str_radix(hex.get(digits * 2..digits * 2 + 2)?, 16).ok()?;
        }
        Some(Self(bytes))
    }

    pub(super) fn prefix(&self) -> [u8; 8] {
        let mut prefix = [0; 8];
        prefix.copy_from_slice(&self.0[..8]);
        prefix
    }
}

/// In hexadecimal, as the settings have it.
impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hash(…)")
    }
}

/// What is known of a key.
#[derive(Debug, Clone)]
pub struct Key {
    /// For people and the record of who did what.
    pub name: String,
    pub role: Role,
    /// A group, or [`EVERY_GROUP`].
    pub group: String,
    pub subsidiary: Option<String>,
    pub hash: Hash,
    pub expires_at: Option<Timestamp>,
}

impl Key {
    pub fn is_for_every_group(&self) -> bool {
        self.group == EVERY_GROUP
    }

    /// May it do everything, making keys included?
    pub fn is_for_everything(&self) -> bool {
        self.is_for_every_group() && self.role == Role::Admin
    }

    /// `role:group[/subsidiary]:hash[:name]`
    fn read(line: &str) -> Result<Self, String> {
        let mut parts = line.splitn(4, ':');
        let (role, group) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let hash = parts.next().and_then(Hash::read).ok_or("the third part must be a SHA-256 in hexadecimal")?;
        let role = Role::read(role).ok_or("the first part must be viewer, client, operator or admin")?;
        let (group, subsidiary) = match group.split_once('/') {
            Some((group, subsidiary)) => (group, Some(check_name("a subsidiary", subsidiary)?.to_owned())),
            None => (group, None),
        };
        if group != EVERY_GROUP {
            check_name("a group", group)?;
        } else if subsidiary.is_some() {
            return Err("a key for every group has no subsidiary".to_owned());
        }
        let name = match parts.next() {
            Some(name) => check_name("a name", name)?.to_owned(),
            None => format!("key-{}", &hash.to_string()[..8]),
        };
        Ok(Self { name, role, group: group.to_owned(), subsidiary, hash, expires_at: None })
    }
}

/// Names of keys, groups and subsidiaries are safe in headers, in paths and on a terminal.
pub fn check_name<'a>(what: &str, name: &'a str) -> Result<&'a str, String> {
    let safe = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.@".contains(&byte);
    match (1..=NAME_CHARS_MAX).contains(&name.len()) && name.bytes().all(safe) {
        true => Ok(name),
        false => Err(format!("{what} has 1 to {NAME_CHARS_MAX} of the letters, digits and - _ . @")),
    }
}

/// Reads `role:group:sha256` entries, apart by commas, spaces or lines; what follows a `#` on a line is a comment. An
/// error says which entry is wrong and never quotes it: somebody may have put the key itself there.
pub fn read_keys(text: &str) -> Result<Vec<Key>, String> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default());
    let entries = lines.flat_map(|line| line.split([',', ' ', '\t', '\r'])).filter(|entry| !entry.is_empty());
    entries
        .enumerate()
        .map(|(index, entry)| Key::read(entry).map_err(|error| format!("entry {}: {error}", index + 1)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_long_random_and_do_not_print() {
        let (one, other) = (Secret::random(), Secret::random());
        assert_eq!(one.reveal().len(), KEY_PREFIX.len() + 43, "256 bits");
        assert_ne!(one.reveal(), other.reveal());
        assert!(!format!("{one:?}").contains(&one.reveal()[4..]));
        assert_eq!(one.hash(), Hash::of(one.reveal()));
    }

    #[test]
    fn entries_are_apart_by_anything_and_may_have_comments() {
        let hash = Secret::random().hash().to_string();
        let text =
            format!("viewer:*:{hash}, client:acme/north:{hash}:till-1\n# nobody\n admin:acme:{hash} # the boss\n");
        let keys = read_keys(&text).unwrap();
        let seen: Vec<_> =
            keys.iter().map(|key| (key.role.as_str(), key.group.as_str(), key.subsidiary.as_deref())).collect();
        assert_eq!(seen, [("viewer", "*", None), ("client", "acme", Some("north")), ("admin", "acme", None)]);
        assert_eq!(keys[1].name, "till-1");
        assert!(hash.starts_with(keys[0].name.strip_prefix("key-").unwrap()));
        assert!(read_keys(" \n#\n").unwrap().is_empty());
    }

    #[test]
    fn a_wrong_entry_is_told_and_not_quoted() {
        let secret = Secret::random();
        let good = secret.hash().to_string();
        for wrong in [
            secret.reveal().to_owned(),
            format!("client:acme:{}", secret.reveal()),
            format!("boss:acme:{good}"),
            format!("client::{good}"),
            format!("client:a\u{1b}b:{good}"),
            format!("client:*/north:{good}"),
            format!("client:acme:{}", &good[1..]),
            format!("client:acme:{good}:"),
            format!("client:acme:{}é", &good[..62]),
        ] {
            let error = read_keys(&wrong).unwrap_err();
            assert!(error.starts_with("entry 1: "), "{error}");
            assert!(!error.contains(&secret.reveal()[4..]) && !error.contains(&good[1..]), "{error}");
        }
    }
}
