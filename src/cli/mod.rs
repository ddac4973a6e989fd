//! Commands: what to run, with which settings. Data goes to stdout, talk to stderr.

mod audit;
mod bench;
mod client;
mod config;
mod dead_letters;
mod demo;
mod doctor;
mod exit;
mod healthcheck;
mod jobs;
mod keys;
mod messages;
mod orders;
mod out;
mod queues;
mod redrive;
mod remote;
mod replay;
mod scratch;
mod serve;
mod stock;
mod table;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use stockade_kernel::secrets::strike_from;

use exit::Exit;

/// What bare `stockade` prints: enough to get going.
const WELCOME: &str = "\
Stockade takes orders, reserves stock and notifies customers, every effect exactly once.

  stockade serve                 start on http://127.0.0.1:8080 with an embedded database
  stockade serve --demo          the same, with the fault lab
  stockade demo all              see what it promises, and that it keeps it
  stockade bench --orders 20000  measure this machine

On Postgres, and on RabbitMQ:
  stockade serve --database-url postgres://user:password@localhost/stockade --broker-url amqp://localhost

`stockade help` lists every command, `stockade help serve` every setting.
";

#[derive(Parser)]
#[command(name = "stockade", version, about, disable_help_subcommand = false)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Serve the API and run the modules.
    Serve(serve::Serve),
    /// Bring the database to this version's schema and exit.
    Migrate(serve::Migrate),
    /// Check every promise on every row, on the database or by asking a server; exit code 3 if one is broken.
    Audit(audit::Audit),
    /// Place orders as fast as they go, or at a given rate, and measure until the last customer is notified.
    Bench(bench::Bench),
    /// See a promise kept: what is done, what to look at, and the figures that prove it.
    Demo(demo::Demo),
    /// Show every setting, its value and where it comes from; secrets are masked.
    Config(config::Config),
    /// Look at everything a server stands on, and say what is amiss.
    Doctor(doctor::Doctor),
    /// Place orders, see what became of them, watch one on its way.
    Order(orders::Orders),
    /// See what is on the shelves, and put it right.
    Stock(stock::Stock),
    /// Show which consumer has dealt with which event.
    Inbox(messages::Inbox),
    /// Show what waits to go out, what went, and what would not go.
    Outbox(messages::Outbox),
    /// Show how full the queues are, once or again and again.
    Queues(queues::Queues),
    /// See what was given up on and why, send it back, put it aside.
    DeadLetters(dead_letters::DeadLetters),
    /// Send dead letters back in bulk, at a rate, and see how far it has come.
    Redrive(redrive::Redrive),
    /// Send published events again; what was applied is skipped.
    Replay(replay::Replay),
    /// Make keys, list them, revoke them.
    Key(keys::Keys),
    /// Ask a server whether it is ready; the exit code tells.
    Healthcheck(healthcheck::Healthcheck),
    /// Print the OpenAPI document.
    Openapi,
    /// Print what a shell needs to complete these commands.
    Completions { shell: clap_complete::Shell },
}

pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let Some(command) = cli.command else {
        return ended(out::print(WELCOME).map(|_| ExitCode::SUCCESS));
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("stockade: no runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let done = runtime.block_on(async {
        match command {
            Command::Serve(serve) => serve.run().await,
            Command::Migrate(migrate) => migrate.run().await,
            Command::Audit(audit) => audit.run().await,
            Command::Bench(bench) => bench.run().await,
            Command::Demo(demo) => demo.run().await,
            Command::Config(config) => config.run(),
            Command::Doctor(doctor) => doctor.run().await,
            Command::Order(orders) => orders.run().await,
            Command::Stock(stock) => stock.run().await,
            Command::Inbox(inbox) => inbox.run().await,
            Command::Outbox(outbox) => outbox.run().await,
            Command::Queues(queues) => queues.run().await,
            Command::DeadLetters(dead_letters) => dead_letters.run().await,
            Command::Redrive(redrive) => redrive.run().await,
            Command::Replay(replay) => replay.run().await,
            Command::Key(keys) => keys.run().await,
            Command::Healthcheck(healthcheck) => healthcheck.run().await,
            Command::Openapi => print_openapi(),
            Command::Completions { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut Cli::command(), "stockade", &mut script);
                out::print(&String::from_utf8_lossy(&script)).map(|_| ExitCode::SUCCESS)
            }
        }
    });
    // Tasks that hang on a dead peer must not hold the process open.
    runtime.shutdown_background();
    ended(done)
}

/// The exit code; of a failure also what it was, on stderr.
fn ended(done: anyhow::Result<ExitCode>) -> ExitCode {
    done.unwrap_or_else(|error| {
        let lines: Vec<String> = strike_from(&format!("{error:#}")).lines().map(table::printable).collect();
        eprintln!("stockade: {}", lines.join("\n"));
        Exit::of(&error).into()
    })
}

fn print_openapi() -> anyhow::Result<ExitCode> {
    out::print(&(stockade::app::openapi().to_pretty_json()? + "\n")).map(|_| ExitCode::SUCCESS)
}
