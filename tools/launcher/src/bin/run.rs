//! `make run`: runs the daemon and Envoy, as shipped, in front of a user's own model servers.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command-line program prints its results"
)]

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use testbed::Result;
use testbed::front::{self, DaemonAndEnvoy, ExtraArgs};
use tokio::signal::unix::{SignalKind, signal};

/// The interval at which to check that both processes still run.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Run switchpointd and Envoy with the picker in front of model servers. Ctrl-C stops both.
#[derive(Debug, Parser)]
#[command(long_about = None)]
struct Args {
    /// The model servers, separated by commas
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',', required = true)]
    endpoints: Vec<String>,
    /// More arguments for `switchpointd serve`, after --
    #[arg(last = true)]
    daemon: Vec<String>,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    println!(
        "Starting switchpointd and Envoy in front of {}. This takes some seconds ...",
        args.endpoints.join(", ")
    );
    let mut front = tokio::select! {
        front = DaemonAndEnvoy::start(&args.endpoints, ExtraArgs { daemon: &args.daemon, ..ExtraArgs::default() }, |_| Ok(())) => front?,
        _ = interrupt.recv() => return Ok(()),
        _ = terminate.recv() => return Ok(()),
    };
    println!("{}", usage());
    let outcome = loop {
        tokio::select! {
            _ = interrupt.recv() => break Ok(()),
            _ = terminate.recv() => break Ok(()),
            () = tokio::time::sleep(LOOK_EVERY) => if let Err(ended) = front.check_running() { break Err(ended) },
        }
    };
    println!("\nStopping Envoy and switchpointd ...");
    outcome.and(front.stop().await)
}

fn usage() -> String {
    let listener = front::LISTENER;
    let envoy = front::ENVOY_ADMIN;
    let daemon = front::DAEMON_ADMIN;
    format!(
        r#"
Ready. Send it requests (replace MODEL by the name of your model):
  curl -s http://127.0.0.1:{listener}/v1/models
  curl -N http://127.0.0.1:{listener}/v1/chat/completions -H 'content-type: application/json' \
    -d '{{"model": "MODEL", "stream": true, "messages": [{{"role": "user", "content": "hello"}}]}}'

See what the daemon knows about your servers, and the filter's metrics:
  curl -s http://127.0.0.1:{daemon}/debug/endpoints
  curl -s http://127.0.0.1:{envoy}/stats/prometheus | grep ^switchpoint

These programs are compiled for a quick start. For production and measurements, see `make build`.
Ctrl-C stops both."#
    )
}
