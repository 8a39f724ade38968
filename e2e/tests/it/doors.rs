//! The paths that clients can reach through the shipped files: only listed paths, however they are
//! spelled.

use std::collections::BTreeSet;

use exchange::api::RequestApi;
use serde_json::{Value, json};
use testbed::client::{ClientReply, RawConnection};
use testbed::stack::{PickerMode, Stack};
use testbed::{Error, Result};

use crate::echo;

/// Control paths, which engines obey from any client that reaches their port, and paths that look
/// like served paths.
const CLOSED: [&str; 20] = [
    "/",
    "/metrics",
    "/sleep",
    "/wake_up",
    "/collective_rpc",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/reset_prefix_cache",
    "/abort_request",
    "/flush_cache",
    "/update_weights_from_disk",
    "/v2/repository/models/demo/unload",
    "/v2/models/demo/config",
    "/server_info",
    "/openapi.json",
    "/v1/modelsx",
    "/v1/chat/completionsx",
    "/x/v1/chat/completions",
    "/v1/models/../../flush_cache",
    "/v1/models/%2e%2e%2f%2e%2e%2fflush_cache",
];

/// Spellings of the chat path that engines treat as the same path.
const SPELLINGS: [&str; 6] = [
    "/v1/chat/%63ompletions",
    "/%76%31/chat/completions",
    "/v1/chat%2Fcompletions",
    "/v1/chat%2fcompletions?x=1",
    "//v1//chat///completions",
    "/flush_cache/../v1/./chat/completions",
];

/// Returns the paths whose bodies the picker reads: the documentation lists the endings of these
/// paths, and this function completes the paths.
fn read_paths() -> Vec<String> {
    let table = exchange::api::reference();
    let ends = table
        .lines()
        .skip(2)
        .filter_map(|row| row.split('`').nth(1));
    let whole = |end: &str| match end {
        service if !service.starts_with('/') => format!("/google.cloud.aiplatform.v1.{service}"),
        own @ ("/generate" | "/inference/v1/generate" | "/invocations") => own.to_owned(),
        own @ ("/tokenize" | "/detokenize" | "/pooling" | "/classify") => own.to_owned(),
        end => format!("/v1{end}"),
    };
    ends.map(whole).collect()
}

#[tokio::test]
async fn only_listed_paths_are_served_however_they_are_spelled() -> Result<()> {
    for front in PickerMode::ALL {
        let stack = Stack::builder()
            .front(front)
            .servers(1)
            .envoy_in_turn()
            .start()
            .await?;
        // These two checks come first, because they expect that no request has reached the engine.
        refuses_paths_that_are_not_listed(front, &stack).await?;
        refuses_an_upgrade(front, &stack).await?;
        serves_paths_that_are_read_and_models_and_health(front, &stack).await?;
        reads_a_chat_however_its_path_is_spelled(front, &stack).await?;
    }
    Ok(())
}

async fn refuses_paths_that_are_not_listed(front: PickerMode, stack: &Stack) -> Result<()> {
    for path in CLOSED {
        for request in [
            echo::get(path, &[])?,
            echo::post(path, &[], echo::chat("x").to_string())?,
        ] {
            let asked = format!("{front:?} {} {path}", request.method());
            let reply = stack.send(request).await?;
            assert_eq!(
                (reply.status, reply.header("content-type")),
                (404, "application/json"),
                "{asked}: {}",
                reply.text()
            );
            let message = "this gateway does not serve this path";
            let error = json!({"error": {"message": message, "type": "invalid_request_error", "param": null, "code": 404}});
            assert_eq!(reply.json()?, error, "{asked}");
        }
    }
    let anthropic = stack
        .send(echo::post("/v1/messages/batches", &[], "{}")?)
        .await?;
    assert_eq!(
        (anthropic.status, &anthropic.json()?["error"]["type"]),
        (404, &json!("not_found_error")),
        "{front:?}"
    );
    if front == PickerMode::Filter {
        assert_eq!(
            stack.envoy.picker_stat("switchpoint_picked_total").await?,
            0,
            "no pick was made for these paths"
        );
    }
    assert_eq!(
        stack
            .envoy
            .stat("cluster.inference-pool.upstream_rq_total")
            .await?,
        0,
        "{front:?}: no request reached an engine"
    );
    Ok(())
}

async fn serves_paths_that_are_read_and_models_and_health(
    front: PickerMode,
    stack: &Stack,
) -> Result<()> {
    for path in read_paths() {
        let reply = stack
            .send(echo::post(&path, &[], echo::chat("x").to_string())?)
            .await?;
        assert_ne!(reply.status, 404, "{front:?} {path}: {}", reply.text());
    }
    for path in [
        "/v1/models",
        "/v1/models/meta-llama/Llama-3",
        "/health",
        "/ping",
        "/v2/health/ready",
        "/switchpoint/ready",
    ] {
        let reply = stack.send(echo::get(path, &[])?).await?;
        assert_eq!(reply.status, 200, "{front:?} {path}: {}", reply.text());
    }
    for (path, body) in [
        ("/v1/rerank", "{}"),
        ("/v1/responses/resp_1/cancel", ""),
        ("/v2/models/demo/infer", "opaque"),
    ] {
        let reply = stack.send(echo::post(path, &[], body)?).await?;
        assert_eq!(
            (reply.status, &reply.json()?["body"]),
            (200, &json!(body)),
            "{front:?} {path}: {}",
            reply.text()
        );
    }
    Ok(())
}

async fn reads_a_chat_however_its_path_is_spelled(front: PickerMode, stack: &Stack) -> Result<()> {
    for path in SPELLINGS {
        let read = stack.send(echo::post(path, &[], "{")?).await?;
        assert_eq!(
            (read.status, &read.json()?["error"]["code"]),
            (400, &json!("invalid_json")),
            "{front:?} {path}"
        );
        let reply = stack
            .send(echo::post(path, &[], echo::chat("x").to_string())?)
            .await?;
        let served = reply.json()?["path"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        assert_eq!(
            (reply.status, served.split('?').next()),
            (200, Some("/v1/chat/completions")),
            "{front:?} {path}"
        );
    }
    Ok(())
}

/// Sends a chat request whose headers request an upgrade, and returns the reply.
async fn upgrade(stack: &Stack, method: &str, path: &str) -> Result<ClientReply> {
    let body = echo::chat("unread").to_string();
    let mut raw = RawConnection::connect(stack.address()).await?;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nx-echo: 1\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: upgrade\r\n\
         upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n{body}",
        body.len()
    );
    raw.write(head).await?;
    raw.read_reply().await
}

async fn refuses_an_upgrade(front: PickerMode, stack: &Stack) -> Result<()> {
    for path in [
        "/v1/chat/completions",
        "/v1/messages",
        "/generate",
        "/v1/rerank",
    ] {
        let reply = upgrade(stack, "POST", path).await?;
        assert_eq!(reply.status, 403, "{front:?} {path}: {}", reply.text());
    }
    assert_eq!(
        stack
            .envoy
            .stat("cluster.inference-pool.upstream_rq_total")
            .await?,
        0,
        "{front:?}: no request reached an engine"
    );
    Ok(())
}

/// Repeats the test of upgrades with a gateway that allows upgrades on every route.
#[tokio::test]
async fn the_picker_refuses_an_upgrade_of_what_it_reads() -> Result<()> {
    for front in PickerMode::ALL {
        let builder = Stack::builder().front(front).servers(1).envoy_config(|config| {
            let connections = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/upgrade_configs";
            if let Some(upgrades) = config.pointer_mut(connections) {
                *upgrades = json!([{"upgrade_type": "websocket"}]);
            }
        });
        let stack = builder.start().await?;
        let reply = upgrade(&stack, "POST", "/v1/chat/completions").await?;
        assert_eq!(
            (reply.status, &reply.json()?["error"]["code"]),
            (400, &json!("invalid_json")),
            "{front:?}: {}",
            reply.text()
        );
        assert_eq!(
            stack
                .envoy
                .stat("cluster.inference-pool.upstream_rq_total")
                .await?,
            0,
            "{front:?}: no request reached an engine"
        );
    }
    Ok(())
}

/// Returns a chat request by HTTP/1.0, as nginx sends it by default.
fn http_10(headers: &str, stream: bool) -> String {
    let body = json!({"model": "demo", "max_tokens": 4, "stream": stream, "messages": [{"role": "user", "content": "x"}]}).to_string();
    format!(
        "POST /v1/chat/completions HTTP/1.0\r\n{headers}content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

#[tokio::test]
async fn clients_with_http_10_are_served() -> Result<()> {
    for front in PickerMode::ALL {
        let stack = Stack::builder()
            .front(front)
            .servers(2)
            .shared_envoy()
            .start()
            .await?;
        let mut raw = RawConnection::connect(stack.address()).await?;
        raw.write(http_10("Host: x\r\nConnection: close\r\n", false))
            .await?;
        let reply = raw.read_reply().await?;
        assert_eq!(
            (reply.status, &reply.json()?["object"]),
            (200, &json!("chat.completion")),
            "{front:?}"
        );
        assert_eq!(
            raw.read_to_end().await?,
            b"",
            "the connection ends with the reply"
        );

        let mut kept = RawConnection::connect(stack.address()).await?;
        for _ in 0..3 {
            kept.write(http_10("Host: x\r\nConnection: keep-alive\r\n", false))
                .await?;
            let reply = kept.read_reply().await?;
            assert_eq!(
                (reply.status, reply.header("connection")),
                (200, "keep-alive"),
                "{front:?}"
            );
            assert!(
                !reply.header("content-length").is_empty(),
                "the reply has a length"
            );
        }
        for headers in ["", "Host: x\r\n", "Host: x\r\nConnection: keep-alive\r\n"] {
            let mut raw = RawConnection::connect(stack.address()).await?;
            raw.write(http_10(headers, true)).await?;
            let text = String::from_utf8(raw.read_to_end().await?)?;
            let (head, events) = text.split_once("\r\n\r\n").ok_or("no head")?;
            assert!(
                head.contains(" 200 ") && !head.contains("transfer-encoding"),
                "{front:?} {headers}: {head}"
            );
            assert!(
                events.starts_with("data: {") && events.ends_with("data: [DONE]\n\n"),
                "{front:?} {headers}: {events}"
            );
        }
    }
    Ok(())
}

fn routes(front: PickerMode) -> Result<Vec<Value>> {
    let mut config = front.config()?;
    let path = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/route_config/virtual_hosts/0/routes";
    let routes = config.value().pointer(path).and_then(Value::as_array);
    Ok(routes.cloned().ok_or("no routes")?)
}

#[test]
fn both_files_list_the_same_paths() -> Result<()> {
    let listed = |front: PickerMode| {
        let matches = routes(front)?
            .iter()
            .map(|route| route["match"].to_string())
            .collect::<BTreeSet<_>>();
        Ok::<_, Error>(matches)
    };
    assert_eq!(listed(PickerMode::Filter)?, listed(PickerMode::ExtProc)?);
    Ok(())
}

/// Checks that every routed POST is read, unless it is listed. Any instance could get a request to
/// a path that is routed but not read, whatever models the instance serves.
#[test]
fn a_routed_post_is_read_unless_it_is_listed_here() -> Result<()> {
    let mut unread = BTreeSet::new();
    for route in routes(PickerMode::Filter)? {
        let matched = &route["match"];
        let path = matched["path"]
            .as_str()
            .or(matched["path_separated_prefix"].as_str());
        if let Some(path) = path
            && !RequestApi::for_request(b"POST", path.as_bytes()).reads_body()
        {
            unread.insert(path.to_owned());
        }
    }
    let without_a_model = [
        "/v1/models",
        "/health",
        "/ping",
        "/v2/health/live",
        "/v2/health/ready",
        "/switchpoint/ready",
        "/v1/realtime",
    ];
    let grpc = [
        "/vllm.grpc.engine.VllmEngine/Generate",
        "/vllm.grpc.engine.VllmEngine/Embed",
    ];
    let listed = without_a_model.into_iter().chain(grpc);
    assert_eq!(unread, listed.map(str::to_owned).collect());
    Ok(())
}
