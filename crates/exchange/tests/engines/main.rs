//! Engines that behave unlike the simulator's, under the default configuration: load is spread, and
//! prompts return to their servers.
//!
//! The test runs in virtual time, with 20 seeds for each engine. `e2e/tests` has the same test on a
//! real Envoy.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]
#![allow(clippy::print_stdout, reason = "prints the table under --nocapture")]
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "small numbers"
)]

mod engine;
mod host;

use std::collections::{BTreeMap, BTreeSet};

use engine::{AT_ONCE, ENGINES, EngineApi, EngineBehaviour, MS};
use host::{EnginesHost, HostPick, ScriptClient};

const SEEDS: u64 = 20;
/// The number of seeds for one worker. It is smaller, because that case is simpler.
const SEEDS_OF_ONE_WORKER: u64 = 5;

/// The number of requests in a burst of distinct long prompts to idle servers. An even spread is 4
/// for each server.
const BURST: usize = 64;
const BURST_SERVERS: usize = 16;
const BURST_TIME: u64 = 200 * MS;
const BURST_MAX: usize = 5;

/// The number of conversations.
const PREFIXES: usize = 16;
const TURNS: usize = 6;
const SERVERS: usize = 8;
const RETURNED_MIN: f64 = 0.97;
const SERVERS_USED_MIN: usize = 6;

/// The number of requests in a steady load of distinct prompts.
const REQUESTS: usize = 1_000;
const CONCURRENCY: usize = 32;
const BUSIEST_MAX: f64 = 1.3;

/// The maximum time until a new endpoint is picked under this steady load.
const NEW_WITHIN: u64 = 1_000 * MS;

/// The results of an engine with one seed, or the worst results of several seeds.
#[derive(Clone, Copy, Debug)]
struct EngineFigures {
    worst_burst: usize,
    returned: f64,
    servers_used: usize,
    busiest_over_mean: f64,
    new_after: u64,
}

impl EngineFigures {
    const BEST: Self = Self {
        worst_burst: 0,
        returned: 1.0,
        servers_used: usize::MAX,
        busiest_over_mean: 0.0,
        new_after: 0,
    };

    fn worse(self, other: Self) -> Self {
        Self {
            worst_burst: self.worst_burst.max(other.worst_burst),
            returned: self.returned.min(other.returned),
            servers_used: self.servers_used.min(other.servers_used),
            busiest_over_mean: self.busiest_over_mean.max(other.busiest_over_mean),
            new_after: self.new_after.max(other.new_after),
        }
    }

    fn is_good(&self) -> bool {
        self.worst_burst <= BURST_MAX
            && self.returned >= RETURNED_MIN
            && self.servers_used >= SERVERS_USED_MIN
            && self.busiest_over_mean <= BUSIEST_MAX
            && self.new_after <= NEW_WITHIN
    }
}

fn prompt(number: usize, tokens: usize) -> String {
    format!("{number:>7} times there was a prompt like no other. ")
        + &"It goes on. ".repeat(tokens / 3)
}

fn by_server(picked: &[HostPick]) -> BTreeMap<usize, usize> {
    picked.iter().fold(BTreeMap::new(), |mut tally, picked| {
        *tally.entry(picked.server).or_default() += 1;
        tally
    })
}

fn most(picked: &[HostPick]) -> usize {
    by_server(picked).into_values().max().unwrap_or(0)
}

/// Sends three bursts. Returns the maximum number of requests in one burst that one server got.
/// Before the first burst, nothing is learned of the engine; before the other two, its times are
/// learned.
fn worst_burst(engine: EngineBehaviour, workers: usize, seed: u64) -> usize {
    let mut host = EnginesHost::new(engine, workers, BURST_SERVERS, seed);
    let burst = |round: usize| {
        let client = |at: usize| ScriptClient {
            begins: BURST_TIME * at as u64 / BURST as u64,
            prompts: [prompt(round * BURST + at, 1_500)].into(),
            ..ScriptClient::default()
        };
        (0..BURST).map(client).collect::<Vec<_>>()
    };
    (0..3)
        .map(|round| most(&host.play(burst(round))))
        .max()
        .unwrap()
}

/// Returns the share of the later turns that returned to the server of the first turn, and the
/// number of servers that had a first turn.
fn returned(host: &mut EnginesHost, seed: u64) -> (f64, usize) {
    let turn = |prefix: usize, turn: usize| prompt(1_000_000 + prefix, 1_500 + 60 * turn);
    // Half of the seeds play one conversation after another. The other half play the first turn of
    // all conversations, then the second, and so on.
    let order: Vec<(usize, usize)> = if seed.is_multiple_of(2) {
        (0..PREFIXES)
            .flat_map(|prefix| (0..TURNS).map(move |turn| (prefix, turn)))
            .collect()
    } else {
        (0..TURNS)
            .flat_map(|turn| (0..PREFIXES).map(move |prefix| (prefix, turn)))
            .collect()
    };
    let prompts = order
        .iter()
        .map(|&(prefix, number)| turn(prefix, number))
        .collect();
    let picked = host.play(vec![ScriptClient {
        begins: 0,
        pause: 20 * MS,
        prompts,
    }]);
    let mut first = BTreeMap::new();
    let mut back = 0;
    for (&(prefix, turn), picked) in order.iter().zip(&picked) {
        let home = *first.entry(prefix).or_insert(picked.server);
        back += usize::from(turn > 0 && home == picked.server);
    }
    (
        back as f64 / (PREFIXES * (TURNS - 1)) as f64,
        first.values().collect::<BTreeSet<_>>().len(),
    )
}

fn load(host: &mut EnginesHost, from: usize, requests: usize) -> Vec<HostPick> {
    let client = |at: usize| ScriptClient {
        begins: at as u64 * MS,
        pause: 0,
        prompts: (0..requests)
            .skip(at)
            .step_by(CONCURRENCY)
            .map(|number| prompt(from + number, 300))
            .collect(),
    };
    host.play((0..CONCURRENCY).map(client).collect())
}

fn found(engine: EngineBehaviour, workers: usize, seed: u64) -> EngineFigures {
    let mut host = EnginesHost::new(engine, workers, SERVERS, seed);
    let picked = load(&mut host, 0, REQUESTS);
    let busiest_over_mean = most(&picked) as f64 / (REQUESTS as f64 / SERVERS as f64);
    // The engine is known by now. The prompts of rerank requests are not read, so they cannot
    // return. The prompts of an engine that answers immediately need not return either. At such an
    // engine a cached prompt saves less than a millisecond, and costs that differ by no more count
    // as equal, so the scheduler spreads these prompts by turns.
    let free = engine.api == EngineApi::Rerank || engine.name == AT_ONCE;
    let (returned, servers_used) = if free {
        (1.0, SERVERS)
    } else {
        returned(&mut host, seed)
    };
    host.grow(SERVERS + 1);
    let picked = load(&mut host, REQUESTS, REQUESTS / 4);
    let new_after = picked
        .iter()
        .find(|picked| picked.server == SERVERS)
        .map_or(u64::MAX, |new| new.at - picked[0].at);
    EngineFigures {
        worst_burst: worst_burst(engine, workers, seed),
        returned,
        servers_used,
        busiest_over_mean,
        new_after,
    }
}

fn check(workers: usize, seeds: u64) {
    let mut bad = Vec::new();
    println!("{workers} workers, worst of {seeds} seeds");
    println!(
        "{:<22} {:>6} {:>9} {:>8} {:>8} {:>8}",
        "engine", "burst", "returned", "servers", "busiest", "new ms"
    );
    // Each engine has a separate thread, because a single test would leave all cores but one idle.
    let all = std::thread::scope(|scope| {
        let measure = |engine| {
            scope.spawn(move || {
                (1..=seeds)
                    .map(|seed| found(engine, workers, seed))
                    .fold(EngineFigures::BEST, EngineFigures::worse)
            })
        };
        let running: Vec<_> = ENGINES.iter().copied().map(measure).collect();
        let joined = running.into_iter().map(|thread| thread.join().unwrap());
        joined.collect::<Vec<_>>()
    });
    for (engine, worst) in ENGINES.iter().zip(all) {
        let EngineFigures {
            worst_burst,
            returned,
            servers_used,
            busiest_over_mean,
            new_after,
        } = worst;
        let name = engine.name;
        let new_ms = new_after / MS;
        println!(
            "{name:<22} {worst_burst:>6} {returned:>9.3} {servers_used:>8} {busiest_over_mean:>8.2} {new_ms:>8}"
        );
        if !worst.is_good() {
            bad.push(name);
        }
    }
    assert!(bad.is_empty(), "beyond the bounds: {bad:?}");
}

#[test]
fn any_engine_is_loaded_evenly_and_keeps_its_prompts_by_one_worker() {
    check(1, SEEDS_OF_ONE_WORKER);
}

#[test]
fn any_engine_is_loaded_evenly_and_keeps_its_prompts_by_four_workers() {
    check(4, SEEDS);
}
