//! The part of a request that a decision can use: the headers that its plugins read, within bounds,
//! and no body if the host passes none. This module also tests the contents of the decision log.

use exchange::explain::REASONS_BYTES_MAX;
use exchange::{
    DecisionLogSettings, Exchange, ExchangeSettings, ExchangeStep, HeadersStep, ManagedPool,
    Timestamp,
};
use scheduler::plugin::ParameterValue;
use scheduler::{EndpointMetrics, Pipeline, PipelineSpec, PluginSpec, Snapshot, Version};

use crate::record::recording;
use crate::release::pool_update;

const PAIRS: [(&[u8], &[u8]); 2] = [(b":method", b"POST"), (b":path", b"/v1/completions")];
const BODY: &[u8] = br#"{"model":"m","prompt":"hi"}"#;

/// Returns a pool whose only plugin reads the header `x-session-id`.
fn pool() -> ManagedPool {
    let session = PluginSpec {
        parameters: vec![(
            "strategy".to_owned(),
            ParameterValue::Text("session_id".to_owned()),
        )],
        ..PluginSpec::of_type("session-affinity-scorer")
    };
    pool_with(session)
}

/// Returns a pool with four endpoints and this scorer.
fn pool_with(scorer: PluginSpec) -> ManagedPool {
    let spec = PipelineSpec::of_one_profile("test", vec![(scorer, 1.0)], 1);
    let endpoints = pool_update(4, 1).endpoints().to_vec();
    let metrics = vec![EndpointMetrics::default(); endpoints.len()];
    let mut pool = ManagedPool::new(7, 1024);
    pool.install(
        Snapshot::try_new(
            Version {
                term: 1,
                sequence: 1,
            },
            endpoints,
            metrics,
            Pipeline::build(&spec).unwrap(),
        )
        .unwrap(),
        7,
        1_000,
    );
    pool
}

fn showing(headers: &str) -> ExchangeSettings {
    let decision_log = DecisionLogSettings {
        one_in: 1,
        headers: headers.to_owned(),
    };
    ExchangeSettings {
        decision_log,
        ..ExchangeSettings::default()
    }
}

/// Returns the request headers that the decision saw, from the member `headers` of its record.
fn seen(before_state: bool, headers: &[(&str, &str)]) -> Vec<(String, usize)> {
    let shown = showing("x-session-id,cookie,x-session-i,x-session-id2,x-a,x-b");
    let settings = shown;
    let mut exchange = Exchange::new(Timestamp(0));
    let mut pool = pool();
    exchange.request_headers(&settings, PAIRS, false);
    let bytes = headers
        .iter()
        .map(|(name, value)| (name.as_bytes(), value.as_bytes()));
    if before_state {
        exchange.capture_headers(&ManagedPool::new(7, 0), bytes);
    } else {
        exchange.capture_headers(&pool, bytes);
    }
    assert!(matches!(
        exchange.decide(&settings, &mut pool, None, BODY, Timestamp(0)),
        ExchangeStep::Forward(_)
    ));
    let record: serde_json::Value = serde_json::from_str(&exchange.take_record().unwrap()).unwrap();
    let headers = record["request"]["headers"]
        .as_object()
        .cloned()
        .unwrap_or_default();
    headers
        .into_iter()
        .map(|(name, value)| (name, value.as_str().unwrap().len()))
        .collect()
}

fn sized(name: &str, bytes: usize) -> (String, usize) {
    (name.to_owned(), bytes)
}

#[test]
fn headers_are_kept_that_a_plugin_reads_and_no_others() {
    let given = [
        ("x-session-id", "anna"),
        ("cookie", "secret"),
        ("x-session-i", "no"),
        ("x-session-id2", "no"),
    ];
    assert_eq!(seen(false, &given), [sized("x-session-id", 4)]);
    assert_eq!(
        seen(true, &given).len(),
        4,
        "before the first state, all headers are kept"
    );
}

/// Returns the log of a decision about a request with these headers. `early` says whether the
/// headers were captured before the pool had state.
fn logged(early: bool, headers: &[(&str, &str)], settings: &ExchangeSettings) -> String {
    let mut pool = pool();
    let mut exchange = Exchange::new(Timestamp(0));
    exchange.request_headers(settings, PAIRS, false);
    let bytes = headers
        .iter()
        .map(|(name, value)| (name.as_bytes(), value.as_bytes()));
    if early {
        exchange.capture_headers(&ManagedPool::new(7, 0), bytes);
    } else {
        exchange.capture_headers(&pool, bytes);
    }
    assert!(matches!(
        exchange.decide(settings, &mut pool, None, BODY, Timestamp(0)),
        ExchangeStep::Forward(_)
    ));
    exchange.take_record().unwrap()
}

#[test]
fn no_header_reaches_the_log_that_is_not_listed() {
    let given = [
        ("authorization", "Bearer s3cret"),
        ("cookie", "s3cret"),
        ("x-api-key", "s3cret"),
        ("x-session-id", "anna"),
    ];
    for early in [true, false] {
        let log = logged(early, &given, &recording());
        assert!(
            !log.contains("s3cret") && log.contains("anna"),
            "early: {early}: {log}"
        );
        let none = showing("-");
        assert!(
            !logged(early, &given, &none).contains("anna"),
            "early: {early}"
        );
    }
    let other = showing("x-a,cookie");
    let log = logged(true, &given, &other);
    assert!(
        log.matches("s3cret").count() == 1 && log.contains(r#""cookie":"s3cret""#),
        "{log}"
    );
}

#[test]
fn the_name_of_a_model_is_cut_in_the_log() {
    let name = format!("é{}", "m".repeat(100_000));
    let body = format!(r#"{{"model":"{name}","prompt":"x"}}"#);
    let settings = recording();
    let mut pool = pool();
    let mut exchange = Exchange::new(Timestamp(0));
    exchange.request_headers(&settings, PAIRS, false);
    assert!(matches!(
        exchange.decide(&settings, &mut pool, None, body.as_bytes(), Timestamp(0)),
        ExchangeStep::Forward(_)
    ));
    let record: serde_json::Value = serde_json::from_str(&exchange.take_record().unwrap()).unwrap();
    assert_eq!(record["request"]["model"], name[..256]);
}

#[test]
fn there_is_room_for_16_kib_of_names_and_values() {
    let value = |bytes: usize| "v".repeat(bytes);
    let most = value(16_384 - 12);
    let more = value(16_384 - 11);
    assert_eq!(
        seen(false, &[("x-session-id", &most)]),
        [sized("x-session-id", 16_372)]
    );
    assert!(
        seen(false, &[("x-session-id", &more)]).is_empty(),
        "one too many"
    );
    let half = value(8_000);
    let rest = value(16_384 - 8_003 - 3);
    assert_eq!(
        seen(true, &[("x-a", &half), ("x-b", &rest)]).len(),
        2,
        "together they fill the limit"
    );
    let rest = value(16_384 - 8_003 - 2);
    assert_eq!(
        seen(true, &[("x-a", &half), ("x-b", &rest)]),
        [sized("x-a", 8_000)]
    );
    assert_eq!(
        seen(true, &[("x-a", &value(16_384)), ("x-b", "small")]),
        [sized("x-b", 5)],
        "a header that does not fit is left out, and the next is tried"
    );
}

#[test]
fn a_body_that_the_host_cannot_show_is_not_asked_for() {
    let settings = ExchangeSettings::default();
    let mut pool = pool();
    for (unseen, routed) in [(true, true), (false, false)] {
        let mut exchange = Exchange::new(Timestamp(0));
        assert_eq!(
            exchange.request_headers(&settings, PAIRS, false),
            HeadersStep::Buffer
        );
        if unseen {
            exchange.set_body_unavailable();
        }
        let step = exchange.decide(&settings, &mut pool, None, b"{ half of a bo", Timestamp(0));
        assert_eq!(
            matches!(step, ExchangeStep::Forward(_)),
            routed,
            "unseen: {unseen}"
        );
        exchange.end(&mut pool, Timestamp(0));
    }
}

#[test]
fn reasons_are_told_to_whoever_asks_for_them_in_the_house() {
    let settings = ExchangeSettings::default();
    let mut pool = pool();
    let mut silent = Exchange::new(Timestamp(0));
    silent.request_headers(&settings, PAIRS, false);
    silent.decide(&settings, &mut pool, None, BODY, Timestamp(0));
    assert_eq!(silent.reasons(), None);
    let mut exchange = Exchange::new(Timestamp(0)).with_explanation();
    exchange.request_headers(&settings, PAIRS, false);
    exchange.decide(&settings, &mut pool, None, BODY, Timestamp(0));
    let reasons: serde_json::Value = serde_json::from_str(exchange.reasons().unwrap()).unwrap();
    assert_eq!(
        reasons["candidates"].as_array().unwrap().len(),
        4,
        "{reasons}"
    );
}

/// Each of the four endpoints repeats the name of the scorer.
#[test]
fn reasons_name_no_more_endpoints_once_they_are_too_long() {
    let scorer = PluginSpec {
        name: "x".repeat(REASONS_BYTES_MAX / 2 - 1),
        ..PluginSpec::of_type("active-request-scorer")
    };
    let mut pool = pool_with(scorer);
    let mut exchange = Exchange::new(Timestamp(0)).with_explanation();
    exchange.request_headers(&ExchangeSettings::default(), PAIRS, false);
    exchange.decide(
        &ExchangeSettings::default(),
        &mut pool,
        None,
        BODY,
        Timestamp(0),
    );
    let reasons = exchange.reasons().unwrap();
    assert!(reasons.len() > REASONS_BYTES_MAX, "{}", reasons.len());
    let reasons: serde_json::Value = serde_json::from_str(reasons).unwrap();
    assert_eq!(reasons["candidates"].as_array().unwrap().len(), 2);
}

#[test]
fn one_decision_in_so_many_is_recorded_and_none_for_0() {
    let recorded = |one_in: u32| {
        let mut settings = ExchangeSettings::default();
        let mut pool = pool();
        settings.decision_log.one_in = one_in;
        let decide = |_| {
            let mut exchange = Exchange::new(Timestamp(0));
            exchange.request_headers(&settings, PAIRS, false);
            exchange.decide(&settings, &mut pool, None, BODY, Timestamp(0));
            exchange.end(&mut pool, Timestamp(0));
            exchange.take_record().is_some()
        };
        (0..400).map(decide).filter(|recorded| *recorded).count()
    };
    assert_eq!((recorded(0), recorded(1)), (0, 400));
    assert!((20..90).contains(&recorded(8)), "{}", recorded(8));
}
