//! SLOs in complete exchanges: which headers are valid, which SLOs are tracked, and that a tracked
//! SLO limits all requests at its endpoint until its request ends.

use exchange::record::ParsedRecord;
use exchange::{
    Exchange, ExchangeSettings, ExchangeStep, HeaderTrust, LocalReply, ManagedPool, ResponseHead,
    ResponseOrigin, Timestamp,
};
use pool_state::{LoadReportHead, LoadReportSum, OwnLoadReport, PeerLoadReport};
use scheduler::latency::LatencyModel;
use scheduler::latency::step::StepModel;
use scheduler::plugin::ParameterValue;
use scheduler::{
    Decision, EndpointRef, Generation, Pipeline, PipelineSpec, PluginSpec, ProfilePlugin,
    ProfileSpec, Slo, Slot, Snapshot,
};

use crate::record::recording;
use crate::release::pool_update;

const ASKED: [(&str, &str); 2] = [("predictionbasedrouting", "true"), ("x-slo-tpot-ms", "80")];

/// Returns the pipeline of the proposal's example, as the daemon compiles it.
fn pipeline(prediction: bool, slo_missing: &str, priority: u32) -> PipelineSpec {
    let with = |plugin_type: &str, name: &str, value: ParameterValue| PluginSpec {
        parameters: vec![(name.to_owned(), value)],
        ..PluginSpec::of_type(plugin_type)
    };
    let part = |name: &str| ProfilePlugin {
        name: name.to_owned(),
        weight: 1.0,
    };
    PipelineSpec {
        plugins: vec![
            PluginSpec::of_type("queue-scorer"),
            with(
                "slo-scorer",
                "shedBelowPriority",
                ParameterValue::Number(f64::from(priority)),
            ),
            with(
                "slo-aware-profile-handler",
                "sloMissing",
                ParameterValue::Text(slo_missing.to_owned()),
            ),
            PluginSpec::of_type("slo-request-tracker"),
            PluginSpec::of_type("max-score-picker"),
        ],
        profiles: vec![
            ProfileSpec {
                name: "default".to_owned(),
                plugins: vec![
                    part("slo-request-tracker"),
                    part("queue-scorer"),
                    part("max-score-picker"),
                ],
            },
            ProfileSpec {
                name: "slo".to_owned(),
                plugins: vec![
                    part("slo-request-tracker"),
                    part("slo-scorer"),
                    part("max-score-picker"),
                ],
            },
        ],
        profile_handler: "slo-aware-profile-handler".to_owned(),
        latency_prediction: prediction,
        ..PipelineSpec::default()
    }
}

/// Returns a pool of two endpoints with this pipeline. The endpoints take these times for each
/// token, and 0.1 s to the first token.
fn pool_of(pipeline: &PipelineSpec, tpots_ms: [f32; 2]) -> ManagedPool {
    let two = pool_update(2, 1);
    let snapshot = Snapshot::try_new(
        two.version(),
        two.endpoints().to_vec(),
        two.metrics().to_vec(),
        Pipeline::build(pipeline).unwrap(),
    )
    .unwrap();
    let mut pool = ManagedPool::new(1, 1 << 10);
    pool.install(snapshot, 7, 10_000);
    pool.recount_load_reports([]);
    let model = tpots_ms.into_iter().zip(0..).fold(
        LatencyModel::constant(100.0, 20.0),
        |model, (tpot_ms, slot)| model.with_endpoint(at(slot), 1.0, tpot_ms / 20.0),
    );
    pool.install_models(StepModel::default(), Some(model));
    pool
}

fn pool(tpots_ms: [f32; 2]) -> ManagedPool {
    pool_of(&pipeline(true, "refuse", 1), tpots_ms)
}

fn at(slot: u16) -> EndpointRef {
    EndpointRef {
        slot: Slot(slot),
        generation: Generation(1),
    }
}

fn ask(
    pool: &mut ManagedPool,
    path: &str,
    headers: &[(&str, &str)],
    settings: &ExchangeSettings,
) -> (Exchange, ExchangeStep) {
    let mut exchange = Exchange::new(Timestamp(0));
    let all: Vec<(&[u8], &[u8])> = [(":method", "POST"), (":path", path)]
        .iter()
        .chain(headers)
        .map(|(name, value)| (name.as_bytes(), value.as_bytes()))
        .collect();
    exchange.request_headers(settings, all.iter().copied(), false);
    exchange.capture_headers(pool, all.iter().copied());
    let step = exchange.decide(
        settings,
        pool,
        None,
        br#"{"model":"m","prompt":"hello","stream":true}"#,
        Timestamp(0),
    );
    (exchange, step)
}

fn trusting() -> ExchangeSettings {
    ExchangeSettings {
        slo_headers: HeaderTrust::Trust,
        ..ExchangeSettings::default()
    }
}

/// Sends a request. Returns the endpoint that gets the request, or the reply.
fn sent(
    pool: &mut ManagedPool,
    headers: &[(&str, &str)],
) -> (Exchange, Result<String, LocalReply>) {
    let (exchange, step) = ask(pool, "/v1/completions", headers, &trusting());
    let to = match step {
        ExchangeStep::Forward(forward) => {
            Ok(forward.set[0].1.split(',').next().unwrap().to_owned())
        }
        ExchangeStep::Reply(reply) => Err(reply),
        ExchangeStep::Park { .. } | ExchangeStep::Hold { .. } => panic!("parked or held"),
    };
    (exchange, to)
}

fn refused(headers: &[(&str, &str)], pipeline: &PipelineSpec) -> Option<(u16, String)> {
    let mut pool = pool_of(pipeline, [20.0, 20.0]);
    let (mut exchange, to) = sent(&mut pool, headers);
    exchange.end(&mut pool, Timestamp(0));
    to.err()
        .map(|reply| (reply.status, String::from_utf8(reply.body).unwrap()))
}

/// Sends a request. Returns the profile that ran, or the status of the refusal, and the number of
/// tracked requests before it ends.
fn cell(prediction: bool, slo: Option<&str>, header: Option<&str>) -> (String, usize) {
    let mut pool = pool_of(&pipeline(prediction, "refuse", 1), [20.0, 20.0]);
    let limits = [
        ("x-slo-tpot-ms", slo),
        ("predictionbasedrouting", header),
        ("x-switchpoint-explain", Some("1")),
    ];
    let headers: Vec<(&str, &str)> = limits
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
        .collect();
    let settings = ExchangeSettings {
        explain: true,
        ..trusting()
    };
    let (mut exchange, step) = ask(&mut pool, "/v1/completions", &headers, &settings);
    let tracked = [0, 1]
        .map(|slot| pool.in_flight().running(at(slot)).len())
        .iter()
        .sum();
    let what = match step {
        ExchangeStep::Reply(reply) => reply.status.to_string(),
        _ => serde_json::from_str::<serde_json::Value>(exchange.reasons().unwrap()).unwrap()["profile"].as_str().unwrap().to_owned(),
    };
    exchange.end(&mut pool, Timestamp(0));
    (what, tracked)
}

fn lowest(pool: &ManagedPool, slot: u16) -> Slo {
    let load = pool.in_flight().load(at(slot));
    Slo {
        ttft_us: load.ttft_slo_us,
        tpot_us: load.tpot_slo_us,
    }
}

fn tpot(us: u32) -> Slo {
    Slo {
        tpot_us: Some(us),
        ..Slo::default()
    }
}

#[test]
fn without_an_slo_every_inference_request_is_told_so_while_latency_is_predicted() {
    for headers in [
        &[][..],
        &[("predictionbasedrouting", "true")],
        &[("predictionbasedrouting", "false")],
    ] {
        let (status, body) = refused(headers, &pipeline(true, "refuse", 1)).unwrap();
        assert_eq!(status, 400);
        assert!(
            body.contains("x-slo-ttft-ms, x-slo-tpot-ms or both") && body.contains("missing_slo"),
            "{body}"
        );
        assert_eq!(
            refused(headers, &pipeline(true, "default", 1)),
            None,
            "relaxed"
        );
        assert_eq!(
            refused(headers, &pipeline(false, "refuse", 1)),
            None,
            "prediction is off"
        );
    }
    assert_eq!(
        refused(&[("x-slo-ttft-ms", "100")], &pipeline(true, "refuse", 1)),
        None,
        "one is enough"
    );
    let mut pool = pool([20.0, 20.0]);
    let (mut exchange, step) = ask(&mut pool, "/v1/models", &[], &trusting());
    assert!(
        matches!(step, ExchangeStep::Forward(_)),
        "no inference: {step:?}"
    );
    exchange.end(&mut pool, Timestamp(0));
}

#[test]
fn what_cannot_be_is_told_by_its_header_and_only_while_it_matters() {
    for (header, value) in [
        ("x-slo-ttft-ms", "0"),
        ("x-llm-d-slo-tpot-ms", "nan"),
        ("predictionbasedrouting", "maybe"),
    ] {
        let headers = [("x-slo-ttft-ms", "100"), (header, value)];
        let headers = if header == "x-slo-ttft-ms" {
            &headers[1..]
        } else {
            &headers[..]
        };
        let (status, body) = refused(headers, &pipeline(true, "refuse", 1)).unwrap();
        assert!(
            status == 400 && body.contains(&format!("the header {header} must be")),
            "{status} {body}"
        );
        assert_eq!(
            refused(headers, &pipeline(false, "refuse", 1)),
            None,
            "{header} changes nothing while prediction is off"
        );
    }
}

#[test]
fn an_slo_counts_only_where_its_header_is_trusted() {
    for value in ["0.1", "nan", "100"] {
        let headers = [("x-slo-tpot-ms", value), ("predictionbasedrouting", "true")];
        let mut pool = pool_of(&pipeline(true, "refuse", 1), [20.0, 20.0]);
        let settings = ExchangeSettings {
            slo_headers: HeaderTrust::Ignore,
            ..ExchangeSettings::default()
        };
        let (mut exchange, step) = ask(&mut pool, "/v1/completions", &headers, &settings);
        assert!(
            matches!(step, ExchangeStep::Forward(_)),
            "{value}: {step:?}"
        );
        assert_eq!([lowest(&pool, 0), lowest(&pool, 1)], [Slo::default(); 2]);
        exchange.end(&mut pool, Timestamp(0));
    }
}

#[test]
fn flag_slo_and_header_decide_cell_by_cell() {
    let some = Some("80");
    let wrong = Some("-1");
    for header in [None, Some("false"), Some("true"), Some("perhaps")] {
        for slo in [None, some, wrong] {
            assert_eq!(
                cell(false, slo, header),
                ("default".to_owned(), 0),
                "off: {slo:?} and {header:?} change nothing"
            );
        }
    }
    let table = [
        (None, None, "400", 0),
        (None, Some("false"), "400", 0),
        (None, Some("true"), "400", 0),
        (some, None, "default", 1),
        (some, Some("false"), "default", 1),
        (some, Some("true"), "slo", 1),
        (wrong, Some("true"), "400", 0),
        (some, Some("perhaps"), "400", 0),
    ];
    for (slo, header, what, tracked) in table {
        assert_eq!(
            cell(true, slo, header),
            (what.to_owned(), tracked),
            "on: {slo:?}, {header:?}"
        );
    }
}

#[test]
fn whatever_ends_a_request_its_slo_ends_with_it() {
    const TOKEN: &[u8] = b"data: {\"choices\":[{\"text\":\"hi\"}]}\n\n";
    let head = |origin, status| ResponseHead {
        origin,
        status,
        content_type: Some(b"text/event-stream"),
        ..ResponseHead::default()
    };
    type StreamEnd<'f> = &'f dyn Fn(&mut Exchange, &mut ManagedPool);
    let ends: [(&str, u32, StreamEnd<'_>); 4] = [
        ("its last token", 1, &|exchange, pool| {
            exchange.response_headers(
                pool,
                &head(ResponseOrigin::Upstream, 200),
                Timestamp(0).plus_ms(5),
            );
            exchange.response_chunk(pool, TOKEN, true, Timestamp(0).plus_ms(9));
            exchange.end(pool, Timestamp(0).plus_ms(9));
        }),
        (
            "a client that leaves in the middle of it",
            1,
            &|exchange, pool| {
                exchange.response_headers(
                    pool,
                    &head(ResponseOrigin::Upstream, 200),
                    Timestamp(0).plus_ms(5),
                );
                exchange.response_chunk(pool, TOKEN, false, Timestamp(0).plus_ms(9));
                exchange.end(pool, Timestamp(0).plus_ms(9));
            },
        ),
        (
            "an endpoint that cannot be reached",
            1,
            &|exchange, pool| {
                exchange.response_headers(
                    pool,
                    &head(ResponseOrigin::Proxy, 503),
                    Timestamp(0).plus_ms(5),
                );
                exchange.end(pool, Timestamp(0).plus_ms(5));
            },
        ),
        ("the crash of its endpoint", 2, &|_, pool| {
            pool.install(pool_update(2, 2), 8, 10_000);
            pool.recount_load_reports([]);
        }),
    ];
    for (what, life, end) in ends {
        let mut pool = pool([20.0, 20.0]);
        let (mut exchange, to) = sent(&mut pool, &ASKED);
        let slot = u16::from(to.unwrap() != "10.0.0.0:8000");
        assert_eq!(
            (
                lowest(&pool, slot),
                pool.in_flight().running(at(slot)).len()
            ),
            (tpot(80_000), 1),
            "before {what}"
        );
        end(&mut exchange, &mut pool);
        let now = EndpointRef {
            generation: Generation(life),
            ..at(slot)
        };
        let load = pool.in_flight().load(now);
        assert_eq!(
            (load.tpot_slo_us, pool.in_flight().running(now).len()),
            (None, 0),
            "after {what}"
        );
        exchange.end(&mut pool, Timestamp(0).plus_ms(20));
        assert_eq!(pool.in_flight().rows().count(), 0, "after {what}");
    }
}

#[test]
fn an_slo_counts_from_the_pick_to_the_end_whatever_the_header_says() {
    let mut pool = pool([20.0, 60.0]);
    let (mut exchange, to) = sent(&mut pool, &[("x-slo-tpot-ms", "30")]);
    let slot = if to.unwrap() == "10.0.0.0:8000" { 0 } else { 1 };
    let expected = if slot == 0 {
        tpot(30_000)
    } else {
        Slo::default()
    };
    assert_eq!(
        lowest(&pool, slot),
        expected,
        "the default profile tracks it too; an SLO that cannot be met does not limit other requests"
    );
    assert_eq!(pool.in_flight().running(at(slot))[0].slo, tpot(30_000));
    exchange.end(&mut pool, Timestamp(0));
    assert_eq!(
        (
            lowest(&pool, slot),
            pool.in_flight().running(at(slot)).len()
        ),
        (Slo::default(), 0),
        "a client that left"
    );
}

#[test]
fn the_lowest_slo_there_makes_others_yield_unless_nobody_could_meet_it() {
    let mut pool = pool([20.0, 20.0]);
    let strict = [("predictionbasedrouting", "true"), ("x-slo-tpot-ms", "21")];
    let held: Vec<Exchange> = (0..2).map(|_| sent(&mut pool, &strict).0).collect();
    assert_eq!(
        [lowest(&pool, 0), lowest(&pool, 1)].map(|slo| slo.tpot_us),
        [Some(21_000); 2],
        "idle first"
    );
    let slow = LatencyModel::constant(100.0, 40.0);
    pool.install_models(StepModel::default(), Some(slow));
    let (_, to) = sent(&mut pool, &ASKED);
    let reply = to.unwrap_err();
    assert_eq!(
        reply.status, 429,
        "40 ms would meet its SLO, but not those of the running requests"
    );
    assert!(
        String::from_utf8(reply.body)
            .unwrap()
            .contains("slo_unattainable")
    );
    for mut exchange in held {
        exchange.end(&mut pool, Timestamp(0));
    }
    // These requests have an SLO that no endpoint could meet even if it were idle. An SLO that no
    // endpoint can meet does not limit other requests.
    let greedy: Vec<Exchange> = (0..2)
        .map(|_| sent(&mut pool, &[("x-slo-tpot-ms", "1")]).0)
        .collect();
    assert_eq!([lowest(&pool, 0), lowest(&pool, 1)], [Slo::default(); 2]);
    let (mut exchange, to) = sent(&mut pool, &ASKED);
    assert!(to.is_ok(), "{to:?}");
    for exchange in greedy.into_iter().chain([std::mem::replace(
        &mut exchange,
        Exchange::new(Timestamp(0)),
    )]) {
        let mut exchange = exchange;
        exchange.end(&mut pool, Timestamp(0));
    }
    assert_eq!(pool.in_flight().rows().count(), 0);
}

#[test]
fn a_retry_takes_its_slo_along_and_what_it_saw_is_appended() {
    let mut pool = pool([20.0, 20.0]);
    let (mut exchange, to) = sent(&mut pool, &ASKED);
    let first = u16::from(to.unwrap() != "10.0.0.0:8000");
    let (second, address) = if first == 0 {
        (1, "10.0.0.1:8000")
    } else {
        (0, "10.0.0.0:8000")
    };
    assert_eq!(
        (lowest(&pool, first), lowest(&pool, second)),
        (tpot(80_000), Slo::default())
    );
    let predicted = pool.in_flight().running(at(first))[0].predicted.unwrap();
    assert!(
        (predicted.tpot_ms - 20.0).abs() < 0.01 && (predicted.ttft_ms - 100.0).abs() < 0.01,
        "{predicted:?}"
    );
    let head = ResponseHead {
        origin: ResponseOrigin::Upstream,
        status: 200,
        upstream_address: Some(address.as_bytes()),
        attempts: 2,
        content_type: Some(b"text/event-stream"),
        ..ResponseHead::default()
    };
    exchange.response_headers(&mut pool, &head, Timestamp(0).plus_ms(5));
    assert_eq!(
        (lowest(&pool, first), lowest(&pool, second)),
        (Slo::default(), tpot(80_000))
    );
    let token = b"data: {\"choices\":[{\"text\":\"hi\"}]}\n\n";
    // A pace is the mean of 16 tokens or a few more, as they are reported.
    for chunk in 0..37 {
        exchange.response_chunk(
            &mut pool,
            token,
            false,
            Timestamp(0).plus_ms(130 + 25 * chunk),
        );
    }
    let running = &pool.in_flight().running(at(second))[0];
    assert_eq!(
        (running.ttft_ms, running.tpots_ms.as_slice()),
        (Some(130.0), [25.0, 25.0].as_slice())
    );
    exchange.end(&mut pool, Timestamp(0).plus_ms(2_000));
    assert_eq!(pool.in_flight().rows().count(), 0);
}

#[test]
fn the_lowest_slo_of_an_endpoint_is_the_lowest_of_all_proxies() {
    let mut one = pool([40.0, 40.0]);
    let mut two = pool([40.0, 40.0]);
    let mut row = OwnLoadReport::default();
    let mut peer = PeerLoadReport::default();
    let strict = [("predictionbasedrouting", "true"), ("x-slo-tpot-ms", "41")];
    let held: Vec<Exchange> = (0..2).map(|_| sent(&mut one, &strict).0).collect();
    let tell = |one: &mut ManagedPool,
                two: &mut ManagedPool,
                row: &mut OwnLoadReport,
                peer: &mut PeerLoadReport| {
        let bytes = one
            .write_load_report(
                row,
                LoadReportHead {
                    vm: 9,
                    written: Timestamp(0).plus_ms(1),
                    ring: 0,
                },
            )
            .to_vec();
        if two.read_load_report(peer, bytes, true) {
            two.recompute_peer_slos([&*peer]);
        }
    };
    tell(&mut one, &mut two, &mut row, &mut peer);
    assert_eq!(
        [lowest(&two, 0), lowest(&two, 1)],
        [tpot(41_000); 2],
        "the SLO of the other proxy"
    );
    let own = sent(&mut two, &[("x-slo-tpot-ms", "50")]).0;
    assert_eq!(
        [lowest(&two, 0), lowest(&two, 1)],
        [tpot(41_000); 2],
        "the lower of both"
    );
    let slower = LatencyModel::constant(100.0, 60.0);
    two.install_models(StepModel::default(), Some(slower));
    assert_eq!(
        sent(&mut two, &ASKED).1.unwrap_err().status,
        429,
        "an SLO at another proxy limits requests here"
    );
    for mut exchange in held {
        exchange.end(&mut one, Timestamp(0));
    }
    tell(&mut one, &mut two, &mut row, &mut peer);
    let slots: Vec<Slo> = [0, 1]
        .map(|slot| lowest(&two, slot))
        .into_iter()
        .filter(|slo| slo.any())
        .collect();
    assert_eq!(
        slots,
        [tpot(50_000)],
        "when it has ended there, it does not limit requests here"
    );
    let mut own = own;
    own.end(&mut two, Timestamp(0));
}

/// Receives a load report from another proxy: this many requests at each of two endpoints, and the
/// SLOs of these requests in µs.
fn receive_slos(pool: &mut ManagedPool, requests: u32, ttft_us: u32, tpot_us: u32) {
    let mut sum = LoadReportSum::default();
    sum.reset(vec![at(0), at(1)], []);
    for slot in 0..2 {
        let load = scheduler::in_flight::EndpointLoad {
            requests,
            ttft_slo_us: Some(ttft_us),
            tpot_slo_us: Some(tpot_us),
            ..Default::default()
        };
        sum.add(at(slot), load);
    }
    let head = LoadReportHead {
        vm: LoadReportHead::OUTSIDE,
        written: Timestamp(0).plus_ms(1),
        ring: 0,
    };
    let mut peer = PeerLoadReport::default();
    pool.read_load_report(&mut peer, sum.row(head, [], &[]), true);
    pool.recompute_peer_slos([&peer]);
}

#[test]
fn an_slo_that_another_proxy_makes_up_counts_only_if_an_idle_endpoint_could_meet_it() {
    let mut pool = pool([40.0, 40.0]);
    let held = [(); 2].map(|()| sent(&mut pool, &[]).0);
    receive_slos(&mut pool, 1, 1, 1);
    assert_eq!([lowest(&pool, 0), lowest(&pool, 1)], [Slo::default(); 2]);
    assert!(
        sent(&mut pool, &ASKED).1.is_ok(),
        "when any SLO counted, this got 429"
    );
    receive_slos(&mut pool, 1, 1, 41_000);
    assert_eq!([lowest(&pool, 0), lowest(&pool, 1)], [tpot(41_000); 2]);
    let mut idle = self::pool([40.0, 40.0]);
    receive_slos(&mut idle, 0, 1_000_000, 41_000);
    assert_eq!(
        [lowest(&idle, 0), lowest(&idle, 1)],
        [Slo::default(); 2],
        "it has no request there"
    );
    drop(held);
}

#[test]
fn what_the_one_who_speaks_for_a_proxy_promised_itself_is_told_too() {
    let mut pool = pool([20.0, 20.0]);
    let (mut exchange, to) = sent(&mut pool, &[("x-slo-tpot-ms", "50")]);
    let slot = u16::from(to.unwrap() != "10.0.0.0:8000");
    let mut ours = LoadReportSum::default();
    let mut theirs = LoadReportSum::default();
    let mut peer = PeerLoadReport::default();
    ours.reset(vec![at(0), at(1)], []);
    pool.in_flight()
        .rows()
        .for_each(|(endpoint, load)| ours.add(endpoint, load));
    theirs.reset(vec![at(0), at(1)], []);
    theirs.read(&mut peer, ours.row(LoadReportHead::default(), [], &[]));
    theirs.reset(vec![at(0), at(1)], [&peer]);
    assert_eq!(theirs.load(at(slot)).tpot_slo_us, Some(50_000));
    exchange.end(&mut pool, Timestamp(0));
}

#[test]
fn a_record_says_what_was_asked_and_who_runs_where_with_which_slo() {
    let mut pool = pool([20.0, 60.0]);
    let settings = ExchangeSettings {
        slo_headers: HeaderTrust::Trust,
        ..recording()
    };
    let mut record = |headers: &[(&str, &str)]| -> serde_json::Value {
        let (mut exchange, _) = ask(&mut pool, "/v1/completions", headers, &settings);
        serde_json::from_str(&exchange.take_record().unwrap()).unwrap()
    };
    let first = record(&[("x-slo-tpot-ms", "90")]);
    let asked = |record: &serde_json::Value| {
        ["slo_ttft_us", "slo_tpot_us", "prediction_based"]
            .map(|name| record["request"][name].clone())
    };
    assert_eq!(
        asked(&first),
        [serde_json::Value::Null, 90_000.into(), false.into()]
    );
    assert!(
        [0, 1]
            .iter()
            .all(|slot| first["endpoints"][slot]["running"] == serde_json::json!([])),
        "{first}"
    );
    let second = record(&ASKED);
    assert_eq!(
        asked(&second),
        [serde_json::Value::Null, 80_000.into(), true.into()]
    );
    let running: Vec<_> = [0, 1]
        .iter()
        .flat_map(|slot| second["endpoints"][slot]["running"].as_array().unwrap())
        .collect();
    let [running] = running[..] else {
        panic!("{second}")
    };
    assert_eq!(
        (&running["tpot_slo_us"], &running["tpots_ms"]),
        (&90_000.into(), &serde_json::json!([]))
    );
    assert_eq!(running["predicted"].as_array().unwrap().len(), 4);
}

#[test]
fn reasons_say_what_is_predicted_and_who_is_late_and_a_record_decides_the_same_again() {
    let mut pool = pool([60.0, 95.0]);
    let strict = [("predictionbasedrouting", "true"), ("x-slo-tpot-ms", "62")];
    let mut held = vec![sent(&mut pool, &strict).0];
    while pool.in_flight().rows().count() < 2 {
        // The default profile picks for these requests, until no endpoint is idle.
        held.push(sent(&mut pool, &[("x-slo-tpot-ms", "500")]).0);
    }
    let settings = ExchangeSettings {
        explain: true,
        slo_headers: HeaderTrust::Trust,
        ..recording()
    };
    let headers = [ASKED.as_slice(), &[("x-switchpoint-explain", "1")]].concat();
    let (mut exchange, step) = ask(&mut pool, "/v1/completions", &headers, &settings);
    assert!(matches!(step, ExchangeStep::Forward(_)), "{step:?}");
    let reasons: serde_json::Value = serde_json::from_str(exchange.reasons().unwrap()).unwrap();
    assert_eq!(reasons["profile"], "slo");
    let candidate = |slot: usize| reasons["candidates"][slot]["predicted"].clone();
    let kept = candidate(0);
    let late = candidate(1);
    let near = |value: &serde_json::Value, expected: f64| {
        (value.as_f64().unwrap() - expected).abs() < 0.01
    };
    assert!(
        near(&kept["tpot"]["ms"], 60.0) && near(&kept["tpot"]["limit_ms"], 62.0),
        "{kept}"
    );
    assert_eq!(
        (&kept["tpot"]["limit_of"], &kept["valid"], &kept["late"]),
        (&"others there".into(), &true.into(), &serde_json::json!([]))
    );
    assert!(near(&late["tpot"]["headroom_ms"], -15.0), "{late}");
    assert_eq!(
        (&late["tpot"]["limit_of"], &late["valid"], &late["late"]),
        (
            &"the request".into(),
            &false.into(),
            &serde_json::json!(["tpot"])
        )
    );
    assert_eq!(
        late["ttft"].as_object().unwrap().len(),
        1,
        "no TTFT SLO anywhere: {late}"
    );

    let record = ParsedRecord::from_json(&exchange.take_record().unwrap()).unwrap();
    pool.install_models(StepModel::default(), Some(LatencyModel::constant(1.0, 1.0)));
    let again = record.replay(pool.snapshot().unwrap(), &[]).unwrap();
    let Decision::Route(route) = again.decision else {
        panic!("{:?}", again.decision)
    };
    let addresses: Vec<&str> = route
        .ranked
        .iter()
        .map(|index| &*again.snapshot.endpoint(index).unwrap().address)
        .collect();
    assert_eq!(
        addresses,
        record.was_picked(),
        "by the recorded predictions, not the current ones"
    );
    exchange.end(&mut pool, Timestamp(0));
    for mut exchange in held {
        exchange.end(&mut pool, Timestamp(0));
    }
}

#[test]
fn requests_that_met_missed_or_were_refused_their_slo_are_counted_by_model() {
    const WHOLE: &[u8] = b"data: {\"choices\":[{\"text\":\"hi\"}]}\n\ndata: [DONE]\n\n";
    const REFUSED: &[u8] = b"{\"error\":{\"message\":\"too long\"}}";
    let mut pool = pool([20.0, 20.0]);
    let play = |pool: &mut ManagedPool,
                headers: &[(&str, &str)],
                (status, body): (u16, &[u8]),
                first_ms: u64,
                last: bool| {
        let (mut exchange, _) = sent(pool, headers);
        let content_type: &[u8] = if status == 200 {
            b"text/event-stream"
        } else {
            b"application/json"
        };
        let head = ResponseHead {
            origin: ResponseOrigin::Upstream,
            status,
            content_type: Some(content_type),
            ..ResponseHead::default()
        };
        exchange.response_headers(pool, &head, Timestamp(0).plus_ms(1));
        exchange.response_chunk(pool, body, last, Timestamp(0).plus_ms(first_ms));
        exchange.end(pool, Timestamp(0).plus_ms(first_ms));
    };
    let asked = [("x-slo-ttft-ms", "200")];
    let good = (200, WHOLE);
    play(&mut pool, &asked, good, 150, true);
    play(&mut pool, &asked, good, 250, true);
    play(&mut pool, &asked, (500, b"{}"), 10, true);
    play(&mut pool, &asked, (200, &WHOLE[..35]), 250, false); // the client left
    play(&mut pool, &asked, (400, REFUSED), 250, true); // This failure is the client's fault.
    play(&mut pool, &[("x-slo-tpot-ms", "200")], good, 150, true); // with one token, no time between tokens is known
    let counted = |pool: &ManagedPool| -> Vec<[u64; 3]> {
        pool.counters().models().iter().map(|row| row.slo).collect()
    };
    assert_eq!(counted(&pool), [[1, 2, 0]], "met, missed, shed");

    pool.install_models(
        StepModel::default(),
        Some(LatencyModel::constant(900.0, 20.0)),
    );
    let held: Vec<Exchange> = (0..2)
        .map(|_| sent(&mut pool, &[("x-slo-ttft-ms", "2000")]).0)
        .collect();
    let strict = [("predictionbasedrouting", "true"), ("x-slo-ttft-ms", "200")];
    assert_eq!(sent(&mut pool, &strict).1.unwrap_err().status, 429);
    assert_eq!(counted(&pool), [[1, 2, 1]]);
    for mut exchange in held {
        exchange.end(&mut pool, Timestamp(0));
    }
}

#[test]
fn the_queues_of_running_requests_name_each_by_its_own_id_with_what_was_predicted_of_it() {
    let mut pool = pool([20.0, 20.0]);
    let long = "x".repeat(1_000);
    let held = [("first", "80"), (long.as_str(), "90")]
        .map(|(id, ms)| sent(&mut pool, &[("x-request-id", id), ("x-slo-tpot-ms", ms)]).0);
    let queues: serde_json::Value =
        serde_json::from_str(&exchange::record::running(&pool)).unwrap();
    let mut shown: Vec<&serde_json::Value> = queues
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|queue| queue["running"].as_array().unwrap())
        .collect();
    shown.sort_by_key(|running| running["tpot_slo_us"].as_u64());
    assert_eq!(
        (&shown[0]["request"], &shown[0]["tpot_slo_us"]),
        (&"first".into(), &80_000.into()),
        "{queues}"
    );
    assert_eq!(
        shown[1]["request"],
        "x".repeat(64),
        "an id is no place to keep things"
    );
    assert_eq!(shown[0]["predicted"].as_array().map(Vec::len), Some(4));
    for mut exchange in held {
        exchange.end(&mut pool, Timestamp(0));
    }
    assert_eq!(exchange::record::running(&pool), "[]");
}
