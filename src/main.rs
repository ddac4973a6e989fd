//! `stockade`: the command line.

mod cli;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    stockade::telemetry::report_panics();
    cli::main()
}
