//! Sends traffic with several SLO classes to a pool with fast and slow servers, and measures the
//! share of requests in time for each policy.
//!
//! All policies get the same requests at the same moments: a seed decides arrivals, classes and
//! prompts. The load is a share of the pool's capacity, which is measured first. A request is in
//! time if its TTFT and its mean TPOT, as the client sees them, are within its SLO. A shed request
//! is not in time.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures::future::join_all;
use http::Request;
use scheduler::Rng;
use serde_json::{Value, json};

use testbed::client::{self, Body, EventStream};
use testbed::model_server::ModelServerOptions;
use testbed::scorers::WEIGHED;
use testbed::stack::{Stack, StackBuilder};
use testbed::{Result, wait_for};

/// The output tokens of every answer.
const OUTPUT_TOKENS: u32 = 16;

/// The smallest and largest number of words of a prompt; a word has about four bytes.
const WORDS: [usize; 2] = [100, 500];

/// A class of requests.
#[derive(Clone, Copy, Debug)]
pub struct ExperimentClass {
    /// The name of the class and of its InferenceObjective.
    pub name: &'static str,
    /// The priority of the objective. Priority 1 is critical.
    pub priority: i32,
    /// The number of requests of the class in ten.
    pub tenths: usize,
    /// The requested TTFT, in ms.
    pub ttft_ms: f64,
    /// The requested time per further token (TPOT), in ms.
    pub tpot_ms: f64,
}

/// The policy by which endpoints are picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExperimentPolicy {
    /// The SLO-aware profiles of the llm-d proposal; every request sets the header that requests
    /// prediction.
    Slo,
    /// The picker without a configuration.
    Default,
    /// Weighted scorers for queue, KV cache, prefix and requests in flight.
    Weighed,
    /// Round robin over the servers, without the proxy.
    RoundRobin,
}

#[derive(Clone, Debug)]
pub struct SloExperiment {
    /// The numbers of fast and of slow servers.
    pub servers: [usize; 2],
    /// The options of the fast servers.
    pub engine: ModelServerOptions,
    /// The factor by which the steps of a slow server take longer.
    pub slowdown: f64,
    pub classes: Vec<ExperimentClass>,
    /// The load, as a share of the pool's capacity.
    pub load: f64,
    /// The time for which each seed is measured.
    pub measured: Duration,
    pub seeds: Vec<u64>,
}

/// The results of a class.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExperimentOutcome {
    pub sent: usize,
    /// The number of requests answered within their SLO.
    pub in_time: usize,
    /// The number of requests refused with 429.
    pub shed: usize,
}

/// Returns the path of the configuration in the proposal's example, which is unchanged.
#[must_use]
pub fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../control-plane/tests/configs/good/slo-aware.yaml")
}

/// Creates a chat request for a stream of at most `max_tokens` tokens.
///
/// # Errors
/// Fails if a header is invalid.
pub fn chat(prompt: &str, max_tokens: u32, headers: &[(&str, &str)]) -> Result<Request<Body>> {
    let body = json!({
        "model": "demo", "max_tokens": max_tokens, "stream": true, "stream_options": {"include_usage": true},
        "messages": [{"role": "user", "content": prompt}],
    });
    let request = headers.iter().fold(
        Request::post("/v1/chat/completions"),
        |request, (name, value)| request.header(*name, *value),
    );
    Ok(request.body(client::full(body.to_string()))?)
}

/// Waits until the daemon's latency model has learned enough to predict latencies.
///
/// # Errors
/// Fails if the learning takes longer than `limit`.
pub async fn predicts(stack: &Stack, limit: Duration) -> Result<()> {
    let page = || async {
        let page = stack
            .daemon
            .as_ref()?
            .admin("/debug/model")
            .await
            .ok()?
            .json()
            .ok()?;
        page["pools"][0]["predicts"]
            .as_bool()
            .filter(|predicts| *predicts)
    };
    wait_for(limit, "a model that predicts", page)
        .await
        .map(drop)
}

// === impl ExperimentOutcome ===

impl ExperimentOutcome {
    /// Returns the share of the sent requests that were answered in time.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "some thousand requests")]
    pub fn attainment(self) -> f64 {
        self.in_time as f64 / self.sent.max(1) as f64
    }
}

// === impl SloExperiment ===

impl SloExperiment {
    /// Runs all seeds under one policy and returns the counts of each class.
    ///
    /// # Errors
    /// Fails if a part does not start, or an answer ends early.
    pub async fn run(
        &self,
        policy: ExperimentPolicy,
        rate: f64,
    ) -> Result<BTreeMap<&'static str, ExperimentOutcome>> {
        let folder = tempfile::tempdir()?;
        let stack = self.builder(policy, folder.path())?.start().await?;
        let mut outcomes = BTreeMap::new();
        if policy == ExperimentPolicy::Slo {
            // Train the model under the same load with other requests. The training time is not
            // measured.
            let began = Instant::now();
            while predicts(&stack, Duration::from_millis(1)).await.is_err() {
                self.play(&stack, policy, rate, 1_000, Duration::from_secs(4))
                    .await?;
                if began.elapsed() > Duration::from_secs(120) {
                    return Err(
                        "the latency model did not learn to predict within two minutes".into(),
                    );
                }
            }
            self.play(
                &stack,
                policy,
                rate,
                1_001,
                self.measured.max(Duration::from_secs(10)),
            )
            .await?;
        }
        for seed in &self.seeds {
            for (class, one) in self
                .play(&stack, policy, rate, *seed, self.measured)
                .await?
            {
                let all: &mut ExperimentOutcome = outcomes.entry(class).or_default();
                *all = ExperimentOutcome {
                    sent: all.sent + one.sent,
                    in_time: all.in_time + one.in_time,
                    shed: all.shed + one.shed,
                };
            }
        }
        Ok(outcomes)
    }

    /// Measures the capacity of the pool in requests per second, with twice as many clients per
    /// server as a server runs requests at the same time.
    ///
    /// # Errors
    /// Fails if a server does not answer.
    pub async fn capacity(&self) -> Result<f64> {
        let stack = self.pool(Stack::builder()).start().await?;
        let began = Instant::now();
        let limit = Duration::from_secs(4);
        let clients = stack
            .servers
            .iter()
            .flat_map(|server| vec![server.addr(); 2 * self.engine.max_num_seqs]);
        let done = join_all(clients.enumerate().map(|(at, server)| async move {
            let mut rng = Rng::seeded(at as u64);
            let mut done = 0_u32;
            while began.elapsed() < limit {
                client::send(server, chat(&prompt(&mut rng), OUTPUT_TOKENS, &[])?).await?;
                done += 1;
            }
            Ok::<u32, testbed::Error>(done)
        }))
        .await;
        let done: u32 = done.into_iter().sum::<Result<u32>>()?;
        Ok(f64::from(done) / began.elapsed().as_secs_f64())
    }

    fn pool(&self, builder: StackBuilder) -> StackBuilder {
        let [fast, slow] = self.servers;
        let slower = ModelServerOptions {
            slowdown: self.slowdown,
            ..self.engine.clone()
        };
        builder
            .servers_like(fast, &self.engine)
            .more_servers_like(slow, &slower)
    }

    fn builder(&self, policy: ExperimentPolicy, folder: &Path) -> Result<StackBuilder> {
        let objective = |class: &ExperimentClass| {
            json!({"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceObjective", "metadata": {"name": class.name},
                   "spec": {"priority": class.priority, "poolRef": {"name": "default"}}})
        };
        let objects: Vec<String> = self
            .classes
            .iter()
            .map(|class| objective(class).to_string())
            .collect();
        std::fs::write(folder.join("objectives.yaml"), objects.join("\n---\n"))?;
        let mut arguments = vec!["--objects".to_owned(), folder.display().to_string()];
        if policy == ExperimentPolicy::Slo {
            arguments.extend([
                "--latency-prediction".to_owned(),
                "--config".to_owned(),
                example().display().to_string(),
            ]);
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let weighed: &[(&str, u32)] = if policy == ExperimentPolicy::Weighed {
            &WEIGHED
        } else {
            &[]
        };
        Ok(self
            .pool(Stack::builder())
            .picker(json!({"objective_header": "trust", "slo_headers": "trust"}))
            .scored_by(weighed)
            .daemon_arguments(&arguments))
    }

    async fn play(
        &self,
        stack: &Stack,
        policy: ExperimentPolicy,
        rate: f64,
        seed: u64,
        lasting: Duration,
    ) -> Result<BTreeMap<&'static str, ExperimentOutcome>> {
        let mut rng = Rng::seeded(seed);
        let mut at = 0.0;
        let began = tokio::time::Instant::now();
        let mut sent = Vec::new();
        while at < lasting.as_secs_f64() {
            let class = self.class(rng.below(10));
            let prompt = prompt(&mut rng);
            let to = match policy {
                ExperimentPolicy::RoundRobin => {
                    stack.servers[sent.len() % stack.servers.len()].addr()
                }
                ExperimentPolicy::Slo | ExperimentPolicy::Default | ExperimentPolicy::Weighed => {
                    stack.address()
                }
            };
            sent.push(tokio::spawn(async move {
                tokio::time::sleep_until(began + Duration::from_secs_f64(at)).await;
                (class.name, one(to, class, &prompt).await)
            }));
            at -= f64::from(rng.open01()).ln() / rate;
        }
        let mut outcomes: BTreeMap<&'static str, ExperimentOutcome> = BTreeMap::new();
        for request in sent {
            let (class, outcome) = request.await?;
            let (in_time, shed) = outcome?;
            let all = outcomes.entry(class).or_default();
            *all = ExperimentOutcome {
                sent: all.sent + 1,
                in_time: all.in_time + usize::from(in_time),
                shed: all.shed + usize::from(shed),
            };
        }
        Ok(outcomes)
    }

    fn class(&self, mut tenth: usize) -> ExperimentClass {
        for class in &self.classes {
            match tenth.checked_sub(class.tenths) {
                Some(rest) => tenth = rest,
                None => return *class,
            }
        }
        self.classes[0]
    }
}

fn prompt(rng: &mut Rng) -> String {
    let [from, to] = WORDS;
    let words = from + rng.below(to - from);
    format!("{:08x} ", rng.next_u64() as u32) + &"abc ".repeat(words)
}

/// Sends one request. Returns whether the request was in time and whether it was shed.
async fn one(to: SocketAddr, class: ExperimentClass, prompt: &str) -> Result<(bool, bool)> {
    let ttft = class.ttft_ms.to_string();
    let tpot = class.tpot_ms.to_string();
    let headers = [
        ("x-llm-d-inference-objective", class.name),
        ("x-slo-ttft-ms", &ttft),
        ("x-slo-tpot-ms", &tpot),
        ("PredictionBasedRouting", "true"),
    ];
    let began = Instant::now();
    let response = client::start(to, chat(prompt, OUTPUT_TOKENS, &headers)?).await?;
    if response.status() != 200 {
        return Ok((false, response.status() == 429));
    }
    let events = EventStream::new(response).rest().await?;
    let content = |data: &str| {
        let event: Value = serde_json::from_str(data).ok()?;
        event["choices"][0]["delta"]["content"]
            .as_str()
            .filter(|text| !text.is_empty())
            .map(drop)
    };
    let tokens: Vec<Instant> = events
        .iter()
        .filter(|event| content(&event.data).is_some())
        .map(|event| event.at)
        .collect();
    let (Some(first), Some(last)) = (tokens.first(), tokens.last()) else {
        return Ok((false, false));
    };
    let ttft_ms = first.duration_since(began).as_secs_f64() * 1_000.0;
    let tpot_ms =
        last.duration_since(*first).as_secs_f64() * 1_000.0 / f64::from(OUTPUT_TOKENS - 1);
    Ok((ttft_ms <= class.ttft_ms && tpot_ms <= class.tpot_ms, false))
}
