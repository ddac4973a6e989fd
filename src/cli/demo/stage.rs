//! What a demo stands on: its servers, what they keep, and what must be put right when it ends, however it does.

use stockade_kernel::db::ScratchSchema;

use super::report::Report;
use super::server::{Recipe, Server};
use super::shop::{Health, Look, Queue, Shop};
use super::{EMBEDDED, Place, tell};
use crate::cli::exit::Exit;
use crate::cli::scratch::Scratch;

pub struct Stage {
    pub report: Report,
    place: Place,
    steps: usize,
    pub servers: Vec<Server>,
    schema: Option<ScratchSchema>,
    scratch: Option<Scratch>,
    /// A consumer that rests on somebody else's server.
    pub to_resume: Option<(Shop, &'static str)>,
}

impl Stage {
    pub fn new(demo: &'static str, place: Place) -> Self {
        let report = Report::new(demo);
        Self { report, place, steps: 0, servers: Vec::new(), schema: None, scratch: None, to_resume: None }
    }

    /// Begins the next step; `look_for` is what one should see.
    pub fn step(&mut self, what: &str, look_for: &str) {
        self.steps += 1;
        tell::step(self.steps, what, look_for);
    }

    /// The server to play on: the one given, or one that is started now.
    pub async fn open(&mut self) -> anyhow::Result<Shop> {
        let Some(url) = self.place.url.clone() else {
            return self.open_own(&["all"], &[]).await;
        };
        self.step(&format!("Using the server at {url}"), "");
        let shop = Shop::enter(&url, &self.place.credential, self.place.patience).await?;
        self.introduce(&shop, false).await?;
        Ok(shop)
    }

    /// The same, where the demo needs the fault lab.
    pub async fn open_with_lab(&mut self) -> anyhow::Result<Shop> {
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
    pub async fn open_own(&mut self, processes: &[&str], flags: &[&str]) -> anyhow::Result<Shop> {
        self.step("Starting a server of its own", "");
        if self.place.broker_url != EMBEDDED {
            self.check_unused().await?;
        }
        for modules in processes {
            let recipe = self.recipe(modules, flags).await?;
            self.servers.push(Server::start(recipe).await?);
        }
        let shop = Shop::own(&self.servers[0].url, self.place.patience)?;
        self.introduce(&shop, true).await?;
        self.work_off(&shop).await?;
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
            // Noted before it is made, so that it is dropped even if the demo is interrupted in between.
            let created = self.schema.insert(ScratchSchema::new(url, "stockade_demo")).create().await;
            created.inspect_err(|_| self.schema = None)?;
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
        let health = until_up(shop).await?;
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

    /// Whoever else is on the queues would take the demo's messages, and it theirs: looks before it takes any, by a
    /// process that consumes nothing.
    async fn check_unused(&mut self) -> anyhow::Result<()> {
        let recipe = self.recipe("api", &[]).await?;
        self.servers.push(Server::start(recipe).await?);
        let shop = Shop::own(&self.servers[0].url, self.place.patience)?;
        until_up(&shop).await?;
        if let Some(queue) = shop.queues().await?.iter().find(|queue| queue.consumers > Some(0)) {
            return Err(Exit::Conflict.because(format!(
                "somebody else consumes from {}, perhaps another demo; give another --queue-prefix than {}",
                queue.name,
                self.place.own_queue_prefix()
            )));
        }
        self.servers.remove(0).stop().await
    }

    /// Lets what a demo that was killed has left in the queues be worked off.
    async fn work_off(&self, shop: &Shop) -> anyhow::Result<()> {
        shop.until("what was left in the queues to be worked off", async || {
            let left = shop.queues().await?.iter().map(Queue::waiting).sum();
            Ok(if left == 0 { Look::There(()) } else { Look::NotYet(left) })
        })
        .await
    }

    /// What its own servers had to say, for when something went wrong.
    pub fn show_logs(&self) {
        for tail in self.servers.iter().map(Server::log_tail).filter(|tail| !tail.is_empty()) {
            tell::note(&format!("\nThe server's log ends with:\n{tail}"));
        }
    }

    /// Puts everything back as it was.
    pub async fn leave(mut self) -> Report {
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

/// Waits until both engines under a server are up.
async fn until_up(shop: &Shop) -> anyhow::Result<Health> {
    let up = shop.until("the database and the broker to be up", async || {
        let health = shop.health().await?;
        let up = health.database.status == "up" && health.broker.status == "up";
        Ok(if up { Look::There(health) } else { Look::NotYet(0) })
    });
    up.await.map_err(|error| match Exit::of(&error) {
        // Nothing was seen broken: there was nothing to see.
        Exit::Broken => Exit::Unavailable.because(error.to_string()),
        _ => error,
    })
}
