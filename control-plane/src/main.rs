//! switchpointd. What it does is in the library; here are only the process's edges: arguments, log, exit code.

use std::process::ExitCode;

use clap::Parser;
use control_plane::args::{Cli, Command};
use control_plane::{logging, run};

/// The daemon could not start or had to stop. (2 is clap's, for a command line it cannot read.)
const EXIT_FAILED: u8 = 1;

#[tokio::main]
async fn main() -> ExitCode {
    let ended = match Cli::parse().command {
        Command::Serve(args) => {
            logging::init(&args.log);
            run::serve(*args).await
        }
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(fatal) => {
            tracing::error!("{fatal}");
            ExitCode::from(EXIT_FAILED)
        }
    }
}
