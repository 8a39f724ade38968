//! How state enters the proxy: every worker applies a message as a whole or refuses it, in order.
//! The test simulates the daemon.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use e2e::explain::ExplainedDecision;
use prost::Message as _;
use proto::state::{self, daemon_message::Message, proxy_message};
use serde_json::json;
use testbed::load::LoadGenerator;
use testbed::model_server::{ModelServer, ModelServerOptions};
use testbed::stack::Stack;
use testbed::{Result, wait_for};

use crate::played::{PlayedDaemon, message, metrics, pool_update};

const LIMIT: Duration = Duration::from_secs(30);

/// A proxy that has received pool update 7.10 with all hosts from a simulated daemon.
struct StateScene {
    daemon: PlayedDaemon,
    stack: Stack,
    hosts: Vec<SocketAddr>,
    _servers: Vec<ModelServer>,
}

impl StateScene {
    async fn open(workers: u32) -> Result<Self> {
        let server = || {
            ModelServer::start(ModelServerOptions {
                models: vec!["demo".into()],
                speed: 0.0,
                ..ModelServerOptions::default()
            })
        };
        let servers = [server()?, server()?, server()?];
        let hosts: Vec<SocketAddr> = servers.iter().map(ModelServer::addr).collect();
        let daemon = PlayedDaemon::start(vec![message(Message::PoolUpdate(pool_update(
            7, 10, &hosts,
        )))])
        .await?;
        // The simulated daemon sends no heartbeats.
        let picker = json!({"explain": true, "state": {"cluster": "switchpoint-state", "silence_max_ms": 600_000}});
        let builder = Stack::builder()
            .without_daemon()
            .concurrency(workers)
            .picker(picker);
        let mut stack = builder
            .envoy_config(daemon.envoy_config(&hosts))
            .start()
            .await?;
        stack.wait_until_ready().await?;
        Ok(Self {
            daemon,
            stack,
            hosts,
            _servers: servers.into(),
        })
    }

    async fn decision(&self) -> Result<ExplainedDecision> {
        ExplainedDecision::ask(self.stack.address(), "and now?").await
    }

    /// Waits for a decision that satisfies `so`, because workers follow the leader VM within
    /// milliseconds.
    async fn decides(&self, what: &str, so: impl Fn(&ExplainedDecision) -> bool) -> Result<()> {
        wait_for(LIMIT, what, || async {
            self.decision()
                .await
                .ok()
                .filter(|decision| so(decision))
                .map(drop)
        })
        .await
    }

    async fn knows(&self, hosts: &[SocketAddr]) -> Result<()> {
        self.decides(&format!("a pool of {hosts:?}"), |decision| {
            decision.endpoints() == addresses(hosts)
        })
        .await
    }

    async fn stat(&self, name: &str) -> Result<i64> {
        self.stack.envoy.picker_stat(name).await
    }

    async fn stat_reaches(&self, name: &str, value: i64) -> Result<i64> {
        self.stack
            .envoy
            .picker_stat_until(name, |now| now >= value, LIMIT)
            .await
    }

    /// Waits for the proxy's refusal of this version, and returns its reason.
    async fn refusal(&self, version: state::Version) -> Result<String> {
        let refusal = |message: &proxy_message::Message| match message {
            proxy_message::Message::Ack(ack)
                if ack.version == Some(version) && !ack.refused.is_empty() =>
            {
                Some(ack.refused.clone())
            }
            _ => None,
        };
        self.daemon
            .hear(&format!("the refusal of {version:?}"), refusal)
            .await
    }

    async fn accepted(&self, version: state::Version) -> Result<()> {
        let accepted = |message: &proxy_message::Message| match message {
            proxy_message::Message::Ack(ack)
                if ack.version == Some(version) && ack.refused.is_empty() =>
            {
                Some(())
            }
            _ => None,
        };
        self.daemon
            .hear(&format!("the acknowledgement of {version:?}"), accepted)
            .await
    }
}

fn version(term: u64, sequence: u64) -> state::Version {
    state::Version { term, sequence }
}

fn addresses(hosts: &[SocketAddr]) -> BTreeSet<String> {
    hosts.iter().map(ToString::to_string).collect()
}

type PoolUpdateEdit = fn(&mut state::PoolUpdate);

/// Pool updates that a proxy must refuse. Each update would do harm if a proxy applied even a part
/// of it, because each update has only one endpoint.
const BAD_POOL_UPDATES: &[(&str, PoolUpdateEdit)] = &[
    ("slot 0 is claimed by two endpoints", |r| {
        r.endpoints.push(state::Endpoint {
            address: "127.0.0.1:1".into(),
            ..r.endpoints[0].clone()
        });
    }),
    ("is claimed by two endpoints", |r| {
        r.endpoints.push(state::Endpoint {
            slot: 9,
            ..r.endpoints[0].clone()
        });
    }),
    ("slot 5000 is out of range", |r| r.endpoints[0].slot = 5_000),
    ("`endpoints.slot` is out of range", |r| {
        r.endpoints[0].slot = u32::MAX;
    }),
    ("address `localhost:80` is not `ip:port`", |r| {
        r.endpoints[0].address = "localhost:80".into();
    }),
    ("unknown plugin type `nonsense-scorer`", |r| {
        pipeline(r).plugins[0].r#type = "nonsense-scorer".into();
    }),
    ("a weight is a number from 0", |r| {
        pipeline(r).profiles[0].plugins[0].weight = f64::NAN;
    }),
    ("`pipeline` is missing", |r| r.pipeline = None),
    ("a ranked list of 0 endpoints", |r| {
        pipeline(r).ranked_max = 0;
    }),
    ("endpoints, at most 1024 are allowed", |r| {
        let endpoint = r.endpoints[0].clone();
        let more = (1..2_000).map(|slot| state::Endpoint {
            slot,
            address: format!("127.0.0.1:{}", slot + 1),
            ..endpoint.clone()
        });
        r.endpoints.extend(more);
    }),
];

fn pipeline(pool_update: &mut state::PoolUpdate) -> &mut state::Pipeline {
    pool_update.pipeline.as_mut().expect("a pipeline")
}

#[tokio::test]
async fn a_bad_pool_update_is_refused_whole_counted_and_answered_with_the_reason() -> Result<()> {
    let scene = StateScene::open(2).await?;
    let load = LoadGenerator::start(scene.stack.address(), 2);
    for (sequence, (why, spoil)) in (11..).zip(BAD_POOL_UPDATES) {
        let refused = scene.stat("switchpoint_state_refused_total").await?;
        let mut bad = pool_update(7, sequence, &scene.hosts[..1]);
        spoil(&mut bad);
        scene.daemon.say(message(Message::PoolUpdate(bad)))?;
        let answer = scene.refusal(version(7, sequence)).await?;
        assert!(answer.contains(why), "{answer:?} should say {why:?}");
        assert_eq!(
            scene.stat("switchpoint_state_refused_total").await?,
            refused + 1,
            "{why}"
        );
        assert_eq!(
            scene.decision().await?.endpoints(),
            addresses(&scene.hosts),
            "the last good pool update stays: {why}"
        );
    }
    // A pool update without a version cannot be acknowledged.
    let refused = scene.stat("switchpoint_state_refused_total").await?;
    scene
        .daemon
        .say(message(Message::PoolUpdate(state::PoolUpdate {
            version: None,
            ..pool_update(7, 90, &scene.hosts[..1])
        })))?;
    scene
        .stat_reaches("switchpoint_state_refused_total", refused + 1)
        .await?;

    scene.daemon.say(message(Message::PoolUpdate(pool_update(
        7,
        99,
        &scene.hosts[..2],
    ))))?;
    scene.accepted(version(7, 99)).await?;
    scene.knows(&scene.hosts[..2]).await?;
    assert_eq!(
        scene.stat("switchpoint_state_connected").await?,
        1,
        "the stream was never closed"
    );
    load.stop().await?.check_all_served()
}

#[tokio::test]
async fn nothing_older_comes_back() -> Result<()> {
    let scene = StateScene::open(1).await?;
    for (term, sequence) in [(7, 9), (6, 1_000), (0, 0)] {
        scene.daemon.say(message(Message::PoolUpdate(pool_update(
            term,
            sequence,
            &scene.hosts[..1],
        ))))?;
        let answer = scene.refusal(version(term, sequence)).await?;
        assert!(answer.contains("older than 7.10"), "{answer}");
        assert_eq!(
            scene.decision().await?.endpoints(),
            addresses(&scene.hosts),
            "{term}.{sequence}"
        );
    }
    // A restarted daemon has a new term and may begin with any sequence.
    scene.daemon.say(message(Message::PoolUpdate(pool_update(
        8,
        1,
        &scene.hosts[..2],
    ))))?;
    scene.accepted(version(8, 1)).await?;
    scene.daemon.say(message(Message::PoolUpdate(pool_update(
        7,
        11,
        &scene.hosts,
    ))))?;
    assert!(
        scene
            .refusal(version(7, 11))
            .await?
            .contains("older than 8.1")
    );
    scene.knows(&scene.hosts[..2]).await?;
    Ok(())
}

#[tokio::test]
async fn metrics_count_only_for_their_pool_update_and_in_order() -> Result<()> {
    let scene = StateScene::open(1).await?;
    let busiest_is = async |index: usize| {
        let wanted = Some(scene.hosts[index].to_string());
        scene
            .decides(&format!("{wanted:?} to be the busiest"), |decision| {
                busiest(decision) == wanted
            })
            .await
    };
    scene.daemon.say(message(Message::Metrics(metrics(
        (7, 10),
        20,
        &[9.0, 0.0, 0.0],
    ))))?;
    busiest_is(0).await?;

    // Late metrics, or metrics of another pool update, are ignored and are no error.
    for old in [
        metrics((7, 10), 19, &[0.0, 9.0, 0.0]),
        metrics((7, 9), 21, &[0.0, 9.0, 0.0]),
        metrics((6, 10), 22, &[0.0, 9.0, 0.0]),
    ] {
        scene.daemon.say(message(Message::Metrics(old)))?;
    }
    let bad = [
        metrics((7, 10), 23, &[0.0, 9.0]),
        state::Metrics {
            lora: vec![state::Lora {
                index: 77,
                ..state::Lora::default()
            }],
            ..metrics((7, 10), 24, &[0.0, 9.0, 0.0])
        },
    ];
    for (count, bad) in (1..).zip(bad) {
        scene.daemon.say(message(Message::Metrics(bad)))?;
        scene
            .stat_reaches("switchpoint_state_refused_total", count)
            .await?;
        assert_eq!(
            busiest(&scene.decision().await?),
            Some(scene.hosts[0].to_string()),
            "the last good metrics stay"
        );
    }
    assert_eq!(scene.stat("switchpoint_state_metrics_total").await?, 1);

    scene.daemon.say(message(Message::Metrics(metrics(
        (7, 10),
        25,
        &[0.0, 0.0, 9.0],
    ))))?;
    busiest_is(2).await
}

/// Returns the endpoint that has the longest queue in the picker's view.
fn busiest(decision: &ExplainedDecision) -> Option<String> {
    let scores = decision.scores("queue-scorer");
    scores
        .into_iter()
        .filter(|(_, score)| *score < 0.5)
        .map(|(endpoint, _)| endpoint)
        .next()
}

#[tokio::test]
async fn numbers_that_are_none_count_as_unknown() -> Result<()> {
    let scene = StateScene::open(1).await?;
    for (sequence, nonsense) in
        (20..)
            .step_by(2)
            .zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -3.0])
    {
        // The daemon sends normal metrics in between, so that the next check sees the effect of
        // this value.
        scene.daemon.say(message(Message::Metrics(metrics(
            (7, 10),
            sequence,
            &[9.0, 0.0, 0.0],
        ))))?;
        scene
            .decides("numbers", |decision| {
                busiest(decision).is_some_and(|busiest| busiest == scene.hosts[0].to_string())
            })
            .await?;
        scene.daemon.say(message(Message::Metrics(metrics(
            (7, 10),
            sequence + 1,
            &[nonsense, 0.0, 8.0],
        ))))?;
        scene
            .decides(
                &format!("{nonsense} to be neither idle nor full"),
                |decision| {
                    let scores = decision.scores("queue-scorer");
                    let [unknown, idle, busy] =
                        [0, 1, 2].map(|index| scores[&scene.hosts[index].to_string()]);
                    idle > unknown && unknown > busy
                },
            )
            .await?;
    }
    assert_eq!(scene.stat("switchpoint_state_refused_total").await?, 0);
    Ok(())
}

#[tokio::test]
async fn a_message_beyond_all_measure_costs_the_stream_but_not_the_state() -> Result<()> {
    let scene = StateScene::open(1).await?;
    let load = LoadGenerator::start(scene.stack.address(), 2);
    let mut huge = pool_update(7, 11, &scene.hosts[..1]);
    huge.endpoints[0].labels.push(state::Label {
        key: "k".into(),
        value: "v".repeat(proto::MESSAGE_BYTES_MAX + 1_000),
    });
    let streams = scene.stat("switchpoint_state_streams_total").await?;
    scene.daemon.say(message(Message::PoolUpdate(huge)))?;
    scene
        .stat_reaches("switchpoint_state_streams_total", streams + 1)
        .await?;
    scene.stat_reaches("switchpoint_state_connected", 1).await?;
    assert_eq!(scene.decision().await?.endpoints(), addresses(&scene.hosts));
    load.stop().await?.check_all_served()
}

#[tokio::test]
async fn a_broken_stream_is_opened_again_by_the_same_process() -> Result<()> {
    let scene = StateScene::open(2).await?;
    let load = LoadGenerator::start(scene.stack.address(), 2);
    for life in 8..12 {
        scene.daemon.rehearse(
            proto::SCHEMA,
            vec![message(Message::PoolUpdate(pool_update(
                life,
                1,
                &scene.hosts[..2],
            )))],
        );
        scene.daemon.leave();
        scene.accepted(version(life, 1)).await?;
    }
    let hello = |message: proxy_message::Message| match message {
        proxy_message::Message::Hello(hello) => Some(hello),
        _ => None,
    };
    let hellos: Vec<state::Hello> = scene
        .daemon
        .received()
        .into_iter()
        .filter_map(hello)
        .collect();
    assert!(hellos.len() >= 5, "{hellos:?}");
    let one = |hello: &state::Hello| {
        (
            hello.node_id.clone(),
            hello.process_id,
            hello.pools.clone(),
            hello.schema,
        )
    };
    assert_eq!(
        hellos.iter().map(one).collect::<BTreeSet<_>>().len(),
        1,
        "one process, one identity: {hellos:?}"
    );
    assert_eq!(
        (hellos[0].node_id.as_str(), &hellos[0].pools[..]),
        ("switchpoint-standalone", &["default".to_owned()][..])
    );
    load.stop().await?.check_all_served()
}

#[tokio::test]
async fn every_worker_follows_and_is_counted() -> Result<()> {
    let scene = StateScene::open(4).await?;
    let load = LoadGenerator::start(scene.stack.address(), 8);
    for sequence in 11..31 {
        let hosts = &scene.hosts[usize::try_from(sequence % 2)?..];
        scene.daemon.say(message(Message::PoolUpdate(pool_update(
            7, sequence, hosts,
        ))))?;
        scene.daemon.say(message(Message::Metrics(metrics(
            (7, sequence),
            sequence * 100,
            &vec![0.0; hosts.len()],
        ))))?;
    }
    scene.accepted(version(7, 30)).await?;
    // Each VM reports the version that it has. The main thread's VM serves no requests, but this VM
    // has the state too.
    let vms = || async {
        let latest =
            scene
                .daemon
                .received()
                .into_iter()
                .rev()
                .find_map(|message| match message {
                    proxy_message::Message::Report(report) => Some(report),
                    _ => None,
                })?;
        let rows = latest
            .counters
            .iter()
            .filter_map(|row| state::VmCounters::decode(row.as_slice()).ok());
        let current = rows
            .filter(|row| row.version == Some(version(7, 30)))
            .map(|row| row.vm_id)
            .collect::<BTreeSet<_>>();
        (current.len() == 5).then_some(())
    };
    wait_for(
        LIMIT,
        "four workers and the main thread to report version 7.30",
        vms,
    )
    .await?;
    load.stop().await?.check_all_served()
}
