//! Who may do what: keys with a role, bound to one group or to all of them.
//!
//! A key is 256 random bits, shown once and kept as its SHA-256 hash: whoever reads the settings or the table learns
//! no key. Keys come from the settings, from a file and from a table; the table is followed, so a key that is revoked
//! stops working on every instance within two seconds. While the database is away the last known keys stand.
//!
//! Without any key a server is open, and only on a loopback address (or where the operator says that something else
//! guards it). It never opens by itself: a table that once held a key keeps the server closed.

mod key;
pub mod sessions;
pub mod store;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;
use tokio::sync::watch;

pub use key::{EVERY_GROUP, Hash, Key, Secret, check_name, read_keys};

use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::Db;

/// Rung when a key is made or revoked.
pub const BELL: &str = "keys";
/// Other instances follow within two of these even if every wake-up is lost.
const REREAD_EVERY: Duration = Duration::from_secs(1);

/// What a key may do. A client acts for customers, an operator on what happens behind; neither may do the other's
/// work, and an admin may do both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Reads.
    Viewer,
    /// Also places, pays, cancels and fulfils orders.
    Client,
    /// Reads; adjusts stock, redrives and discards; over all groups also pauses and replays.
    Operator,
    /// Everything, and keys.
    Admin,
}

impl Role {
    pub const ALL: [Self; 4] = [Self::Viewer, Self::Client, Self::Operator, Self::Admin];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Client => "client",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }

    pub fn read(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.as_str() == text)
    }

    /// May whoever holds this role do what `needed` may?
    pub fn includes(self, needed: Self) -> bool {
        self == needed || self == Self::Admin || needed == Self::Viewer
    }
}

/// All keys as last known, by the first bytes of their hashes.
#[derive(Debug, Default)]
struct Ring {
    keys: HashMap<[u8; 8], Vec<Arc<Key>>>,
    /// Has there ever been a key?
    closed: bool,
}

impl Ring {
    fn new(configured: &[Arc<Key>], table: store::Table) -> Self {
        let mut ring = Self { keys: HashMap::new(), closed: !configured.is_empty() || table.ever_held_a_key };
        for key in configured.iter().cloned().chain(table.keys.into_iter().map(Arc::new)) {
            ring.keys.entry(key.hash.prefix()).or_default().push(key);
        }
        ring
    }

    /// Finds a key by its hash; how long that takes tells nothing of how much of it was right.
    fn find(&self, hash: &Hash) -> Option<Arc<Key>> {
        let alike = self.keys.get(&hash.prefix())?;
        alike.iter().find(|key| bool::from(key.hash.0.ct_eq(&hash.0))).cloned()
    }
}

/// The keys that are good now, followed as they change.
#[derive(Clone)]
pub struct Keys {
    db: Db,
    configured: Arc<[Arc<Key>]>,
    /// May it be open while there is no key?
    may_open: bool,
    ring: watch::Sender<Arc<Ring>>,
}

impl Keys {
    /// `configured`: the keys of the settings. `may_open`: what to do while there are no keys at all.
    pub async fn load(db: Db, configured: Vec<Key>, may_open: bool) -> sqlx::Result<Self> {
        let configured: Arc<[Arc<Key>]> = configured.into_iter().map(Arc::new).collect();
        let keys = Self { db, configured, may_open, ring: watch::Sender::default() };
        let table = store::load(&mut keys.db.read().await?).await?;
        keys.ring.send_replace(Arc::new(Ring::new(&keys.configured, table)));
        Ok(keys)
    }

    /// Is there any key, or was there one?
    pub fn exist(&self) -> bool {
        self.ring.borrow().closed
    }

    /// May anybody do anything?
    pub fn is_open(&self) -> bool {
        self.may_open && !self.exist()
    }

    /// The key of this hash, if it is still good.
    pub fn find(&self, hash: &Hash) -> Option<Arc<Key>> {
        let now = self.db.clock().now();
        let found = self.ring.borrow().find(hash);
        found.filter(|key| key.expires_at.is_none_or(|end| now < end))
    }

    /// Does a key of the settings let somebody manage all keys?
    pub fn configure_an_admin(&self) -> bool {
        self.configured.iter().any(|key| key.is_for_everything() && key.expires_at.is_none())
    }

    pub fn configured(&self) -> &[Arc<Key>] {
        &self.configured
    }

    pub fn now(&self) -> Timestamp {
        self.db.clock().now()
    }

    pub fn db(&self) -> &Db {
        &self.db
    }

    /// Follows the table until cancelled.
    pub async fn follow(self) {
        let mut bell = self.db.wakes().bell(BELL);
        loop {
            tokio::select! {
                () = bell.rung() => {}
                () = tokio::time::sleep(REREAD_EVERY) => {}
            }
            self.reread().await;
        }
    }

    /// Looks at the table now.
    pub async fn reread(&self) {
        let read = async { store::load(&mut self.db.read().await?).await };
        if let Ok(table) = read.await {
            self.ring.send_replace(Arc::new(Ring::new(&self.configured, table)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_and_an_operator_are_both_viewers_and_neither_is_the_other() {
        let may = |role: Role| Role::ALL.map(|needed| role.includes(needed));
        assert_eq!(may(Role::Viewer), [true, false, false, false]);
        assert_eq!(may(Role::Client), [true, true, false, false]);
        assert_eq!(may(Role::Operator), [true, false, true, false]);
        assert_eq!(may(Role::Admin), [true, true, true, true]);
    }

    #[test]
    fn a_ring_finds_a_key_by_its_whole_hash_alone() {
        let secret = Secret::random();
        let line = format!("client:acme:{}", secret.hash());
        let keys: Vec<Arc<Key>> = read_keys(&line).unwrap().into_iter().map(Arc::new).collect();
        let ring = Ring::new(&keys, store::Table::default());
        assert_eq!(ring.find(&secret.hash()).unwrap().group, "acme");
        let mut near = secret.hash();
        near.0[31] ^= 1;
        assert!(ring.find(&near).is_none(), "the same prefix is not enough");
        assert!(ring.find(&Secret::random().hash()).is_none());
        assert!(ring.closed && !Ring::new(&[], store::Table::default()).closed);
        let revoked = store::Table { keys: Vec::new(), ever_held_a_key: true };
        assert!(Ring::new(&[], revoked).closed, "a server never opens by itself");
    }
}
