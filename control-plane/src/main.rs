//! The process `switchpointd`: arguments, output, log and exit code. The library does the work.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use control_plane::cli::args::{Cli, CliCommand};
use control_plane::cli::{check, explain, logging, migrate_alias, register};
use control_plane::daemon;
use control_plane::daemon::signals::SignalWatch;

/// The exit code if the daemon could not start or had to stop. (clap exits with 2 on an invalid
/// command line.)
const EXIT_FAILED: u8 = 1;

#[tokio::main]
async fn main() -> ExitCode {
    match Cli::parse().command {
        CliCommand::Serve(args) => {
            logging::init(&args.log);
            match daemon::serve(*args).await {
                Ok(()) => ExitCode::SUCCESS,
                Err(fatal) => {
                    tracing::error!("{fatal}");
                    ExitCode::from(EXIT_FAILED)
                }
            }
        }
        CliCommand::Register(args) => {
            logging::init(&args.log);
            exit_code(match SignalWatch::listen() {
                Ok(mut signals) => tokio::select! {
                    registered = register::register(*args) => registered,
                    _ = signals.received() => Ok(()),
                },
                Err(error) => Err(format!("cannot listen for signals: {error}")),
            })
        }
        CliCommand::Instances(args) => {
            exit_code(register::instances(args, std::io::stdout()).await)
        }
        CliCommand::Check(args) => {
            let (printed, verdict) = check::check(args).await;
            print(&printed);
            ExitCode::from(verdict as u8)
        }
        CliCommand::Migrate { arguments } => {
            let _ = writeln!(
                std::io::stderr(),
                "switchpointd: `migrate` is a program of its own now, switchpoint-migrate; the next version has no such command"
            );
            exit_code(Err(migrate_alias::run(arguments)))
        }
        CliCommand::Explain(args) => exit_code(explain::ask(*args).await.map(|text| print(&text))),
    }
}

/// Prints `text`. A closed stdout is no failure, because the exit code still gives the result.
fn print(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// Prints the error, if there is one, and returns the exit code.
fn exit_code(result: Result<(), String>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "switchpointd: {error}");
            ExitCode::from(EXIT_FAILED)
        }
    }
}
