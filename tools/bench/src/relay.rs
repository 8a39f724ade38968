//! Measures the cost of many proxies for one daemon. The bench simulates the proxies at the
//! protocol level. Each simulated proxy sends what a proxy sends: reports of its picks
//! (placements), and every few milliseconds a load report of all endpoints, in which many values
//! have changed. The bench measures the daemon's CPU, and the age of load reports and placements on
//! arrival.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use exchange::Timestamp;
use pool_state::{LoadReportHead, LoadReportSum, PeerLoadReport};
use proto::placements::{self, EncodedPlacement};
use proto::state::state_service_client::StateServiceClient;
use proto::state::{self, daemon_message, proxy_message};
use scheduler::in_flight::EndpointLoad;
use scheduler::{EndpointRef, Generation, Slot};
use serde_json::json;
use testbed::ports::ReservedPort;
use testbed::process::ChildProcess;
use testbed::{Result, client, daemon, root, wait_for};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::load::cpu_ns;

/// The maximum time from the start of the first proxy until the last proxy has a pool update.
const LIMIT: Duration = Duration::from_secs(30);
/// The maximum age to record, in tenths of a ms. An older message is recorded with this age.
const AGE_TENTHS_MAX: usize = 100_000;
/// The pause before the measurement, so that the start of the daemon and of the streams is not
/// counted.
const SETTLE: Duration = Duration::from_secs(2);

/// Sets the proxies and their messages.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Args {
    /// Proxies
    #[arg(long, default_value_t = 32)]
    proxies: u16,
    /// Picks per second of each proxy
    #[arg(long, default_value_t = 1_000)]
    picks: usize,
    /// New blocks of 64 tokens in each pick's placement
    #[arg(long, default_value_t = 8)]
    blocks: usize,
    /// Endpoints, at least as many as proxies
    #[arg(long, default_value_t = 100)]
    endpoints: u16,
    /// Time between two messages from a proxy, ms
    #[arg(long, default_value_t = 5)]
    every_ms: u64,
    /// Seconds measured
    #[arg(long, default_value_t = 10)]
    seconds: u64,
}

/// Counts of the messages that all proxies together sent and received, and the ages of received
/// messages.
#[derive(Debug, Default)]
struct RelayCounts {
    reports_sent: u64,
    placements_sent: u64,
    messages: u64,
    rows: AgeHistogram,
    placements: AgeHistogram,
}

/// The count of messages of each age, by tenths of a ms.
#[derive(Debug, Default)]
struct AgeHistogram {
    counts: Vec<u64>,
}

/// The state that the simulated proxies share.
#[derive(Debug)]
struct RelayBench {
    args: Args,
    began: Instant,
    counts: AtomicBool,
    over: AtomicBool,
    counts_seen: Mutex<RelayCounts>,
}

/// Measures, prints and writes `target/bench/relay.json`.
pub(crate) async fn bench(args: Args) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let state = ReservedPort::lease()?;
    let others = [
        ReservedPort::lease()?,
        ReservedPort::lease()?,
        ReservedPort::lease()?,
    ];
    let mut command = Command::new(daemon::binary()?);
    command
        .arg("serve")
        .arg("--snapshot-file")
        .arg(folder.path().join("snapshot"));
    command
        .arg("--listen-state")
        .arg(state.address().to_string());
    for (flag, port) in ["--listen-admin", "--listen-ext-proc", "--listen-health"]
        .into_iter()
        .zip(&others)
    {
        command.arg(flag).arg(port.address().to_string());
    }
    // The daemon does not need model servers at these addresses, because scraping is not measured.
    command.args(
        (0..args.endpoints).flat_map(|i| ["--endpoint".to_owned(), format!("127.0.0.1:{}", 1 + i)]),
    );
    let daemon = ChildProcess::spawn("switchpointd", &mut command, folder.path())?;

    wait_for(LIMIT, "the daemon", || async {
        tokio::net::TcpStream::connect(state.address()).await.ok()
    })
    .await?;
    let stage = RelayBench {
        args,
        began: Instant::now(),
        counts: false.into(),
        over: false.into(),
        counts_seen: Mutex::default(),
    };
    let stage = Arc::new(stage);
    let mut proxies = Vec::new();
    for number in 0..args.proxies {
        proxies
            .push(RelayProxy::start(&stage, number, &format!("http://{}", state.address())).await?);
    }
    tokio::time::sleep(SETTLE).await;
    let cpu = || -> Result<[u64; 2]> { Ok([cpu_ns(daemon.id())?, cpu_ns(std::process::id())?]) };
    let before = cpu()?;
    let began = Instant::now();
    stage.counts.store(true, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(args.seconds)).await;
    stage.counts.store(false, Ordering::Relaxed);
    let after = cpu()?;
    let ns = began.elapsed().as_nanos() as f64;
    let cores = [0, 1].map(|process| after[process].saturating_sub(before[process]) as f64 / ns);
    let dropped = dropped(others[0].address()).await?;
    stage.over.store(true, Ordering::Relaxed);
    for proxy in proxies {
        proxy.await??;
    }
    stage.report(cores, dropped)
}

/// Returns the number of placements that the daemon dropped and did not forward.
async fn dropped(admin: std::net::SocketAddr) -> Result<f64> {
    let page = client::get(admin, "/metrics").await?.text();
    let line = page
        .lines()
        .find(|line| line.starts_with("switchpoint_placements_dropped_total"));
    Ok(line
        .and_then(|line| line.rsplit(' ').next())
        .ok_or("no such metric")?
        .parse()?)
}

// === impl RelayBench ===

impl RelayBench {
    fn now_us(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn seen(&self) -> MutexGuard<'_, RelayCounts> {
        self.counts_seen
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Prints and writes the result. `cores` is the CPU use of the daemon and of this process,
    /// which simulates the proxies.
    fn report(&self, cores: [f64; 2], dropped: f64) -> Result<()> {
        let seen = self.seen();
        let args = &self.args;
        let ages = |ages: &AgeHistogram| [0.5, 0.99, 1.0].map(|share| ages.quantile_ms(share));
        let rows = ages(&seen.rows);
        let placements = ages(&seen.placements);
        let per_second = |count: u64| count as f64 / args.seconds as f64;
        println!(
            "{} proxies with {} picks/s each, {} endpoints, {} new blocks per pick, a message every {} ms: the daemon uses {:.2} cores, the simulated proxies {:.2}",
            args.proxies,
            args.picks,
            args.endpoints,
            args.blocks,
            args.every_ms,
            cores[0],
            cores[1]
        );
        let due = f64::from(args.proxies) * 1e3 / args.every_ms as f64;
        println!(
            "messages per second: {:.0} sent of {due:.0} planned, {:.0} forwarded",
            per_second(seen.reports_sent),
            per_second(seen.messages)
        );
        let listeners = f64::from(args.proxies) - 1.0;
        let arrived = seen.placements.count() as f64 / (seen.placements_sent as f64 * listeners);
        println!(
            "placements: {:.1} % arrived, {dropped:.0} dropped",
            arrived * 1e2
        );
        println!(
            "age of load reports on arrival: p50 {:.1} ms, p99 {:.1} ms, longest {:.1} ms",
            rows[0], rows[1], rows[2]
        );
        println!(
            "age of placements on arrival: p50 {:.1} ms, p99 {:.1} ms, longest {:.1} ms",
            placements[0], placements[1], placements[2]
        );
        let file = root().join("target/bench/relay.json");
        std::fs::create_dir_all(file.parent().ok_or("no folder")?)?;
        let row = json!({
            "proxies": args.proxies, "picks": args.picks, "endpoints": args.endpoints, "blocks": args.blocks, "every_ms": args.every_ms,
            "daemon_cores": cores[0], "players_cores": cores[1], "told_per_second": per_second(seen.reports_sent), "due_per_second": due,
            "passed_on_per_second": per_second(seen.messages), "placements_arrived": arrived, "placements_dropped": dropped,
            "load_ms": {"p50": rows[0], "p99": rows[1]}, "placements_ms": {"p50": placements[0], "p99": placements[1]},
        });
        std::fs::write(
            &file,
            serde_json::to_string_pretty(&json!({"rows": [row]}))?,
        )?;
        println!("written to target/bench/relay.json");
        Ok(())
    }
}

// === impl AgeHistogram ===

impl AgeHistogram {
    fn add(&mut self, age_us: u64) {
        let tenths = usize::try_from(age_us / 100)
            .unwrap_or(usize::MAX)
            .min(AGE_TENTHS_MAX);
        if self.counts.len() <= tenths {
            self.counts.resize(tenths + 1, 0);
        }
        self.counts[tenths] += 1;
    }

    fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    fn quantile_ms(&self, share: f64) -> f64 {
        let wanted = share * self.count() as f64;
        let mut seen = 0;
        let at = self.counts.iter().position(|count| {
            seen += count;
            seen > 0 && seen as f64 >= wanted
        });
        at.map_or(f64::NAN, |tenths| tenths as f64 / 10.0)
    }
}

/// A simulated proxy.
struct RelayProxy {
    stage: Arc<RelayBench>,
    number: u16,
    present: Vec<EndpointRef>,
    /// The last time stamp received from each proxy.
    received: Vec<u64>,
    peers: (LoadReportSum, PeerLoadReport),
}

impl RelayProxy {
    /// Connects to the daemon and waits for the pool update. Then sends and receives in a task
    /// until the bench is over.
    async fn start(
        stage: &Arc<RelayBench>,
        number: u16,
        daemon: &str,
    ) -> Result<tokio::task::JoinHandle<Result<()>>> {
        let (out, messages) = mpsc::channel(16);
        let mut client = StateServiceClient::connect(daemon.to_owned()).await?;
        let pools = vec!["default".to_owned()];
        let hello = state::Hello {
            schema: proto::SCHEMA,
            node_id: format!("played-{number}"),
            process_id: 1 + u64::from(number),
            pools,
            ..state::Hello::default()
        };
        out.send(proxy_message::Message::Hello(hello)).await?;
        let wrapped = tokio_stream::StreamExt::map(ReceiverStream::new(messages), |message| {
            state::ProxyMessage {
                message: Some(message),
            }
        });
        let mut stream = client.stream(wrapped).await?.into_inner();
        let present = tokio::time::timeout(LIMIT, pool_update(&mut stream, &out)).await??;
        let last_sent = vec![0; usize::from(stage.args.proxies)];
        let mut proxy = Self {
            stage: Arc::clone(stage),
            number,
            present,
            received: last_sent,
            peers: (LoadReportSum::default(), PeerLoadReport::default()),
        };
        proxy.peers.0.reset(proxy.present.clone(), []);
        Ok(tokio::spawn(proxy.run(out, stream)))
    }

    async fn run(
        mut self,
        out: mpsc::Sender<proxy_message::Message>,
        mut stream: Streaming<state::DaemonMessage>,
    ) -> Result<()> {
        let mut ticks = tokio::time::interval(Duration::from_millis(self.stage.args.every_ms));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut round = 0;
        let mut reported_us = self.stage.now_us();
        while !self.stage.over.load(Ordering::Relaxed) {
            tokio::select! {
                _ = ticks.tick() => {
                    round += 1;
                    let now_us = self.stage.now_us();
                    let picks = usize::try_from(now_us - reported_us)? * self.stage.args.picks / 1_000_000;
                    reported_us += u64::try_from(picks * 1_000_000 / self.stage.args.picks)?;
                    let _ = out.send(proxy_message::Message::LoadReport(self.report(round, picks, now_us))).await;
                }
                message = stream.message() => match message?.and_then(|message| message.message) {
                    Some(daemon_message::Message::PeerLoad(peers)) => self.receive(peers),
                    Some(daemon_message::Message::PoolUpdate(pool_update)) => out.send(ack(&pool_update)).await?,
                    Some(_) => {}
                    None => return Err("the daemon closed the stream".into()),
                },
            }
        }
        Ok(())
    }

    /// Builds a load report. At the endpoint with this proxy's number, the field for prefill tokens
    /// has the time of sending. Most other values change from report to report.
    fn report(&self, round: u64, picks: usize, now_us: u64) -> state::LoadReport {
        let mut sum = LoadReportSum::default();
        let proxies = usize::from(self.stage.args.proxies);
        sum.reset(self.present.clone(), []);
        for (at, endpoint) in self.present.iter().enumerate() {
            let own = if at == usize::from(self.number) {
                now_us & u64::from(u32::MAX)
            } else {
                0
            };
            let changing = (round + at as u64 * 7 + u64::from(self.number)) % 9;
            let prefill_tokens = if at < proxies { own } else { changing * 700 };
            let requests = u32::try_from(changing).unwrap_or(0);
            sum.add(
                *endpoint,
                EndpointLoad {
                    requests,
                    prefill_tokens,
                    decode_tokens: changing * 300,
                    ..EndpointLoad::default()
                },
            );
        }
        let head = LoadReportHead {
            written: Timestamp(now_us * 1_000),
            ..LoadReportHead::default()
        };
        let mut placed = Vec::new();
        let placement = |pick: usize| {
            let endpoint = self.present[pick % self.present.len()];
            let blocks: Vec<u64> = (0..self.stage.args.blocks as u64)
                .map(|block| now_us | block << 48)
                .collect();
            placements::push(&mut placed, endpoint, &blocks);
        };
        (0..picks).for_each(placement);
        if self.stage.counts.load(Ordering::Relaxed) {
            let mut seen = self.stage.seen();
            seen.reports_sent += 1;
            seen.placements_sent += picks as u64;
        }
        state::LoadReport {
            pool: "default".into(),
            row: sum.row(head, [], &[]),
            placements: placed,
            stamp: now_us,
            ..state::LoadReport::default()
        }
    }

    fn receive(&mut self, peers: state::PeerLoad) {
        let now_us = self.stage.now_us();
        let (sum, row) = &mut self.peers;
        sum.read(row, peers.row);
        let mut seen = self.stage.seen();
        let counts = self.stage.counts.load(Ordering::Relaxed);
        for (at, last_sent) in self
            .received
            .iter_mut()
            .enumerate()
            .filter(|(at, _)| *at != usize::from(self.number))
        {
            let placed = sum.load(self.present[at]).prefill_tokens;
            if counts && placed != *last_sent && placed > 0 {
                seen.rows
                    .add((now_us & u64::from(u32::MAX)).saturating_sub(placed));
            }
            *last_sent = placed;
        }
        if counts {
            seen.messages += 1;
            let mut rest = peers.placements.as_slice();
            while let Some(EncodedPlacement {
                blocks,
                rest: after,
                ..
            }) = placements::take(rest)
            {
                rest = after;
                // The first block hash of a placement contains the time of sending.
                seen.placements.add(
                    now_us.saturating_sub(
                        blocks
                            .first()
                            .map_or(0, |placed| u64::from_le_bytes(*placed)),
                    ),
                );
            }
        }
    }
}

async fn pool_update(
    stream: &mut Streaming<state::DaemonMessage>,
    out: &mpsc::Sender<proxy_message::Message>,
) -> Result<Vec<EndpointRef>> {
    loop {
        let message = stream
            .message()
            .await?
            .ok_or("the daemon closed the stream")?
            .message;
        if let Some(daemon_message::Message::PoolUpdate(pool_update)) = message {
            out.send(ack(&pool_update)).await?;
            let endpoint = |e: &state::Endpoint| {
                Ok(EndpointRef {
                    slot: Slot(u16::try_from(e.slot)?),
                    generation: Generation(e.generation),
                })
            };
            return pool_update.endpoints.iter().map(endpoint).collect();
        }
    }
}

fn ack(pool_update: &state::PoolUpdate) -> proxy_message::Message {
    proxy_message::Message::Ack(state::Ack {
        pool: pool_update.pool.clone(),
        version: pool_update.version,
        ..state::Ack::default()
    })
}
