//! Learning from live traffic: proxies send the measurements of ended requests to the daemon, the
//! daemon sends the learned models back, and the models follow a pool that changes. Wrong messages
//! change nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use proto::observation::OBSERVATION_BYTES;
use proto::state::state_service_client::StateServiceClient;
use proto::state::{self, daemon_message::Message, proxy_message};
use scheduler::latency::LatencyModel;
use scheduler::latency::step::StepModel;
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use testbed::model_server::{ModelServer, ModelServerOptions};
use testbed::stack::{PickerMode, Stack, StackBuilder};
use testbed::{Result, client, wait_for};
use tokio_stream::StreamExt;

use crate::played::{PlayedDaemon, message, pool_update};

const LIMIT: Duration = Duration::from_secs(90);

/// The number of observations of an endpoint after which a drift must be known.
const DRIFT_OBSERVATIONS: u64 = 200;

/// The number of newest outcomes in the daemon's calibration scores.
const RECENT: u64 = 100;

/// The mean error of predictions that a busy machine alone may cause. While a slowdown by three is
/// not learned, the error is 0.67.
const BUSY_ERROR: f64 = 0.3;

/// Returns the options of a simulated engine. It is faster than a real engine, so that a test takes
/// seconds, and slow enough that its times exceed the machine's own delays.
fn engine(slowdown: f64) -> ModelServerOptions {
    ModelServerOptions {
        models: vec!["demo".to_owned()],
        speed: 1.5,
        slowdown,
        ..ModelServerOptions::default()
    }
}

/// Describes a stack with two servers, the second 1.5 times slower. Random picks send the same
/// traffic to both servers.
fn builder(config: &NamedTempFile, arguments: &[&str]) -> Result<StackBuilder> {
    std::fs::write(
        config.path(),
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: random-picker\n",
    )?;
    let config = config.path().to_str().ok_or("a path of text")?;
    let arguments: Vec<&str> = ["--config", config]
        .into_iter()
        .chain(arguments.iter().copied())
        .collect();
    Ok(Stack::builder()
        .servers_like(1, &engine(1.0))
        .more_servers_like(1, &engine(1.5))
        .concurrency(2)
        .daemon_arguments(&arguments))
}

/// Traffic of streams of all lengths. The traffic ends when this value is dropped.
struct BackgroundTraffic {
    over: Arc<AtomicBool>,
}

impl BackgroundTraffic {
    fn start(stack: &Stack, clients: u64) -> Self {
        let over = Arc::<AtomicBool>::default();
        let number = Arc::<AtomicU64>::default();
        let address = stack.address();
        for _ in 0..clients {
            let over = Arc::clone(&over);
            let number = Arc::clone(&number);
            tokio::spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    let n = number.fetch_add(1, Ordering::Relaxed);
                    let _ =
                        client::post(address, "/v1/chat/completions", body(n, 6).to_string()).await; // other tests check failures
                }
            });
        }
        Self { over }
    }
}

impl Drop for BackgroundTraffic {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

/// Returns a chat request with a unique prompt of 100 to about 3,000 tokens.
fn body(n: u64, tokens: u32) -> Value {
    let words = 30 + usize::try_from(n * 7_919 % 900).unwrap_or(0);
    let text = format!("{n:06} wonders. ").repeat(words);
    json!({
        "model": "demo", "max_tokens": tokens, "stream": true, "stream_options": {"include_usage": true},
        "messages": [{"role": "user", "content": text}],
    })
}

/// Returns the daemon's report on the learner of its only pool.
async fn page(stack: &Stack) -> Result<Value> {
    let daemon = stack.daemon.as_ref().ok_or("a daemon")?;
    Ok(daemon.admin("/debug/model").await?.json()?["pools"][0].clone())
}

async fn page_that(stack: &Stack, what: &str, so: impl Fn(&Value) -> bool) -> Result<Value> {
    let found = wait_for(LIMIT, what, || async { page(stack).await.ok().filter(&so) }).await;
    match found {
        Ok(page) => Ok(page),
        Err(error) => Err(format!("{error}: {:#}", page(stack).await?).into()),
    }
}

fn number(page: &Value, pointer: &str) -> f64 {
    page.pointer(pointer).and_then(Value::as_f64).unwrap_or(0.0)
}

fn count(page: &Value, pointer: &str) -> u64 {
    page.pointer(pointer).and_then(Value::as_u64).unwrap_or(0)
}

fn outcomes(page: &Value, endpoint: &str) -> u64 {
    count(
        page,
        &format!("/calibration/endpoints/{endpoint}/tpot/count"),
    )
}

/// Waits for this many more outcomes at an endpoint. Returns the daemon's report after the wait.
async fn more(stack: &Stack, endpoint: &str, outcomes_more: u64) -> Result<Value> {
    let before = outcomes(&page(stack).await?, endpoint);
    page_that(
        stack,
        &format!("{outcomes_more} outcomes at {endpoint}"),
        |page| outcomes(page, endpoint) >= before + outcomes_more,
    )
    .await
}

#[tokio::test]
async fn a_cold_pool_abstains_visibly_and_live_traffic_makes_proxies_predict() -> Result<()> {
    let config = NamedTempFile::new()?;
    let stack = builder(&config, &["--latency-prediction"])?.start().await?;
    let cold = page_that(&stack, "a page", |page| page["latency"].is_object()).await?;
    assert_eq!(
        (&cold["predicts"], &cold["latency"]["abstains"]),
        (&json!(false), &json!("too little data")),
        "{cold:#}"
    );

    let traffic = BackgroundTraffic::start(&stack, 6);
    let learned = page_that(&stack, "predictions held against outcomes", |page| {
        ["server-0", "server-1"]
            .iter()
            .all(|endpoint| outcomes(page, endpoint) >= 60)
    })
    .await?;
    // The daemon learns without a label that one server is 1.5 times slower.
    let speed =
        |page: &Value, endpoint: &str| number(page, &format!("/step/speeds/{endpoint}/decode"));
    let slower =
        |page: &Value| (1.15..2.2).contains(&(speed(page, "server-1") / speed(page, "server-0")));
    page_that(&stack, "the slower server to be recognised", slower).await?;
    drop(traffic);
    assert!(
        count(&learned, "/abstained/too little data") >= 60,
        "requests without a prediction are reported: {learned:#}"
    );
    assert_eq!(
        (&learned["predicts"], &learned["latency"]["abstains"]),
        (&json!(true), &json!(null)),
        "{learned:#}"
    );
    assert!(count(&learned, "/published/bytes") <= 65_536);
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_state_refused_total")
            .await?,
        0
    );
    assert!(
        stack
            .envoy
            .picker_stat("switchpoint_state_learned_total")
            .await?
            > 1
    );
    // The Prometheus metrics report the same speed.
    let metrics = stack
        .daemon
        .as_ref()
        .ok_or("a daemon")?
        .admin("/metrics")
        .await?
        .text();
    for line in [
        r#"switchpoint_latency_observations_total{pool="default",result="learned"}"#,
        r#"switchpoint_latency_mape{pool="default",endpoint_name="server-1",target="tpot"}"#,
        r#"switchpoint_latency_coverage90{pool="default",endpoint_name="",target="ttft"}"#,
        r#"switchpoint_latency_predictions_total{pool="default",endpoint_name="server-0",target="ttft"}"#,
        r#"switchpoint_latency_predicts{pool="default"} 1.0"#,
    ] {
        assert!(metrics.contains(line), "{line}");
    }
    Ok(())
}

#[tokio::test]
async fn without_the_flag_steps_are_learned_and_nothing_is_predicted() -> Result<()> {
    let config = NamedTempFile::new()?;
    let stack = builder(&config, &[])?.shared_envoy().start().await?;
    let _traffic = BackgroundTraffic::start(&stack, 4);
    let page = page_that(&stack, "observations", |page| {
        count(page, "/observations/learned") >= 150
    })
    .await?;
    assert_eq!(
        (
            &page["predicts"],
            count(&page, "/calibration/pool/ttft/count")
        ),
        (&json!(false), 0)
    );
    assert!(
        page["latency"]["abstains"]
            .as_str()
            .is_some_and(|why| why.contains("--latency-prediction")),
        "{page:#}"
    );
    let prior = StepModel::default();
    assert_ne!(
        number(&page, "/step/prefill/1"),
        f64::from(prior.prefill()[1]),
        "{page:#}"
    );
    assert_ne!(
        number(&page, "/step/decode/0"),
        f64::from(prior.decode()[0]),
        "{page:#}"
    );
    Ok(())
}

#[tokio::test]
async fn a_restarted_daemon_begins_with_what_the_file_knows() -> Result<()> {
    let config = NamedTempFile::new()?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("models.json");
    let mut stack = builder(
        &config,
        &[
            "--latency-prediction",
            "--latency-model-file",
            file.to_str().ok_or("text")?,
        ],
    )?
    .shared_envoy()
    .start()
    .await?;
    let traffic = BackgroundTraffic::start(&stack, 6);
    let before = more(&stack, "server-1", RECENT).await?;
    drop(traffic);
    stack.daemon()?.process().stop(LIMIT).await?;
    stack.daemon()?.start_again()?;
    let warm = page_that(&stack, "a warm start", |page| {
        page["predicts"] == json!(true)
    })
    .await?;
    assert_eq!(
        (
            count(&warm, "/observations/learned"),
            count(&warm, "/calibration/pool/ttft/count")
        ),
        (0, 0),
        "{warm:#}"
    );
    for at in ["/step/prefill/1", "/step/decode/0"] {
        let kept = number(&warm, at);
        let known = number(&before, at);
        assert!(
            (kept / known - 1.0).abs() < 0.3,
            "{at}: {known} before, {kept} after"
        );
    }
    Ok(())
}

#[tokio::test]
async fn clients_that_leave_are_censored_and_the_ext_proc_front_learns_too() -> Result<()> {
    let config = NamedTempFile::new()?;
    let stack = builder(&config, &["--latency-prediction"])?
        .front(PickerMode::ExtProc)
        .shared_envoy()
        .start()
        .await?;
    let _traffic = BackgroundTraffic::start(&stack, 4);
    for n in 0..20 {
        let request =
            http::Request::post("/v1/chat/completions").header("content-type", "application/json");
        let response = client::start(
            stack.address(),
            request.body(client::full(body(n, 500).to_string()))?,
        )
        .await?;
        drop(response);
    }
    let page = page_that(&stack, "both", |page| {
        count(page, "/observations/learned") >= 50 && count(page, "/observations/censored") > 0
    })
    .await?;
    // A stalled proxy may see all tokens of a reply at the same time. The daemon refuses a time per
    // token of zero.
    assert!(count(&page, "/observations/refused") < 5, "{page:#}");
    Ok(())
}

/// Sends observations that no filter would send to the daemon's state listener. Returns after the
/// daemon has read the observations.
async fn report(stack: &Stack, observations: Vec<state::Observations>) -> Result<()> {
    let address = stack
        .daemon
        .as_ref()
        .ok_or("a daemon")?
        .settings()
        .state
        .address();
    let mut client = StateServiceClient::connect(format!("http://{address}")).await?;
    let pools = vec!["default".to_owned()];
    let hello = state::Hello {
        schema: proto::SCHEMA,
        node_id: "liar".to_owned(),
        process_id: 99,
        pools,
        ..state::Hello::default()
    };
    let said = [proxy_message::Message::Hello(hello)].into_iter().chain(
        observations
            .into_iter()
            .map(proxy_message::Message::Observations),
    );
    let said: Vec<state::ProxyMessage> = said
        .map(|message| state::ProxyMessage {
            message: Some(message),
        })
        .collect();
    // The stream stays open, because closing it could drop messages that are still on it.
    let mut replies = client
        .stream(tokio_stream::iter(said).chain(tokio_stream::pending()))
        .await?
        .into_inner();
    let _ = tokio::time::timeout(Duration::from_secs(2), async {
        while replies.next().await.is_some() {}
    })
    .await; // heartbeats never end
    Ok(())
}

#[tokio::test]
async fn a_model_that_is_wrong_or_too_large_is_refused_whole_and_the_next_is_taken() -> Result<()> {
    let server = ModelServer::start(engine(1.0))?;
    let hosts = [server.addr()];
    let daemon = PlayedDaemon::start(vec![message(Message::PoolUpdate(pool_update(
        7, 10, &hosts,
    )))])
    .await?;
    let picker = json!({"state": {"cluster": "switchpoint-state", "silence_max_ms": 600_000}});
    let mut stack = Stack::builder()
        .without_daemon()
        .concurrency(2)
        .picker(picker)
        .envoy_config(daemon.envoy_config(&hosts))
        .start()
        .await?;
    stack.wait_until_ready().await?;

    let good = |sequence| state::LearnedModels {
        pool: "default".to_owned(),
        version: Some(state::Version { term: 7, sequence }),
        step: StepModel::default().words(),
        latency: LatencyModel::constant(100.0, 10.0).words(),
        provisional: false,
    };
    let nan = f32::NAN.to_bits();
    let bad: [fn(&mut state::LearnedModels, u32); 4] = [
        |m, nan| m.step[1] = nan,
        |m, _| m.latency[0] ^= 1,
        |m, _| m.latency.resize(16_384, 0),
        |m, _| m.version = None,
    ];
    for (at, spoil) in (0_i64..).zip(bad) {
        let mut message_of = good(20);
        spoil(&mut message_of, nan);
        daemon.say(message(Message::LearnedModels(message_of)))?;
        stack
            .envoy
            .picker_stat_until("switchpoint_state_refused_total", |now| now > at, LIMIT)
            .await?;
    }
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_state_learned_total")
            .await?,
        0
    );
    daemon.say(message(Message::LearnedModels(good(21))))?;
    stack
        .envoy
        .picker_stat_until("switchpoint_state_learned_total", |now| now == 1, LIMIT)
        .await?;
    // A proxy that has a latency model sends observations with the predictions of their requests.
    // The statistic covers the whole process, and the worker that serves may install the model a
    // little later.
    for n in 0..10 {
        let reply = stack.post("/v1/chat/completions", &body(n, 6)).await?;
        assert_eq!(reply.status, 200);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let predicted = |message: &proxy_message::Message| match message {
        proxy_message::Message::Observations(report) => {
            let report = pool_state::EncodedObservation::from_bytes(report.rows.first_chunk()?)?;
            report.predicted.is_some().then_some(report)
        }
        _ => None,
    };
    let report = daemon
        .hear("an observation of what was predicted", predicted)
        .await?;
    assert!(
        (report.predicted.ok_or("a prediction")?.ttft_ms - 100.0).abs() < 1.0,
        "{report:?}"
    );
    assert_eq!(
        (report.observation.output_tokens, report.estimated),
        (Some(6), false)
    );
    Ok(())
}

/// `make e2e-long` runs these tests.
mod slow {
    use super::*;

    #[tokio::test]
    async fn a_pod_that_slows_down_three_times_is_known_within_200_observations_or_a_minute()
    -> Result<()> {
        let config = NamedTempFile::new()?;
        let stack = builder(&config, &["--latency-prediction"])?.start().await?;
        let _traffic = BackgroundTraffic::start(&stack, 6);
        let error = |page: &Value| number(page, "/calibration/endpoints/server-0/tpot/mape");
        let mut before = more(&stack, "server-0", RECENT).await?;
        let mut error_before = 0.0;
        for _ in 0..3 {
            before = more(&stack, "server-0", RECENT).await?;
            error_before += error(&before) / 3.0;
        }

        let slower = |page: &Value| {
            let factor = |endpoint: &str| {
                page.pointer(&format!("/latency/endpoints/{endpoint}/tpot_factor"))
                    .and_then(Value::as_f64)
                    .unwrap_or(1.0)
            };
            factor("server-0") / factor("server-1")
        };

        stack.servers[0].slow_down(3.0);
        // After this many outcomes, every scored outcome is from the time when the drift must be
        // known. Other load on the machine adds errors that come and go. So the test allows a
        // minute, and an error that is still far below the error of a drift that was not learned.
        let enough = outcomes(&before, "server-0") + DRIFT_OBSERVATIONS + RECENT;
        let bound = (1.2 * error_before).max(BUSY_ERROR);
        let as_before = |page: &Value| outcomes(page, "server-0") >= enough && error(page) <= bound;
        let after = page_that(
            &stack,
            &format!("an error of at most {bound:.3} again"),
            as_before,
        )
        .await?;
        assert!(
            slower(&after) > 1.6 * slower(&before),
            "the pod is known to be slower: {:.2}, then {:.2}",
            slower(&before),
            slower(&after)
        );
        Ok(())
    }

    #[tokio::test]
    async fn a_pod_replaced_at_its_address_starts_clean() -> Result<()> {
        let config = NamedTempFile::new()?;
        let stack = builder(&config, &["--latency-prediction"])?.start().await?;
        stack.servers[1].slow_down(4.0);
        let traffic = BackgroundTraffic::start(&stack, 6);
        more(&stack, "server-1", RECENT).await?;
        let is_slower = |page: &Value| {
            number(page, "/step/speeds/server-1/decode")
                > number(page, "/step/speeds/server-0/decode") * 1.5
        };
        page_that(&stack, "the slower pod to be recognised", is_slower).await?;
        drop(traffic);

        stack.servers[1].restart(None).await;
        stack.servers[1].slow_down(1.0);
        // An endpoint whose start time changed at the same name and address has a new generation.
        let clean = page_that(&stack, "the new pod", |page| {
            outcomes(page, "server-1") == 0
        })
        .await?;
        assert_eq!(
            clean["step"]["speeds"]["server-1"],
            json!({"prefill": 1.0, "decode": 1.0}),
            "{clean:#}"
        );
        assert_eq!(
            &clean["latency"]["endpoints"]["server-1"],
            &json!(null),
            "{clean:#}"
        );
        // The new pod's real speed is learned.
        let _traffic = BackgroundTraffic::start(&stack, 6);
        let learned = more(&stack, "server-1", RECENT).await?;
        let ratio = number(&learned, "/step/speeds/server-1/decode")
            / number(&learned, "/step/speeds/server-0/decode");
        assert!((0.6..1.6).contains(&ratio), "{ratio}: {learned:#}");
        Ok(())
    }

    #[tokio::test]
    async fn absurd_observations_are_refused_counted_and_harmless() -> Result<()> {
        let config = NamedTempFile::new()?;
        let stack = builder(&config, &["--latency-prediction"])?.start().await?;
        let traffic = BackgroundTraffic::start(&stack, 6);
        more(&stack, "server-0", RECENT).await?;
        drop(traffic);
        tokio::time::sleep(Duration::from_secs(2)).await; // Running requests end during this pause.
        let before = page(&stack).await?;

        let row = |word: u32| -> Vec<u8> {
            (0..OBSERVATION_BYTES / 4)
                .flat_map(|_| word.to_le_bytes())
                .collect()
        };
        let absurd = [
            f32::NAN.to_bits(),
            f32::INFINITY.to_bits(),
            (-1.0_f32).to_bits(),
            1e30_f32.to_bits(),
            u32::MAX,
            7,
        ];
        let rows: Vec<u8> = absurd.into_iter().flat_map(row).collect();
        let of = |vm_id, first, rows: &[u8]| state::Observations {
            pool: "default".to_owned(),
            vm_id,
            first,
            rows: rows.to_vec(),
        };
        let messages = vec![
            of(1, 0, &rows),
            of(2, u64::MAX, &rows),
            of(3, 0, &rows[1..]),
            of(4, 0, &[0; OBSERVATION_BYTES * 600]),
        ];
        report(&stack, messages).await?;

        // The daemon refuses six rows of each of the first two messages, and one incomplete row.
        // The last message exceeds the size limit, so the daemon refuses it on receipt.
        let after = page_that(&stack, "refusals", |page| {
            count(page, "/observations/refused") >= 13
        })
        .await?;
        let unchanged = |page: &Value| {
            (
                page["step"].clone(),
                page["latency"]["endpoints"].clone(),
                count(page, "/observations/learned"),
            )
        };
        assert_eq!(unchanged(&after), unchanged(&before));
        // Learning continues.
        let _traffic = BackgroundTraffic::start(&stack, 6);
        more(&stack, "server-0", 20).await?;
        Ok(())
    }
}
