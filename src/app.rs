//! The composition root: the only file that knows everything.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use axum::routing::any;
use futures_util::future::BoxFuture;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use utoipa::openapi::OpenApi;
use utoipa_axum::router::OpenApiRouter;

use crate::access::{Keys, sessions};
use crate::config::{NotifyChannel, Part, Settings};
use crate::http::caller::DEFAULT_GROUP;
use crate::http::guard::Guard;
use crate::http::live::{self, Live, Section};
use crate::http::probes::{self, Probes};
use crate::http::problem::Problem;
use crate::http::serve::{listen, serve};
use crate::http::session::{self, Sessions};
use crate::inventory::reactions::Inventory;
use crate::inventory::service::Change;
use crate::ledger::reactions::Ledger;
use crate::lifecycle::{Lifecycle, Stage};
use crate::notifications::channels::{Channel, Smtp, Webhook};
use crate::notifications::reactions::Notifications;
use crate::numbers::Numbers;
use crate::operations::audit::{self, Audits, Grace, Queues, Report};
use crate::operations::metrics::{ProcessedRows, Scrape};
use crate::operations::{self, Operations, lab};
use crate::orders::desk::{self, Clerk, Desk};
use crate::orders::expiry::{self, Expiry};
use crate::orders::http::OrdersApi;
use crate::orders::reactions::Orders;
use crate::{http, inventory, ledger, notifications, orders};
use stockade_kernel::clock::{Clock, mint_id};
use stockade_kernel::db::Db;
use stockade_kernel::messaging::brim::Brim;
use stockade_kernel::messaging::consumer::{Consumer, read_delivery};
use stockade_kernel::messaging::faults::Faults;
use stockade_kernel::messaging::health::Health;
use stockade_kernel::messaging::instances;
use stockade_kernel::messaging::office::{Office, Sender};
use stockade_kernel::messaging::pause::Pauses;
use stockade_kernel::messaging::relay::Relay;
use stockade_kernel::messaging::resync::{self, Resyncs};
use stockade_kernel::messaging::retention::{self, Retention, Sweep};
use stockade_kernel::messaging::transport::rabbit::{self, Rabbit};
use stockade_kernel::messaging::transport::table::TableQueue;
use stockade_kernel::messaging::transport::{Binding, Topology, Transport};
use stockade_kernel::messaging::{Kernel, Origin, Reaction, jobs};

/// What is on the shelves of a fresh embedded store.
const DEMO_STOCK: [(&str, i64); 4] = [("WIDGET-A", 100), ("WIDGET-B", 50), ("WIDGET-C", 25), ("GADGET-X", 10)];

/// Loops that share the names of consumers, in health and where consumers are paused.
const RESERVED_NAMES: [&str; 6] = ["relay", "dead-letters", jobs::NAME, retention::NAME, expiry::NAME, desk::NAME];

/// Puts an application together: the built-in modules, and any of your own.
pub struct Builder {
    settings: Settings,
    demo: bool,
    alone: bool,
    clock: Clock,
    /// Beside the built-in ones.
    members: Vec<Member>,
    schemas: Vec<&'static str>,
    routes: Vec<Box<dyn FnOnce(&Db) -> OpenApiRouter + Send>>,
}

/// A module as the composition root sees it: its queue, its gate, and its consumer to run.
struct Member {
    consumer: &'static str,
    keys: &'static [&'static str],
    check: Sender,
    runs_here: bool,
    start: Box<dyn FnOnce(Kernel, CancellationToken) -> BoxFuture<'static, ()> + Send>,
}

impl Member {
    fn of<R: Reaction>(reaction: R, runs_here: bool) -> Self {
        Self {
            consumer: R::NAME,
            keys: R::KEYS,
            check: Sender {
                consumer: R::NAME,
                check: |delivery, bytes_max| read_delivery::<R>(delivery, bytes_max).map(drop),
            },
            runs_here,
            start: Box::new(|kernel, stop| Box::pin(Consumer::new(kernel, reaction).run(stop))),
        }
    }
}

impl Builder {
    pub fn new(settings: Settings) -> Self {
        let (schemas, routes) = (Vec::new(), Vec::new());
        Self { settings, demo: false, alone: false, clock: Clock::System, members: Vec::new(), schemas, routes }
    }

    /// Adds a module: its queue is declared, its consumer run, its dead letters filed.
    #[must_use]
    pub fn with(mut self, reaction: impl Reaction) -> Self {
        self.members.push(Member::of(reaction, true));
        self
    }

    /// Adds tables, created before anything runs. `sql` is run at each start and must leave what is there alone
    /// (`CREATE TABLE IF NOT EXISTS`).
    #[must_use]
    pub fn with_schema(mut self, sql: &'static str) -> Self {
        self.schemas.push(sql);
        self
    }

    /// Adds routes, made once the database is open.
    #[must_use]
    pub fn with_routes(mut self, routes: impl FnOnce(&Db) -> OpenApiRouter + Send + 'static) -> Self {
        self.routes.push(Box::new(routes));
        self
    }

    /// Opens the fault lab, on a loopback address only.
    #[must_use]
    pub fn demo(mut self, demo: bool) -> Self {
        self.demo = demo;
        self
    }

    /// Declares no queue of a module that does not run here: no other process is going to empty it.
    #[must_use]
    pub fn alone(mut self, alone: bool) -> Self {
        self.alone = alone;
        self
    }

    /// Opens the database, declares the topology and starts every task; returns once requests are answered.
    pub async fn start(self) -> anyhow::Result<Running> {
        let settings = self.settings;
        settings.validate()?;
        if self.demo && !settings.listen.ip().is_loopback() {
            anyhow::bail!("the fault lab is for loopback addresses only; {} is none", settings.listen);
        }
        let mut members = built_in(&settings, &self.clock)?;
        members.extend(self.members);
        members.retain(|member| member.runs_here || !self.alone);
        let topology = topology(&members, &settings);
        topology.check(&RESERVED_NAMES).map_err(anyhow::Error::msg)?;
        let db = Db::open(&settings.database(), self.clock).await?;
        for sql in self.schemas {
            db.create(sql).await.context("cannot create a module's tables")?;
        }
        for member in &members {
            db.metrics().create_consumer_counters(member.consumer);
        }
        let keys = load_keys(&settings, &db).await?;
        check_exposure(&settings, &keys)?;
        let resyncs = Resyncs::new(db.clone());
        let transport = match settings.rabbit()? {
            None => Transport::Table(TableQueue::new(db.clone(), settings.lease)),
            Some(options) => Transport::Rabbit(Rabbit::try_new(options, resyncs.clone()).map_err(anyhow::Error::msg)?),
        };
        transport.declare(&topology).await.context("cannot declare the queues")?;
        let kernel = Kernel {
            pauses: Pauses::load(db.clone(), matches!(transport, Transport::Table(_))).await?,
            db: db.clone(),
            transport,
            health: Health::default(),
            faults: Faults::default(),
            tuning: settings.tuning(),
        };
        if settings.is_embedded() || self.demo {
            stock_the_demo(&db).await?;
        }
        allow_many_connections();
        // Before anything runs: a port that is taken should end the process, not half start it.
        let listener = listen(settings.listen)
            .with_context(|| format!("cannot listen on {}; set STOCKADE_LISTEN to another address", settings.listen))?;
        let address = listener.local_addr()?;
        let (desk, clerk) =
            Desk::open(db.clone(), kernel.faults.clone(), &kernel.health, Arc::new(Numbers::new("ORD")));
        let draining = CancellationToken::new();
        let brim = Brim::at(settings.outbox_max_pending);
        let orders = OrdersApi {
            db: db.clone(),
            desk,
            brim: brim.clone(),
            items_max: settings.max_items,
            // Leaves the answer time to get out before the request's own time is up.
            wait_max: settings.http_request_timeout.mul_f64(5.0 / 6.0),
            draining: draining.clone(),
        };
        let topology = Arc::new(topology);
        let operations = Operations {
            kernel: kernel.clone(),
            topology: topology.clone(),
            audits: Audits::default(),
            keys: keys.clone(),
        };
        let me = mint_id();
        let probes = Probes { kernel: kernel.clone(), me, topology: topology.clone(), draining: draining.clone() };
        let watched = Live::new(settings.sse_max_streams, keys.clone(), draining.clone());
        let sampler = watched.sampler(sections(&operations, &probes, self.demo), operations::live::bells(&operations));
        let mut document = openapi();
        let processed = ProcessedRows::default();
        let scrape = Scrape {
            operations: operations.clone(),
            token: settings.metrics_token.as_deref().map(str::to_owned),
            processed: processed.clone(),
            live: watched.clone(),
        };
        let mut router = Router::from(probes::routes().with_state(probes))
            .merge(Router::from(operations::metrics::routes().with_state(scrape)));
        // A process without the API still answers its probes.
        if settings.runs(Part::Api) {
            router = router.merge(api_router(&kernel, orders, operations.clone(), self.demo));
            router = router.merge(Router::from(live::routes().with_state(watched)));
            let sessions = Sessions { keys: keys.clone(), ttl: settings.session_ttl };
            router = router.merge(Router::from(session::routes().with_state(sessions)));
            for routes in self.routes {
                let (extra, extra_document) = routes(&db).split_for_parts();
                router = router.merge(extra);
                document.merge(extra_document);
            }
            http::document::complete(&mut document);
        }
        let guard = Guard::new(keys.clone(), &document, settings.listen.ip().is_loopback())?;
        let mut limits = settings.http_limits();
        if self.demo {
            limits.buffer_bytes_max = limits.buffer_bytes_max.max(lab::BODY_BYTES_MAX);
        }
        let router = http::finish(router, guard, document, &limits, db.metrics());
        let lifecycle = Lifecycle::new().context("cannot start the threads that do the work")?;
        if settings.runs(Part::Relay) {
            let jobs = jobs::Runner::new(kernel.clone(), topology.clone());
            lifecycle.spawn(Stage::Work, jobs::NAME, |stop| jobs.run(stop));
            let idempotency = Sweep {
                name: "idempotency keys",
                keep: settings.idempotency_ttl,
                sweep: |tx, before, limit| Box::pin(orders::store::forget_keys(tx, before, limit)),
            };
            let ended = Sweep {
                name: "sessions",
                keep: Duration::ZERO,
                sweep: |tx, before, limit| Box::pin(sessions::forget(tx, before, limit)),
            };
            let retention = Retention::new(kernel.clone(), vec![idempotency, ended]);
            lifecycle.spawn(Stage::Work, retention::NAME, |stop| retention.run(stop));
        }
        let resync = resync::run(kernel.clone(), topology, resyncs);
        lifecycle.spawn(Stage::Helpers, "resync", |stop| until(stop, resync));
        spawn_all(&lifecycle, &kernel, &settings, members, clerk, listener, router);
        lifecycle.spawn(Stage::Helpers, "keys", |stop| until(stop, keys.follow()));
        let present = kernel.clone();
        lifecycle.spawn(Stage::Helpers, "presence", |stop| {
            instances::beat(present, me, address.to_string(), stop.cancelled_owned())
        });
        if settings.runs(Part::Api) {
            let watcher = brim.watch(db.clone());
            lifecycle.spawn(Stage::Helpers, "brim", |stop| until(stop, watcher));
        }
        let auditor = audit::watch(operations.clone(), settings.audit_every, settings.audit_window);
        lifecycle.spawn(Stage::Helpers, "audit", |stop| until(stop, auditor));
        lifecycle.spawn(Stage::Helpers, "recount", |stop| until(stop, processed.follow(operations)));
        lifecycle.spawn(Stage::Http, "live", |stop| sampler.run(stop));
        Ok(Running { address, kernel, lifecycle, draining, settings })
    }
}

/// The keys that a server with these settings and this database would have.
async fn load_keys(settings: &Settings, db: &Db) -> anyhow::Result<Keys> {
    Ok(Keys::load(db.clone(), settings.keys()?, settings.may_be_open()).await?)
}

/// May a server with these settings and this database start?
pub async fn check_access(settings: &Settings, db: &Db) -> anyhow::Result<()> {
    check_exposure(settings, &load_keys(settings, db).await?)
}

/// A server that others can reach is not open to them by mistake.
fn check_exposure(settings: &Settings, keys: &Keys) -> anyhow::Result<()> {
    let at = settings.listen;
    if !keys.exist() && !settings.may_be_open() {
        anyhow::bail!(
            "{at} can be reached by others and there are no API keys: set STOCKADE_API_KEYS or STOCKADE_API_KEYS_FILE \
             (`stockade key new --offline --role admin --group '*'` makes an entry), or listen on 127.0.0.1, or set \
             STOCKADE_INSECURE_NO_AUTH=true if something in front guards it"
        );
    }
    if keys.is_open() && !at.ip().is_loopback() {
        tracing::warn!("OPEN TO ANYBODY who reaches {at}: there are no API keys and STOCKADE_INSECURE_NO_AUTH is set");
    }
    Ok(())
}

/// Checks every promise on a database without serving it, beside the server if there is one.
pub async fn audit(settings: Settings, is_at_rest: bool) -> anyhow::Result<Report> {
    let db = Db::open_read_only(&settings.database(), Clock::System).await?;
    let topology = topology(&built_in(&settings, &Clock::System)?, &settings);
    let queues = match settings.rabbit()? {
        None => {
            let transport = Transport::Table(TableQueue::new(db.clone(), settings.lease));
            let queues = Queues::look(&transport, &topology.queues, &settings.tuning()).await?;
            if is_at_rest { Queues { grace: Grace::NONE, ..queues } } else { queues }
        }
        Some(_) if is_at_rest => Queues::at_rest(&topology.queues),
        // Only the server has a connection to the broker.
        Some(_) => Queues::unknown(&topology.queues),
    };
    let report = audit::run(&db, &queues).await?;
    db.close().await;
    Ok(report)
}

/// Says what the broker is, and the arguments of each queue. Fails with what would keep a server from using it.
pub async fn inspect_broker(settings: &Settings) -> anyhow::Result<Vec<(String, String)>> {
    let Some(options) = settings.rabbit()? else {
        return Ok(vec![("broker".to_owned(), "embedded: tables of the database".to_owned())]);
    };
    let topology = topology(&built_in(settings, &Clock::System)?, settings);
    rabbit::inspect(&options, &topology).await.map_err(anyhow::Error::msg)
}

fn built_in(settings: &Settings, clock: &Clock) -> anyhow::Result<Vec<Member>> {
    let notifications =
        Notifications { channel: channel(settings, clock)?, repeats_unknown: settings.notify_repeat_unknown };
    Ok(vec![
        Member::of(Orders { hold: settings.hold_time }, settings.runs(Part::Orders)),
        Member::of(Inventory { numbers: Arc::new(Numbers::new("RES")) }, settings.runs(Part::Inventory)),
        Member::of(notifications, settings.runs(Part::Notifications)),
        Member::of(Ledger, settings.runs(Part::Ledger)),
    ])
}

/// The way to the customers; `None` is the log.
fn channel(settings: &Settings, clock: &Clock) -> anyhow::Result<Option<Channel>> {
    fn given<'a>(setting: Option<&'a str>, name: &str, channel: &str) -> anyhow::Result<&'a str> {
        setting.with_context(|| format!("STOCKADE_NOTIFY_CHANNEL={channel} needs {name}"))
    }
    let timeout = settings.handler_timeout;
    Ok(match settings.notify_channel {
        NotifyChannel::Log => None,
        NotifyChannel::Webhook => {
            let url = given(settings.webhook_url.as_deref(), "STOCKADE_WEBHOOK_URL", "webhook")?;
            let secret = given(settings.webhook_secret.as_deref(), "STOCKADE_WEBHOOK_SECRET", "webhook")?;
            Some(Channel::Webhook(Webhook::try_new(url, secret, timeout, clock.clone())?))
        }
        NotifyChannel::Smtp => {
            let url = given(settings.smtp_url.as_deref(), "STOCKADE_SMTP_URL", "smtp")?;
            let from = given(settings.smtp_from.as_deref(), "STOCKADE_SMTP_FROM", "smtp")?;
            let to = given(settings.smtp_to.as_deref(), "STOCKADE_SMTP_TO", "smtp")?;
            Some(Channel::Smtp(Smtp::try_new(url, from, to, timeout)?))
        }
    })
}

fn topology(members: &[Member], settings: &Settings) -> Topology {
    let tuning = settings.tuning();
    let bind = |member: &Member| Binding {
        consumer: member.consumer,
        queue: tuning.queue_name(member.consumer),
        keys: member.keys,
    };
    Topology { queues: members.iter().map(bind).collect() }
}

/// The routes of everything built in.
fn api_router(kernel: &Kernel, api: OrdersApi, operations: Operations, demo: bool) -> Router {
    let db = &kernel.db;
    let router: Router = OpenApiRouter::new()
        .merge(orders::http::routes().with_state(Arc::new(api)))
        .merge(inventory::http::routes().with_state(db.clone()))
        .merge(notifications::http::routes().with_state(db.clone()))
        .merge(ledger::http::routes().with_state(db.clone()))
        .merge(operations::routes().with_state(operations.clone()))
        .into();
    match demo {
        true => router.merge(Router::from(lab::routes().with_state(operations))),
        // The document shows it all the same.
        false => router.route(
            "/v1/lab/{*fault}",
            any(async || Problem::not_found("the fault lab is closed: `stockade serve --demo` opens it")),
        ),
    }
}

/// What the dashboard watches.
fn sections(operations: &Operations, probes: &Probes, demo: bool) -> Vec<Section> {
    let mut sections = operations::live::sections(operations, probes, demo);
    let db = operations.kernel.db.clone();
    sections.push(Section::of_group("orders", move |group| orders::http::latest(db.clone(), group)));
    let db = operations.kernel.db.clone();
    sections.push(Section::of_group("reservations", move |group| inventory::http::latest(db.clone(), group)));
    sections
}

/// The API document of everything built in, the fault lab included whether or not it is open.
pub fn openapi() -> OpenApi {
    http::join([
        orders::http::routes().into_openapi(),
        inventory::http::routes().into_openapi(),
        notifications::http::routes().into_openapi(),
        ledger::http::routes().into_openapi(),
        operations::routes().into_openapi(),
        live::routes().into_openapi(),
        session::routes().into_openapi(),
        lab::routes().into_openapi(),
        probes::routes().into_openapi(),
        operations::metrics::routes().into_openapi(),
    ])
}

fn spawn_all(
    lifecycle: &Lifecycle,
    kernel: &Kernel,
    settings: &Settings,
    members: Vec<Member>,
    clerk: Clerk,
    listener: TcpListener,
    router: Router,
) {
    let pauses = kernel.pauses.clone();
    lifecycle.spawn(Stage::Helpers, "pauses", |stop| until(stop, pauses.follow()));
    let transport = kernel.transport.clone();
    lifecycle.spawn(Stage::Helpers, "broker", |stop| async move {
        until(stop, transport.tend()).await;
        transport.close().await;
    });
    let db = kernel.db.clone();
    lifecycle.spawn(Stage::Helpers, "wakes", |stop| async move {
        tokio::select! { () = db.exchange_wakes() => stop.cancelled().await, () = stop.cancelled() => {} }
    });
    let db = kernel.db.clone();
    lifecycle.spawn(Stage::Helpers, "checkpoints", |stop| async move {
        tokio::select! { () = db.keep_log_short() => stop.cancelled().await, () = stop.cancelled() => {} }
    });
    if settings.runs(Part::Relay) {
        let relay = Relay::new(kernel.clone());
        lifecycle.spawn(Stage::Relay, "relay", |stop| relay.run(stop));
    }
    if settings.runs(Part::DeadLetters) {
        let office = Office::new(kernel.clone(), members.iter().map(|member| member.check.clone()).collect());
        lifecycle.spawn(Stage::Work, "dead-letters", |stop| office.run(stop));
    }
    for member in members.into_iter().filter(|member| member.runs_here) {
        let kernel = kernel.clone();
        lifecycle.spawn(Stage::Work, member.consumer, |stop| (member.start)(kernel, stop));
    }
    if settings.runs(Part::Orders) {
        let expiry = Expiry::new(kernel.db.clone(), &kernel.health);
        lifecycle.spawn(Stage::Work, expiry::NAME, |stop| expiry.run(stop));
    }
    lifecycle.spawn(Stage::Work, "desk", |stop| clerk.run(stop));
    let doorway = settings.doorway();
    lifecycle.spawn(Stage::Http, "http", move |stop| serve(listener, router, doorway, stop));
}

async fn until(stop: CancellationToken, task: impl Future<Output = ()>) {
    tokio::select! { () = task => {} () = stop.cancelled() => {} }
}

/// Connections are open files: as many as the system lets this process have.
fn allow_many_connections() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::debug!(%error, "the number of open files stays at its limit");
    }
}

/// Fills the shelves of a store that has none.
async fn stock_the_demo(db: &Db) -> anyhow::Result<()> {
    let mut tx = db.begin().await?;
    if !inventory::store::is_empty(&mut tx).await? {
        return Ok(());
    }
    for (sku, on_hand) in DEMO_STOCK {
        let origin = Origin {
            group_id: DEFAULT_GROUP.to_owned(),
            subsidiary_id: None,
            correlation_id: mint_id().to_string(),
            causation_id: None,
            traceparent: None,
        };
        let sku = sku.to_owned().try_into().map_err(anyhow::Error::msg)?;
        inventory::service::adjust(&mut tx, origin, &sku, Change::Set(on_hand), "demo stock").await?;
    }
    tx.commit().await?;
    Ok(())
}

/// A started application.
pub struct Running {
    pub address: SocketAddr,
    pub kernel: Kernel,
    lifecycle: Lifecycle,
    draining: CancellationToken,
    settings: Settings,
}

impl Running {
    /// Serves until `stop` resolves or a task dies, then winds down. `false` if that went wrong.
    pub async fn run_until(self, stop: impl Future<Output = ()>) -> bool {
        tokio::select! {
            () = stop => {}
            () = self.lifecycle.ending() => {}
        }
        self.stop().await
    }

    /// Winds down: no new requests, work in hand finished, what it wrote published.
    pub async fn stop(self) -> bool {
        self.draining.cancel();
        let clean = self.lifecycle.shut_down(self.settings.shutdown_drain).await;
        self.kernel.db.close().await;
        clean
    }
}
