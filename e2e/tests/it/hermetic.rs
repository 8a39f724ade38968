//! Test cases as data (`hermetic.yaml`), run through a real Envoy. A case has the loads of the
//! endpoints, a request, and the endpoint that must get the request or the refusal.

use std::collections::BTreeMap;
use std::time::Duration;

use e2e::explain::ExplainedDecision;
use http_body_util::BodyExt;
use hyper::body::{Bytes, Frame};
use serde::Deserialize;
use serde_json::{Value, json};
use testbed::client::{self, ClientReply};
use testbed::envoy::subset_hint_filter;
use testbed::model_server::{MetricOverrides, ModelServer, ModelServerOptions};
use testbed::stack::{PickerMode, Stack};
use testbed::{Result, wait_for};

use crate::echo;

const LIMIT: Duration = Duration::from_secs(30);

/// The wait for reports. It is longer than the interval at which proxies report, about one second.
const REPORTS: Duration = Duration::from_secs(3);

/// The configuration of the reference picker's tests.
const DEFAULT: &str = "
plugins: [{type: queue-scorer}, {type: kv-cache-utilization-scorer}, {type: prefix-cache-scorer}, {type: lora-affinity-scorer}, {type: openai-parser}]
requestHandler: {parsers: [{pluginRef: openai-parser}]}
";
const PASSTHROUGH: &str = "
plugins: [{type: queue-scorer}, {type: kv-cache-utilization-scorer}, {type: passthrough-parser}]
requestHandler: {parsers: [{pluginRef: passthrough-parser}]}
";

const OBJECTS: &str = "
apiVersion: inference.networking.x-k8s.io/v1alpha2
kind: InferenceModelRewrite
metadata: {name: rewrites}
spec:
  poolRef: {name: default}
  rules: [{matches: [{model: {value: model-to-be-rewritten}}], targets: [{modelRewrite: model-after-rewrite}]}]
";

/// The number of times that each request is sent, so that a case cannot pass by chance.
const TIMES: usize = 3;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HermeticCase {
    case: String,
    #[serde(default)]
    config: HermeticConfig,
    endpoints: Vec<EndpointLoadRow>,
    request: HermeticRequest,
    expect: HermeticExpectation,
    /// The reason why the reference picker answers differently; for readers only.
    #[serde(default, rename = "differs")]
    _differs: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum HermeticConfig {
    #[default]
    Default,
    Passthrough,
}

/// Waiting requests, KV-cache utilisation, LoRA adapters in use.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum EndpointLoadRow {
    Plain(f64, f64),
    Adapters(f64, f64, Vec<String>),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HermeticRequest {
    #[serde(default)]
    headers: BTreeMap<String, String>,
    body: Option<Value>,
    raw: Option<Vec<String>>,
    #[serde(default)]
    get: bool,
    /// If true, the engine answers as usual; otherwise it echoes the request.
    #[serde(default)]
    infer: bool,
    /// Indices of the endpoints in the subset hint. An empty list is a hint with no endpoint of the
    /// pool.
    subset: Option<Vec<usize>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HermeticExpectation {
    to: Option<usize>,
    #[serde(default)]
    body_as_sent: bool,
    /// The body that the engine must receive.
    body: Option<String>,
    /// The model name in the reply.
    model: Option<String>,
    /// The model name in each event of a streamed reply.
    events_of: Option<String>,
    /// The increase of the daemon's count of output tokens.
    completion_tokens: Option<u64>,
    status: Option<u16>,
    code: Option<String>,
    dropped: Option<String>,
}

impl EndpointLoadRow {
    fn queue(&self) -> f64 {
        let (Self::Plain(queue, _) | Self::Adapters(queue, ..)) = self;
        *queue
    }

    fn kv(&self) -> f64 {
        let (Self::Plain(_, kv) | Self::Adapters(_, kv, _)) = self;
        *kv
    }

    fn lies(&self) -> MetricOverrides {
        let adapters = if let Self::Adapters(.., adapters) = self {
            adapters.join(", ")
        } else {
            String::new()
        };
        let numbers = [
            ("num_requests_waiting", self.queue().to_string()),
            ("kv_cache_usage_perc", self.kv().to_string()),
            ("running_lora_adapters", adapters),
        ];
        numbers.map(|(name, value)| (name.to_owned(), value)).into()
    }
}

/// A stack with one configuration. Each case sets the loads of its endpoints.
struct HermeticStack {
    stack: Stack,
}

impl HermeticStack {
    async fn new(
        front: PickerMode,
        configured: HermeticConfig,
    ) -> Result<(Self, tempfile::TempDir)> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("config.yaml");
        let config = if configured == HermeticConfig::Default {
            DEFAULT
        } else {
            PASSTHROUGH
        };
        std::fs::write(
            &file,
            format!("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig{config}"),
        )?;
        let objects = folder.path().join("objects");
        std::fs::create_dir(&objects)?;
        std::fs::write(objects.join("rewrites.yaml"), OBJECTS)?;
        let text = |path: &std::path::Path| path.display().to_string();
        let arguments = [
            "--config",
            &text(&file),
            "--objects",
            &text(&objects),
            "--scrape-interval",
            "50ms",
        ];
        let server = ModelServerOptions {
            models: ["demo", "my-model", "direct-model", "model-after-rewrite"]
                .map(str::to_owned)
                .into(),
            loras: ["foo", "bar", "sql-lora-1fdg2", "sql-lora-sheddable"]
                .map(str::to_owned)
                .into(),
            max_lora: 2,
            speed: 0.0,
            // Short writes cut names and events in the middle.
            bytes_per_write: 23,
            ..ModelServerOptions::default()
        };
        let stack = Stack::builder()
            .front(front)
            .servers_like(3, &server)
            .daemon_arguments(&arguments)
            .filter_before_picker(subset_hint_filter())
            .picker(json!({"explain": true}))
            .shared_envoy()
            .start();
        Ok((
            Self {
                stack: stack.await?,
            },
            folder,
        ))
    }

    /// Sets the loads of the endpoints and waits until the picker uses them.
    async fn becomes(&mut self, rows: &[EndpointLoadRow]) -> Result<()> {
        for (server, row) in self.stack.servers.iter().zip(rows) {
            server.override_metrics(row.lies());
        }
        let indices: Vec<usize> = (0..rows.len()).collect();
        self.stack.set_pool(&indices)?;
        let stack = &self.stack;
        let servers: Vec<&ModelServer> = stack.servers.iter().take(rows.len()).collect();
        let expected: BTreeMap<String, i64> = servers
            .iter()
            .zip(rows)
            .map(|(server, row)| (server.addr().to_string(), permille(1.0 - row.kv())))
            .collect();
        let seen = || async {
            if rows.is_empty() {
                return (stack.get("/v1/models").await.ok()?.status == 503).then_some(());
            }
            let decision = ExplainedDecision::ask(stack.address(), "how full are you?")
                .await
                .ok()?;
            let scores = decision.scores("kv-cache-utilization-scorer");
            let scores: BTreeMap<String, i64> = scores
                .into_iter()
                .map(|(endpoint, score)| (endpoint, permille(score)))
                .collect();
            (scores == expected).then_some(())
        };
        wait_for(LIMIT, &format!("the picker to use {rows:?}"), seen).await
    }

    async fn send(&self, request: &HermeticRequest) -> Result<ClientReply> {
        let hint = request.subset.as_ref().map(|subset| {
            let addresses: Vec<String> = subset
                .iter()
                .filter_map(|i| self.stack.servers.get(*i))
                .map(|s| s.addr().to_string())
                .collect();
            if addresses.is_empty() {
                "192.0.2.99:8000".to_owned()
            } else {
                addresses.join(",")
            }
        });
        let given = request
            .headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()));
        let headers: Vec<(&str, &str)> = hint
            .iter()
            .map(|hint| ("x-test-subset-list", hint.as_str()))
            .chain(given)
            .collect();
        let request = match request {
            HermeticRequest { get: true, .. } => echo::get("/v1/models", &headers)?,
            HermeticRequest {
                raw: Some(parts), ..
            } => {
                let frames = parts
                    .iter()
                    .map(|part| Frame::data(Bytes::from(part.clone())))
                    .collect();
                echo::request(
                    "POST",
                    "/v1/completions",
                    &headers,
                    client::frames(frames).boxed(),
                )?
            }
            HermeticRequest {
                infer: true, body, ..
            } => {
                let body = body.clone().unwrap_or_default().to_string();
                http::Request::post("/v1/completions").body(client::full(body))?
            }
            HermeticRequest { body, .. } => echo::post(
                "/v1/completions",
                &headers,
                body.clone().unwrap_or_default().to_string(),
            )?,
        };
        self.stack.send(request).await
    }

    /// Returns the output tokens of all models, from the daemon's metrics.
    async fn output_tokens(&self) -> Result<u64> {
        let page = self
            .stack
            .daemon
            .as_ref()
            .ok_or("no daemon")?
            .admin("/metrics")
            .await?
            .text();
        let sums = page
            .lines()
            .filter(|line| line.starts_with("llm_d_epp_request_output_tokens_sum"));
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a count"
        )]
        let sum = sums
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum::<f64>() as u64;
        Ok(sum)
    }

    /// Returns the output tokens of all models, after the reports of earlier cases have arrived.
    async fn settled_output_tokens(&self) -> Result<u64> {
        let mut before = self.output_tokens().await?;
        loop {
            tokio::time::sleep(REPORTS).await;
            let now = self.output_tokens().await?;
            if now == before {
                return Ok(now);
            }
            before = now;
        }
    }

    fn check(&self, case: &HermeticCase, reply: &ClientReply) -> Result<()> {
        let HermeticExpectation {
            to,
            body_as_sent,
            body,
            model,
            events_of,
            status,
            code,
            dropped,
            completion_tokens: _,
        } = &case.expect;
        let said = || format!("{}: {} {}", case.case, reply.status, reply.text());
        assert_eq!(reply.status, status.unwrap_or(200), "{}", said());
        if let Some(code) = code {
            assert_eq!(reply.json()?["error"]["code"], **code, "{}", said());
        }
        if let Some(reason) = dropped {
            assert_eq!(
                reply.header("x-llm-d-request-dropped-reason"),
                reason,
                "{}",
                said()
            );
        }
        if let Some(to) = to {
            assert_eq!(self.stack.server_of(reply)?, *to, "{}", said());
        }
        if let Some(body) = body {
            assert_eq!(reply.json()?["body"], **body, "{}", said());
        }
        if let Some(model) = model {
            assert_eq!(reply.json()?["model"], **model, "{}", said());
        }
        if let Some(model) = events_of {
            let text = reply.text();
            let events = text.lines().filter_map(|line| {
                serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok()
            });
            let models: Vec<Value> = events.map(|event| event["model"].clone()).collect();
            assert!(
                models.len() > 2 && models.iter().all(|said| *said == **model),
                "{}",
                said()
            );
            assert!(text.ends_with("data: [DONE]\n\n"), "{}", said());
        }
        if *body_as_sent {
            let sent = case
                .request
                .raw
                .as_ref()
                .map(|parts| parts.concat())
                .unwrap_or_default();
            assert_eq!(reply.json()?["body"], sent, "{}", said());
        }
        Ok(())
    }
}

/// Returns a score in thousandths, so that floats from different computations compare equal.
fn permille(share: f64) -> i64 {
    #[expect(clippy::cast_possible_truncation, reason = "a share")]
    let permille = (share * 1000.0).round() as i64;
    permille
}

/// Returns loads that no case uses, so that the proxy sees the loads of the next case as a change.
fn between() -> Vec<EndpointLoadRow> {
    vec![
        EndpointLoadRow::Plain(0.0, 0.55),
        EndpointLoadRow::Plain(0.0, 0.56),
        EndpointLoadRow::Plain(0.0, 0.57),
    ]
}

async fn all_of(front: PickerMode, configured: HermeticConfig) -> Result<()> {
    let cases: Vec<HermeticCase> = serde_saphyr::from_str(include_str!("hermetic.yaml"))?;
    let (mut world, _folder) = HermeticStack::new(front, configured).await?;
    let mut run = 0;
    for case in cases.iter().filter(|case| case.config == configured) {
        world.becomes(&between()).await?;
        world.becomes(&case.endpoints).await?;
        let before = if case.expect.completion_tokens.is_some() {
            world.settled_output_tokens().await?
        } else {
            0
        };
        for _ in 0..TIMES {
            world.check(case, &world.send(&case.request).await?)?;
        }
        if let Some(tokens) = case.expect.completion_tokens {
            let grown = before + tokens * TIMES as u64;
            let counted = || async { (world.output_tokens().await.ok()? == grown).then_some(()) };
            wait_for(
                LIMIT,
                &format!("{grown} output tokens in the metrics"),
                counted,
            )
            .await?;
        }
        run += 1;
    }
    assert!(run > 0);
    Ok(())
}

#[tokio::test]
async fn small_worlds() -> Result<()> {
    all_of(PickerMode::Filter, HermeticConfig::Default).await
}

#[tokio::test]
async fn small_worlds_by_ext_proc() -> Result<()> {
    all_of(PickerMode::ExtProc, HermeticConfig::Default).await
}

#[tokio::test]
async fn small_worlds_of_bodies_that_nobody_reads() -> Result<()> {
    all_of(PickerMode::Filter, HermeticConfig::Passthrough).await
}

#[tokio::test]
async fn small_worlds_of_bodies_that_nobody_reads_by_ext_proc() -> Result<()> {
    all_of(PickerMode::ExtProc, HermeticConfig::Passthrough).await
}
