//! A server with one more consumer, the witness, which has no unique key of its own: an event that runs twice leaves two
//! rows, where the built-in modules would hide it behind their constraints.
//!
//! The server is this test binary again, started with [`SETTINGS`] in its environment: only a host program can add a
//! consumer, and a second program would have to be built beside the tests.

use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{LazyLock, Mutex};

use serde_json::value::RawValue;
use stockade::app::Builder;
use stockade::lifecycle::asked_to_stop;
use stockade::telemetry;
use stockade_kernel::crash_points;
use stockade_kernel::db::Tx;
use stockade_kernel::messaging::{Message, Outcome, Reaction};
use stockade_kernel::on;
use uuid::Uuid;

use super::{CONNECTIONS_MAX, Server, TestDb, settings_from};

/// The server's command line, as a JSON array.
const SETTINGS: &str = "STOCKADE_TEST_WITNESS_SERVER";

/// Names a file of crash points. The server dies at the first point that is not in it, having added it.
pub const DEATHS: &str = "STOCKADE_TEST_DEATHS";

/// Customers whose events the witness fails to handle, each in its own way. An event that became a dead letter because of
/// one of the others is handled when it is redriven.
///
/// Each run panics.
pub const PANICS: &str = "a customer to panic over";

/// Each run aborts the process. In a run that is recorded as one of a possible killer, the database is unavailable first,
/// once in each process.
pub const KILLS: &str = "a customer to die of";

/// Events that the witness defers. When the wait is over the run panics; the retry succeeds.
pub const DEFERRED_PANICS: &str = "a customer to defer and panic over";

/// The same, but each run aborts the process.
pub const DEFERRED_KILLS: &str = "a customer to defer and die of";

/// The same, but the database is unavailable in the first run of each process; the next run succeeds.
pub const DEFERRED_UNAVAILABLE: &str = "a customer to defer while the database is unavailable";

const FAULTS: &[&str] = &[PANICS, KILLS, DEFERRED_PANICS, DEFERRED_KILLS, DEFERRED_UNAVAILABLE];

/// What deferred events wait for. Nothing publishes it about their aggregates.
const AWAITED: &str = "order.fulfilled";

pub const KEYS: &[&str] = &[
    "order.placed",
    "order.paid",
    "order.cancelled",
    "order.expired",
    "order.fulfilled",
    "inventory.reserved",
    "inventory.failed",
];

const SCHEMA: &str = "CREATE TABLE IF NOT EXISTS witness_effects (event_id TEXT NOT NULL)";

/// How many effects there are too many or too few. Zero for both parts means one effect for each event.
const WRONG_EFFECTS: &str = "SELECT (SELECT COUNT(*) FROM
         (SELECT event_id FROM witness_effects GROUP BY event_id HAVING COUNT(*) > 1) AS repeated)
     + ABS((SELECT COUNT(*) FROM witness_effects)
         - (SELECT COUNT(*) FROM messaging_inbox WHERE consumer = 'witness' AND state = 'processed'))";

/// Events that have failed in this process with an unavailable database.
static FAILED_ONCE: LazyLock<Mutex<HashSet<Uuid>>> = LazyLock::new(Mutex::default);

struct Witness;

impl Reaction for Witness {
    const NAME: &'static str = "witness";
    const KEYS: &'static [&'static str] = KEYS;
    const AWAITED: &'static [&'static str] = &[AWAITED];
    /// The customer, if it is one of [`FAULTS`].
    type Fact = Option<&'static str>;

    fn decode(_key: &str, payload: &RawValue) -> Result<Self::Fact, serde_json::Error> {
        let is_customer = |fault: &&&str| payload.get().contains(&format!("\"{fault}\""));
        Ok(FAULTS.iter().find(is_customer).copied())
    }

    async fn react(&self, tx: &mut Tx, batch: &[&Message<Self::Fact>]) -> sqlx::Result<Vec<Outcome>> {
        let mut outcomes = Vec::with_capacity(batch.len());
        for message in batch {
            if let Some(customer) = message.fact
                && let Some(outcome) = fail(tx, customer, message.event.event_id).await?
            {
                outcomes.push(outcome);
                continue;
            }
            on!(tx, c => {
                sqlx::query("INSERT INTO witness_effects (event_id) VALUES ($1)")
                    .bind(message.event.event_id.to_string())
                    .execute(c)
                    .await
                    .map(drop)
            })?;
            outcomes.push(Outcome::Done);
        }
        Ok(outcomes)
    }
}

/// Fails as the customer demands, unless the event is to be handled by now.
async fn fail(tx: &mut Tx, customer: &str, event_id: Uuid) -> sqlx::Result<Option<Outcome>> {
    let (state, was_letter): (String, bool) = on!(tx, c => {
        sqlx::query_as(
            "SELECT i.state, EXISTS (SELECT 1 FROM messaging_dead_letters d
                 WHERE d.consumer = i.consumer AND d.event_id = i.event_id)
             FROM messaging_inbox i WHERE i.consumer = 'witness' AND i.event_id = $1",
        )
        .bind(event_id)
        .fetch_one(c)
        .await
    })?;
    let is_first_failure = || FAILED_ONCE.lock().unwrap().insert(event_id);
    match (customer, state.as_str()) {
        (PANICS, _) => panic!("the witness panics, as it was told to"),
        _ if was_letter => Ok(None),
        // Recorded before its run, as opposed to a run in a batch.
        (KILLS, "processing") if is_first_failure() => Err(sqlx::Error::PoolTimedOut),
        (KILLS, _) => std::process::abort(),
        // A new row says so already.
        (_, "processed") => Ok(Some(Outcome::Wait { key: AWAITED })),
        (DEFERRED_PANICS, "waiting") => panic!("the witness panics over a deferred event, as it was told to"),
        (DEFERRED_KILLS, "waiting") => std::process::abort(),
        (DEFERRED_UNAVAILABLE, "waiting") if is_first_failure() => Err(sqlx::Error::PoolTimedOut),
        _ => Ok(None),
    }
}

/// The command line of a server with a witness on `db`.
pub fn command(db: &TestDb, flags: &[&str]) -> Command {
    let mut args: Vec<String> = ["--database-url", &db.url, "--listen", "127.0.0.1:0"].map(str::to_owned).to_vec();
    args.extend(db.wire.flags(flags));
    args.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "support::witness::server", "--nocapture"]);
    command.env(SETTINGS, serde_json::to_string(&args).unwrap()).env("STOCKADE_LOG", "warn");
    command.env("STOCKADE_DB_MAX_CONNECTIONS", CONNECTIONS_MAX.to_string());
    // It panics on purpose, and a debug build takes most of a second to print where.
    command.env("RUST_BACKTRACE", "0");
    command
}

/// Starts a server with a witness on `db` and waits until it is ready.
pub fn start(db: &TestDb, flags: &[&str]) -> Server {
    Server::spawn(command(db, flags), Path::new("/dev/null"))
}

/// Every event that the witness has handled had one effect.
pub async fn check(db: &TestDb) {
    assert_eq!(db.count(WRONG_EFFECTS).await, 0, "effects too many or too few");
}

/// Serves until asked to stop, if this process was started by [`command`]; a test that passes otherwise.
#[test]
fn server() {
    let Ok(args) = std::env::var(SETTINGS) else { return };
    let args: Vec<String> = serde_json::from_str(&args).unwrap();
    if let Some(deaths) = std::env::var_os(DEATHS) {
        die_once_at_every_point(deaths.into());
    }
    let clean = tokio::runtime::Runtime::new().unwrap().block_on(serve(&args));
    std::process::exit(if clean { 0 } else { 1 });
}

/// Aborts at each point that the file does not name yet: no destructor runs, as with a kill -9 at that very line.
fn die_once_at_every_point(deaths: PathBuf) {
    let known = std::fs::read_to_string(&deaths).unwrap_or_default();
    let known: HashSet<String> = known.lines().map(str::to_owned).collect();
    // Held until the process is gone: two threads at new points must not both be taken for dead.
    let dying = Mutex::new(());
    crash_points::install(move |point| {
        let point = point.to_string();
        if !known.contains(&point) {
            let _dying = dying.lock();
            let mut file = File::options().create(true).append(true).open(&deaths).unwrap();
            writeln!(file, "{point}").unwrap();
            std::process::abort();
        }
    });
}

async fn serve(args: &[String]) -> bool {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let settings = settings_from(args.iter().map(String::as_str));
    telemetry::init(&settings.log, settings.log_format).unwrap();
    let builder = Builder::new(settings).demo(true).with_schema(SCHEMA).with(Witness);
    let running = builder.start().await.unwrap();
    println!("\n  dashboard  http://{}/", running.address);
    running.run_until(async { drop(asked_to_stop().await) }).await
}
