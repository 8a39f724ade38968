//! What a pool keeps, and what it lets go, when the daemon speaks again.

use exchange::{Exchange, Pool, Settings, Step, Time};
use scheduler::{EndpointMetrics, Snapshot, Version};

use crate::release::roster;

fn picked(pool: &mut Pool, prompt: &str) -> String {
    let mut exchange = Exchange::new(Time(0));
    let pairs: [(&[u8], &[u8]); 2] = [(b":method", b"POST"), (b":path", b"/v1/completions")];
    exchange.request_headers(&Settings::default(), pairs, false);
    let body = format!(r#"{{"model":"m","prompt":"{prompt}"}}"#);
    let Step::Forward(forward) = exchange.decide(&Settings::default(), pool, None, body.as_bytes(), Time(0)) else { panic!("not routed") };
    let first = forward.set[0].1.split(',').next().unwrap().to_owned();
    exchange.end(pool, Time(0));
    first
}

/// The same endpoints at a newer version.
fn again(snapshot: &Snapshot, sequence: u64) -> Snapshot {
    let metrics = vec![EndpointMetrics::default(); snapshot.endpoints().len()];
    snapshot.with_metrics(Version { term: 1, sequence }, metrics).unwrap()
}

#[test]
fn who_stays_is_remembered_over_a_new_roster_and_who_is_new_is_not() {
    let mut pool = Pool::new(7, 4096);
    let first = roster(4, 1);
    let same = again(&first, 2);
    pool.install(first, 7, 1000);
    let prompt = "once upon a time ".repeat(100);
    let home = picked(&mut pool, &prompt);
    pool.install(same, 7, 1000);
    assert!((0..20).all(|_| picked(&mut pool, &prompt) == home), "its prefix is still known to be there");
    assert!(pool.prefixes().stats().entries > 0);
    pool.install(roster(4, 2), 7, 1000);
    assert_eq!(pool.prefixes().stats().entries, 0, "other lives at the same slots hold nothing");
}

#[test]
fn an_index_is_made_once_and_only_where_it_is_asked_for() {
    let mut pool = Pool::new(7, 0);
    pool.install(roster(4, 1), 7, 1000);
    pool.reserve_prefixes(0);
    assert_eq!(pool.prefixes().bytes(), 0);
    pool.reserve_prefixes(4096);
    let bytes = pool.prefixes().bytes();
    assert!(bytes > 0);
    picked(&mut pool, &"once upon a time ".repeat(100));
    let entries = pool.prefixes().stats().entries;
    pool.reserve_prefixes(4096);
    assert_eq!((pool.prefixes().bytes(), pool.prefixes().stats().entries > 0, entries > 0), (bytes, true, true), "kept, not made anew");
}
