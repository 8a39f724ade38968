//! The scaling signal: gauges, the debug page, and the external scaler as KEDA calls it.

use std::collections::BTreeMap;

use control_plane::daemon::StandbyDaemon;
use prost::Message;
use proto::external_scaler::external_scaler_client::ExternalScalerClient;
use proto::external_scaler::{GetMetricsRequest, IsActiveResponse, MetricSpec, ScaledObjectRef};
use proto::state::{self, proxy_message};
use tokio::net::TcpStream;
use tonic::Code;
use tonic::transport::Channel;

use super::harness::*;

const PORTS: [u16; 2] = [41_101, 41_102];

/// Returns a trigger with this metadata.
fn object(metadata: &[(&str, &str)]) -> ScaledObjectRef {
    let scaler_metadata = metadata
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect();
    ScaledObjectRef {
        name: "llama".to_owned(),
        namespace: "prod".to_owned(),
        scaler_metadata,
    }
}

fn question(metadata: &[(&str, &str)]) -> GetMetricsRequest {
    GetMetricsRequest {
        scaled_object_ref: Some(object(metadata)),
        metric_name: "desired-replicas".to_owned(),
    }
}

async fn keda(daemon: &Daemon) -> ExternalScalerClient<Channel> {
    let address = daemon.scaler_address.expect("a scaler");
    ExternalScalerClient::new(
        Channel::from_shared(format!("http://{address}"))
            .unwrap()
            .connect()
            .await
            .unwrap(),
    )
}

async fn desired(scaler: &mut ExternalScalerClient<Channel>, metadata: &[(&str, &str)]) -> f64 {
    let found = scaler
        .get_metrics(question(metadata))
        .await
        .unwrap()
        .into_inner()
        .metric_values;
    let [value] = &found[..] else {
        panic!("{found:?}")
    };
    assert_eq!(
        (value.metric_name.as_str(), value.metric_value),
        ("desired-replicas", value.metric_value_float.ceil() as i64)
    );
    value.metric_value_float
}

/// Reports this load at each endpoint, and requests that are held, as a proxy does.
async fn report(filter: &FilterStream, endpoints: &[(u32, u32)], prompts: u64, held: u64) {
    let row = |&(slot, generation): &(u32, u32)| state::EndpointCounters {
        slot,
        generation,
        requests: prompts,
        prompts,
        prefill_tokens: 4_000 * prompts,
        ..state::EndpointCounters::default()
    };
    let bands = vec![state::BandCounters {
        held,
        bytes: held,
        ..state::BandCounters::default()
    }];
    let endpoints = endpoints.iter().map(row).collect();
    let vm = state::VmCounters {
        pool: "default".to_owned(),
        vm_id: 1,
        endpoints,
        bands,
        ..state::VmCounters::default()
    };
    filter
        .say(proxy_message::Message::Report(state::Report {
            counters: vec![vm.encode_to_vec()],
        }))
        .await;
}

/// Returns the values of a gauge of the daemon, by its labels.
fn gauges(page: &str, name: &str) -> BTreeMap<String, f64> {
    let rows = page
        .lines()
        .filter_map(|line| line.strip_prefix(name)?.strip_prefix('{')?.split_once("} "));
    rows.map(|(labels, value)| (labels.to_owned(), value.parse().unwrap()))
        .collect()
}

#[tokio::test]
async fn work_that_a_proxy_reports_is_a_backlog_and_needs_replicas() {
    let [one, two] = PORTS.map(|port| format!("127.0.0.1:{port}"));
    let daemon = daemon(&[
        "--endpoint",
        &one,
        "--endpoint",
        &two,
        "--listen-scaler",
        "127.0.0.1:0",
        "--scale-max",
        "500",
    ])
    .await;
    let mut scaler = keda(&daemon).await;
    let spec = scaler
        .get_metric_spec(object(&[]))
        .await
        .unwrap()
        .into_inner()
        .metric_specs;
    assert_eq!(
        spec,
        [MetricSpec {
            metric_name: "desired-replicas".to_owned(),
            target_size: 1,
            target_size_float: 1.0
        }]
    );
    assert_eq!(
        desired(&mut scaler, &[]).await,
        2.0,
        "nothing is known about the engines, so the pool keeps its size"
    );

    let endpoints = daemon
        .shared
        .pools
        .views
        .borrow()
        .get("default")
        .unwrap()
        .members
        .clone();
    let id = endpoints[0].id;
    let (filter, _) = FilterStream::connect(daemon.state_address, "n", 1, &["default"]).await;
    report(&filter, &[(id.slot.0.into(), id.generation.0)], 2_000, 0).await;
    until("the reported work is a backlog", async || {
        desired(&mut keda(&daemon).await, &[]).await > 3.0
    })
    .await;

    let all = desired(&mut scaler, &[]).await;
    let hurried = desired(&mut scaler, &[("drain", "20s"), ("startup", "1s")]).await;
    assert!(hurried > 2.0 * all, "{hurried} against {all}");
    assert_eq!(desired(&mut scaler, &[("maxReplicas", "3")]).await, 3.0);
    assert!(
        scaler
            .is_active(object(&[("minReplicas", "0")]))
            .await
            .unwrap()
            .into_inner()
            .result
    );

    let (_, page) = get(daemon.admin_address, "/metrics").await;
    let labels = "pool=\"default\",role=\"both\",model_name=\"\"";
    let [backlog, wanted] = [
        "switchpoint_backlog_seconds",
        "switchpoint_desired_replicas",
    ]
    .map(|name| gauges(&page, name));
    assert!(
        (wanted[labels] / all - 1.0).abs() < 0.01 && backlog[labels] > 60.0,
        "{wanted:?} {backlog:?} {all}"
    );
    let debug = get_json(daemon.admin_address, "/debug/scaling").await;
    assert_eq!(
        (
            debug["groups"][0]["requests"].as_f64(),
            debug["groups"][0]["endpoints_unknown"].as_u64()
        ),
        (Some(2_000.0), Some(2))
    );
    assert_eq!(debug["goal"]["replicas_max"], 500);
    daemon.stop().await;
}

/// Checks gauges for the work of two proxies at endpoints of two roles, while both proxies hold
/// requests.
#[tokio::test]
async fn each_role_has_the_work_of_all_proxies_and_what_they_hold() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("endpoints.yaml");
    let row = |(name, port, role): (&str, u16, &str)| {
        format!(
            "- {{name: {name}, address: 127.0.0.1, port: {port}, labels: {{llm-d.ai/role: {role}}}}}\n"
        )
    };
    let rows: String = [("p", 41_104, "prefill"), ("d", 41_105, "decode")]
        .map(row)
        .concat();
    write(&file, &format!("endpoints:\n{rows}"));
    let daemon = daemon(&["--endpoints-file", file.to_str().unwrap()]).await;
    let backlogs = async || {
        let found = gauges(
            &get(daemon.admin_address, "/metrics").await.1,
            "switchpoint_backlog_seconds",
        );
        ["prefill", "decode"].map(|role| {
            found
                .get(&format!("pool=\"default\",role=\"{role}\",model_name=\"\""))
                .copied()
                .unwrap_or(0.0)
        })
    };
    let ids = || -> Vec<(u32, u32)> {
        let pools = daemon.shared.pools.views.borrow();
        let members = pools
            .get("default")
            .map(|view| view.members.clone())
            .unwrap_or_default();
        members
            .iter()
            .map(|member| (member.id.slot.0.into(), member.id.generation.0))
            .collect()
    };
    until("both endpoints are in the pool", async || ids().len() == 2).await;
    let ids = ids();
    let proxies = [
        FilterStream::connect(daemon.state_address, "one", 1, &["default"])
            .await
            .0,
        FilterStream::connect(daemon.state_address, "two", 2, &["default"])
            .await
            .0,
    ];
    report(&proxies[0], &ids, 100, 0).await;
    until("the first proxy's work is known", async || {
        backlogs().await.iter().all(|backlog| *backlog > 0.0)
    })
    .await;
    let of_one = backlogs().await;
    report(&proxies[1], &ids, 100, 0).await;
    let twice = |now: [f64; 2], before: [f64; 2]| {
        now.iter()
            .zip(before)
            .all(|(now, before)| (1.9..2.1).contains(&(now / before)))
    };
    until("both proxies' work is known", async || {
        twice(backlogs().await, of_one)
    })
    .await;
    let of_both = backlogs().await;
    for proxy in &proxies {
        report(proxy, &ids, 100, 500).await;
    }
    let more = |now: [f64; 2]| now.iter().zip(of_both).all(|(now, before)| *now > before);
    until("what both hold is known", async || more(backlogs().await)).await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_group_that_is_gone_leaves_no_series_and_an_empty_pool_is_not_active() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("endpoints.yaml");
    let rows = |role: &str| {
        format!(
            "endpoints:\n- {{name: a, address: 127.0.0.1, port: 41103, labels: {{llm-d.ai/role: {role}}}}}\n"
        )
    };
    write(&file, &rows("decode"));
    let daemon = daemon(&[
        "--endpoints-file",
        file.to_str().unwrap(),
        "--listen-scaler",
        "127.0.0.1:0",
        "--scale-min",
        "0",
    ])
    .await;
    let roles = async |name: &str| {
        let found = gauges(&get(daemon.admin_address, "/metrics").await.1, name);
        found
            .into_keys()
            .map(|labels| labels.split('"').nth(3).unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    until("the group is there", async || {
        roles("switchpoint_desired_replicas").await == ["decode"]
    })
    .await;
    write(&file, &rows("prefill"));
    until("the group has another role", async || {
        roles("switchpoint_desired_replicas").await == ["prefill"]
    })
    .await;
    let mut scaler = keda(&daemon).await;
    assert!(
        scaler
            .is_active(object(&[]))
            .await
            .unwrap()
            .into_inner()
            .result,
        "nothing is known about its engine"
    );
    let refused = scaler
        .is_active(object(&[("role", "decode")]))
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);

    let mut pushed = scaler
        .stream_is_active(object(&[]))
        .await
        .unwrap()
        .into_inner();
    let first = tokio::time::timeout(PATIENCE, pushed.message())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(first, Some(IsActiveResponse { result: true }));
    write(&file, "endpoints: []\n");
    until("no series is left", async || {
        roles("switchpoint_busy_replicas").await.is_empty()
    })
    .await;
    let next = tokio::time::timeout(PATIENCE, pushed.message())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(next, Some(IsActiveResponse { result: false }));
    assert_eq!(desired(&mut scaler, &[]).await, 0.0);
    daemon.stop().await;
}

#[tokio::test]
async fn only_the_leader_answers() {
    let standby = StandbyDaemon::start(serve(&[
        "--endpoint",
        "127.0.0.1:1",
        "--listen-scaler",
        "127.0.0.1:0",
    ]))
    .await
    .unwrap();
    let published = async || {
        !gauges(
            &get(standby.admin_address, "/metrics").await.1,
            "switchpoint_desired_replicas",
        )
        .is_empty()
    };
    for _ in 0..2 {
        assert!(!published().await, "a standby publishes no series");
        let leading = standby.lead().await.unwrap();
        let address = leading.scaler_address.unwrap();
        let mut scaler = ExternalScalerClient::connect(format!("http://{address}"))
            .await
            .unwrap();
        assert_eq!(desired(&mut scaler, &[]).await, 1.0);
        assert!(published().await);
        leading.lose().await;
        assert!(
            scaler.get_metrics(question(&[])).await.is_err(),
            "KEDA connects again, and reaches the leader"
        );
        assert!(TcpStream::connect(address).await.is_err());
    }
    standby.stop().await;
}

#[tokio::test]
async fn hostile_requests_to_the_scaler_are_refused_and_do_no_harm() {
    let daemon = daemon(&[
        "--endpoint",
        "127.0.0.1:1",
        "--listen-scaler",
        "127.0.0.1:0",
    ])
    .await;
    let mut scaler = keda(&daemon).await;
    let long = "x".repeat(1 << 20);
    for (metadata, code) in [
        (&[("pool", "other")][..], Code::InvalidArgument),
        (&[("ttft", "-1s")], Code::InvalidArgument),
        (&[("ttft", "1e999s")], Code::InvalidArgument),
        (&[("drain", "NaNs")], Code::InvalidArgument),
        (&[("spare", "-1")], Code::InvalidArgument),
        (
            &[("maxReplicas", "99999999999999999999")],
            Code::InvalidArgument,
        ),
        (&[("role", "\u{0}")], Code::InvalidArgument),
        (&[("Min-Replicas", "3")], Code::InvalidArgument),
        (&[("pool", long.as_str())], Code::OutOfRange),
    ] {
        let refused = scaler.get_metrics(question(metadata)).await.unwrap_err();
        assert_eq!(refused.code(), code, "{refused:?}");
        assert!(refused.message().len() < 500, "{refused:?}");
    }
    let other = GetMetricsRequest {
        metric_name: "other".to_owned(),
        ..question(&[])
    };
    assert_eq!(
        scaler.get_metrics(other).await.unwrap_err().code(),
        Code::InvalidArgument
    );
    let none = GetMetricsRequest {
        scaled_object_ref: None,
        ..question(&[])
    };
    assert_eq!(
        scaler.get_metrics(none).await.unwrap_err().code(),
        Code::InvalidArgument
    );
    let mut streams = Vec::new();
    let refused = loop {
        match scaler.stream_is_active(object(&[])).await {
            Ok(stream) => streams.push(stream),
            Err(refused) => break refused,
        }
        assert!(streams.len() <= 256, "streams have no limit");
    };
    assert_eq!(refused.code(), Code::ResourceExhausted);
    drop(streams);
    let open = async || {
        keda(&daemon)
            .await
            .stream_is_active(object(&[]))
            .await
            .is_ok()
    };
    until("closed streams are free again", open).await;
    assert_eq!(desired(&mut scaler, &[]).await, 1.0);
    daemon.stop().await;
}
