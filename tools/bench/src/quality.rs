//! Checks that the simulator's ranking of policies holds where everything but the GPUs is real.
//! Replays a recorded trace in real time through Envoy, the filter and the daemon, with our policy,
//! with llm-d's weights and with Envoy's round robin.
//!
//! The policies take turns within a round, each on servers with empty caches. Each round places the
//! arrivals differently within the trace's time steps.

use std::time::Duration;

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use serde::Serialize;
use testbed::front::{self, DaemonAndEnvoy, ExtraArgs};
use testbed::model_server::{ModelServer, ModelServerOptions};
use testbed::replay::{self, ReplayPlan, ReplayResult, quantile};
use testbed::trace::{self, Arrival};
use testbed::{Result, root};

/// Model name of the simulated servers.
const MODEL: &str = "llama-3.1-8b";
/// Requests with this header take the round-robin route.
const POLICY_HEADER: &str = "x-bench-policy";

/// How much to measure.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Args {
    /// Rounds; each measures every policy once
    #[arg(long, default_value_t = 1)]
    rounds: u64,
    /// Minutes of the trace
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// Speed-up of the recorded arrivals; 3 is 0.7 of what eight servers sustain
    #[arg(long, default_value_t = 3.0)]
    rate: f64,
    /// Simulated model servers: Llama 3.1 8B on one H100 each
    #[arg(long, default_value_t = 8)]
    servers: usize,
}

/// A policy to measure, ordered by the simulator's ranking, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QualityPolicy {
    Ours,
    Weighted,
    RoundRobin,
}

/// One row of the result file: one run.
#[derive(Clone, Debug, Serialize)]
struct QualityRow {
    policy: &'static str,
    round: u64,
    requests: usize,
    failed: usize,
    ttft_mean_ms: f64,
    ttft_p50_ms: f64,
    ttft_p99_ms: f64,
    e2e_mean_ms: f64,
    /// Share of prompt tokens that the engines had cached.
    hits: f64,
}

/// Measures, prints and writes `target/bench/quality-real.json`.
pub(crate) async fn bench(args: Args) -> Result<()> {
    let end = Duration::from_secs_f64(args.minutes * 60.0);
    let mut rows = Vec::new();
    for round in 1..=args.rounds {
        let all = trace::read(
            &root().join("tools/testbed/data/mooncake_conversation_10min.jsonl.gz"),
            round,
        )?;
        let arrivals: Vec<Arrival> = all.into_iter().filter(|arrival| arrival.at < end).collect();
        for policy in QualityPolicy::ALL {
            println!(
                "round {round}: {} requests by {}, {:.0} s",
                arrivals.len(),
                policy.name(),
                end.as_secs_f64() / args.rate
            );
            rows.push(policy.run(args, &arrivals, round).await?);
        }
    }
    println!("{}", table(&rows));
    let mut ranked = QualityPolicy::ALL.map(QualityPolicy::name);
    ranked.sort_by(|a, b| {
        mean(&rows, a, |row| row.ttft_mean_ms).total_cmp(&mean(&rows, b, |row| row.ttft_mean_ms))
    });
    let holds = ranked == QualityPolicy::ALL.map(QualityPolicy::name);
    println!(
        "by mean TTFT: {}; the simulator's ranking {}",
        ranked.join(", "),
        if holds { "holds" } else { "does not hold" }
    );
    crate::write_result("quality-real", &rows)
}

// === impl QualityPolicy ===

impl QualityPolicy {
    const ALL: [Self; 3] = [Self::Ours, Self::Weighted, Self::RoundRobin];

    fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Weighted => "2/2/3",
            Self::RoundRobin => "round robin",
        }
    }

    /// The daemon's configuration file. Round robin ignores it, because its route bypasses the
    /// picker.
    fn config(self) -> String {
        let scorers: &[(&str, u32)] = match self {
            Self::Weighted => &[
                ("queue-scorer", 2),
                ("kv-cache-utilization-scorer", 2),
                ("prefix-cache-scorer", 3),
            ],
            _ => &[("marginal-cost-scorer", 1)],
        };
        let plugins: String = scorers
            .iter()
            .map(|(scorer, _)| format!("- type: {scorer}\n"))
            .collect();
        let parts: String = scorers
            .iter()
            .map(|(scorer, weight)| format!("  - {{pluginRef: {scorer}, weight: {weight}}}\n"))
            .collect();
        format!(
            "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n{plugins}schedulingProfiles:\n- name: default\n  plugins:\n{parts}"
        )
    }

    async fn run(self, args: Args, arrivals: &[Arrival], round: u64) -> Result<QualityRow> {
        let options = ModelServerOptions {
            models: vec![MODEL.into()],
            ..ModelServerOptions::default()
        };
        let servers = (0..args.servers)
            .map(|_| Ok(ModelServer::start(options.clone())?))
            .collect::<Result<Vec<_>>>()?;
        let addresses: Vec<String> = servers
            .iter()
            .map(|server| server.addr().to_string())
            .collect();
        let folder = tempfile::tempdir()?;
        let config = folder.path().join("config.yaml");
        std::fs::write(&config, self.config())?;
        let daemon = ["--config".to_owned(), config.display().to_string()];
        let more = ExtraArgs {
            daemon: &daemon,
            ..ExtraArgs::default()
        };
        let mut front = DaemonAndEnvoy::start(&addresses, more, |config| {
            front::add_round_robin(config, &addresses, POLICY_HEADER)
        })
        .await?;
        let headers = if self == Self::RoundRobin {
            vec![(POLICY_HEADER.into(), "round-robin".into())]
        } else {
            vec![]
        };
        let plan = ReplayPlan {
            target: DaemonAndEnvoy::address(),
            model: MODEL.into(),
            headers,
            rate: args.rate,
        };
        let seen = replay::run(&plan, arrivals).await?;
        front.check_running()?;
        front.stop().await?;
        Ok(QualityRow::of(self.name(), round, &seen))
    }
}

// === impl QualityRow ===

impl QualityRow {
    fn of(policy: &'static str, round: u64, seen: &[ReplayResult]) -> Self {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let served: Vec<(Duration, Duration)> = seen
            .iter()
            .filter_map(|seen| Some((seen.ttft?, seen.duration)))
            .collect();
        let mut ttft: Vec<Duration> = served.iter().map(|(ttft, _)| *ttft).collect();
        ttft.sort();
        let mean = |times: &mut dyn Iterator<Item = Duration>| {
            ms(times.sum::<Duration>()) / served.len().max(1) as f64
        };
        let tokens = |of: fn(&ReplayResult) -> u64| seen.iter().map(of).sum::<u64>() as f64;
        Self {
            policy,
            round,
            requests: seen.len(),
            failed: seen.len() - served.len(),
            ttft_mean_ms: mean(&mut served.iter().map(|(ttft, _)| *ttft)),
            ttft_p50_ms: quantile(&ttft, 0.5).map_or(f64::NAN, ms),
            ttft_p99_ms: quantile(&ttft, 0.99).map_or(f64::NAN, ms),
            e2e_mean_ms: mean(&mut served.iter().map(|(_, duration)| *duration)),
            hits: tokens(|seen| seen.cached_tokens) / tokens(|seen| seen.prompt_tokens).max(1.0),
        }
    }
}

fn mean(rows: &[QualityRow], policy: &str, of: fn(&QualityRow) -> f64) -> f64 {
    let values: Vec<f64> = rows
        .iter()
        .filter(|row| row.policy == policy)
        .map(of)
        .collect();
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

fn table(rows: &[QualityRow]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header([
        "policy",
        "TTFT mean, ms",
        "p50",
        "p99",
        "E2E mean, ms",
        "cached",
        "failed",
    ]);
    for policy in QualityPolicy::ALL.map(QualityPolicy::name) {
        let times: [fn(&QualityRow) -> f64; 4] = [
            |row| row.ttft_mean_ms,
            |row| row.ttft_p50_ms,
            |row| row.ttft_p99_ms,
            |row| row.e2e_mean_ms,
        ];
        let times = times.map(|of| format!("{:.0}", mean(rows, policy, of)));
        let failed: usize = rows
            .iter()
            .filter(|row| row.policy == policy)
            .map(|row| row.failed)
            .sum();
        let hits = format!("{:.1} %", 100.0 * mean(rows, policy, |row| row.hits));
        table.add_row(
            [policy.to_owned()]
                .into_iter()
                .chain(times)
                .chain([hits, failed.to_string()]),
        );
    }
    table
}
