//! Sends equal requests at equal times through two Envoys. One Envoy spreads the requests by round
//! robin, and the other has the picker. The demo prints the results of both side by side while they
//! run.
#![allow(
    clippy::print_stdout,
    reason = "a command-line program prints its results"
)]

mod cpu;
mod policy;
mod table;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use clap::builder::RangedU64ValueParser;
use testbed::front::{self, DaemonAndEnvoy, ExtraArgs, RoundRobinEnvoy};
use testbed::model_server::{EngineProfile, ModelServer, ModelServerOptions};
use testbed::trace::{self, Arrival};
use testbed::{Result, client, sessions};
use tokio::signal::unix::{Signal, SignalKind, signal};

use cpu::CpuMeter;
use policy::DemoPolicy;
use table::LiveView;

/// Name of the simulated model.
const MODEL: &str = "qwen3-32b";

/// Model and GPU whose measured step times the servers have.
const PROFILE: EngineProfile = EngineProfile::Qwen32bH200;

/// The seed of the sessions, and of the arrivals within the clock steps of a recorded trace.
const SEED: u64 = 1;

/// First port of the picker's servers, and of the other Envoy's servers.
const SERVER_PORTS: (u16, u16) = (8001, 8101);

/// Port of the Envoy without the picker.
const ROUND_ROBIN_PORT: u16 = 8081;

/// The interval at which the figures are shown: on a terminal, and elsewhere.
const SHOW_EVERY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));

/// Compare Envoy's round robin with the picker on simulated GPUs: the same requests, at the same
/// time, side by side.
#[derive(Debug, Parser)]
#[command(long_about = None)]
struct Args {
    /// Minutes of requests to send
    #[arg(long, default_value_t = 1.75)]
    minutes: f64,
    /// Sessions of agents that begin per minute. With 20 round robin just keeps up; with 30 it does
    /// not
    #[arg(long, default_value_t = 20.0)]
    sessions: f64,
    /// Speed-up of the arrivals
    #[arg(long, default_value_t = 1.0)]
    rate: f64,
    /// Simulated model servers of each policy, on ports 8001 and up, and 8101 and up
    #[arg(long, default_value_t = 4, value_parser = RangedU64ValueParser::<u16>::new().range(1..=64))]
    servers: u16,
    /// Exit after the comparison instead of staying up
    #[arg(long)]
    exit: bool,
    /// Replay this recorded trace instead of generated sessions, for example
    /// tools/testbed/data/mooncake_conversation_10min.jsonl.gz
    #[arg(long)]
    trace: Option<PathBuf>,
}

/// SIGINT and SIGTERM, which both end the demo.
struct StopSignals(Signal, Signal);

/// The running parts: both Envoys, the daemon, and the model servers of each policy.
struct Demo {
    picker: DaemonAndEnvoy,
    round_robin: RoundRobinEnvoy,
    policies: [DemoPolicy; 2],
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(&Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: &Args) -> Result<()> {
    let mut stop = StopSignals(
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
    );
    let mut demo = tokio::select! {
        demo = Demo::start(args) => demo?,
        () = stop.next() => return Ok(()),
    };
    let outcome = tokio::select! {
        outcome = demo.compare(args) => outcome,
        () = stop.next() => Ok(()),
    };
    println!("Stopping ...");
    outcome.and(demo.stop().await)
}

/// Returns the requests of both policies.
fn arrivals(args: &Args) -> Result<Vec<Arrival>> {
    let end = Duration::try_from_secs_f64(args.minutes * 60.0)
        .map_err(|error| format!("--minutes: {error}"))?;
    let arrivals = match &args.trace {
        Some(file) => trace::read(file, SEED)?
            .into_iter()
            .filter(|arrival| arrival.at < end)
            .collect(),
        None => sessions::generate(SEED, args.sessions, end),
    };
    if arrivals.is_empty() {
        Err("no request arrives within this time".into())
    } else {
        Ok(arrivals)
    }
}

// === impl StopSignals ===

impl StopSignals {
    /// Returns when one of the signals arrives.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
        }
    }
}

// === impl Demo ===

impl Demo {
    /// Starts all parts and sends a first request through each Envoy.
    async fn start(args: &Args) -> Result<Self> {
        let start = Instant::now();
        println!(
            "Starting 2 x {} simulated model servers, two Envoys and switchpointd ...",
            args.servers
        );
        let [theirs, ours] = [
            servers(SERVER_PORTS.1, args.servers)?,
            servers(SERVER_PORTS.0, args.servers)?,
        ];
        let [their_addresses, our_addresses] = [addresses(&theirs), addresses(&ours)];
        let (picker, round_robin) = tokio::try_join!(
            DaemonAndEnvoy::start(&our_addresses, ExtraArgs::default(), |_| Ok(())),
            RoundRobinEnvoy::start(ROUND_ROBIN_PORT, &their_addresses),
        )?;
        let policies = [
            DemoPolicy::new("round robin", round_robin.address(), theirs),
            DemoPolicy::new("switchpoint", DaemonAndEnvoy::address(), ours),
        ];
        for policy in &policies {
            let sent = Instant::now();
            let body = format!(
                r#"{{"model":"{MODEL}","max_tokens":1,"messages":[{{"role":"user","content":"hello"}}]}}"#
            );
            let reply = client::post(policy.target(), "/v1/chat/completions", body).await?;
            println!(
                "{:5.1} s: first request by {}: status {} from {}, after {} ms",
                start.elapsed().as_secs_f64(),
                policy.name(),
                reply.status,
                reply.header("x-served-by"),
                sent.elapsed().as_millis()
            );
        }
        Ok(Self {
            picker,
            round_robin,
            policies,
        })
    }

    /// Sends the requests and shows the figures. Then, unless `--exit` is set, the demo stays up
    /// until it is stopped.
    async fn compare(&mut self, args: &Args) -> Result<()> {
        let arrivals = arrivals(args)?;
        let length = Duration::from_secs_f64(args.minutes * 60.0 / args.rate);
        println!("{}", introduction(args, arrivals.len(), length));
        let mut cpu = CpuMeter::start(&[
            self.picker.daemon().id(),
            self.picker.envoy().id(),
            self.round_robin.process().id(),
        ]);
        self.replay(args, &arrivals, length, &cpu).await?;
        self.picker.check_running()?;
        self.round_robin.process().check_running()?;
        println!("\nDone. TTFT is the time to the first token, \"reply\" the time to the last.");
        println!(
            "The hit rate is the share of prompt tokens that the engines had in their prefix caches."
        );
        println!(
            "{}\n{}",
            table::comparison(&self.policies),
            cpu.finish(&self.policies)
        );
        if !args.exit {
            println!("\n{}", invitation());
            std::future::pending::<()>().await;
        }
        Ok(())
    }

    async fn replay(
        &self,
        args: &Args,
        arrivals: &[Arrival],
        length: Duration,
        cpu: &CpuMeter,
    ) -> Result<()> {
        let start = Instant::now();
        let [theirs, ours] = &self.policies;
        let mut both = std::pin::pin!(async {
            tokio::try_join!(
                theirs.replay(arrivals, args.rate, start),
                ours.replay(arrivals, args.rate, start)
            )
        });
        let mut view = LiveView::new(std::io::stdout().is_terminal(), length);
        let mut show = tokio::time::interval(if view.on_terminal() {
            SHOW_EVERY.0
        } else {
            SHOW_EVERY.1
        });
        loop {
            tokio::select! {
                ended = &mut both => {
                    view.show(start.elapsed(), &self.policies, cpu);
                    return ended.map(drop);
                }
                _ = show.tick() => view.show(start.elapsed(), &self.policies, cpu),
            }
        }
    }

    /// Stops the Envoys and the daemon.
    async fn stop(self) -> Result<()> {
        let (picker, round_robin) = tokio::join!(self.picker.stop(), self.round_robin.stop());
        picker.and(round_robin)
    }
}

fn servers(first_port: u16, count: u16) -> Result<Vec<ModelServer>> {
    (first_port..first_port + count).map(server).collect()
}

fn server(port: u16) -> Result<ModelServer> {
    let listen = ([127, 0, 0, 1], port).into();
    let options = ModelServerOptions {
        listen,
        profile: PROFILE,
        models: vec![MODEL.into()],
        ..ModelServerOptions::default()
    };
    Ok(ModelServer::start(options)
        .map_err(|error| format!("cannot listen on port {port}, which the demo needs: {error}"))?)
}

fn addresses(servers: &[ModelServer]) -> Vec<String> {
    servers
        .iter()
        .map(|server| server.addr().to_string())
        .collect()
}

fn introduction(args: &Args, requests: usize, length: Duration) -> String {
    let source = match &args.trace {
        Some(file) => format!(
            "The requests are those of the recorded trace {}.",
            file.display()
        ),
        None => format!(
            "The requests are generated (seed {SEED}): sessions of agents, {} new ones per minute.\n\
             Each prompt repeats all earlier turns of its session. The load grows, because\n\
             sessions begin one after another and last for minutes.",
            args.sessions
        ),
    };
    format!(
        r#"
Simulated: the GPUs. Each server is a Qwen3-32B on an H200, with step times fitted
to measured kernels.
Real: Envoy, the picker in it, switchpointd, HTTP, queues, KV blocks, prefix caches.
{source}
Sending {requests} requests to each policy, at the same times, for {:.0} s.
To see the picks move, open the console: http://localhost:{}/
"#,
        length.as_secs_f64(),
        front::DAEMON_ADMIN
    )
}

fn invitation() -> String {
    let listener = front::LISTENER;
    let admin = front::DAEMON_ADMIN;
    let envoy = front::ENVOY_ADMIN;
    format!(
        r#"Everything keeps running until you press Ctrl-C. In another terminal, try:

A chat completion, and a streamed one (port {ROUND_ROBIN_PORT} instead of {listener}: without the picker):
  curl -s localhost:{listener}/v1/chat/completions -H 'content-type: application/json' \
    -d '{{"model":"{MODEL}","messages":[{{"role":"user","content":"hello"}}],"max_tokens":8}}'
  curl -sN localhost:{listener}/v1/chat/completions -H 'content-type: application/json' \
    -d '{{"model":"{MODEL}","stream":true,"messages":[{{"role":"user","content":"hello"}}],"max_tokens":8}}'

A request that names no model, and the error it gets:
  curl -s localhost:{listener}/v1/chat/completions -d '{{"no":"model"}}'

The console, in a browser: endpoints, traffic, sampled decisions and the cost of each candidate:
  http://localhost:{admin}/

What the daemon knows about the endpoints, and the metrics of the daemon and of the filter:
  curl -s localhost:{admin}/debug/endpoints
  curl -s localhost:{admin}/metrics | grep -v '^#'
  curl -s localhost:{envoy}/stats/prometheus | grep switchpoint

Next: put it in front of your own model servers with  make run ENDPOINTS=host:port,host:port"#
    )
}
