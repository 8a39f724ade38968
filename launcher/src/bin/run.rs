//! `make run`: the daemon and Envoy, as shipped, in front of a user's own model servers.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "this program talks to a person")]

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use testbed::Result;
use testbed::front::{self, DaemonAndEnvoy, ExtraArgs};
use tokio::signal::unix::{SignalKind, signal};

/// How often it is looked whether both processes are still there.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Run switchpointd and Envoy, with the picker inside, in front of model servers. Ctrl-C stops both.
#[derive(Debug, Parser)]
#[command(about, long_about = None)]
struct Args {
    /// The model servers
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',', required = true)]
    endpoints: Vec<String>,
    /// Further arguments of `switchpointd serve`
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
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    println!("Starting switchpointd and Envoy in front of {} ...", args.endpoints.join(", "));
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
    println!("\nStopping ...");
    outcome.and(front.stop().await)
}

fn usage() -> String {
    let (listener, envoy, daemon) = (front::LISTENER, front::ENVOY_ADMIN, front::DAEMON_ADMIN);
    format!(
        r#"
Ready. Ask it (put your model's name):
  curl -s http://127.0.0.1:{listener}/v1/models
  curl -N http://127.0.0.1:{listener}/v1/chat/completions -H 'content-type: application/json' \
    -d '{{"model": "MODEL", "stream": true, "messages": [{{"role": "user", "content": "hello"}}]}}'

See what it knows and does:
  curl -s http://127.0.0.1:{daemon}/debug/endpoints
  curl -s http://127.0.0.1:{envoy}/stats/prometheus | grep ^switchpoint

Ctrl-C stops it."#
    )
}
