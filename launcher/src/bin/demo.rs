//! The main job, before your eyes: a real trace through a real Envoy, once by round robin and once by the picker.
#![allow(clippy::print_stdout, reason = "this program talks to a person")]

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

/// Model the simulated servers serve.
const MODEL: &str = "llama-3.1-8b";

/// Requests with this header take the round-robin route instead of the picker's.
const POLICY_HEADER: &str = "x-demo-policy";

/// How often the table is drawn on a terminal, and printed elsewhere.
const DRAW_EVERY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));

/// Rest between the two replays, so that the second starts on idle servers.
const REST: Duration = Duration::from_secs(2);

/// Replay a real trace against Envoy's round robin and against the picker, on simulated GPUs, and compare.
#[derive(Debug, Parser)]
#[command(about, long_about = None)]
struct Args {
    /// Minutes of the trace to replay
    #[arg(long, default_value_t = 3.0)]
    minutes: f64,
    /// How much faster than recorded the requests come
    #[arg(long, default_value_t = 1.6)]
    rate: f64,
    /// Simulated model servers, on ports 8001 and up
    #[arg(long, default_value_t = 4)]
    servers: u16,
    /// End after the comparison instead of staying up
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
    // Arrivals within one 3 s step of the trace's clock are spread by this seed: the same in both replays.
    let end = Duration::from_secs_f64(args.minutes * 60.0);
    let arrivals: Vec<Arrival> = trace::read(&args.trace, 1)?.into_iter().filter(|a| a.at < end).collect();
    println!("Starting {} simulated model servers (Llama 3.1 8B on an H100 each), switchpointd and Envoy ...", args.servers);
    let servers = (0..args.servers).map(|i| server(8001 + i)).collect::<Result<Vec<_>>>()?;
    let addresses: Vec<String> = servers.iter().map(|s| s.addr().to_string()).collect();
    let mut front =
        DaemonAndEnvoy::start(&addresses, ExtraArgs::default(), |config| front::add_round_robin(config, &addresses, POLICY_HEADER)).await?;
    println!(
        "Replaying {} requests of a real conversation trace ({:.0} s each time): once by Envoy's round robin, once by the picker.",
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
    println!("\n{}", comparison(&[(round_robin.name, &before), (picker.name, &after)]));

    if !args.exit {
        println!("{}", invitation());
        tokio::signal::ctrl_c().await?;
    }
    front.stop().await
}

fn server(port: u16) -> Result<ModelServer> {
    let options = ModelServerOptions { listen: ([127, 0, 0, 1], port).into(), models: vec![MODEL.into()], ..ModelServerOptions::default() };
    Ok(ModelServer::start(options).map_err(|error| format!("port {port} is needed and not free: {error}"))?)
}

/// One pass over the trace.
struct DemoReplay {
    name: &'static str,
    headers: Vec<(String, String)>,
}

impl DemoReplay {
    async fn run(&self, args: &Args, arrivals: &[Arrival], servers: &[ModelServer]) -> Result<Vec<ReplayResult>> {
        let plan = ReplayPlan { target: DaemonAndEnvoy::address(), model: MODEL.into(), headers: self.headers.clone(), rate: args.rate };
        let (start, terminal) = (Instant::now(), std::io::stdout().is_terminal());
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
                    println!("{home}{}: {:.0} s\n{}", self.name, start.elapsed().as_secs_f64(), live(servers, &before).await?);
                }
            }
        }
    }
}

/// Requests that each server has answered since it was started.
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
    let mut table = table(&["policy", "TTFT p50", "TTFT p99", "whole reply p50", "prefix hit rate", "requests", "errors"]);
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

/// Numbers to the right, names to the left.
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
        r#"It all stays up until Ctrl-C. Try it:

  curl -s localhost:{listener}/v1/chat/completions -H 'content-type: application/json' \
    -d '{{"model":"{MODEL}","messages":[{{"role":"user","content":"hello"}}],"max_tokens":8}}'
  curl -sN localhost:{listener}/v1/chat/completions -H 'content-type: application/json' \
    -d '{{"model":"{MODEL}","stream":true,"messages":[{{"role":"user","content":"hello"}}],"max_tokens":8}}'
  curl -s localhost:{listener}/v1/chat/completions -d '{{"no":"model"}}'
  curl -s localhost:{admin}/debug/endpoints
  curl -s localhost:{admin}/metrics | grep -v '^#'
  curl -s localhost:{envoy}/stats/prometheus | grep switchpoint"#
    )
}
