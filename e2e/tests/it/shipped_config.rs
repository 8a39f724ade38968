//! Settings of the shipped configuration that differ from Envoy's defaults. Each setting is tested
//! by its effect or, where the effect takes minutes, by the configuration that Envoy reports.

use std::process::Command;
use std::time::{Duration, Instant};

use http::Request;
use serde_json::{Value, json};
use testbed::envoy::{EnvoyConfig, EnvoyProcess};
use testbed::model_server::{FaultMode, ServerFault};
use testbed::ports::ReservedPort;
use testbed::stack::Stack;
use testbed::{Result, client, root};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::mpsc;

use crate::echo;
use crate::engine::{self, RawEngine};
use crate::limits;

/// Returns the configuration that Envoy runs with, as one tree.
async fn running(stack: &Stack) -> Result<Value> {
    Ok(serde_json::from_str(
        &stack.envoy.admin_page("/config_dump").await?,
    )?)
}

fn values<'a>(tree: &'a Value, key: &str) -> Vec<&'a Value> {
    match tree {
        Value::Object(fields) => {
            let here = fields.get(key);
            here.into_iter()
                .chain(fields.values().flat_map(|value| values(value, key)))
                .collect()
        }
        Value::Array(items) => items.iter().flat_map(|item| values(item, key)).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn the_file_is_valid_as_it_stands() -> Result<()> {
    let mut validate = Command::new(EnvoyProcess::binary());
    let output = validate
        .current_dir(root())
        .args(["--mode", "validate", "-c", "envoy-config/standalone.yaml"])
        .output()?;
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

#[tokio::test]
async fn limits_and_times_fit_long_generations() -> Result<()> {
    // The Envoy that tests share allows all admin pages.
    let stack = Stack::builder().servers(1).envoy_in_turn().start().await?;
    let tree = running(&stack).await?;
    for (key, expected) in [
        ("stream_idle_timeout", json!("3600s")),
        ("request_timeout", json!("300s")),
        ("stream_flush_timeout", json!("300s")),
        ("idle_timeout", json!("660s")),
        ("max_request_headers_kb", json!(16)),
        ("delayed_close_timeout", json!("0.100s")),
        ("accept_http_10", json!(true)),
        ("request_body_buffer_limit", json!("33554432")),
        ("max_retries", json!(1_000_000)),
        ("max_requests", json!(1_000_000)),
        ("max_pending_requests", json!(1_000_000)),
        ("max_connections", json!(1_000_000)),
        (
            "retry_back_off",
            json!({"base_interval": "0.005s", "max_interval": "0.020s"}),
        ),
        ("failure_policy", json!("FAIL_RELOAD")),
        (
            "reload_config",
            json!({"backoff": {"base_interval": "0.010s"}}),
        ),
        ("allow_on_headers_stop_iteration", json!(true)),
        (
            "connection_keepalive",
            json!({"interval": "10s", "timeout": "5s"}),
        ),
    ] {
        let found = values(&tree, key);
        assert!(found.contains(&&expected), "{key}: {found:?}");
    }
    assert!(
        values(&tree, "timeout").contains(&&json!("0s")),
        "the route has no timeout"
    );
    for action in [
        "shrink_heap",
        "reset_high_memory_stream",
        "reduce_timeouts",
        "stop_accepting_requests",
    ] {
        let name = json!(format!("envoy.overload_actions.{action}"));
        assert!(values(&tree, "name").contains(&&name), "{action}");
    }
    let monitors = stack.envoy.stats("^overload\\..*pressure$").await?;
    assert_eq!(
        monitors.len(),
        2,
        "memory and connections are monitored: {monitors:?}"
    );
    Ok(())
}

#[tokio::test]
async fn no_web_page_can_change_envoy_or_read_its_configuration() -> Result<()> {
    let admin_of =
        |file| -> Result<Value> { Ok(EnvoyConfig::shipped(file)?.value()["admin"].take()) };
    assert_eq!(admin_of("standalone.yaml")?, admin_of("ext_proc.yaml")?);
    let mut stack = Stack::start(1).await?;
    let admin = stack.envoy.admin();
    for order in [
        "/quitquitquit",
        "/logging?http=debug",
        "/drain_listeners?graceful",
        "/healthcheck/fail",
        "/runtime_modify?key=value",
        "/stats/recentlookups/enable",
    ] {
        let reply = client::post(admin, order, "").await?;
        assert_eq!(reply.status, 403, "{order}: {}", reply.text());
    }
    for (page, status) in [
        ("/config_dump", 403),
        ("/server_info", 403),
        ("/", 403),
        ("/ready", 200),
        ("/memory", 200),
        ("/clusters?format=json", 200),
        ("/stats?usedonly&filter=ingress", 200),
        ("/stats/prometheus", 200),
    ] {
        let reply = client::get(admin, page).await?;
        assert_eq!(reply.status, status, "{page}: {}", reply.text());
    }
    stack.envoy.check_running()?;
    assert_eq!(stack.get("/v1/models").await?.status, 200);
    Ok(())
}

#[tokio::test]
async fn control_headers_of_a_client_go_no_further() -> Result<()> {
    let stack = Stack::start_shared(2).await?;
    let elsewhere = "127.0.0.1:1";
    for path in ["/v1/chat/completions", "/v1/rerank"] {
        let mut request = Request::post(path).header("x-echo", "1");
        for name in [
            "x-gateway-destination-endpoint",
            "X-Gateway-Destination-Endpoint-Fallback",
            "x-gateway-destination-endpoint-subset",
            "x-gateway-destination-endpoint-served",
            "x-gateway-destination-endpoint-scores",
            "x-prefiller-host-port",
            "x-encoder-hosts-ports",
            "x-data-parallel-host-port",
            "x-switchpoint-open",
            "x-switchpoint-decision",
        ] {
            // The client sends the header twice, because all values must be removed.
            request = request.header(name, elsewhere).header(name, elsewhere);
        }
        let body = json!({"model": "demo", "messages": []}).to_string();
        let reply = stack.send(request.body(client::full(body))?).await?;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert!(
            !reply.text().contains(elsewhere),
            "{path}: {}",
            reply.text()
        );
    }
    Ok(())
}

#[tokio::test]
async fn a_client_cannot_order_retries_or_write_long_log_lines() -> Result<()> {
    let stack = Stack::start_shared(1).await?;
    let id = "i".repeat(10_000);
    let request = Request::get("/v1/models")
        .header("x-forwarded-for", "10.0.0.1")
        .header("x-request-id", &id);
    let reply = stack.send(request.body(client::empty())?).await?;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let line = stack
        .envoy
        .access_log_of(&id[..64], Duration::from_secs(5))
        .await?
        .to_string();
    assert!(line.len() < 2_000, "{line}");
    stack.servers[0]
        .fault(ServerFault::new(FaultMode::Status))
        .await;
    let request = Request::get("/v1/models")
        .header("x-envoy-retry-on", "5xx")
        .header("x-envoy-max-retries", "5");
    // A trusted proxy in front of Envoy would send these headers.
    let request = request
        .header("x-forwarded-for", "10.0.0.1")
        .header("x-request-id", "retries");
    let reply = stack.send(request.body(client::empty())?).await?;
    assert_eq!(
        reply.status,
        503,
        "the engine's own reply: {}",
        reply.text()
    );
    let line = stack
        .envoy
        .access_log_of("retries", Duration::from_secs(5))
        .await?;
    assert_eq!(
        line["attempts"], 1,
        "a ranked list of one endpoint is tried once"
    );
    Ok(())
}

/// Returns the line that samples the access log, which the shipped files have as a comment.
fn commented_sampling(file: &str) -> Result<Value> {
    let text = std::fs::read_to_string(root().join("envoy-config").join(file))?;
    let mut lines = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("# filter: "));
    Ok(serde_saphyr::from_str(
        lines.next().ok_or("no line that samples the access log")?,
    )?)
}

#[tokio::test]
async fn a_sampled_access_log_still_has_every_failure() -> Result<()> {
    let mut sampling = commented_sampling("standalone.yaml")?;
    assert_eq!(sampling, commented_sampling("ext_proc.yaml")?);
    *sampling
        .pointer_mut("/or_filter/filters/0/runtime_filter/percent_sampled/numerator")
        .ok_or("no percentage")? = json!(0);
    let sampled = move |config: &mut Value| {
        let log = config.pointer_mut(
            "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/access_log/0",
        );
        log.expect("the access log")["filter"] = sampling.clone();
    };
    let stack = Stack::builder()
        .servers(1)
        .envoy_config(sampled)
        .shared_envoy()
        .start()
        .await?;
    for (path, id, status) in [("/v1/models", "fine", 200), ("/unknown", "failed", 404)] {
        let request = Request::get(path).header("x-request-id", id);
        assert_eq!(
            stack.send(request.body(client::empty())?).await?.status,
            status,
            "{path}"
        );
    }
    stack
        .envoy
        .access_log_of("failed", Duration::from_secs(10))
        .await?;
    assert_eq!(
        stack
            .envoy
            .access_log()
            .iter()
            .filter(|line| line["request_id"] == "fine")
            .count(),
        0,
        "at 0 % no success is logged"
    );
    Ok(())
}

#[tokio::test]
async fn replies_of_envoy_speak_the_language_of_the_api() -> Result<()> {
    let stack = Stack::start_shared(1).await?;
    stack.servers[0]
        .fault(ServerFault::new(FaultMode::ResetBeforeHeaders))
        .await;
    let body = json!({"model": "demo", "max_tokens": 1, "messages": []});
    let openai = stack.post("/v1/chat/completions", &body).await?;
    assert_eq!(
        (openai.status, openai.header("content-type")),
        (503, "application/json")
    );
    let message = "the model server failed before it answered; retry";
    assert_eq!(
        openai.json()?,
        json!({"error": {"message": message, "type": "service_unavailable", "param": null, "code": 503}})
    );
    let anthropic = stack.post("/v1/messages", &body).await?;
    assert_eq!(anthropic.status, 503);
    assert_eq!(
        anthropic.json()?,
        json!({"type": "error", "error": {"type": "api_error", "message": message}})
    );
    for reply in [openai, anthropic] {
        assert!(
            !reply.headers.contains_key("x-llm-d-request-dropped-reason"),
            "nothing was dropped"
        );
    }
    Ok(())
}

#[tokio::test]
async fn a_destination_outside_the_pool_is_refused() -> Result<()> {
    // No client header can set a destination that is not in the pool, so a filter behind the picker
    // sets this destination.
    let stack = Stack::builder()
        .servers(2)
        .envoy_config(overwrite_destination)
        .shared_envoy()
        .start()
        .await?;
    let reply = stack.get("/v1/models").await?;
    assert_eq!(
        (reply.status, reply.header("x-llm-d-request-dropped-reason")),
        (503, "rejected-no-endpoints")
    );
    assert_eq!(
        reply.json()?["error"]["message"],
        "no model server can take this request now"
    );
    Ok(())
}

#[tokio::test]
async fn an_idle_connection_is_closed_before_uvicorn_would() -> Result<()> {
    const UVICORN: Duration = Duration::from_secs(5);
    let (ended, mut endings) = mpsc::unbounded_channel();
    // The engine answers on its connection as long as requests come. The engine sends the number of
    // answers, and whether Envoy closed the connection first.
    let engine = RawEngine::start(move |mut stream| {
        let ended = ended.clone();
        async move {
            let mut answered = 0;
            let closed = loop {
                let _ = stream
                    .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                    .await; // If the connection is closed, the next read notices it.
                answered += 1;
                match tokio::time::timeout(UVICORN, engine::head(&mut stream)).await {
                    Ok(Some(_)) => {}
                    Ok(None) => break true,
                    Err(_) => break false,
                }
            };
            let _ = ended.send((answered, closed)); // The receiver is gone if the test is over.
        }
    });
    let engine = engine.await?;
    let stack = Stack::builder()
        .servers(0)
        .stranger(engine.address())
        .shared_envoy()
        .start()
        .await?;
    for _ in 0..3 {
        assert_eq!(stack.get("/v1/models").await?.text(), "ok");
    }
    let (answered, closed) = endings.recv().await.ok_or("the engine is gone")?;
    assert_eq!(answered, 3, "the connection was reused");
    assert!(
        closed,
        "Envoy closed the connection before {UVICORN:?} had passed"
    );
    Ok(())
}

#[tokio::test]
async fn an_endpoint_that_takes_no_connection_is_soon_left_for_the_next() -> Result<()> {
    const DEFAULT: Duration = Duration::from_secs(5);
    // The listener's queue is full, so the kernel lets further connections wait, like a network
    // that drops packets.
    let port = ReservedPort::lease()?;
    let socket = TcpSocket::new_v4()?;
    socket.bind(port.address())?;
    let _listener = socket.listen(1)?;
    let _full = [
        TcpStream::connect(port.address()).await?,
        TcpStream::connect(port.address()).await?,
    ];
    let stack = Stack::builder()
        .servers(1)
        .stranger(port.address())
        .envoy_in_turn()
        .start()
        .await?;
    let mut left = None;
    for prompt in 0..50 {
        let id = format!("hole-{prompt}");
        let asked = Instant::now();
        let body = json!({"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": id}]}).to_string();
        let reply = stack
            .send(
                Request::post("/v1/chat/completions")
                    .header("x-request-id", &id)
                    .body(client::full(body))?,
            )
            .await?;
        let took = asked.elapsed();
        assert_eq!(
            (reply.status, stack.server_of(&reply)?),
            (200, 0),
            "{}",
            reply.text()
        );
        if stack.envoy.access_log_of(&id, DEFAULT).await?["attempts"] == 2 {
            left = Some(took);
            break;
        }
    }
    let took = left.ok_or("the endpoint was never picked first")?;
    assert!(
        took < DEFAULT,
        "shorter than Envoy's default of {DEFAULT:?}: {took:?}"
    );
    assert_eq!(
        stack
            .envoy
            .stat("cluster.inference-pool.upstream_cx_connect_timeout")
            .await?,
        1
    );
    Ok(())
}

fn overwrite_destination(config: &mut Value) {
    let path = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters";
    let filters = config
        .pointer_mut(path)
        .and_then(Value::as_array_mut)
        .expect("the HTTP filters");
    let picker = filters
        .iter()
        .position(|filter| filter["name"] == "switchpoint")
        .expect("the picker");
    let set = json!({
        "header": {"key": "x-gateway-destination-endpoint", "value": "127.0.0.1:9"},
        "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
    });
    let mutation = json!({
        "name": "overwrite",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
            "mutations": {"request_mutations": [{"append": set}]},
        },
    });
    filters.insert(picker + 1, mutation);
}

#[tokio::test]
async fn compressed_requests_arrive_in_the_clear() -> Result<()> {
    use std::io::Write as _;
    let stack = Stack::start_shared(1).await?;
    let text = echo::chat(&limits::regular_prompt()).to_string();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(text.as_bytes())?;
    let gzip = encoder.finish()?;
    assert!(gzip.len() * 50 < text.len(), "{} bytes", gzip.len());
    let request = Request::post("/v1/chat/completions")
        .header("content-encoding", "gzip")
        .header("x-echo", "1");
    let reply = stack.send(request.body(client::full(gzip))?).await?;
    let echo = reply.json()?;
    assert_eq!(
        (reply.status, &echo["body_bytes"]),
        (200, &json!(text.len())),
        "{}",
        reply.text()
    );
    let names = echo["headers"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|pair| pair[0].as_str())
        .collect::<Vec<_>>();
    assert!(!names.contains(&"content-encoding"), "{names:?}");
    assert!(
        names.contains(&"x-gateway-destination-endpoint"),
        "picked: {names:?}"
    );

    // Envoy cuts off a body that inflates more. The part before the cut is invalid JSON, which
    // reaches no engine.
    let text = echo::chat(&limits::SENTENCE.repeat(8_000)).to_string();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(text.as_bytes())?;
    let request = Request::post("/v1/chat/completions")
        .header("content-encoding", "gzip")
        .header("x-echo", "1");
    let reply = stack
        .send(request.body(client::full(encoder.finish()?))?)
        .await?;
    assert_eq!(reply.status, 400, "{}", reply.text());
    Ok(())
}
