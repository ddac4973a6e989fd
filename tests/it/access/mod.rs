//! Keys and roles, sessions, and the walls between tenants.

mod isolation;
mod keys;
mod sessions;

use stockade::access::Secret;

/// A server's keys: the secrets to present and the entries for its settings.
struct Keyed {
    entries: Vec<String>,
}

impl Keyed {
    fn new() -> Self {
        Self { entries: Vec::new() }
    }

    /// Makes a key; returns its secret.
    fn key(&mut self, role: &str, group: &str) -> String {
        let secret = Secret::random();
        self.entries.push(format!("{role}:{group}:{}:{role}-key", secret.hash()));
        secret.reveal().to_owned()
    }

    fn setting(&self) -> String {
        self.entries.join(",")
    }
}
