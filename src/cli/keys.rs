//! `stockade key`: makes keys, lists and revokes them, on a running server; or makes one for the settings, offline.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use stockade::access::{EVERY_GROUP, Role, Secret, check_name};

use super::exit::Exit;
use super::remote::{Remote, segment};
use super::table::{facts, table};

#[derive(Args)]
pub struct Keys {
    #[command(subcommand)]
    verb: Verb,
    #[command(flatten)]
    remote: Remote,
}

#[derive(Subcommand)]
enum Verb {
    /// Make a key and print it, the only time that it is shown.
    New(New),
    /// List the keys that were made on the server, the revoked ones too.
    List,
    /// Revoke a key: it stops working at once, and its sessions with it.
    Revoke {
        id: String,
        /// For whoever looks later.
        #[arg(long)]
        reason: Option<String>,
    },
}

#[derive(Args)]
struct New {
    #[arg(long, value_enum)]
    role: Role,

    /// The group it is bound to; `*` is every group.
    #[arg(long)]
    group: String,

    /// Put on whatever is written with it.
    #[arg(long)]
    subsidiary: Option<String>,

    /// For people, and for the record of who did what.
    #[arg(long)]
    name: Option<String>,

    /// For how long it is good, as 90d; for ever if not given.
    #[arg(long, value_parser = humantime::parse_duration)]
    expires: Option<Duration>,

    /// Ask no server: print the key, and its entry for STOCKADE_API_KEYS.
    #[arg(long, conflicts_with = "expires")]
    offline: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct Key {
    id: String,
    name: String,
    role: String,
    group_id: String,
    subsidiary_id: Option<String>,
    created_by: String,
    created_at: String,
    expires_at: Option<String>,
    revoked_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
}

impl Keys {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let remote = self.remote;
        match self.verb {
            Verb::New(new) if new.offline => new.print_entry(&remote)?,
            Verb::New(new) => {
                let made: Key = remote.client()?.post("/v1/keys", &new.body()).await?;
                remote.answer(&made, |made| format!("{}\n", made.key.as_deref().unwrap_or_default()))?;
                eprintln!("This is the only time that the key is shown: {} of {}.", made.role, made.group_id);
            }
            Verb::List => remote.answer(&remote.client()?.list::<Key>("/v1/keys").await?, |keys| list(keys))?,
            Verb::Revoke { id, reason } => {
                let path = format!("/v1/keys/{}/revoke", segment(&id));
                let revoked: Key = remote.client()?.post(&path, &json!({ "reason": reason })).await?;
                remote.answer(&revoked, show)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl New {
    fn body(&self) -> Value {
        json!({
            "role": self.role,
            "group_id": self.group,
            "subsidiary_id": self.subsidiary,
            "name": self.name.clone().unwrap_or_else(|| format!("{}-key", self.role.as_str())),
            "expires_in_seconds": self.expires.map(|expires| expires.as_secs()),
        })
    }

    fn print_entry(&self, remote: &Remote) -> anyhow::Result<()> {
        let usage = |why| Exit::Usage.because(why);
        if self.group != EVERY_GROUP {
            check_name("a group", &self.group).map_err(usage)?;
        }
        let mut group = self.group.clone();
        if let Some(subsidiary) = &self.subsidiary {
            group = format!("{group}/{}", check_name("a subsidiary", subsidiary).map_err(usage)?);
        }
        let secret = Secret::random();
        let mut entry = format!("{}:{group}:{}", self.role.as_str(), secret.hash());
        if let Some(name) = &self.name {
            entry.push_str(&format!(":{}", check_name("a name", name).map_err(usage)?));
        }
        let made = json!({ "key": secret.reveal(), "entry": entry });
        remote.answer(&made, |_| format!("{}\n", secret.reveal()))?;
        eprintln!("Its entry for STOCKADE_API_KEYS, or a line of STOCKADE_API_KEYS_FILE:\n{entry}");
        Ok(())
    }
}

fn list(keys: &[Key]) -> String {
    let row = |key: &Key| {
        let state = match (&key.revoked_at, &key.expires_at) {
            (Some(at), _) => format!("revoked {at}"),
            (None, Some(at)) => format!("until {at}"),
            (None, None) => "good".to_owned(),
        };
        [key.id.clone(), key.name.clone(), key.role.clone(), group(key), state, key.created_by.clone()]
    };
    table(["ID", "NAME", "ROLE", "GROUP", "STATE", "MADE BY"], keys.iter().map(row))
}

fn group(key: &Key) -> String {
    match &key.subsidiary_id {
        Some(subsidiary) => format!("{}/{subsidiary}", key.group_id),
        None => key.group_id.clone(),
    }
}

fn show(key: &Key) -> String {
    facts(&[
        ("id", key.id.clone()),
        ("name", key.name.clone()),
        ("role", key.role.clone()),
        ("group", group(key)),
        ("revoked", key.revoked_at.clone().unwrap_or_else(|| "no".to_owned())),
    ])
}
