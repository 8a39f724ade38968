//! Engines other than vLLM: an endpoint's label selects where the daemon finds the engine's metrics
//! page, and picks follow the queue that the page reports.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use testbed::stack::Stack;
use testbed::{Result, scorers, wait_for};
use tokio::net::TcpListener;

use crate::discovered::asked;

/// The maximum wait for a few scrapes on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);

/// The number of consecutive picks that proves a preference. By chance, this happens once in a
/// thousand runs.
const IN_A_ROW: usize = 10;

/// A kind of engine that the daemon recognises by the endpoint's label.
#[derive(Clone, Copy)]
struct EngineKind {
    label: &'static str,
    /// The port of the metrics page, if the engine has a separate port for it.
    port: Option<u16>,
    path: &'static str,
    /// The metrics page, with `QUEUE` in place of the queue length.
    page: &'static str,
}

const SGLANG: EngineKind = EngineKind {
    label: "sglang",
    port: None,
    path: "/metrics",
    page: "sglang:num_queue_reqs{engine_type=\"unified\",model_name=\"demo\",tp_rank=\"0\",pp_rank=\"0\"} QUEUE.0
sglang:num_running_reqs{engine_type=\"unified\",model_name=\"demo\",tp_rank=\"0\",pp_rank=\"0\"} 2.0
sglang:token_usage{engine_type=\"unified\",model_name=\"demo\",tp_rank=\"0\",pp_rank=\"0\"} 0.25
",
};

const TENSORRT_LLM: EngineKind = EngineKind {
    label: "trtllm-serve",
    port: None,
    path: "/prometheus/metrics",
    page: "trtllm_num_requests_waiting{engine_type=\"undefined\",model_name=\"demo\"} QUEUE.0
trtllm_num_requests_running{engine_type=\"undefined\",model_name=\"demo\"} 2.0
trtllm_kv_cache_utilization{engine_type=\"undefined\",model_name=\"demo\"} 0.25
",
};

const TRITON: EngineKind = EngineKind {
    label: "triton-tensorrt-llm",
    port: Some(8002),
    path: "/metrics",
    page: "nv_trt_llm_request_metrics{model=\"tensorrt_llm\",request_type=\"waiting\",version=\"1\"} QUEUE
nv_trt_llm_request_metrics{model=\"tensorrt_llm\",request_type=\"scheduled\",version=\"1\"} 2
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=\"fraction\",model=\"tensorrt_llm\",version=\"1\"} 0.25
",
};

/// A running engine of one [`EngineKind`], with a queue length that the test sets.
struct PageEngine {
    address: SocketAddr,
    queue: Arc<AtomicUsize>,
}

impl PageEngine {
    /// Listens on a loopback address that no other test uses, because the metrics port of an engine
    /// kind is fixed.
    async fn start(kind: EngineKind) -> Result<Self> {
        let ip = format!(
            "127.{}.{}.{}",
            1 + rand::random::<u8>() % 254,
            rand::random::<u8>(),
            1 + rand::random::<u8>() % 254
        );
        let api = TcpListener::bind((ip.as_str(), 0)).await?;
        let address = api.local_addr()?;
        let queue = Arc::new(AtomicUsize::new(0));
        let metrics = match kind.port {
            Some(port) => Some(TcpListener::bind((ip.as_str(), port)).await?),
            None => None,
        };
        let at_api = metrics.is_none();
        let at_metrics = Arc::clone(&queue);
        let reply = move |uri: Uri, is_page: bool| -> Response {
            if is_page && uri.path() == kind.path {
                return kind
                    .page
                    .replace("QUEUE", &at_metrics.load(Ordering::Relaxed).to_string())
                    .into_response();
            }
            match uri.path() {
                "/v1/chat/completions" => (
                    [("x-served-by", address.to_string())],
                    "{\"object\":\"chat.completion\"}",
                )
                    .into_response(),
                // TensorRT-LLM serves JSON at this path, which is not Prometheus text.
                "/metrics" => "[]".into_response(),
                _ => StatusCode::NOT_FOUND.into_response(),
            }
        };
        for (listener, is_page) in [(Some(api), at_api), (metrics, true)] {
            let (Some(listener), reply) = (listener, reply.clone()) else {
                continue;
            };
            let app = Router::new().fallback(move |uri: Uri| async move { reply(uri, is_page) });
            tokio::spawn(async move { axum::serve(listener, app).await });
        }
        Ok(Self { address, queue })
    }
}

async fn picks_follow_the_queue(kind: EngineKind) -> Result<()> {
    let engines = [
        PageEngine::start(kind).await?,
        PageEngine::start(kind).await?,
    ];
    let folder = tempfile::tempdir()?;
    let rows = engines.iter().enumerate().map(|(at, engine)| {
        let address = engine.address;
        json!({"name": format!("engine-{at}"), "address": address.ip().to_string(), "port": address.port(),
               "labels": {"llm-d.ai/engine-type": kind.label}})
    });
    std::fs::write(
        folder.path().join("endpoints.yaml"),
        json!({"endpoints": rows.collect::<Vec<_>>()}).to_string(),
    )?;
    let config = scorers::write(&[("queue-scorer".to_owned(), 1)], folder.path())?;
    let pools = json!({"pools": [{"name": "default", "endpointsFile": folder.path().join("endpoints.yaml"), "config": config}]});
    std::fs::write(folder.path().join("pools.json"), pools.to_string())?;
    let pools = folder.path().join("pools.json").display().to_string();
    let stack = Stack::builder()
        .servers(0)
        .daemon_arguments(&["--pools", &pools])
        .shared_envoy()
        .start()
        .await?;
    let daemon = stack.daemon.as_ref().ok_or("a daemon")?;

    for (busy, free) in [(1, 0), (0, 1), (1, 0)] {
        engines[busy].queue.store(40, Ordering::Relaxed);
        engines[free].queue.store(0, Ordering::Relaxed);
        let free = engines[free].address.to_string();
        let follows = || async {
            for _ in 0..IN_A_ROW {
                if asked(&stack, "demo").await.ok()? != (200, free.clone()) {
                    return None;
                }
            }
            Some(())
        };
        wait_for(
            LIMIT,
            &format!("{}: only picks of {free}, whose queue is empty", kind.label),
            follows,
        )
        .await?;
    }
    for row in daemon.endpoints().await? {
        let metrics = &row["metrics"];
        assert_eq!(
            (
                &metrics["running_requests"],
                &metrics["kv_cache_utilization"]
            ),
            (&json!(2.0), &json!(0.25)),
            "{row}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn picks_follow_the_queue_of_sglang() -> Result<()> {
    picks_follow_the_queue(SGLANG).await
}

#[tokio::test]
async fn picks_follow_the_queue_of_tensorrt_llm_at_its_own_path() -> Result<()> {
    picks_follow_the_queue(TENSORRT_LLM).await
}

#[tokio::test]
async fn picks_follow_the_queue_of_triton_at_its_own_port() -> Result<()> {
    picks_follow_the_queue(TRITON).await
}
