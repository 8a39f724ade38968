//! SLOs on a real Envoy: the llm-d proposal's example unchanged, and the lowest SLO of an endpoint
//! as seen by all workers and proxies.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use e2e::ledger_metrics::note;
use e2e::slo::{chat, example, predicts};
use futures::future::join_all;
use serde_json::{Value, json};
use testbed::client::{self, ClientReply, EventStream};
use testbed::daemon::{DaemonProcess, DaemonSettings};
use testbed::model_server::ModelServerOptions;
use testbed::second_envoy::SecondEnvoy;
use testbed::stack::{Stack, StackBuilder};
use testbed::{Result, wait_for};
use tokio::task::JoinHandle;

use crate::drills_daemon::connected;

use crate::discovered::{EtcdProcess, both_daemons, leads};

/// The maximum wait for learning from live traffic.
const LIMIT: Duration = Duration::from_secs(60);

const LOOSE: [(&str, &str); 3] = [
    ("x-slo-ttft-ms", "60000"),
    ("x-slo-tpot-ms", "5000"),
    ("PredictionBasedRouting", "true"),
];

fn engine() -> ModelServerOptions {
    ModelServerOptions {
        models: vec!["demo".to_owned()],
        speed: 2.0,
        ..ModelServerOptions::default()
    }
}

/// Sets up the proposal's example, including its environment variable.
fn by_example(builder: StackBuilder) -> Result<StackBuilder> {
    let file = example();
    let arguments = [
        "--latency-prediction",
        "--config",
        file.to_str().ok_or("a path of text")?,
    ];
    let picker = json!({"explain": true, "objective_header": "trust", "slo_headers": "trust"});
    Ok(builder
        .picker(picker)
        .daemon_arguments(&arguments)
        .daemon_environment("HEADROOM_SELECTION_STRATEGY", "highest"))
}

/// Sends requests of all lengths until the daemon has a latency model that can predict.
async fn learn(stack: &Stack) -> Result<()> {
    let learned = predicts(stack, LIMIT);
    let traffic = async {
        for round in 0_u32.. {
            let prompts = (0..8).map(|at| {
                format!("{round} {at} ")
                    + &"words ".repeat(20 + usize::try_from((round * 8 + at) % 97).unwrap_or(0) * 5)
            });
            let replies = join_all(prompts.map(|prompt| async move {
                client::send(stack.address(), chat(&prompt, 6, &LOOSE)?).await
            }))
            .await;
            for reply in replies {
                assert_eq!(reply?.status, 200);
            }
        }
        Ok(())
    };
    tokio::select! {
        learned = learned => learned,
        failed = traffic => failed,
    }
}

/// Returns the decision that the picker reports in its reply.
fn reasons(reply: &ClientReply) -> Result<Value> {
    Ok(serde_json::from_str(
        reply.header("x-switchpoint-decision"),
    )?)
}

async fn send_explained(stack: &Stack, headers: &[(&str, &str)]) -> Result<ClientReply> {
    let headers = [headers, &[("x-switchpoint-explain", "1")]].concat();
    client::send(stack.address(), chat("hello", 2, &headers)?).await
}

fn message(reply: &ClientReply) -> Result<String> {
    Ok(reply.json()?["error"]["message"].to_string())
}

#[tokio::test]
async fn the_proposals_example_runs_as_it_is() -> Result<()> {
    let stack = by_example(Stack::builder().servers_like(2, &engine()))?
        .shared_envoy()
        .start()
        .await?;
    let config = stack
        .daemon
        .as_ref()
        .ok_or("a daemon")?
        .admin("/debug/config")
        .await?
        .text();
    assert!(
        config.contains("highest"),
        "the environment's strategy: {config}"
    );

    let missing = send_explained(&stack, &[("PredictionBasedRouting", "true")]).await?;
    assert!(
        missing.status == 400 && message(&missing)?.contains("x-slo-ttft-ms"),
        "{}",
        missing.text()
    );
    for (header, value) in [
        ("x-slo-ttft-ms", "0"),
        ("x-llm-d-slo-tpot-ms", "NaN"),
        ("PredictionBasedRouting", "perhaps"),
    ] {
        let wrong = send_explained(&stack, &[("x-slo-tpot-ms", "50"), (header, value)]).await?;
        assert!(
            wrong.status == 400 && message(&wrong)?.contains(&header.to_lowercase()),
            "{header}: {}",
            wrong.text()
        );
    }
    let slo = ("x-slo-ttft-ms", "60000");
    let by_weights = send_explained(&stack, &[slo]).await?;
    assert_eq!(
        (by_weights.status, &reasons(&by_weights)?["profile"]),
        (200, &json!("default")),
        "{}",
        by_weights.text()
    );
    let cold = send_explained(&stack, &[slo, ("predictionbasedrouting", "True")]).await?;
    assert_eq!(
        (cold.status, &reasons(&cold)?["profile"]),
        (200, &json!("slo"))
    );
    assert_eq!(
        stack.get("/v1/models").await?.status,
        200,
        "a request without inference needs no SLO"
    );

    learn(&stack).await?;
    let predicted = wait_for(LIMIT, "the proxy to predict", || async {
        let reasons = reasons(&send_explained(&stack, &LOOSE).await.ok()?).ok()?;
        reasons["candidates"][0]["predicted"]["tpot"]["headroom_ms"]
            .as_f64()
            .map(|_| reasons)
    })
    .await?;
    for candidate in predicted["candidates"].as_array().ok_or("candidates")? {
        let predicted = &candidate["predicted"];
        assert!(
            predicted["ttft"]["ms"].as_f64() > Some(0.0) && predicted["valid"] == json!(true),
            "{candidate}"
        );
    }
    Ok(())
}

/// Opens long streams, so that no server is idle.
async fn busy(stack: &Stack, headers: &[(&str, &str)], streams: usize) -> Result<Vec<EventStream>> {
    let mut open = Vec::new();
    for at in 0..streams {
        let asked = json!({
            "model": "demo", "max_tokens": 4_000, "ignore_eos": true, "stream": true,
            "messages": [{"role": "user", "content": format!("stream {at}")}],
        });
        let request = headers.iter().fold(
            http::Request::post("/v1/chat/completions"),
            |request, (name, value)| request.header(*name, *value),
        );
        let response = client::start(
            stack.address(),
            request.body(client::full(asked.to_string()))?,
        )
        .await?;
        assert_eq!(response.status(), 200);
        let mut events = EventStream::new(response);
        events.next().await?;
        open.push(events);
    }
    Ok(open)
}

#[tokio::test]
async fn the_lowest_slo_of_a_server_is_the_lowest_at_any_proxy_until_its_request_ends() -> Result<()>
{
    let stack = by_example(Stack::builder().servers_like(1, &engine()))?
        .start()
        .await?;
    learn(&stack).await?;
    let other = SecondEnvoy::start(&stack, "another", 1).await?;
    let limit = |reply: &ClientReply| -> Result<Value> {
        Ok(reasons(reply)?["candidates"][0]["predicted"]["tpot"].clone())
    };
    let ask = || async {
        let headers = [LOOSE.as_slice(), &[("x-switchpoint-explain", "1")]].concat();
        client::send(other.envoy.listener(), chat("hello", 2, &headers)?).await
    };
    let open = busy(&stack, &[("x-slo-tpot-ms", "1234")], 2).await?;
    let reported = |of: &'static str, ms: f64| {
        let ask = &ask;
        let limit = &limit;
        wait_for(LIMIT, of, move || async move {
            let tpot = limit(&ask().await.ok()?).ok()?;
            (tpot["limit_of"] == of && tpot["limit_ms"].as_f64() == Some(ms)).then_some(())
        })
    };
    reported("others there", 1234.0).await?;
    // Not even an idle server can meet a TPOT of 0.1 ms, so an SLO of 0.1 ms does not limit other
    // requests.
    let greedy = busy(&stack, &[("x-slo-tpot-ms", "0.1")], 1).await?;
    tokio::time::sleep(Duration::from_millis(200)).await;
    reported("others there", 1234.0).await?;
    // A request with this SLO is shed if it is not critical.
    let shed = send_explained(
        &stack,
        &[("x-slo-tpot-ms", "0.1"), ("PredictionBasedRouting", "true")],
    )
    .await?;
    assert_eq!(
        (shed.status, &shed.json()?["error"]["code"]),
        (429, &json!("slo_unattainable")),
        "{}",
        shed.text()
    );
    drop(open);
    reported("the request", 5000.0).await?;
    drop(greedy);
    Ok(())
}

#[tokio::test]
async fn the_lowest_slo_of_a_server_is_the_lowest_at_any_worker() -> Result<()> {
    let stack = by_example(Stack::builder().servers_like(1, &engine()).concurrency(4))?
        .shared_envoy()
        .start()
        .await?;
    learn(&stack).await?;
    let limit_ms = || async {
        let reply = send_explained(&stack, &LOOSE).await.ok()?;
        reasons(&reply).ok()?["candidates"][0]["predicted"]["tpot"]["limit_ms"].as_f64()
    };
    wait_for(LIMIT, "the proxy to predict", limit_ms).await?;
    // The stream is at one worker. Each question uses a separate connection, so each worker may
    // answer.
    let open = busy(&stack, &[("x-slo-tpot-ms", "1234")], 1).await?;
    tokio::time::sleep(Duration::from_millis(50)).await;
    for at in 0..40 {
        assert_eq!(limit_ms().await, Some(1234.0), "question {at}");
    }
    drop(open);
    wait_for(LIMIT, "the stream to be forgotten", || async {
        (limit_ms().await == Some(5000.0)).then_some(())
    })
    .await?;
    for at in 0..40 {
        assert_eq!(
            limit_ms().await,
            Some(5000.0),
            "question {at}, without other requests"
        );
    }
    Ok(())
}

/// Creates a folder with objectives of these names and priorities.
fn objectives(rows: &[(&str, i32)]) -> Result<tempfile::TempDir> {
    let folder = tempfile::tempdir()?;
    for (name, priority) in rows {
        let objective = json!({"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceObjective", "metadata": {"name": name},
                               "spec": {"priority": priority, "poolRef": {"name": "default"}}});
        std::fs::write(
            folder.path().join(format!("{name}.json")),
            objective.to_string(),
        )?;
    }
    Ok(folder)
}

/// Waits until the proxy predicts latencies. With a strict SLO, waits until no server is valid for
/// the request, which also requires that no server is idle. The requests have a priority that no
/// test counts.
async fn predicting(stack: &Stack, headers: &[(&str, &str)], valid: bool) -> Result<()> {
    let headers = [headers, &[("x-llm-d-inference-objective", "probe")]].concat();
    let all = || async {
        let reasons = reasons(&send_explained(stack, &headers).await.ok()?).ok()?;
        let of = |candidate: &Value| {
            let predicted = &candidate["predicted"];
            predicted["tpot"]["headroom_ms"].is_number() && predicted["valid"] == json!(valid)
        };
        reasons["candidates"]
            .as_array()
            .filter(|candidates| candidates.iter().all(of))
            .map(drop)
    };
    wait_for(LIMIT, "the proxy to predict", all).await
}

/// Returns the number of requests of a priority with this outcome, from the daemon's metrics.
async fn counted(stack: &Stack, priority: &str, outcome: &str) -> Option<u64> {
    let page = stack.daemon.as_ref()?.admin("/metrics").await.ok()?.text();
    let is_row = |line: &&str| {
        line.starts_with("switchpoint_slo_requests_total{")
            && line.contains(&format!("outcome=\"{outcome}\""))
    };
    let rows = page
        .lines()
        .filter(is_row)
        .filter(|line| line.contains(&format!("priority=\"{priority}\"")));
    rows.map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .map(|count| count.map(|count| count as u64))
        .sum()
}

/// Checks which requests are shed. No server can send a first token within 0.1 ms, and no server is
/// idle, so the result does not depend on the speed of the machine.
#[tokio::test]
async fn only_requests_that_are_not_critical_are_shed_on_a_pool_of_two_speeds() -> Result<()> {
    const ROUNDS: u64 = 10;
    let folder = objectives(&[
        ("critical", 1),
        ("standard", 0),
        ("batch", -1),
        ("probe", 2),
    ])?;
    let slow = ModelServerOptions {
        slowdown: 3.0,
        ..engine()
    };
    let arguments = ["--objects", &folder.path().display().to_string()];
    let builder = Stack::builder()
        .servers_like(1, &engine())
        .more_servers_like(1, &slow)
        .daemon_arguments(&arguments);
    let stack = by_example(builder)?.shared_envoy().start().await?;
    learn(&stack).await?;
    let open = busy(
        &stack,
        &[
            ("x-slo-tpot-ms", "5000"),
            ("x-llm-d-inference-objective", "probe"),
        ],
        12,
    )
    .await?;
    predicting(
        &stack,
        &[("x-slo-tpot-ms", "0.1"), ("PredictionBasedRouting", "true")],
        false,
    )
    .await?;

    let ask = |objective: &'static str, by_slo: &'static str| {
        let slo = [("x-slo-ttft-ms", "0.1"), ("x-slo-tpot-ms", "0.1")];
        let headers = [
            ("x-llm-d-inference-objective", objective),
            slo[0],
            slo[1],
            ("PredictionBasedRouting", by_slo),
        ];
        client_of(&stack, headers)
    };
    for round in 0..ROUNDS {
        for objective in ["standard", "batch"] {
            let shed = ask(objective, "true").await?;
            assert_eq!(
                (shed.status, &shed.json()?["error"]["code"]),
                (429, &json!("slo_unattainable")),
                "{round} {objective}"
            );
        }
        for (objective, by_slo) in [("critical", "true"), ("batch", "false")] {
            assert_eq!(
                ask(objective, by_slo).await?.status,
                200,
                "{round}: {objective} requests are served, although they are late"
            );
        }
    }
    let reported = || async {
        let shed = [
            counted(&stack, "0", "shed").await?,
            counted(&stack, "-1", "shed").await?,
            counted(&stack, "1", "shed").await?,
        ];
        let missed = [
            counted(&stack, "1", "missed").await?,
            counted(&stack, "-1", "missed").await?,
        ];
        (shed == [ROUNDS, ROUNDS, 0] && missed == [ROUNDS, ROUNDS]).then_some(())
    };
    wait_for(LIMIT, "the daemon to count each of them", reported).await?;
    drop(open);
    Ok(())
}

/// The pause between two requests. A restarted daemon begins a new model after 64 requests. With
/// this pause, the daemon receives models from a proxy before these 64 requests.
const PREDICTED_TRAFFIC_PAUSE: Duration = Duration::from_millis(100);

/// The maximum time from the moment when a restarted daemon leads until it predicts from the models
/// of a proxy. The proxy connects again after at most 0.8 s, and the daemon publishes models once a
/// second. The rest is for a busy machine of two cores, on which the proxy needs more attempts to
/// connect, with pauses of up to 2 s between attempts.
const PREDICTS_AGAIN_MAX: Duration = Duration::from_secs(5);

/// The same for a standby that has replaced a killed leader. After an outage as long as a lease,
/// the proxy pauses for up to 2 s before each attempt. Envoy alternates between the addresses of
/// the two daemons, so the first attempt may fail.
const TAKES_OVER_MAX: Duration = PREDICTS_AGAIN_MAX.saturating_add(Duration::from_secs(2));

/// Sends requests with SLOs, one after the other, until the value is dropped.
struct PredictedTraffic {
    served: Arc<AtomicU64>,
    /// The requests that failed, or were picked without a prediction.
    unpredicted: Arc<Mutex<Vec<String>>>,
    task: JoinHandle<()>,
}

impl PredictedTraffic {
    fn start(address: SocketAddr) -> Self {
        let served = Arc::<AtomicU64>::default();
        let unpredicted = Arc::<Mutex<Vec<String>>>::default();
        let count = Arc::clone(&served);
        let failures = Arc::clone(&unpredicted);
        let task = tokio::spawn(async move {
            loop {
                tokio::time::sleep(PREDICTED_TRAFFIC_PAUSE).await;
                match predicted_at(address).await {
                    Ok(None) => drop(count.fetch_add(1, Ordering::Relaxed)),
                    Ok(Some(reasons)) => failures
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push(reasons),
                    Err(error) => failures
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push(error.to_string()),
                }
            }
        });
        Self {
            served,
            unpredicted,
            task,
        }
    }

    async fn wait_for_more(&self, requests: u64) -> Result<()> {
        let enough = self.served.load(Ordering::Relaxed) + requests;
        wait_for(LIMIT, "further requests", || async {
            (self.served.load(Ordering::Relaxed) >= enough).then_some(())
        })
        .await
    }

    /// Checks that all requests so far were served with a prediction.
    fn check_all_predicted(&self, drill: &str) {
        let unpredicted = self
            .unpredicted
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        assert!(unpredicted.is_empty(), "{unpredicted:?}");
        let served = self.served.load(Ordering::Relaxed);
        note(
            drill,
            &format!("{served} requests served, 0 without a prediction"),
        );
    }
}

impl Drop for PredictedTraffic {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Sends a request with loose SLOs. Returns the reasons for the pick if a candidate has no
/// prediction.
async fn predicted_at(address: SocketAddr) -> Result<Option<String>> {
    let headers = [LOOSE.as_slice(), &[("x-switchpoint-explain", "1")]].concat();
    let reply = client::send(address, chat("hello", 2, &headers)?).await?;
    let reasons = reasons(&reply)?;
    let is_predicted =
        |candidate: &Value| candidate["predicted"]["tpot"]["headroom_ms"].is_number();
    let all = reply.status == 200
        && reasons["candidates"]
            .as_array()
            .is_some_and(|all| !all.is_empty() && all.iter().all(is_predicted));
    Ok((!all).then(|| format!("{}: {reasons}", reply.status)))
}

/// Returns the page of the daemon about the models of its pool.
async fn models(stack: &Stack) -> Result<Value> {
    let daemon = stack.daemon.as_ref().ok_or("a daemon")?;
    Ok(daemon.admin("/debug/model").await?.json()?["pools"][0].clone())
}

/// Returns the fixed part of a decode step in these models, in ms.
fn decode_ms(models: &Value) -> f64 {
    models["step"]["decode"][0].as_f64().unwrap_or_default()
}

/// Waits until the daemon, which has just begun to lead, predicts from the models of a proxy.
/// Returns how long that took. `before` is [`decode_ms`] of the daemon that led before.
async fn predicts_again(
    stack: &Stack,
    traffic: &PredictedTraffic,
    drill: &str,
    before: f64,
) -> Result<Duration> {
    let began = Instant::now();
    traffic.wait_for_more(1).await?;
    let served = began.elapsed();
    connected(stack, 1).await?;
    predicts(stack, LIMIT).await?;
    let elapsed = began.elapsed();
    // The daemon cannot have learned these models itself, because it needs more requests to learn a
    // model.
    let known = models(stack).await?;
    note(
        drill,
        &format!(
            "after the daemon led, a request was predicted within {} ms, and the daemon predicted after {} ms",
            served.as_millis(),
            elapsed.as_millis()
        ),
    );
    let learned = known["observations"]["learned"].as_u64().ok_or("a count")?;
    assert!(learned < 64, "after {learned} observations");
    let now = decode_ms(&known);
    assert!(
        (now / before - 1.0).abs() < 0.3,
        "the fixed part of a decode step: {before} ms, then {now}"
    );
    Ok(elapsed)
}

/// The daemon has no file of models. It restarts with its memory of slots.
#[tokio::test]
async fn a_restart_ends_no_prediction() -> Result<()> {
    const DRILL: &str = "daemon killed and restarted under requests with SLOs";
    let mut stack = by_example(Stack::builder().servers_like(2, &engine()).concurrency(2))?
        .envoy_in_turn()
        .start()
        .await?;
    learn(&stack).await?;
    predicting(&stack, &LOOSE, true).await?;
    let before = decode_ms(&models(&stack).await?);
    let traffic = PredictedTraffic::start(stack.address());
    traffic.wait_for_more(10).await?;
    stack.daemon()?.process().kill()?;
    connected(&stack, 0).await?;
    traffic.wait_for_more(10).await?;
    stack.daemon()?.start_again()?;
    wait_for(LIMIT, "the daemon to lead", || async {
        leads(stack.daemon.as_ref()?).await?.then_some(())
    })
    .await?;
    let elapsed = predicts_again(&stack, &traffic, DRILL, before).await?;
    assert!(elapsed < PREDICTS_AGAIN_MAX, "{elapsed:?}");
    traffic.wait_for_more(20).await?;
    traffic.check_all_predicted(DRILL);
    Ok(())
}

/// Two daemons share a lease, but no file: the standby knows neither the leader's models nor its
/// slots. The leader is killed, and the standby leads when the lease has expired.
#[tokio::test]
async fn a_failover_by_a_lease_ends_no_prediction() -> Result<()> {
    const DRILL: &str = "leader killed under requests with SLOs";
    let Some(etcd) = EtcdProcess::start() else {
        return Ok(());
    };
    let folder = tempfile::tempdir()?;
    let mut spare = DaemonSettings::new(folder.path())?;
    let other = spare.state.number();
    let mut stack = by_example(Stack::builder().servers_like(2, &engine()).concurrency(2))?
        .daemon_arguments(&["--lease-etcd", &etcd.url])
        .envoy_config(move |config| both_daemons(config, other))
        .start()
        .await?;
    let leader = stack.daemon()?.settings();
    spare.arguments.clone_from(&leader.arguments);
    spare.environment.clone_from(&leader.environment);
    let endpoints = "endpoints.yaml";
    std::fs::copy(leader.folder.join(endpoints), spare.folder.join(endpoints))?;
    let standby = DaemonProcess::start(spare)?;
    wait_for(LIMIT, "the second daemon to stand by", || async {
        (!leads(&standby).await?).then_some(())
    })
    .await?;
    learn(&stack).await?;
    predicting(&stack, &LOOSE, true).await?;
    let before = decode_ms(&models(&stack).await?);
    let traffic = PredictedTraffic::start(stack.address());
    traffic.wait_for_more(10).await?;
    let killed_at = Instant::now();
    stack.daemon()?.process().kill()?;
    connected(&stack, 0).await?;
    wait_for(LIMIT, "the standby to lead", || async {
        leads(&standby).await?.then_some(())
    })
    .await?;
    note(
        DRILL,
        &format!("another leads after {:.1?}", killed_at.elapsed()),
    );
    // The ports of the killed daemon stay reserved, because Envoy still tries its address.
    let _killed = stack.daemon.replace(standby);
    let elapsed = predicts_again(&stack, &traffic, DRILL, before).await?;
    assert!(elapsed < TAKES_OVER_MAX, "{elapsed:?}");
    // A proxy that starts now also predicts latencies.
    let fresh = SecondEnvoy::start(&stack, "fresh", 1).await?;
    wait_for(LIMIT, "a new proxy to predict", || async {
        predicted_at(fresh.envoy.listener())
            .await
            .ok()?
            .is_none()
            .then_some(())
    })
    .await?;
    traffic.wait_for_more(20).await?;
    traffic.check_all_predicted(DRILL);
    Ok(())
}

async fn client_of(stack: &Stack, headers: [(&str, &str); 4]) -> Result<ClientReply> {
    client::send(stack.address(), chat("hello", 4, &headers)?).await
}

#[tokio::test]
async fn the_daemon_shows_running_requests_with_an_slo_by_their_own_ids_until_they_end()
-> Result<()> {
    let stack = by_example(Stack::builder().servers_like(1, &engine()))?
        .shared_envoy()
        .start()
        .await?;
    learn(&stack).await?;
    predicting(&stack, &LOOSE, true).await?;
    let open = busy(
        &stack,
        &[
            ("x-slo-tpot-ms", "1234"),
            ("x-request-id", "the-clients-own"),
        ],
        1,
    )
    .await?;
    let running = || async {
        let page = stack
            .daemon
            .as_ref()?
            .admin("/debug/running")
            .await
            .ok()?
            .json()
            .ok()?;
        let queues = page["queues"].as_array()?.clone();
        Some(
            queues
                .into_iter()
                .flat_map(|queue| queue["running"].as_array().cloned().unwrap_or_default())
                .collect::<Vec<Value>>(),
        )
    };
    let shown = wait_for(LIMIT, "the request to be shown", || async {
        running()
            .await?
            .into_iter()
            .find(|row| row["tpot_slo_us"] == json!(1_234_000) && row["tpots_ms"] != json!([]))
    })
    .await?;
    assert_eq!(shown["request"], "the-clients-own");
    assert!(
        shown["ttft_ms"].as_f64() > Some(0.0)
            && shown["predicted"]
                .as_array()
                .is_some_and(|four| four.len() == 4),
        "{shown}"
    );
    drop(open);
    wait_for(LIMIT, "the ended request to be removed", || async {
        running().await?.is_empty().then_some(())
    })
    .await?;

    let metrics = stack
        .daemon
        .as_ref()
        .ok_or("a daemon")?
        .admin("/metrics")
        .await?
        .text();
    for name in [
        "predicted_seconds",
        "actual_seconds",
        "actual_to_predicted_ratio",
    ] {
        let count = metrics.lines().find(|line| {
            line.starts_with(&format!("switchpoint_latency_{name}_count")) && line.contains("ttft")
        });
        assert!(
            count.is_some_and(|line| !line.ends_with(" 0")),
            "{name}: {count:?}"
        );
    }
    Ok(())
}
