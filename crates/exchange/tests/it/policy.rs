//! Laws of the default policy for prompts that share a beginning, whatever its numbers are.

use std::collections::{BTreeMap, VecDeque};

use exchange::{
    Exchange, ExchangeSettings, ExchangeStep, ManagedPool, ResponseHead, ResponseOrigin, Timestamp,
};

use crate::release::pool_update;

const ENDPOINTS: usize = 8;

/// A pool of eight endpoints with the default policy, and its requests in flight, oldest first.
struct PolicyWorld {
    pool: ManagedPool,
    in_flight: VecDeque<(Exchange, String)>,
}

// === impl PolicyWorld ===

impl PolicyWorld {
    fn new() -> Self {
        let mut pool = ManagedPool::new(7, 65_536);
        pool.install(pool_update(8, 1), 7, 1_000);
        Self {
            pool,
            in_flight: VecDeque::new(),
        }
    }

    /// Sends a request that stays in flight, and returns its endpoint.
    fn send(&mut self, prompt: &str) -> String {
        let settings = ExchangeSettings::default();
        let mut exchange = Exchange::new(Timestamp(0));
        let pairs: [(&[u8], &[u8]); 2] = [(b":method", b"POST"), (b":path", b"/v1/completions")];
        exchange.request_headers(&settings, pairs, false);
        let body = format!(r#"{{"model":"m","prompt":"{prompt}"}}"#);
        let ExchangeStep::Forward(forward) = exchange.decide(
            &settings,
            &mut self.pool,
            None,
            body.as_bytes(),
            Timestamp(0),
        ) else {
            panic!("not routed")
        };
        let to = forward.set[0].1.split(',').next().unwrap().to_owned();
        self.in_flight.push_back((exchange, to.clone()));
        to
    }

    /// Answers the oldest requests until this many are in flight.
    fn end_until(&mut self, left: usize) {
        while self.in_flight.len() > left {
            if let Some((mut exchange, to)) = self.in_flight.pop_front() {
                let head = ResponseHead {
                    origin: ResponseOrigin::Upstream,
                    status: 200,
                    upstream_address: Some(to.as_bytes()),
                    attempts: 1,
                    ..ResponseHead::default()
                };
                exchange.response_headers(&mut self.pool, &head, Timestamp(0));
                let reply = br#"{"choices":[{"text":"ok","finish_reason":"stop"}]}"#;
                exchange.response_chunk(&mut self.pool, reply, true, Timestamp(0));
                exchange.end(&mut self.pool, Timestamp(0));
            }
        }
    }
}

/// Checks that copies of a shared prompt are made. Sixteen sessions at a time begin with one long
/// system prompt. At first one endpoint has the prompt cached, and all sessions wait for this
/// endpoint while seven are idle.
#[test]
fn a_prompt_that_all_share_comes_to_be_used_at_all_endpoints() {
    let mut world = PolicyWorld::new();
    let system = "You are a careful agent. ".repeat(1_000);
    let mut counts = BTreeMap::<String, usize>::new();
    for session in 0..120 {
        world.end_until(15);
        let endpoint = world.send(&format!(
            "{system} session {session} {}",
            "asks ".repeat(20 + session)
        ));
        if session >= 60 {
            *counts.entry(endpoint).or_default() += 1;
        }
    }
    assert_eq!(counts.len(), ENDPOINTS, "{counts:?}");
    assert!(
        counts.values().all(|&count| count <= 2 * 60 / ENDPOINTS),
        "{counts:?}"
    );
}

/// Checks that a session stays at its endpoint. A session's history is requested once in each turn,
/// so a copy of the history would save no other session anything.
#[test]
fn a_session_stays_where_its_history_is_cached() {
    let mut world = PolicyWorld::new();
    let mut histories: Vec<String> = (0..16)
        .map(|session| format!("session {session} ").repeat(400))
        .collect();
    let homes: Vec<String> = histories
        .iter()
        .map(|history| world.send(history))
        .collect();
    let mut moved = 0;
    for turn in 0..8 {
        for (history, home) in histories.iter_mut().zip(&homes) {
            world.end_until(11);
            history.push_str(&format!("turn {turn} {}", "and then ".repeat(60)));
            moved += usize::from(world.send(history) != *home);
        }
    }
    assert!(moved <= 8, "{moved} of 128 turns left their home");
}

/// Checks that prompts that share nothing find equal endpoints, so each endpoint gets the same
/// number of prompts.
#[test]
fn distinct_prompts_spread_over_an_idle_pool() {
    let mut world = PolicyWorld::new();
    let mut counts = BTreeMap::<String, usize>::new();
    for n in 0..10 * ENDPOINTS {
        *counts
            .entry(world.send(&format!("{n} is another prompt ").repeat(50)))
            .or_default() += 1;
        world.end_until(0);
    }
    assert!(
        counts.len() == ENDPOINTS && counts.values().all(|&count| count <= 15),
        "{counts:?}"
    );
}
