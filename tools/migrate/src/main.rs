//! The process `switchpoint-migrate`: arguments, output and exit code. The library does the work.

use std::process::ExitCode;

use clap::Parser;
use migrate::MigrateArgs;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = MigrateArgs::parse();
    ExitCode::from(migrate::run(args, &mut std::io::stdout(), &mut std::io::stderr()).await)
}
