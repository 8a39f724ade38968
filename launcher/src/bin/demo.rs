//! Replays a real trace through a real Envoy, once with Envoy's round robin and once with the
//! picker, and compares the two.
#![allow(clippy::print_stdout, reason = "a command-line program prints its results")]

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use testbed::front::{self, DaemonAndEnvoy, ExtraArgs};
use testbed::model_server::{ModelServer, ModelServerOptions};
use testbed::replay::{self, ReplayPlan, ReplayResult, quantile};
use testbed::trace::{self, Arrival};
use testbed::{Result, root};

/// Model name of the simulated servers.
const MODEL: &str = "llama-3.1-8b";

/// Requests with this header take the round-robin route instead of the picker's.
const POLICY_HEADER: &str = "x-demo-policy";

/// How often the table is printed: on a terminal, and elsewhere.
const DRAW_EVERY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));

/// Pause between the two replays, so that the second starts on idle servers.
const REST: Duration = Duration::from_secs(2);

/// Compare Envoy's round robin with the picker on simulated GPUs, by replaying a real trace against
/// both.
#[derive(Debug, Parser)]
#[command(about, long_about = None)]
struct Args {
    /// Minutes of the trace to replay
    #[arg(long, default_value_t = 3.0)]
    minutes: f64,
    /// Speed-up of the recorded arrivals
    #[arg(long, default_value_t = 1.6)]
    rate: f64,
    /// Simulated model servers, on ports 8001 and up
    #[arg(long, default_value_t = 4)]
    servers: u16,
    /// Exit after the comparison instead of staying up
    #[arg(long)]
    exit: bool,
    /// Trace file
    #[arg(long, default_value_os_t = root().join("testbed/data/mooncake_conversation_10min.jsonl.gz"))]
    trace: PathBuf,
}

#[tokio::main]
async fn main() -> ExitCode {
    let outcome = tokio::select! {
        outcome = run(Args::parse()) => outcome,
        _ = tokio::signal::ctrl_c() => Ok(()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<()> {
    // The trace's clock has steps of 3 s. This seed spreads the arrivals within a step, the same
    // way in both replays.
    let end = Duration::from_secs_f64(args.minutes * 60.0);
    let arrivals: Vec<Arrival> = trace::read(&args.trace, 1)?.into_iter().filter(|a| a.at < end).collect();
    println!(
        "Starting {} simulated model servers (Llama 3.1 8B on an H100 each), switchpointd and Envoy. This takes some seconds ...",
        args.servers
    );
    let servers = (0..args.servers).map(|i| server(8001 + i)).collect::<Result<Vec<_>>>()?;
    let addresses: Vec<String> = servers.iter().map(|s| s.addr().to_string()).collect();
    let mut front =
        DaemonAndEnvoy::start(&addresses, ExtraArgs::default(), |config| front::add_round_robin(config, &addresses, POLICY_HEADER)).await?;
    println!(
        "Replaying {} requests of a real conversation trace twice, {:.0} s each time: first with Envoy's round robin, then with the picker.",
        arrivals.len(),
        end.as_secs_f64() / args.rate
    );

    let round_robin = DemoReplay { name: "round robin", headers: vec![(POLICY_HEADER.into(), "round-robin".into())] };
    let picker = DemoReplay { name: "switchpoint", headers: vec![] };
    let before = round_robin.run(&args, &arrivals, &servers).await?;
    for server in &servers {
        server.restart(None).await;
    }
    tokio::time::sleep(REST).await;
    let after = picker.run(&args, &arrivals, &servers).await?;
    front.check_running()?;
    println!("\nBoth replays are done. TTFT is the time to the first token.");
    println!("{}", comparison(&[(round_robin.name, &before), (picker.name, &after)]));

    if !args.exit {
        println!("{}", invitation());
        tokio::signal::ctrl_c().await?;
    }
    front.stop().await
}

fn server(port: u16) -> Result<ModelServer> {
    let options = ModelServerOptions { listen: ([127, 0, 0, 1], port).into(), models: vec![MODEL.into()], ..ModelServerOptions::default() };
    Ok(ModelServer::start(options).map_err(|error| format!("cannot listen on port {port}, which the demo needs: {error}"))?)
}

/// One pass over the trace.
struct DemoReplay {
    name: &'static str,
    headers: Vec<(String, String)>,
}

impl DemoReplay {
    async fn run(&self, args: &Args, arrivals: &[Arrival], servers: &[ModelServer]) -> Result<Vec<ReplayResult>> {
        let plan = ReplayPlan { target: DaemonAndEnvoy::address(), model: MODEL.into(), headers: self.headers.clone(), rate: args.rate };
        let (start, length, terminal) = (Instant::now(), args.minutes * 60.0 / args.rate, std::io::stdout().is_terminal());
        let before = served(servers).await?;
        let mut replay = std::pin::pin!(replay::run(&plan, arrivals));
        let mut draw = tokio::time::interval(if terminal { DRAW_EVERY.0 } else { DRAW_EVERY.1 });
        if terminal {
            print!("\x1b[2J");
        }
        loop {
            tokio::select! {
                seen = &mut replay => return seen,
                _ = draw.tick() => {
                    let home = if terminal { "\x1b[H" } else { "" };
                    println!("{home}{}, second {:.0} of {:.0}\n{}", self.name, start.elapsed().as_secs_f64(), length, live(servers, &before).await?);
                }
            }
        }
    }
}

/// Requests that each server has answered since it started.
async fn served(servers: &[ModelServer]) -> Result<Vec<f64>> {
    let mut served = Vec::new();
    for server in servers {
        served.push(server.state().await?["requests_served"].as_f64().unwrap_or(0.0));
    }
    Ok(served)
}

async fn live(servers: &[ModelServer], before: &[f64]) -> Result<Table> {
    let mut table = table(&["endpoint", "running", "queue", "KV", "hit rate", "picks"]);
    for (server, before) in servers.iter().zip(before) {
        let state = server.state().await?;
        let number = |key: &str| state[key].as_f64().unwrap_or(0.0);
        table.add_row([
            server.addr().to_string(),
            number("running").to_string(),
            number("waiting").to_string(),
            format!("{:.0} %", 100.0 * number("kv_usage")),
            share(number("prefix_hit_tokens"), number("prefix_query_tokens")),
            (number("requests_served") - before).to_string(),
        ]);
    }
    Ok(right(table))
}

fn comparison(replays: &[(&str, &Vec<ReplayResult>)]) -> Table {
    let mut table = table(&["policy", "TTFT p50", "TTFT p99", "full reply p50", "prefix hit rate", "requests", "errors"]);
    for (name, seen) in replays {
        let mut ttfts: Vec<Duration> = seen.iter().filter_map(|s| s.ttft).collect();
        let mut durations: Vec<Duration> = seen.iter().filter(|s| s.ttft.is_some()).map(|s| s.duration).collect();
        ttfts.sort();
        durations.sort();
        let ms = |values: &[Duration], q| quantile(values, q).map_or("-".to_owned(), |d| format!("{} ms", d.as_millis()));
        #[expect(clippy::cast_precision_loss, reason = "token counts stay far below 2^52")]
        let sum = |of: fn(&ReplayResult) -> u64| seen.iter().map(of).sum::<u64>() as f64;
        table.add_row([
            (*name).to_owned(),
            ms(&ttfts, 0.5),
            ms(&ttfts, 0.99),
            ms(&durations, 0.5),
            share(sum(|s| s.cached_tokens), sum(|s| s.prompt_tokens)),
            seen.len().to_string(),
            seen.iter().filter(|s| s.status != 200 || s.ttft.is_none()).count().to_string(),
        ]);
    }
    right(table)
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(header.to_vec());
    table
}

/// Aligns all columns but the first to the right.
fn right(mut table: Table) -> Table {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn share(part: f64, whole: f64) -> String {
    if whole > 0.0 { format!("{:.1} %", 100.0 * part / whole) } else { "-".to_owned() }
}

fn invitation() -> String {
    let (listener, admin, envoy) = (front::LISTENER, front::DAEMON_ADMIN, front::ENVOY_ADMIN);
    format!(
        r#"Everything keeps running until you press Ctrl-C. In another terminal, try:

A chat completion, and a streamed one:
  curl -s localhost:{listener}/v1/chat/completions -H 'content-type: application/json' \
    -d '{{"model":"{MODEL}","messages":[{{"role":"user","content":"hello"}}],"max_tokens":8}}'
  curl -sN localhost:{listener}/v1/chat/completions -H 'content-type: application/json' \
    -d '{{"model":"{MODEL}","stream":true,"messages":[{{"role":"user","content":"hello"}}],"max_tokens":8}}'

A request that names no model, and the error it gets:
  curl -s localhost:{listener}/v1/chat/completions -d '{{"no":"model"}}'

What the daemon knows about the endpoints, and the metrics of the daemon and of the filter:
  curl -s localhost:{admin}/debug/endpoints
  curl -s localhost:{admin}/metrics | grep -v '^#'
  curl -s localhost:{envoy}/stats/prometheus | grep switchpoint

Next: put it in front of your own model servers with  make run ENDPOINTS=host:port,host:port"#
    )
}
