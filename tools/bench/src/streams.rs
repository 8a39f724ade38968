//! Measures the CPU cost of a streamed chunk, with many slow streams at the same time through each
//! path.

use std::net::SocketAddr;
use std::time::Duration;

use http::Request;
use http_body_util::BodyExt;
use serde::{Deserialize, Serialize};
use testbed::{Result, client};
use tokio::task::JoinSet;

use crate::load::{cpu_ns, cpu_ns_of};
use crate::stats::{PairedDifference, median};
use crate::world::{BenchStack, RequestPath};
use crate::{Args, write_result};

/// The number of concurrent streams, the chunks of each stream, and the pause between two chunks.
/// Together the streams have 5,000 chunks/s for about 3 s.
const STREAMS: u64 = 50;
const CHUNKS: u64 = 300;
const EVERY_MS: u64 = 10;

/// The maximum time of a run, after which the bench assumes that the run hangs.
const LIMIT: Duration = Duration::from_secs(60);

/// One row of the result file.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct StreamsRow {
    pub(crate) front: String,
    pub(crate) chunks: u64,
    pub(crate) chunks_per_s: f64,
    /// The CPU time per chunk of Envoy and the daemon together, in µs.
    pub(crate) cpu_us: f64,
    pub(crate) added_cpu_us: f64,
    pub(crate) iqr_us: f64,
}

pub(crate) async fn bench(args: &Args) -> Result<()> {
    let mut world = BenchStack::start(10, 1, &args.daemon_argument).await?;
    let mut runs: [Vec<StreamRunFigures>; 3] = Default::default();
    for round in 0..args.rounds {
        for turn in 0..RequestPath::SHIPPED.len() {
            let at = (round + turn) % RequestPath::SHIPPED.len();
            runs[at].push(
                run(
                    world.address(RequestPath::SHIPPED[at]),
                    world.processes(RequestPath::SHIPPED[at]),
                )
                .await?,
            );
        }
    }
    world.stop().await?;
    let cpu = |runs: &[StreamRunFigures]| {
        runs.iter()
            .map(StreamRunFigures::sum_us)
            .collect::<Vec<_>>()
    };
    let rows: Vec<StreamsRow> = RequestPath::SHIPPED
        .iter()
        .zip(&runs)
        .map(|(way, ours)| {
            let added = PairedDifference::between(&cpu(ours), &cpu(&runs[0]));
            let rates: Vec<f64> = ours.iter().map(|run| run.chunks_per_s).collect();
            StreamsRow {
                front: way.name().to_owned(),
                chunks: STREAMS * CHUNKS,
                chunks_per_s: median(&rates),
                cpu_us: median(&cpu(ours)),
                added_cpu_us: added.median,
                iqr_us: added.iqr,
            }
        })
        .collect();
    for row in &rows {
        println!(
            "{:>8} {:.0} chunks/s: {:.2} us a chunk, + {:.2} ({:.2})",
            row.front, row.chunks_per_s, row.cpu_us, row.added_cpu_us, row.iqr_us
        );
    }
    write_result("streams", &rows)
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamRunFigures {
    /// The CPU time per chunk, in µs: of Envoy's workers, of the rest of Envoy, and of the daemon.
    pub(crate) cpu_us: [f64; 3],
    chunks_per_s: f64,
}

impl StreamRunFigures {
    pub(crate) fn sum_us(&self) -> f64 {
        self.cpu_us.iter().sum()
    }
}

/// Runs the streams through `target`. Measures the CPU time of this Envoy and of this daemon.
#[expect(clippy::cast_precision_loss, reason = "counts of one run")]
pub(crate) async fn run(target: SocketAddr, [envoy, daemon]: [u32; 2]) -> Result<StreamRunFigures> {
    let worker = |name: &str| name.starts_with("wrk:");
    let cpu = || -> Result<[u64; 3]> {
        Ok([
            cpu_ns_of(envoy, worker)?,
            cpu_ns_of(envoy, |name| !worker(name))?,
            cpu_ns(daemon)?,
        ])
    };
    let before = cpu()?;
    let began = tokio::time::Instant::now();
    let mut streams = JoinSet::new();
    for number in 0..STREAMS {
        streams.spawn(async move {
            let body = format!(r#"{{"model":"m","stream":true,"messages":[{{"role":"user","content":"stream {number}"}}]}}"#);
            let path = format!("/v1/chat/completions?chunks={CHUNKS}&every_ms={EVERY_MS}");
            let request = Request::post(path).header("content-type", "application/json").body(client::full(body))?;
            let mut reply = client::start(target, request).await?.into_body();
            let mut bytes = 0;
            while let Some(frame) = reply.frame().await {
                bytes += frame?.data_ref().map_or(0, |data| data.len());
            }
            Ok::<usize, testbed::Error>(bytes)
        });
    }
    let ended = tokio::time::timeout(LIMIT, streams.join_all())
        .await
        .map_err(|_| "the streams did not end in time")?;
    let bytes: Vec<usize> = ended.into_iter().collect::<Result<_>>()?;
    if bytes.iter().any(|got| *got != bytes[0] || *got == 0) {
        return Err("a stream ended early".into());
    }
    let chunks = (STREAMS * CHUNKS) as f64;
    let after = cpu()?;
    let cpu_us = [0, 1, 2].map(|part| (after[part] - before[part]) as f64 / 1e3 / chunks);
    Ok(StreamRunFigures {
        cpu_us,
        chunks_per_s: chunks / began.elapsed().as_secs_f64(),
    })
}
