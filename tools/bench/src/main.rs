//! Benchmarks of what the picker adds to a request, to a streamed chunk and to the load of the
//! machine. All variants run side by side.
//!
//! | part | measures | file in `target/bench` |
//! |---|---|---|
//! | `overhead` | a request through the filter and ext_proc, beside a minimal Envoy and the shipped one without a picker | `overhead.json` |
//! | `streams` | a streamed chunk | `streams.json` |
//! | `standing` | scraping, memory, time to start, time until a change takes effect | `standing.json` |
//! | `sharing` | what shared state between workers and proxies gains, and its cost per pick | `sharing.json` |
//! | `relay` | what many proxies cost one daemon | `relay.json` |
//! | `engines` | how traffic spreads over engines of every kind, and over pools with broken engines | `engines.json` |
//! | `neighbour` | small requests beside uploads of 23 MiB | `neighbour.json` |
//! | `flow` | flow control over workers and proxies, and what it costs a request | `flow.json`, `flow-cost.json` |
//! | `page` | copies the results of the first three and of `flow` to `docs/data` and prints `docs/reference/performance.md` from there | |
//!
//! Without a part, `bench` runs the first three parts and writes the page. CPU time is the time
//! that the kernel scheduler counts for the processes, in nanoseconds. The model servers answer
//! immediately, so that only the proxy is measured.
#![allow(clippy::print_stdout, reason = "this program talks to a person")]

use std::net::SocketAddr;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use serde::Serialize;
use serde_json::json;
use testbed::{Result, root};

mod engines;
mod flow;
mod load;
mod minimal;
mod neighbour;
mod overhead;
mod page;
mod predicting;
mod relay;
mod sharing;
mod sink;
mod standing;
mod stats;
mod streams;
mod world;

#[derive(Debug, Parser)]
#[command(about = "What the picker adds to plain Envoy -> target/bench, docs/reference/performance.md", long_about = None)]
#[command(args_conflicts_with_subcommands = true)]
struct BenchArgs {
    #[command(subcommand)]
    part: Option<BenchPart>,
    #[command(flatten)]
    args: Args,
}

/// Sets how many rounds and seconds to measure.
#[derive(Debug, clap::Args)]
struct Args {
    /// Measure only the cases of the targets in `overhead`
    #[arg(long)]
    quick: bool,
    /// Number of rounds. Each round measures every variant once
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds of load for each path and round
    #[arg(long, default_value_t = 1)]
    seconds: u32,
    /// More arguments for the daemon, such as --latency-prediction
    #[arg(long, allow_hyphen_values = true)]
    daemon_argument: Vec<String>,
}

#[derive(Debug, Subcommand)]
enum BenchPart {
    /// The cost of a request: latency, CPU, requests/s and tails, compared with two bases (18
    /// minutes; --quick: 6)
    Overhead(Args),
    /// The cost of a streamed chunk
    Streams(Args),
    /// The cost of scraping, memory, time to start, time until a change takes effect
    Standing(Args),
    /// Gain of shared state: one worker compared with several workers of one and of two proxies ->
    /// target/bench/sharing.json
    Sharing(sharing::Args),
    /// Cost of 32 proxies for one daemon: its CPU, and the age of load and placements on arrival ->
    /// target/bench/relay.json
    Relay(relay::Args),
    /// Engines of every kind, and pools with a broken engine: bursts, load, conversations, share of
    /// the broken engine -> target/bench/engines.json
    Engines(engines::Args),
    /// Flow control: chat beside a wave of batch requests, through one worker, four workers, and
    /// two proxies of four workers, then without the daemon; and the cost for a request ->
    /// target/bench/flow.json, flow-cost.json
    Flow(flow::Args),
    /// Small requests while another client uploads 23 MiB, at one worker ->
    /// target/bench/neighbour.json
    Neighbour(Args),
    /// Copy the last results to docs/data and print docs/reference/performance.md from there
    Page,
    /// Run the model servers that answer at once (the bench starts them)
    #[command(hide = true)]
    Sink {
        /// Addresses to listen on
        #[arg(long, value_delimiter = ',')]
        listen: Vec<SocketAddr>,
    },
}

#[tokio::main]
async fn main() -> ExitCode {
    let BenchArgs { part, args } = BenchArgs::parse();
    let outcome = match &part {
        Some(BenchPart::Overhead(args)) => overhead::bench(args).await,
        Some(BenchPart::Streams(args)) => streams::bench(args).await,
        Some(BenchPart::Standing(args)) => standing::bench(args).await,
        Some(BenchPart::Sharing(args)) => sharing::bench(*args).await,
        Some(BenchPart::Relay(args)) => relay::bench(*args).await,
        Some(BenchPart::Engines(args)) => engines::bench(*args).await,
        Some(BenchPart::Flow(args)) => flow::bench(*args).await,
        Some(BenchPart::Neighbour(args)) => neighbour::bench(args).await,
        Some(BenchPart::Page) => page::write(),
        Some(BenchPart::Sink { listen }) => sink::serve(listen).await,
        None => all(&args).await,
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn all(args: &Args) -> Result<()> {
    overhead::bench(args).await?;
    streams::bench(args).await?;
    standing::bench(args).await?;
    page::write()
}

/// Writes `target/bench/<part>.json`.
fn write_result(part: &str, rows: &[impl Serialize]) -> Result<()> {
    let file = root().join("target/bench").join(format!("{part}.json"));
    std::fs::create_dir_all(file.parent().unwrap_or(&root()))?;
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let version = std::process::Command::new(testbed::envoy::EnvoyProcess::binary())
        .arg("--version")
        .output()?;
    let version = String::from_utf8_lossy(&version.stdout);
    let envoy = version
        .split_once("version: ")
        .and_then(|(_, rest)| rest.split('/').nth(1))
        .unwrap_or("unknown")
        .to_owned();
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let date = std::process::Command::new("date")
        .args(["-u", "+%F"])
        .output()?;
    let result = json!({
        "date": String::from_utf8_lossy(&date.stdout).trim(), "host": std::env::consts::ARCH, "cores": cores, "envoy": envoy, "rows": rows,
        // The average covers the last minute and includes the bench's own load. A value far above
        // the number of cores means that other processes used the machine.
        "load_average": load.split(' ').next().and_then(|load| load.parse::<f64>().ok()),
    });
    std::fs::write(&file, lines(result))?;
    println!("written to target/bench/{part}.json");
    Ok(())
}

/// Returns the JSON as text, with a line for each row. Floats have four decimals, so that a share
/// such as 1.05 % is not rounded.
fn lines(mut result: serde_json::Value) -> String {
    let rows = result["rows"].take();
    let rows: Vec<String> = rows
        .as_array()
        .into_iter()
        .flatten()
        .map(|row| rounded(row).to_string())
        .collect();
    let rows = format!("\"rows\":[\n{}\n]", rows.join(",\n"));
    result.to_string().replace("\"rows\":null", &rows) + "\n"
}

fn rounded(value: &serde_json::Value) -> serde_json::Value {
    use serde_json::Value;
    match value {
        Value::Number(number) if number.is_f64() => number
            .as_f64()
            .map_or(Value::Null, |float| json!((float * 1e4).round() / 1e4)),
        Value::Array(items) => items.iter().map(rounded).collect(),
        Value::Object(fields) => fields
            .iter()
            .map(|(name, field)| (name.clone(), rounded(field)))
            .collect(),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_a_line_for_each_row_and_short_numbers() {
        let rows = json!([{ "us": 0.012_345, "count": 7, "of": [1.0, null] }, { "us": 2.0 }]);
        let text = lines(json!({ "cores": 2, "rows": rows }));
        assert_eq!(text.lines().count(), 4, "{text}");
        assert!(
            text.contains("0.0123,") || text.contains("0.0123}"),
            "{text}"
        );
        let read: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (&read["cores"], &read["rows"][0]["count"]),
            (&json!(2), &json!(7))
        );
        assert_eq!(read["rows"][1], json!({ "us": 2.0 }));
    }
}
