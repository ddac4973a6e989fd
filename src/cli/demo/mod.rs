//! `stockade demo`: the promises, seen to be kept. Each demo says what it does and what one should see, shows the
//! figures while they move, and ends with proofs; if one does not hold, the exit code is 3.
//!
//! A demo runs on the server given by `--url`, on a shelf of its own there, and leaves it as it was. Without that it
//! starts processes of this same binary in a place of their own, gone afterwards: a temporary SQLite file, or a schema
//! in the Postgres given. On a broker its queues have a prefix of their own, so that it takes no message of others.

mod backlog;
mod crash;
mod duplicates;
mod poison;
mod report;
mod server;
mod shop;
mod tell;

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use stockade::db::ScratchSchema;
use stockade::lifecycle::asked_to_stop;

use super::exit::Exit;
use super::scratch::Scratch;
use backlog::Backlog;
use crash::Crash;
use duplicates::Duplicates;
use poison::Poison;
use report::Report;
use server::{Recipe, Server};
use shop::{Look, Shop};

/// The queue that is a table in the database.
const EMBEDDED: &str = "embedded";

#[derive(Args)]
pub struct Demo {
    #[command(subcommand)]
    which: Which,
}

#[derive(Subcommand)]
enum Which {
    #[command(flatten)]
    One(One),
    /// All of these, one after the other.
    All(Place),
}

#[derive(Subcommand)]
enum One {
    /// Inventory rests while orders come in; when it is back it works off what waited, and nothing is lost.
    Backlog(Backlog),
    /// The same event is published again and again; its effect happens once. Needs the fault lab (`serve --demo`).
    Duplicates(Duplicates),
    /// Messages that nobody can read become dead letters with a reason, and hold nobody up. Needs the fault lab.
    Poison(Poison),
    /// The process dies between its commit and its acknowledgement, and comes back; nothing is lost or done twice.
    Crash(Crash),
}

/// Where a demo runs, and how it reports.
#[derive(Debug, Clone, Args)]
pub struct Place {
    /// A running server; without it the demo starts one of its own.
    #[arg(long, help_heading = "Where")]
    url: Option<String>,

    /// For a server of its own: `postgres://…`, where it keeps to a schema that is dropped at the end. Otherwise a
    /// temporary SQLite file.
    #[arg(long, env = "STOCKADE_DATABASE_URL", hide_env_values = true, help_heading = "Where")]
    database_url: Option<String>,

    /// For a server of its own: `embedded`, or `amqp://…`.
    #[arg(long, env = "STOCKADE_BROKER_URL", default_value = EMBEDDED, hide_env_values = true, help_heading = "Where")]
    broker_url: String,

    /// For a server of its own: what queue names begin with; `stockade-demo` on a broker.
    #[arg(long, help_heading = "Where")]
    queue_prefix: Option<String>,

    /// How long to wait while nothing moves.
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration)]
    patience: Duration,

    /// Print the figures as one JSON object.
    #[arg(long)]
    json: bool,
}

/// A demo: what it is about, and how it goes.
trait Play {
    const NAME: &str;
    const TITLE: &str;
    const ABOUT: &str;

    fn place(&self) -> &Place;

    /// Goes through the steps and adds to the report what they prove. An error breaks it off.
    async fn play(&self, stage: &mut Stage) -> anyhow::Result<()>;
}

impl Demo {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let reports = match self.which {
            Which::One(demo) => {
                let report = demo.perform().await?;
                report.print(demo.place().json)?;
                vec![report]
            }
            Which::All(place) => perform_all(place).await?,
        };
        let proven = reports.iter().all(Report::is_proven);
        Ok(if proven { Exit::Ok } else { Exit::Broken }.into())
    }
}

async fn perform_all(place: Place) -> anyhow::Result<Vec<Report>> {
    let mut demos = vec![
        One::Backlog(Backlog::usual(place.clone())),
        One::Duplicates(Duplicates::usual(place.clone())),
        One::Poison(Poison::usual(place.clone())),
    ];
    match place.url {
        None => demos.push(One::Crash(Crash::usual(place.clone()))),
        Some(_) => tell::note("Without the crash: the server at --url is not the demo's to kill.\n"),
    }
    let mut reports = Vec::new();
    for demo in demos {
        let report = demo.perform().await?;
        if !place.json {
            report.print(false)?;
            tell::gap();
        }
        reports.push(report);
    }
    if place.json {
        report::print_all(&reports)?;
    }
    Ok(reports)
}

impl One {
    fn place(&self) -> &Place {
        match self {
            Self::Backlog(backlog) => backlog.place(),
            Self::Duplicates(duplicates) => duplicates.place(),
            Self::Poison(poison) => poison.place(),
            Self::Crash(crash) => crash.place(),
        }
    }

    async fn perform(&self) -> anyhow::Result<Report> {
        match self {
            Self::Backlog(backlog) => perform(backlog).await,
            Self::Duplicates(duplicates) => perform(duplicates).await,
            Self::Poison(poison) => perform(poison).await,
            Self::Crash(crash) => perform(crash).await,
        }
    }
}

/// Plays a demo through. A promise that was seen broken is part of the report; anything else that goes wrong is an
/// error, since it proves nothing.
async fn perform<P: Play>(play: &P) -> anyhow::Result<Report> {
    let mut stage = Stage::new(P::NAME, play.place().clone());
    tell::title(P::TITLE, P::ABOUT);
    let ended = tokio::select! {
        // First, so that signals are listened for before anything starts that must be put right.
        biased;
        asked = asked_to_stop() => asked.map_err(Into::into).and(Err(Exit::Interrupted.because("interrupted"))),
        ended = play.play(&mut stage) => ended,
    };
    let ended = match ended {
        Err(error) if Exit::of(&error) == Exit::Broken => {
            stage.report.broke_off(error.to_string());
            Ok(())
        }
        ended => ended,
    };
    if !stage.report.is_proven() {
        stage.show_logs();
    }
    let report = stage.leave().await;
    ended.map(|()| report)
}

/// What a demo stands on: its servers and what they keep, and what must be put right when it ends, however it does.
struct Stage {
    report: Report,
    place: Place,
    steps: usize,
    servers: Vec<Server>,
    schema: Option<ScratchSchema>,
    scratch: Option<Scratch>,
    /// A consumer that rests on somebody else's server.
    to_resume: Option<(Shop, &'static str)>,
}

impl Stage {
    fn new(demo: &'static str, place: Place) -> Self {
        let report = Report::new(demo);
        Self { report, place, steps: 0, servers: Vec::new(), schema: None, scratch: None, to_resume: None }
    }

    /// Begins the next step; `look_for` is what one should see.
    fn step(&mut self, what: &str, look_for: &str) {
        self.steps += 1;
        tell::step(self.steps, what, look_for);
    }

    /// The server to play on: the one given, or one that is started now.
    async fn open(&mut self) -> anyhow::Result<Shop> {
        let Some(url) = self.place.url.clone() else {
            return self.open_own(&["all"], &[]).await;
        };
        self.step(&format!("Using the server at {url}"), "");
        let shop = Shop::new(&url, self.place.patience)?;
        self.introduce(&shop, false).await?;
        Ok(shop)
    }

    /// The same, where the demo needs the fault lab.
    async fn open_with_lab(&mut self) -> anyhow::Result<Shop> {
        let shop = self.open().await?;
        if !shop.has_lab().await? {
            anyhow::bail!(
                "the server at {} has no fault lab, which this demo needs: start it with `stockade serve --demo`, or \
                 leave --url out and the demo starts one of its own",
                shop.url()
            );
        }
        Ok(shop)
    }

    /// Servers of the demo's own, one per set of modules; the first is the one to talk to.
    async fn open_own(&mut self, processes: &[&str], flags: &[&str]) -> anyhow::Result<Shop> {
        self.step("Starting a server of its own", "");
        for modules in processes {
            let recipe = self.recipe(modules, flags).await?;
            self.servers.push(Server::start(recipe).await?);
        }
        let shop = Shop::new(&self.servers[0].url, self.place.patience)?;
        self.introduce(&shop, true).await?;
        self.check_alone(&shop).await?;
        Ok(shop)
    }

    /// How to start a process on the demo's own database and queues.
    async fn recipe(&mut self, modules: &str, flags: &[&str]) -> anyhow::Result<Recipe> {
        let folder = match &self.scratch {
            Some(scratch) => scratch,
            None => self.scratch.insert(Scratch::new("demo")?),
        };
        if self.schema.is_none()
            && let Some(url) = self.place.postgres()?
        {
            self.schema = Some(ScratchSchema::create(url, "stockade_demo").await?);
        }
        Ok(Recipe {
            database_url: match &self.schema {
                Some(schema) => schema.url(),
                None => format!("sqlite:{}", folder.path().join("demo.db").display()),
            },
            broker_url: self.place.broker_url.clone(),
            queue_prefix: self.place.own_queue_prefix(),
            modules: modules.to_owned(),
            flags: flags.iter().map(|&flag| flag.to_owned()).collect(),
            log: folder.path().join(format!("server-{}.log", self.servers.len())),
        })
    }

    /// Says what a server runs on, once both its engines are up.
    async fn introduce(&mut self, shop: &Shop, own: bool) -> anyhow::Result<()> {
        let health = shop
            .until("the database and the broker", async || {
                let health = shop.health().await?;
                let up = health.database.status == "up" && health.broker.status == "up";
                Ok(if up { Look::There(health) } else { Look::NotYet(0) })
            })
            .await
            .map_err(|error| match Exit::of(&error) {
                Exit::Broken => Exit::Unavailable.because(error.to_string()),
                _ => error,
            })?;
        let (database, broker) = (health.database.kind, health.broker.kind);
        let place = match &self.schema {
            Some(schema) => format!(", in a schema of its own ({})", schema.name()),
            None if own => ", in a temporary file".to_owned(),
            None => String::new(),
        };
        tell::note(&format!("{}, database {database}{place}, queue {broker}", shop.url()));
        for (name, value) in [("url", shop.url()), ("database", &database), ("broker", &broker)] {
            self.report.server(name, value);
        }
        self.report.server("own", own);
        Ok(())
    }

    /// Others on the same queues would take the demo's messages, and what is left in them is worked off first.
    async fn check_alone(&self, shop: &Shop) -> anyhow::Result<()> {
        let queue = shop.queue("inventory").await?;
        if queue.consumers.unwrap_or(0) > 1 {
            let prefix = self.place.own_queue_prefix();
            return Err(Exit::Conflict.because(format!(
                "somebody else consumes from {}; give another --queue-prefix than {prefix}",
                queue.name
            )));
        }
        shop.until("what was left in the queue to be worked off", async || {
            let left = shop.queue("inventory").await?.waiting();
            Ok(if left == 0 { Look::There(()) } else { Look::NotYet(left) })
        })
        .await
    }

    /// What its own servers had to say, for when something went wrong.
    fn show_logs(&self) {
        for tail in self.servers.iter().map(Server::log_tail).filter(|tail| !tail.is_empty()) {
            tell::note(&format!("\nThe server's log ends with:\n{tail}"));
        }
    }

    /// Puts everything back as it was.
    async fn leave(mut self) -> Report {
        if let Some((shop, consumer)) = self.to_resume.take()
            && let Err(error) = shop.resume(consumer).await
        {
            tell::note(&format!("{consumer} is still paused at {}: {error:#}", shop.url()));
        }
        for mut server in self.servers.drain(..) {
            if let Err(error) = server.stop().await {
                tell::note(&format!("a server could not be stopped: {error:#}"));
            }
        }
        if let Some(schema) = self.schema.take()
            && let Err(error) = schema.remove().await
        {
            tell::note(&format!("{error:#}"));
        }
        self.report
    }
}

impl Place {
    /// The Postgres for a server of its own, if one was given.
    fn postgres(&self) -> anyhow::Result<Option<&str>> {
        match self.database_url.as_deref() {
            Some(url) if url.starts_with("postgres://") || url.starts_with("postgresql://") => Ok(Some(url)),
            Some(url) if !url.starts_with("sqlite:") => {
                Err(Exit::Usage.because("--database-url must start with postgres:// or sqlite:"))
            }
            // A demo never writes into a file that is somebody's.
            _ => Ok(None),
        }
    }

    fn own_queue_prefix(&self) -> String {
        let usual = if self.broker_url == EMBEDDED { "stockade" } else { "stockade-demo" };
        self.queue_prefix.clone().unwrap_or_else(|| usual.to_owned())
    }
}
