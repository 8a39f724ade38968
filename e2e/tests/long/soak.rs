//! Mixed traffic for a set time: memory stays flat, counters agree, and ledgers end empty.
//!
//! `SOAK_SECONDS` is the length, 10 minutes by default. The slope of memory is fitted to the minima
//! of 16 blocks of samples. The first third of the samples is left out as warm-up, in which
//! connection pools, prefix indexes and the allocators' arenas fill once. The fit uses minima,
//! because the process did not give back the memory that it still has at a minimum, whereas peaks
//! come from traffic. The bounds are those of least squares, one-sided 95 % each (t with 14 degrees
//! of freedom). Neighbouring blocks are not quite independent, so the bounds are a little too
//! narrow. Only hours of traffic can show growth below 1 MB an hour. Shorter runs therefore fail
//! only if even the lower bound of the slope is above the limit. Runs of an hour or more fail if
//! the upper bound is above the limit.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use e2e::ledger_metrics;
use http::Request;
use serde_json::{Value, json};
use testbed::client::{self, EventStream};
use testbed::model_server::{FaultMode, ModelServerOptions, ServerFault};
use testbed::stack::Stack;
use testbed::{Result, wait_for};

const LIMIT: Duration = Duration::from_secs(60);
const SAMPLE: Duration = Duration::from_millis(500);
const BLOCKS: usize = 16;
/// The one-sided 95 % quantile of Student's t with `BLOCKS - 2` degrees of freedom.
const T95: f64 = 1.761;
const SLOPE_MB_PER_HOUR_MAX: f64 = 1.0;
const CLIENTS: usize = 6;

/// The requests and replies of the clients.
#[derive(Debug, Default)]
struct SoakCounts {
    /// The number of requests that the proxy can pick for and whose replies the client awaits.
    sent: AtomicUsize,
    served: AtomicUsize,
    left: AtomicUsize,
    refused: AtomicUsize,
    failed: AtomicUsize,
}

fn seconds() -> u64 {
    std::env::var("SOAK_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(600)
}

/// Returns the resident memory of a process, in MB of 2^20 bytes.
fn rss_mb(id: u32) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{id}/status"))?;
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .ok_or("no VmRSS")?;
    let kb: f64 = line.split_whitespace().nth(1).ok_or("no number")?.parse()?;
    Ok(kb / 1_024.0)
}

fn chat(number: usize, stream: bool) -> Value {
    // Conversations recur, and have very different lengths.
    let system = format!("{} is who you are. ", number % 23).repeat(1 + (number % 7) * 300);
    let messages = json!([{"role": "system", "content": system}, {"role": "user", "content": format!("question {number}")}]);
    json!({"model": "demo", "stream": stream, "max_tokens": 4 + number % 12, "messages": messages})
}

/// Sends one request, whose kind depends on its number.
async fn one(address: SocketAddr, number: usize, tally: &SoakCounts) -> Result<()> {
    let count = |counter: &AtomicUsize| counter.fetch_add(1, Ordering::Relaxed);
    let post = |body: String| {
        Ok::<_, testbed::Error>(Request::post("/v1/chat/completions").body(client::full(body))?)
    };
    match number % 10 {
        0 => {
            let reply = client::send(
                address,
                post("{\"model\": \"demo\", \"messages\": [".to_owned())?,
            )
            .await?;
            assert_eq!(reply.status, 400, "{}", reply.text());
            count(&tally.refused);
        }
        1 => {
            // The client disconnects in the middle of the stream.
            let mut events = EventStream::new(
                client::start(address, post(chat(number, true).to_string())?).await?,
            );
            events.next().await?;
            count(&tally.left);
        }
        kind => {
            count(&tally.sent);
            let reply = match kind {
                2 => client::get(address, "/v1/models").await,
                3..=6 => client::send(address, post(chat(number, true).to_string())?).await,
                _ => client::send(address, post(chat(number, false).to_string())?).await,
            };
            count(if reply.is_ok_and(|reply| reply.status == 200) {
                &tally.served
            } else {
                &tally.failed
            });
        }
    }
    Ok(())
}

async fn traffic(
    address: SocketAddr,
    over: Arc<AtomicBool>,
    numbers: Arc<AtomicUsize>,
    tally: Arc<SoakCounts>,
) -> Result<()> {
    while !over.load(Ordering::Relaxed) {
        one(address, numbers.fetch_add(1, Ordering::Relaxed), &tally).await?;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// Returns the slope of the block minima, and its one-sided 95 % bounds, in MB per hour.
fn slope(samples: &[(f64, f64)]) -> (f64, f64, f64) {
    let settled = &samples[samples.len() / 3..];
    let block = settled.len() / BLOCKS;
    let minimum = |block: &[(f64, f64)]| {
        block
            .iter()
            .copied()
            .min_by(|a, b| a.1.total_cmp(&b.1))
            .expect("a sample")
    };
    let points: Vec<(f64, f64)> = settled
        .chunks_exact(block)
        .take(BLOCKS)
        .map(minimum)
        .collect();
    let n = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let x = mean(|p| p.0);
    let y = mean(|p| p.1);
    let xx: f64 = points.iter().map(|p| (p.0 - x).powi(2)).sum();
    let slope = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum::<f64>() / xx;
    let rest: f64 = points
        .iter()
        .map(|p| (p.1 - y - slope * (p.0 - x)).powi(2))
        .sum();
    let error = T95 * (rest / (n - 2.0) / xx).sqrt();
    (slope, slope - error, slope + error)
}

#[test]
fn a_slope_is_found_and_bounded() {
    let noise = |i: usize| {
        if i.is_multiple_of(7) {
            0.0
        } else {
            (i % 5) as f64
        }
    };
    let line = |rise: f64| {
        (0..960)
            .map(|i| (i as f64 / 480.0, 50.0 + rise * i as f64 / 480.0 + noise(i)))
            .collect::<Vec<_>>()
    };
    let (flat, lower, upper) = slope(&line(0.0));
    assert!(
        flat.abs() < 0.2 && lower <= 0.0 && (0.0..1.0).contains(&upper),
        "{flat} {lower} {upper}"
    );
    let (steep, lower, upper) = slope(&line(10.0));
    assert!(
        (9.0..11.0).contains(&steep) && lower > 1.0 && upper > steep,
        "{steep} {lower} {upper}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_stays_and_counters_agree() -> Result<()> {
    let length = Duration::from_secs(seconds());
    let options = ModelServerOptions {
        models: vec!["demo".into()],
        speed: 0.0,
        chunk_delay_ms: 2,
        ..ModelServerOptions::default()
    };
    let mut stack = Stack::builder()
        .servers_like(4, &options)
        .concurrency(2)
        .start()
        .await?;
    let processes = [
        ("Envoy", stack.envoy.process().id()),
        ("daemon", stack.daemon()?.process().id()),
    ];
    let over = Arc::<AtomicBool>::default();
    let numbers = Arc::<AtomicUsize>::default();
    let tally = Arc::<SoakCounts>::default();
    let clients = (0..CLIENTS).map(|_| {
        tokio::spawn(traffic(
            stack.address(),
            over.clone(),
            numbers.clone(),
            tally.clone(),
        ))
    });
    let clients: Vec<_> = clients.collect();

    let began = Instant::now();
    let mut samples = [Vec::new(), Vec::new()];
    let mut last_fault = Instant::now();
    while began.elapsed() < length {
        tokio::time::sleep(SAMPLE).await;
        for ((_, id), samples) in processes.iter().zip(&mut samples) {
            samples.push((began.elapsed().as_secs_f64() / 3_600.0, rss_mb(*id)?));
        }
        // Every 7 s an engine fails three requests; retries send them to the next endpoint.
        if last_fault.elapsed() > Duration::from_secs(7) {
            last_fault = Instant::now();
            let index = began.elapsed().as_secs() as usize % stack.servers.len();
            stack.servers[index]
                .fault(ServerFault {
                    count: Some(3),
                    ..ServerFault::new(FaultMode::ResetBeforeHeaders)
                })
                .await;
        }
    }
    over.store(true, Ordering::Relaxed);
    for client in clients {
        client.await??;
    }
    ledger_metrics::nothing_left(&stack).await?;
    let value = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
    let asked = value(&tally.sent);
    let served = value(&tally.served);
    let left = value(&tally.left);
    let refused = value(&tally.refused);
    assert_eq!(
        (asked - served, value(&tally.failed)),
        (0, 0),
        "every request was served"
    );
    // The filter, the clients and the daemon must all count the same number of picks. The filter
    // adds its picks to the proxy's counter at the next tick.
    let sent = i64::try_from(asked + left)?;
    let picked = stack
        .envoy
        .picker_stat_until("switchpoint_picked_total", |picked| picked == sent, LIMIT)
        .await?;
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_refused_invalid_total")
            .await?,
        i64::try_from(refused)?
    );
    let counted = || async {
        let rows = stack.daemon.as_ref()?.endpoints().await.ok()?;
        (rows
            .iter()
            .filter_map(|row| row["picked"].as_i64())
            .sum::<i64>()
            == picked)
            .then_some(())
    };
    wait_for(LIMIT, "the daemon's count to be the filter's", counted).await?;

    ledger_metrics::note(
        "soak",
        &format!("{length:?}: {served} served, {left} left, {refused} refused, 0 failed"),
    );
    for ((name, _), samples) in processes.iter().zip(&samples) {
        let (slope, lower, upper) = slope(samples);
        let ends = (samples[samples.len() / 3].1, samples[samples.len() - 1].1);
        let seen = format!(
            "{name}: {:.1} to {:.1} MB, slope {slope:.2} MB/h, 95 % bounds {lower:.2} and {upper:.2}",
            ends.0, ends.1
        );
        ledger_metrics::note("soak", &seen);
        let bound = if length >= Duration::from_secs(3_600) {
            upper
        } else {
            lower
        };
        assert!(bound < SLOPE_MB_PER_HOUR_MAX, "{seen}");
    }
    Ok(())
}
