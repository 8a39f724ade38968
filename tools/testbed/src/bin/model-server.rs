//! `model-server`: simulated model servers as a process.

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use testbed::model_server::{ModelServer, ModelServerOptions, serve_admin};
use tokio::signal::unix::{SignalKind, signal};

/// Time limit for requests in flight after SIGTERM or SIGINT.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);

/// Simulated model servers. For a client they behave like vLLM pods, with real queues, KV blocks,
/// prefix hits and measured step times. The text is seeded, and no GPU is needed.
#[derive(Debug, Parser)]
#[command(name = "model-server", version, after_long_help = EXAMPLES)]
struct Args {
    /// Address to serve on; repeat the flag for several engines in this process
    #[arg(long, value_name = "HOST:PORT", required = true)]
    listen: Vec<SocketAddr>,

    /// Control listener for all engines, which still answers while an engine refuses connections
    #[arg(long, value_name = "HOST:PORT")]
    admin: Option<SocketAddr>,

    #[command(flatten)]
    options: ModelServerOptions,
}

const EXAMPLES: &str = r#"A token is four bytes of text, generated ones too; a KV block is 16 tokens.

Start two engines, and ask one:
  model-server --listen 127.0.0.1:8001 --listen 127.0.0.1:8002 --admin 127.0.0.1:8000 --model demo
  curl -N 127.0.0.1:8001/v1/completions -d '{"model":"demo","stream":true,"prompt":"hello"}'
  curl 127.0.0.1:8001/metrics
  curl -g '127.0.0.1:8001/metrics?name[]=vllm:num_requests_running'

Every reply has x-served-by. With request header `x-echo: 1`, and on paths no engine has, it
repeats the request as JSON.

Orders, at /admin/... of an engine or /servers/HOST:PORT/... of the control listener:
  GET  state     load, cache hits, the last requests with their headers
  POST faults    {"mode":"status", "status":503, "body":"...", "retry_after":1,
                  "paths":"inference|metrics|all", "count":2, "for_ms":500}
                 modes: refuse (closes the socket, resets connections; takes for_ms only), hang,
                 status, reset_before_headers, reset_mid_headers, reset_mid_stream (after_chunks),
                 none (ends them all). One fault for each kind of path.
  POST lie       {"num_requests_waiting":50,"kv_cache_usage_perc":"NaN"}; {} ends it
  POST pace      {"slowdown":3}: steps take three times as long as measured, from now on
  POST restart   a cold start: cache, queue and counters gone; {"for_ms":500} stays down this long

  curl 127.0.0.1:8000/servers
  curl 127.0.0.1:8000/servers/127.0.0.1:8001/faults -d '{"mode":"refuse","for_ms":2000}'
  curl 127.0.0.1:8000/servers/127.0.0.1:8001/state"#;

#[tokio::main]
async fn main() -> ExitCode {
    let filter =
        tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    match run(Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let start = |&listen: &SocketAddr| {
        ModelServer::start(ModelServerOptions {
            listen,
            ..args.options.clone()
        })
        .map_err(|error| {
            std::io::Error::new(error.kind(), format!("cannot listen on {listen}: {error}"))
        })
    };
    let servers = args
        .listen
        .iter()
        .map(start)
        .collect::<std::io::Result<Vec<_>>>()?;
    if let Some(admin) = args.admin {
        let (address, _) = serve_admin(admin, &servers)?;
        tracing::info!("admin on {address}");
    }
    let addresses: Vec<String> = servers
        .iter()
        .map(|server| server.addr().to_string())
        .collect();
    tracing::info!("listening on {}", addresses.join(", "));
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("draining");
    futures::future::join_all(servers.into_iter().map(|server| server.drain(DRAIN_LIMIT))).await;
    Ok(())
}
