//! A server within the test.

use std::ops::Deref;

use clap::Parser;
use stockade::app::{Builder, Running};
use stockade::config::Settings;

use super::{Api, CONNECTIONS_MAX, TestDb};

pub struct App {
    api: Api,
    pub running: Running,
}

/// Settings as the command line would give them.
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    settings: Settings,
}

pub fn settings(db: &TestDb, more: &[&str]) -> Settings {
    let connections = CONNECTIONS_MAX.to_string();
    let mut args = vec!["--listen", "127.0.0.1:0", "--database-url", &db.url, "--db-max-connections", &connections];
    let wire = db.wire.flags(more);
    args.extend(wire.iter().map(String::as_str));
    args.extend(more);
    settings_from(args)
}

pub fn settings_from<'a>(args: impl IntoIterator<Item = &'a str>) -> Settings {
    Cli::parse_from(["test"].into_iter().chain(args)).settings
}

impl App {
    pub async fn start(db: &TestDb) -> Self {
        Self::start_with(db, &[]).await
    }

    /// With more flags, as for `stockade serve --demo`.
    pub async fn start_with(db: &TestDb, flags: &[&str]) -> Self {
        let builder = Builder::new(settings(db, flags)).demo(true);
        Self::start_built(builder).await
    }

    pub async fn start_built(builder: Builder) -> Self {
        let running = builder.start().await.unwrap();
        Self { api: Api::new(format!("http://{}", running.address)), running }
    }

    pub async fn stop(self) {
        drop(self.api);
        assert!(self.running.stop().await, "a clean stop");
    }
}

impl Deref for App {
    type Target = Api;

    fn deref(&self) -> &Api {
        &self.api
    }
}
