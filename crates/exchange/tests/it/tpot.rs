//! Time per output token: from the first token to the last, divided by the tokens after the first.
//! Events without a token are ignored.

use exchange::{
    Exchange, ExchangeSettings, ExchangeStep, ManagedPool, ResponseHead, ResponseOrigin, Timestamp,
};
use pool_state::{CountHistogram, DURATION_BOUNDS_MS};

use crate::release::pool_update;

const ROLE: &str = r#"data: {"choices":[{"delta":{"role":"assistant","content":""}}]}"#;
const TOKEN: &str = r#"data: {"choices":[{"delta":{"content":"hi"}}]}"#;
const FINISH: &str = r#"data: {"choices":[{"delta":{},"finish_reason":"stop"}]}"#;
const USAGE: &str = r#"data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}"#;
const COMMENT: &str = ": still there";
const DONE: &str = "data: [DONE]";

/// Returns the histogram after one streamed reply with these events, each at its time in ms after
/// the request.
fn tpot_ms(events: &[(u64, &str)]) -> CountHistogram {
    let settings = ExchangeSettings::default();
    let mut pool = ManagedPool::new(1, 1024);
    let mut exchange = Exchange::new(Timestamp(0));
    pool.install(pool_update(1, 1), 7, 1000);
    let pairs: [(&[u8], &[u8]); 2] = [(b":method", b"POST"), (b":path", b"/v1/chat/completions")];
    exchange.request_headers(&settings, pairs, false);
    let body = br#"{"model":"m","stream":true,"messages":[]}"#;
    let ExchangeStep::Forward(_) = exchange.decide(&settings, &mut pool, None, body, Timestamp(0))
    else {
        panic!("not routed")
    };
    let head = ResponseHead {
        origin: ResponseOrigin::Upstream,
        status: 200,
        upstream_address: Some(b"10.0.0.0:8000"),
        attempts: 1,
        content_type: Some(b"text/event-stream"),
        encoded: false,
        ..ResponseHead::default()
    };
    exchange.response_headers(&mut pool, &head, Timestamp(0));
    let mut now = Timestamp(0);
    for (at_ms, event) in events {
        now = Timestamp(0).plus_ms(*at_ms);
        exchange.response_chunk(&mut pool, format!("{event}\n\n").as_bytes(), false, now);
    }
    exchange.end(&mut pool, now).unwrap();
    pool.counters().models()[0].tpot_ms.clone()
}

fn one(value_ms: f64) -> CountHistogram {
    let mut histogram = CountHistogram::default();
    histogram.record(value_ms, &DURATION_BOUNDS_MS);
    histogram
}

#[test]
fn it_is_the_mean_over_the_tokens_after_the_first() {
    // Five tokens by `usage`, in three events: four gaps in 200 ms.
    assert_eq!(
        tpot_ms(&[(100, TOKEN), (150, TOKEN), (300, TOKEN), (300, USAGE)]),
        one(50.0)
    );
    // Without the field `usage` an event counts as a token: two gaps in 200 ms.
    assert_eq!(
        tpot_ms(&[(100, TOKEN), (150, TOKEN), (300, TOKEN)]),
        one(100.0)
    );
}

#[test]
fn what_comes_late_and_carries_no_token_does_not_stretch_it() {
    for trailing in [FINISH, USAGE, COMMENT, DONE] {
        let histogram = tpot_ms(&[
            (100, TOKEN),
            (200, TOKEN),
            (300, TOKEN),
            (300, USAGE),
            (10_000, trailing),
        ]);
        assert_eq!(histogram, one(50.0), "{trailing} after ten seconds");
    }
}

#[test]
fn what_comes_early_and_carries_no_token_does_not_stretch_it() {
    for leading in [ROLE, COMMENT] {
        let histogram = tpot_ms(&[
            (0, leading),
            (10_000, TOKEN),
            (10_200, TOKEN),
            (10_200, USAGE),
        ]);
        assert_eq!(histogram, one(50.0), "{leading} ten seconds before");
    }
}

#[test]
fn of_one_token_or_none_there_is_no_time_between_tokens() {
    assert_eq!(
        tpot_ms(&[(100, TOKEN), (900, DONE)]),
        CountHistogram::default()
    );
    assert_eq!(
        tpot_ms(&[(100, ROLE), (900, USAGE)]),
        CountHistogram::default()
    );
}
