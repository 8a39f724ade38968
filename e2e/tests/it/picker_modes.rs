//! The Endpoint Picker Protocol in all picker modes: its clauses as data (`fronts.yaml`), and
//! tests of ext_proc only.

mod failover;
mod retried;
mod tls;
mod together;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use e2e::manifests;
use http::Request;
use serde::Deserialize;
use serde_json::{Value, json};
use testbed::client::{self, ClientReply, EventStream, RawConnection};
use testbed::envoy::subset_hint_filter;
use testbed::model_server::{FaultMode, MetricOverrides, ModelServerOptions, ServerFault};
use testbed::stack::{PickerMode, Stack, StackBuilder};
use testbed::{Result, wait_for};

use crate::echo;

const LIMIT: Duration = Duration::from_secs(20);

// === The protocol, in both modes ===

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FrontCase {
    clause: String,
    case: String,
    get: Option<String>,
    post: Option<String>,
    /// The body that replaces the default body.
    body: Option<String>,
    /// The number of bytes of the prompt in the default body.
    filler: Option<usize>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    subset: Option<String>,
    subset_list: Option<String>,
    refuses: Option<usize>,
    expect: FrontExpectation,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FrontExpectation {
    /// The endpoints that the ranked list must name, in any order.
    from: Option<BTreeSet<usize>>,
    served: Option<usize>,
    absent: Option<String>,
    present: Option<String>,
    status: Option<u16>,
    code: Option<String>,
    kind: Option<String>,
    dropped: Option<String>,
}

/// Adds the `envoy.lb` metadata to the access log, the only place where a test can see it.
fn log_metadata(config: &mut Value) {
    let format = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/access_log/0/typed_config/log_format/json_format";
    if let Some(fields) = config.pointer_mut(format).and_then(Value::as_object_mut) {
        for key in [
            "x-gateway-destination-endpoint",
            "x-gateway-destination-endpoint-fallback",
            "x-gateway-destination-endpoint-served",
        ] {
            fields.insert(
                format!("lb:{key}"),
                format!("%DYNAMIC_METADATA(envoy.lb:{key})%").into(),
            );
        }
    }
}

impl FrontCase {
    fn body(&self) -> String {
        match (&self.body, self.filler) {
            (Some(body), _) => body.clone(),
            (None, Some(bytes)) => echo::chat(&"lorem \\\"ipsum\\n".repeat(bytes / 15 + 1)).to_string(),
            (None, None) => {
                json!({"model": "demo", "max_tokens": 4, "prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}).to_string()
            }
        }
    }

    async fn send(&self, stack: &Stack, id: &str, body: &str) -> Result<ClientReply> {
        let named = |text: &str| {
            (0..3).fold(text.to_owned(), |text, i| {
                text.replace(&format!("@{i}"), &stack.servers[i].addr().to_string())
            })
        };
        let mut headers: Vec<(&str, String)> = self
            .headers
            .iter()
            .map(|(name, value)| (name.as_str(), named(value)))
            .collect();
        headers.extend(
            self.subset
                .iter()
                .map(|hint| ("x-test-subset", named(hint))),
        );
        headers.extend(
            self.subset_list
                .iter()
                .map(|hint| ("x-test-subset-list", named(hint))),
        );
        headers.push(("x-request-id", id.to_owned()));
        let headers: Vec<(&str, &str)> = headers
            .iter()
            .map(|(name, value)| (*name, value.as_str()))
            .collect();
        let request = match (&self.get, &self.post) {
            (Some(path), None) => echo::get(path, &headers)?,
            (None, Some(path)) => echo::post(path, &headers, body.to_owned())?,
            _ => return Err(format!("{}: get or post?", self.case).into()),
        };
        stack.send(request).await
    }

    async fn check(&self, front: PickerMode, stack: &Stack, id: &str) -> Result<()> {
        let sent = self.body();
        let reply = self.send(stack, id, &sent).await?;
        let FrontExpectation {
            from,
            served,
            absent,
            present,
            status,
            code,
            kind,
            dropped,
        } = &self.expect;
        let text = reply.text();
        let said = || {
            format!(
                "{front:?}, {}: {}: {} {}",
                self.clause,
                self.case,
                reply.status,
                text.get(..400).unwrap_or(&text)
            )
        };
        assert_eq!(reply.status, status.unwrap_or(200), "{}", said());
        if let Some(code) = code {
            assert_eq!(reply.json()?["error"]["code"], **code, "{}", said());
        }
        if let Some(kind) = kind {
            let body = reply.json()?;
            assert_eq!(
                (&body["type"], &body["error"]["type"]),
                (&json!("error"), &json!(kind)),
                "{}",
                said()
            );
        }
        if let Some(reason) = dropped {
            assert_eq!(
                reply.header("x-llm-d-request-dropped-reason"),
                reason,
                "{}",
                said()
            );
        }
        if reply.status != 200 {
            return Ok(());
        }
        let ranked = echo::ranked(&reply)?;
        let body = reply.json()?;
        let addresses = |indices: &BTreeSet<usize>| {
            indices
                .iter()
                .map(|i| stack.servers[*i].addr().to_string())
                .collect::<BTreeSet<_>>()
        };
        if let Some(from) = from {
            assert_eq!(
                ranked.iter().cloned().collect::<BTreeSet<_>>(),
                addresses(from),
                "{}",
                said()
            );
        }
        if let Some(served) = served {
            assert_eq!(stack.server_of(&reply)?, *served, "{}", said());
        }
        assert!(
            absent
                .iter()
                .all(|name| echo::header(&body, name).is_empty()),
            "{}",
            said()
        );
        assert!(
            present
                .iter()
                .all(|name| !echo::header(&body, name).is_empty()),
            "{}",
            said()
        );
        if self.post.is_some() {
            assert_eq!(body["body_bytes"], sent.len(), "{}", said());
            assert!(body["body"].is_null() || body["body"] == sent, "{}", said());
        }
        let line = stack.envoy.access_log_of(id, LIMIT).await?;
        assert_eq!(
            line["lb:x-gateway-destination-endpoint"],
            ranked.join(","),
            "{}",
            said()
        );
        assert_eq!(
            line["lb:x-gateway-destination-endpoint-served"],
            reply.header("x-served-by"),
            "{}",
            said()
        );
        assert_eq!(
            line["lb:x-gateway-destination-endpoint-fallback"],
            Value::Null,
            "{}",
            said()
        );
        Ok(())
    }
}

async fn protocol(front: PickerMode) -> Result<()> {
    let cases: Vec<FrontCase> = serde_saphyr::from_str(include_str!("fronts.yaml"))?;
    play(front, Stack::builder().front(front), &cases).await
}

async fn play(front: PickerMode, builder: StackBuilder, cases: &[FrontCase]) -> Result<()> {
    let builder = builder
        .servers(3)
        .filter_before_picker(subset_hint_filter())
        .shared_envoy();
    let stack = builder.envoy_config(log_metadata).start().await?;
    for (index, case) in cases.iter().enumerate() {
        if let Some(index) = case.refuses {
            stack.servers[index]
                .fault(ServerFault::new(FaultMode::Refuse))
                .await;
        }
        case.check(front, &stack, &format!("case-{index}")).await?;
    }
    Ok(())
}

#[tokio::test]
async fn the_protocol_by_the_filter() -> Result<()> {
    protocol(PickerMode::Filter).await
}

#[tokio::test]
async fn the_protocol_by_the_native_module() -> Result<()> {
    protocol(PickerMode::Native).await
}

#[tokio::test]
async fn the_protocol_by_the_filter_that_decides_at_the_headers() -> Result<()> {
    // All cases except those that need the picker to read the body.
    let mut cases: Vec<FrontCase> = serde_saphyr::from_str(include_str!("fronts.yaml"))?;
    cases.retain(|case| case.clause != "bodies" || case.expect.status.is_none());
    play(
        PickerMode::Filter,
        Stack::builder().picker(json!({"decide_at": "headers"})),
        &cases,
    )
    .await
}

const FILTERS: &str =
    "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters";

/// Removes from the filter the permission to hold headers, as Istio's WasmPlugin does.
pub fn forbid_to_hold_headers(config: &mut Value) {
    let filters = config
        .pointer_mut(FILTERS)
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten();
    for filter in filters.filter(|filter| filter["name"] == "switchpoint") {
        filter["typed_config"]["config"]["allow_on_headers_stop_iteration"] = json!(false);
    }
}

/// Inserts the filters of `istio/wasmplugin.yaml` that hold requests and set their headers.
fn hold_after_the_picker(config: &mut Value) {
    forbid_to_hold_headers(config);
    let objects = manifests::read("istio/wasmplugin.yaml").expect("the shipped file");
    let patches =
        &manifests::only(&objects, "EnvoyFilter").expect("an EnvoyFilter")["spec"]["configPatches"];
    let filters = config
        .pointer_mut(FILTERS)
        .and_then(Value::as_array_mut)
        .expect("filters");
    let mut at = filters
        .iter()
        .position(|filter| filter["name"] == "switchpoint")
        .expect("the picker");
    for filter in patches
        .as_array()
        .into_iter()
        .flatten()
        .map(|patch| &patch["patch"]["value"])
    {
        if ["hold", "picked_headers"]
            .iter()
            .any(|name| filter["name"] == *name)
        {
            at += 1;
            filters.insert(at, filter.clone());
        }
    }
}

#[tokio::test]
async fn the_protocol_by_the_filter_whose_requests_a_buffer_filter_holds() -> Result<()> {
    let cases: Vec<FrontCase> = serde_saphyr::from_str(include_str!("fronts.yaml"))?;
    let builder = Stack::builder()
        .picker(json!({"hold_headers": false}))
        .envoy_config(hold_after_the_picker);
    play(PickerMode::Filter, builder, &cases).await
}

/// Checks why `hold_headers: false` exists. If a filter without the permission holds the headers,
/// Envoy shows it no body, so the request ends by a timeout.
#[tokio::test]
async fn a_filter_that_may_not_hold_headers_gets_no_body() -> Result<()> {
    let short = |config: &mut Value| {
        forbid_to_hold_headers(config);
        config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
            ["stream_idle_timeout"] = json!("1s");
    };
    let stack = Stack::builder()
        .servers(1)
        .envoy_config(short)
        .shared_envoy()
        .start()
        .await?;
    assert_eq!(
        stack.get("/v1/models").await?.status,
        200,
        "nothing to hold"
    );
    assert_eq!(
        stack
            .post("/v1/chat/completions", &echo::chat("x"))
            .await?
            .status,
        504
    );
    Ok(())
}

#[tokio::test]
async fn a_model_header_says_what_an_unread_body_cannot() -> Result<()> {
    for front in PickerMode::ALL {
        let builder = Stack::builder().front(front).servers(2).shared_envoy();
        let builder = match front {
            PickerMode::Filter | PickerMode::Native => {
                builder.picker(json!({"decide_at": "headers", "model_header": "x-model"}))
            }
            PickerMode::ExtProc => builder
                .envoy_config(modes("NONE", "STREAMED", false))
                .daemon_arguments(&["--ext-proc-model-header", "x-model"]),
        };
        let folder = tempfile::tempdir()?;
        let model = "{apiVersion: inference.networking.x-k8s.io/v1alpha2, kind: InferenceModel, metadata: {name: demo}, \
                     spec: {modelName: demo, criticality: Standard, poolRef: {name: default}}}";
        std::fs::write(folder.path().join("models.yaml"), model)?;
        let stack = builder
            .daemon_arguments(&["--objects", &folder.path().display().to_string()])
            .start()
            .await?;
        let ask = |model: &'static str| {
            let request = echo::post(
                "/v1/chat/completions",
                &[("x-model", model)],
                echo::chat("x").to_string(),
            );
            async { stack.send(request?).await }
        };
        let unknown = ask("unheard-of").await?;
        assert_eq!(
            (unknown.status, &unknown.json()?["error"]["code"]),
            (404, &json!("model_not_found")),
            "{front:?}: {}",
            unknown.text()
        );
        assert_eq!(ask("demo").await?.status, 200, "{front:?}");
        assert_eq!(
            stack
                .post("/v1/chat/completions", &echo::chat("x"))
                .await?
                .status,
            200,
            "{front:?}: without the header the model is unknown"
        );
    }
    Ok(())
}

#[tokio::test]
async fn the_protocol_by_ext_proc() -> Result<()> {
    protocol(PickerMode::ExtProc).await
}

const OBJECTS: &str = r#"
{apiVersion: llm-d.ai/v1alpha2, kind: InferenceObjective, metadata: {name: batch}, spec: {priority: -1, poolRef: {name: default}}}
---
apiVersion: inference.networking.x-k8s.io/v1alpha2
kind: InferenceModelRewrite
metadata: {name: rewrites}
spec:
  poolRef: {name: default}
  rules: [{matches: [{model: {value: alias}}], targets: [{modelRewrite: demo}]}]
"#;

/// Writes objects into a folder, and describes a stack that watches the folder.
fn with_objects(builder: StackBuilder) -> Result<(StackBuilder, tempfile::TempDir)> {
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("objects.yaml"), OBJECTS)?;
    let path = folder.path().display().to_string();
    Ok((builder.daemon_arguments(&["--objects", &path]), folder))
}

#[tokio::test]
async fn an_empty_pool_is_503_in_the_shape_of_the_api() -> Result<()> {
    for front in PickerMode::ALL {
        let mut stack = Stack::builder()
            .front(front)
            .servers(1)
            .shared_envoy()
            .start()
            .await?;
        stack.set_pool(&[])?;
        let empty = || async {
            stack
                .post("/v1/chat/completions", &echo::chat("x"))
                .await
                .ok()
                .filter(|reply| reply.status == 503)
        };
        let reply = wait_for(LIMIT, "the pool to be empty", empty).await?;
        assert_eq!(
            reply.json()?["error"]["code"],
            "no_ready_endpoint",
            "{front:?}: {}",
            reply.text()
        );
        assert_eq!(
            reply.header("x-llm-d-request-dropped-reason"),
            "rejected-no-endpoints",
            "{front:?}"
        );
        let anthropic = stack
            .post(
                "/v1/messages",
                &json!({"model": "demo", "max_tokens": 1, "messages": []}),
            )
            .await?;
        assert_eq!(
            (anthropic.status, &anthropic.json()?["type"]),
            (503, &json!("error")),
            "{front:?}: {}",
            anthropic.text()
        );
        assert_eq!(
            stack.get("/v1/models").await?.status,
            503,
            "{front:?}: also without a body"
        );
        assert_eq!(
            stack.get("/switchpoint/ready").await?.status,
            200,
            "{front:?}: an empty pool is a known state"
        );
        stack.set_pool(&[0])?;
        let again = || async {
            stack
                .get("/v1/models")
                .await
                .ok()
                .filter(|reply| reply.status == 200)
        };
        wait_for(LIMIT, "the endpoint to be back", again).await?;
    }
    Ok(())
}

#[tokio::test]
async fn one_destination_where_the_older_text_is_read() -> Result<()> {
    for front in PickerMode::ALL {
        let builder = Stack::builder()
            .front(front)
            .servers(3)
            .picker(json!({"destination_format": "single"}))
            .shared_envoy();
        let stack = builder.envoy_config(log_metadata).start().await?;
        let reply = stack
            .send(echo::post(
                "/v1/chat/completions",
                &[("x-request-id", "old")],
                echo::chat("hi").to_string(),
            )?)
            .await?;
        let echo = reply.json()?;
        let [destination] = echo::header(&echo, "x-gateway-destination-endpoint")[..] else {
            return Err(echo.to_string().into());
        };
        let [fallback] = echo::header(&echo, "x-gateway-destination-endpoint-fallback")[..] else {
            return Err(echo.to_string().into());
        };
        assert!(
            !destination.contains(',') && !fallback.contains(',') && destination != fallback,
            "{front:?} {destination} {fallback}"
        );
        assert_eq!(reply.header("x-served-by"), destination, "{front:?}");
        let line = stack.envoy.access_log_of("old", LIMIT).await?;
        assert_eq!(
            line["lb:x-gateway-destination-endpoint"], destination,
            "{front:?}"
        );
        assert_eq!(
            line["lb:x-gateway-destination-endpoint-fallback"], fallback,
            "{front:?}"
        );
    }
    Ok(())
}

// === ext_proc only ===

fn ext_proc() -> StackBuilder {
    Stack::builder().front(PickerMode::ExtProc)
}

/// Returns the ext_proc filter that calls the daemon.
fn asking(config: &mut Value) -> Option<&mut Value> {
    let filters = config.pointer_mut(FILTERS)?.as_array_mut()?;
    Some(
        &mut filters
            .iter_mut()
            .find(|filter| filter["name"] == "switchpoint")?["typed_config"],
    )
}

/// Sets other body modes than the shipped file's, as other gateways use.
fn modes(
    request: &'static str,
    response: &'static str,
    early: bool,
) -> impl Fn(&mut Value) + Send + 'static {
    move |config| {
        let Some(asking) = asking(config) else { return };
        let trailers = |mode| {
            if mode == "FULL_DUPLEX_STREAMED" {
                "SEND"
            } else {
                "SKIP"
            }
        };
        asking["processing_mode"] = json!({
            "request_body_mode": request, "request_trailer_mode": trailers(request),
            "response_body_mode": response, "response_trailer_mode": trailers(response),
        });
        asking["send_body_without_waiting_for_header_response"] = early.into();
    }
}

fn streamed(model: &str, tokens: u32) -> Value {
    json!({"model": model, "stream": true, "stream_options": {"include_usage": true}, "max_tokens": tokens, "ignore_eos": true,
           "messages": [{"role": "user", "content": "tell me more"}]})
}

/// Opens a stream of this many tokens.
async fn stream(address: SocketAddr, tokens: u32) -> Result<EventStream> {
    let request = Request::post("/v1/chat/completions").header("content-type", "application/json");
    Ok(EventStream::new(
        client::start(
            address,
            request.body(client::full(streamed("demo", tokens).to_string()))?,
        )
        .await?,
    ))
}

/// Returns the options of a server that pauses before each write of a stream.
fn slow(chunk_delay_ms: u64) -> ModelServerOptions {
    ModelServerOptions {
        models: vec!["demo".into()],
        speed: 0.0,
        chunk_delay_ms,
        ..ModelServerOptions::default()
    }
}

async fn in_flight(stack: &Stack) -> Option<u64> {
    let endpoints = stack.daemon.as_ref()?.endpoints().await.ok()?;
    Some(
        endpoints
            .iter()
            .filter_map(|endpoint| endpoint["in_flight"].as_u64())
            .sum(),
    )
}

async fn until_in_flight(stack: &Stack, wanted: u64) -> Result<()> {
    let seen = || async { (in_flight(stack).await? == wanted).then_some(()) };
    wait_for(LIMIT, &format!("{wanted} in flight"), seen).await
}

/// Sends small, large, streamed and rewritten exchanges in one combination of body modes. `read`
/// says whether the picker sees the request body before the decision.
async fn in_modes(
    request: &'static str,
    response: &'static str,
    early: bool,
    read: bool,
) -> Result<()> {
    let what = format!("{request} {early}, {response}");
    let (builder, _folder) = with_objects(
        ext_proc()
            .servers(2)
            .envoy_config(modes(request, response, early)),
    )?;
    let stack = builder.start().await?;
    for bytes in [10, 400_000] {
        let body = echo::chat(&"lorem ".repeat(bytes / 6)).to_string();
        let reply = stack
            .send(echo::post("/v1/chat/completions", &[], body.clone())?)
            .await?;
        assert_eq!(
            (reply.status, &reply.json()?["body_bytes"]),
            (200, &json!(body.len())),
            "{what}: {}",
            reply.text()
        );
        assert_eq!(echo::ranked(&reply)?.len(), 2, "{what}");
        let opaque = stack
            .send(echo::post("/v1/rerank", &[], body.clone())?)
            .await?;
        assert_eq!(
            (opaque.status, &opaque.json()?["body_bytes"]),
            (200, &json!(body.len())),
            "{what}: {}",
            opaque.text()
        );
    }
    assert_eq!(stack.get("/v1/models").await?.status, 200, "{what}");
    let whole = stack
        .post("/v1/chat/completions", &echo::chat("whole"))
        .await?;
    assert_eq!(
        (whole.status, &whole.json()?["model"]),
        (200, &json!("demo")),
        "{what}: {}",
        whole.text()
    );
    let events = stack
        .post("/v1/chat/completions", &streamed("demo", 20))
        .await?;
    assert!(
        events.status == 200 && events.text().ends_with("data: [DONE]\n\n"),
        "{what}: {}",
        events.text()
    );
    let direct = client::post(
        stack.servers[0].addr(),
        "/v1/chat/completions",
        streamed("demo", 20).to_string(),
    )
    .await?;
    let contents = |reply: &ClientReply| reply.text().matches("\"content\"").count();
    assert_eq!(contents(&events), contents(&direct), "{what}");

    let bad = client::post(stack.address(), "/v1/chat/completions", "{").await?;
    let mut renamed = echo::chat("x");
    renamed["model"] = "alias".into();
    let plain = stack
        .send(echo::post(
            "/v1/chat/completions",
            &[],
            renamed.to_string(),
        )?)
        .await?;
    if read {
        assert_eq!(
            (bad.status, &bad.json()?["error"]["code"]),
            (400, &json!("invalid_json")),
            "{what}: {}",
            bad.text()
        );
        assert_eq!(
            plain.json()?["body"],
            renamed.to_string().replace("alias", "demo"),
            "{what}"
        );
    } else {
        assert_ne!(
            bad.json()?["error"]["code"],
            "invalid_json",
            "{what}: the engine judges the body: {}",
            bad.text()
        );
        assert_eq!(plain.json()?["body"], renamed.to_string(), "{what}");
    }
    if read && response != "NONE" {
        for body in [renamed.clone(), streamed("alias", 5)] {
            let reply = stack.post("/v1/chat/completions", &body).await?;
            assert_eq!(reply.status, 200, "{what}: {}", reply.text());
            assert!(
                reply.text().contains(r#""model":"alias""#) && !reply.text().contains("demo"),
                "{what}: {}",
                reply.text()
            );
        }
    }
    until_in_flight(&stack, 0).await
}

#[tokio::test]
async fn bodies_full_duplex_both_ways() -> Result<()> {
    in_modes("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED", false, true).await
}

#[tokio::test]
async fn bodies_buffered_both_ways() -> Result<()> {
    in_modes("BUFFERED", "BUFFERED", false, true).await
}

#[tokio::test]
async fn bodies_buffered_as_far_as_they_go() -> Result<()> {
    in_modes("BUFFERED_PARTIAL", "BUFFERED_PARTIAL", false, true).await
}

#[tokio::test]
async fn bodies_streamed_ahead_of_the_decision() -> Result<()> {
    in_modes("STREAMED", "STREAMED", true, true).await
}

#[tokio::test]
async fn bodies_streamed_behind_the_decision() -> Result<()> {
    in_modes("STREAMED", "STREAMED", false, false).await
}

#[tokio::test]
async fn bodies_not_shown() -> Result<()> {
    in_modes("NONE", "NONE", false, false).await
}

/// The module `objectives` has this test for the filter.
#[tokio::test]
async fn a_full_pool_sheds() -> Result<()> {
    let (builder, _folder) = with_objects(
        ext_proc()
            .servers(2)
            .picker(json!({"objective_header": "trust"})),
    )?;
    let stack = builder.start().await?;
    let ask = |objective: &'static str| {
        let request = echo::post(
            "/v1/chat/completions",
            &[("x-llm-d-inference-objective", objective)],
            echo::chat("x").to_string(),
        );
        async { stack.send(request?).await }
    };
    assert_eq!(ask("batch").await?.status, 200, "the pool has room");
    stack.servers.iter().for_each(|server| {
        server.override_metrics(MetricOverrides::from([(
            "num_requests_waiting".to_owned(),
            "50".to_owned(),
        )]));
    });
    let shed = wait_for(LIMIT, "the pool to be full", || async {
        ask("batch").await.ok().filter(|reply| reply.status != 200)
    })
    .await?;
    assert_eq!(
        (shed.status, shed.header("x-llm-d-request-dropped-reason")),
        (429, "rejected-saturated"),
        "{}",
        shed.text()
    );
    assert_eq!(shed.header("retry-after"), "1");
    assert_eq!(
        ask("unheard-of").await?.status,
        200,
        "only sheddable requests are shed"
    );
    Ok(())
}

#[tokio::test]
async fn one_that_looks_on_changes_nothing() -> Result<()> {
    let observe = |config: &mut Value| {
        modes("STREAMED", "STREAMED", false)(config);
        if let Some(asking) = asking(config) {
            asking["observability_mode"] = true.into();
        }
    };
    let stack = ext_proc()
        .servers(1)
        .envoy_config(observe)
        .without_waiting()
        .start()
        .await?;
    let reply = stack.post("/v1/chat/completions", &echo::chat("x")).await?;
    assert_eq!(
        reply.status,
        503,
        "in observability mode no destination is set: {}",
        reply.text()
    );
    Ok(())
}

#[tokio::test]
async fn a_client_that_leaves_at_any_moment_leaves_nothing_behind() -> Result<()> {
    let stack = ext_proc().servers_like(1, &slow(50)).start().await?;
    let head =
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
    // The client leaves while it sends the body.
    let mut raw = RawConnection::connect(stack.address()).await?;
    raw.write(format!("{head}content-length: 1000\r\n\r\n{{\"model\":"))
        .await?;
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(raw);
    // The client leaves before the engine answers.
    stack.servers[0]
        .fault(ServerFault::new(FaultMode::Hang))
        .await;
    let body = echo::chat("x").to_string();
    let mut raw = RawConnection::connect(stack.address()).await?;
    raw.write(format!(
        "{head}content-length: {}\r\n\r\n{body}",
        body.len()
    ))
    .await?;
    until_in_flight(&stack, 1).await?;
    drop(raw);
    until_in_flight(&stack, 0).await?;
    stack.servers[0]
        .fault(ServerFault::new(FaultMode::None))
        .await;
    // The client leaves while the engine streams.
    let mut events = stream(stack.address(), 500).await?;
    assert!(events.next().await?.is_some());
    until_in_flight(&stack, 1).await?;
    drop(events);
    until_in_flight(&stack, 0).await?;
    assert_eq!(
        stack
            .post("/v1/chat/completions", &echo::chat("after all"))
            .await?
            .status,
        200
    );
    until_in_flight(&stack, 0).await
}

#[tokio::test]
async fn a_daemon_that_dies_cuts_no_reply_and_refuses_until_it_is_back() -> Result<()> {
    let mut stack = ext_proc().servers_like(2, &slow(40)).start().await?;
    for graceful in [true, false] {
        let mut events = stream(stack.address(), 60).await?;
        assert!(events.next().await?.is_some());
        let process = stack.daemon()?.process();
        let _ended = if graceful {
            process.stop(LIMIT).await?
        } else {
            process.kill()?
        };
        let refused = || async {
            stack
                .get("/v1/models")
                .await
                .ok()
                .filter(|reply| reply.status == 503)
        };
        let refused = wait_for(LIMIT, "a refusal", refused).await?;
        assert_eq!(
            refused.header("x-llm-d-request-dropped-reason"),
            "rejected-no-endpoints",
            "{}",
            refused.text()
        );
        let mut tokens = 1;
        let mut done = false;
        while let Some(event) = events.next().await? {
            tokens += usize::from(event.data.contains("\"content\""));
            done |= event.data == "[DONE]";
        }
        assert!(
            done && tokens >= 60,
            "graceful {graceful}: {tokens} tokens, ended normally: {done}"
        );
        stack.daemon()?.start_again()?;
        let back = || async {
            stack
                .post("/v1/chat/completions", &echo::chat("x"))
                .await
                .ok()
                .filter(|reply| reply.status == 200)
        };
        wait_for(LIMIT, "the daemon to be back", back).await?;
    }
    Ok(())
}
