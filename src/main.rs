//! `stockade`: the command line.

mod cli;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    stockade::telemetry::report_panics();
    // Whoever speaks TLS without saying by which library does so by ring. It is the first, so it cannot be refused.
    let _ = rustls::crypto::ring::default_provider().install_default();
    cli::main()
}
