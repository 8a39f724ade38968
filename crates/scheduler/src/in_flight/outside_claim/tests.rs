//! Tests with proxies that pick from four engines, each proxy by its ledger, and with peers that
//! may claim a false load.

use proptest::prelude::*;

use super::*;
use crate::endpoint::{EndpointRef, Generation, Slot};
use crate::in_flight::{InFlight, InFlightTicket};
use crate::metrics::EndpointMetrics;
use crate::rng::Rng;

const ENGINES: usize = 4;
const PATIENCE_US: u64 = 2_500_000;
const PROMPT: u32 = 1_000;
const PREFILL_MS: u64 = 40;

fn engine(slot: usize) -> EndpointRef {
    EndpointRef {
        slot: Slot(slot as u16),
        generation: Generation(1),
    }
}

type Loads = [EndpointLoad; ENGINES];

/// A function that returns the load that a proxy falsely claims. The arguments are the time in ms,
/// and the true loads of the other proxies.
type Lie = fn(u64, &Loads) -> Loads;

#[derive(Default)]
struct ClaimProxy {
    ledger: InFlight,
    clients: usize,
    heard: Loads,
    running: Vec<RunningClaim>,
}

struct RunningClaim {
    ticket: InFlightTicket,
    slot: usize,
    sent_ms: u64,
    prefilled: bool,
}

struct ClaimFleet {
    proxies: Vec<ClaimProxy>,
    now_ms: u64,
    service_ms: u64,
    shown: [(usize, usize); ENGINES],
    scraped_next_ms: [u64; ENGINES],
    /// The time when each engine last had work; an engine is scraped often until 2 s after this
    /// time.
    busy_ms: [u64; ENGINES],
    rng: Rng,
    served: [u64; ENGINES],
    /// The largest part of an honest claim that was not counted, in requests.
    cut: u32,
}

impl ClaimFleet {
    fn new(clients: &[usize], service_ms: u64) -> Self {
        let proxies = clients.iter().map(|clients| {
            let mut proxy = ClaimProxy {
                clients: *clients,
                ..ClaimProxy::default()
            };
            let present: Vec<EndpointRef> = (0..ENGINES).map(engine).collect();
            proxy.ledger.others_mut().start(&present);
            proxy
        });
        Self {
            proxies: proxies.collect(),
            now_ms: 1_000,
            service_ms,
            shown: [(0, 0); ENGINES],
            scraped_next_ms: [0; ENGINES],
            busy_ms: [0; ENGINES],
            rng: Rng::seeded(1),
            served: [0; ENGINES],
            cut: 0,
        }
    }

    fn us(&self) -> u64 {
        self.now_ms * 1_000
    }

    /// Lets `ms` pass. Reports arrive every 5 ms, engines are scraped every 100 ms (every second if
    /// they have been idle for 2 s), and metrics arrive every 250 ms.
    fn run(&mut self, ms: u64, lie: Option<Lie>) {
        for _ in 0..ms / 5 {
            self.now_ms += 5;
            self.serve();
            self.report(lie);
            for slot in 0..ENGINES {
                if self.now_ms >= self.scraped_next_ms[slot] {
                    let waiting = self.at(slot).filter(|running| !running.prefilled);
                    self.shown[slot] = (self.at(slot).count(), waiting.count());
                    let is_busy = self.now_ms < self.busy_ms[slot] + 2_000;
                    let interval_ms = if is_busy { 100 } else { 1_000 };
                    let chance = 0.9 + 0.2 * self.rng.open01();
                    self.scraped_next_ms[slot] = self.now_ms + (interval_ms as f32 * chance) as u64;
                }
            }
            if self.now_ms.is_multiple_of(250) {
                self.judge();
            }
            self.pick();
        }
    }

    fn at(&self, slot: usize) -> impl Iterator<Item = &RunningClaim> {
        let running = self.proxies.iter().flat_map(|proxy| &proxy.running);
        running.filter(move |running| running.slot == slot)
    }

    fn serve(&mut self) {
        for proxy in &mut self.proxies {
            for running in &mut proxy.running {
                if !running.prefilled && self.now_ms >= running.sent_ms + PREFILL_MS {
                    running.prefilled = true;
                    proxy.ledger.first_token(&mut running.ticket, PROMPT);
                }
            }
            for at in (0..proxy.running.len()).rev() {
                let service_ms = self.service_ms + 37 * (at as u64 % 5);
                if self.now_ms >= proxy.running[at].sent_ms + service_ms {
                    proxy.ledger.release(proxy.running.swap_remove(at).ticket);
                }
            }
        }
    }

    fn report(&mut self, lie: Option<Lie>) {
        let own: Vec<Loads> = self
            .proxies
            .iter()
            .map(|proxy| std::array::from_fn(|slot| proxy.ledger.own(engine(slot))))
            .collect();
        let now_us = self.us();
        for (me, proxy) in self.proxies.iter_mut().enumerate() {
            let others = own.iter().enumerate().filter(|(other, _)| *other != me);
            let mut claims = others.fold(Loads::default(), |sum, (_, loads)| {
                std::array::from_fn(|slot| sum[slot].with(loads[slot]))
            });
            let honest = claims;
            if let Some(lie) = lie {
                let lies = lie(self.now_ms, &claims);
                claims = std::array::from_fn(|slot| claims[slot].with(lies[slot]));
            }
            for slot in 0..ENGINES {
                let others = proxy.ledger.others_mut();
                others.claim(engine(slot), &proxy.heard[slot], &claims[slot], now_us);
                if lie.is_none() {
                    self.cut = self.cut.max(
                        honest[slot]
                            .requests
                            .saturating_sub(others.requests(engine(slot))),
                    );
                }
            }
            proxy.heard = claims;
        }
    }

    fn judge(&mut self) {
        let now_us = self.us();
        for (slot, (shown, waiting)) in self.shown.into_iter().enumerate() {
            let metrics = EndpointMetrics {
                running_requests: Some((shown - waiting) as f32),
                queue_depth: Some(waiting as f32),
                ..EndpointMetrics::default()
            };
            for proxy in &mut self.proxies {
                proxy
                    .ledger
                    .judge_claims(engine(slot), &metrics, PATIENCE_US, now_us);
            }
        }
    }

    /// Lets each client without a request send a request to the engine that seems least busy.
    fn pick(&mut self) {
        for proxy in &mut self.proxies {
            while proxy.running.len() < proxy.clients {
                let cost = |slot: &usize| {
                    let at = engine(*slot);
                    let load = proxy.ledger.load(at);
                    let busy = 1_000 * u64::from(load.requests) + load.prefills.uncached_tokens;
                    (busy, proxy.ledger.last_pick(at))
                };
                let slot = (0..ENGINES).min_by_key(cost).unwrap();
                self.served[slot] += 1;
                self.busy_ms[slot] = self.now_ms;
                proxy.running.push(RunningClaim {
                    ticket: proxy.ledger.admit(engine(slot), PROMPT),
                    slot,
                    sent_ms: self.now_ms,
                    prefilled: false,
                });
            }
        }
    }

    /// Returns the largest number of requests that an engine has got since the last call, as a
    /// multiple of the mean.
    fn largest_share(&mut self) -> f64 {
        let served = std::mem::take(&mut self.served);
        let most = *served.iter().max().unwrap();
        most as f64 * ENGINES as f64 / served.iter().sum::<u64>().max(1) as f64
    }
}

fn busy(requests: u32, tokens: u64) -> EndpointLoad {
    EndpointLoad {
        requests,
        prefill_tokens: tokens,
        decode_tokens: tokens,
        prefills: PendingPrefills {
            prompts: requests,
            prompt_tokens: tokens,
            uncached_tokens: tokens,
            attention: tokens,
        },
        ..EndpointLoad::default()
    }
}

fn at_three(load: EndpointLoad) -> Loads {
    [load, load, load, EndpointLoad::default()]
}

const LARGEST: u64 = 0xffff_ffff;

const LIES: [(&str, Lie); 8] = [
    ("the largest numbers", |_, _| {
        at_three(busy(0xffff, LARGEST))
    }),
    ("one request of the largest prompt", |_, _| {
        at_three(busy(1, LARGEST))
    }),
    ("tokens without a request", |_, _| {
        at_three(busy(0, LARGEST))
    }),
    ("twenty requests", |_, _| at_three(busy(20, 20_000))),
    ("one request", |_, _| at_three(busy(1, 1_000))),
    ("what the others report, again", |_, others| {
        [others[0], others[1], others[2], EndpointLoad::default()]
    }),
    ("a report of long ago, again and again", |ms, _| {
        at_three(busy(if ms < 3_200 { 0 } else { 30 }, 30_000))
    }),
    ("nothing", |_, _| Loads::default()),
];

#[test]
fn a_lie_steers_traffic_for_seconds_and_not_for_good() {
    for (what, lie) in LIES {
        for clients in [[1, 0, 0], [2, 2, 2], [20, 0, 0], [20, 20, 20], [60, 6, 0]] {
            let mut fleet = ClaimFleet::new(&clients, 600);
            fleet.run(2_000, None);
            fleet.run(6_000, Some(lie));
            fleet.largest_share();
            fleet.run(10_000, Some(lie));
            let share = fleet.largest_share();
            assert!(share <= 1.5, "{what}, {clients:?}: {share:.2} of the mean");
        }
    }
}

#[test]
fn lies_that_come_and_go_steer_a_part_of_the_traffic() {
    let lies: [(&str, Lie); 4] = [
        ("a burst before three requests", |ms, _| {
            // The first burst is the beginning of the lie.
            let is_burst = (ms + 4_000) % 10_000 < 30;
            at_three(busy(if is_burst { 0xffff } else { 3 }, 3_000))
        }),
        ("3 s of each 20", |ms, _| {
            at_three(busy(
                if ms % 20_000 < 3_000 { 0xffff } else { 0 },
                LARGEST * u64::from(ms % 20_000 < 3_000),
            ))
        }),
        ("every other 50 ms", |ms, _| {
            at_three(busy(if ms % 100 < 50 { 0xffff } else { 0 }, 0))
        }),
        ("not when metrics arrive", |ms, _| {
            at_three(busy(if (ms + 20) % 250 < 40 { 0 } else { 0xffff }, 0))
        }),
    ];
    for (what, lie) in lies {
        for clients in [[2, 2, 2], [20, 20, 20]] {
            let mut fleet = ClaimFleet::new(&clients, 600);
            fleet.run(5_000, None);
            fleet.largest_share();
            fleet.run(60_000, Some(lie));
            let share = fleet.largest_share();
            assert!(share <= 1.6, "{what}, {clients:?}: {share:.2} of the mean");
        }
    }
}

#[test]
fn a_burst_of_another_proxy_counts_in_full_before_a_scrape_shows_it() {
    let mut fleet = ClaimFleet::new(&[1, 0], 600);
    fleet.run(5_000, None);
    for clients in [64, 0, 256, 1_000, 3] {
        fleet.proxies[1].clients = clients;
        fleet.run(3_000, None);
        assert_eq!(fleet.cut, 0, "{clients} clients");
    }
}

#[test]
fn honest_claims_are_never_cut_however_unequal_the_proxies() {
    for clients in [[90, 10, 0], [1, 1, 1], [1, 0, 30], [9, 1, 1], [50, 50, 50]] {
        for service_ms in [30, 200, 1_000, 7_000] {
            let mut fleet = ClaimFleet::new(&clients, service_ms);
            fleet.run(20_000, None);
            assert_eq!(fleet.cut, 0, "{clients:?}, {service_ms} ms");
        }
    }
}

#[test]
fn half_a_minute_after_a_lie_all_counts_in_full_again() {
    for (what, lie) in LIES {
        let mut fleet = ClaimFleet::new(&[5, 5], 600);
        fleet.run(15_000, Some(lie));
        fleet.run(30_000, None);
        fleet.cut = 0;
        fleet.proxies[1].clients = 64 * ENGINES;
        fleet.run(2_000, None);
        assert_eq!(fleet.cut, 0, "{what}");
    }
}

#[test]
fn what_no_scrape_shows_is_not_judged() {
    let mut claim = OutsideClaim::default();
    for step in 1..200 {
        claim.update(|claim| *claim = busy(500, LARGEST), step * 250_000);
        claim.judge(None, 0, PATIENCE_US, step * 250_000);
    }
    assert_eq!(*claim.counted(), busy(500, LARGEST), "unknown is not idle");
    let shows = |requests| {
        Some(ShownLoad {
            requests,
            waiting: 0.0,
            tokens: 100.0,
        })
    };
    for step in 200..400 {
        claim.judge(shows(0.0), 9, PATIENCE_US, step * 250_000);
    }
    assert!(
        claim.counted().requests > 0,
        "a scrape that does not show the own requests proves nothing"
    );
    for step in 400..440 {
        claim.judge(shows(0.0), 0, PATIENCE_US, step * 250_000);
    }
    assert_eq!(
        *claim.counted(),
        EndpointLoad::default(),
        "an idle endpoint"
    );
    claim.judge(None, 0, PATIENCE_US, 441 * 250_000);
    assert_eq!(
        *claim.counted(),
        EndpointLoad::default(),
        "absent is not forgotten"
    );
}

proptest! {
    /// Checks for random claims and scrapes that no more load is counted than is claimed, and that
    /// in the end a claim counts at most as a few times the load that the endpoint shows.
    #[test]
    fn a_claim_counts_within_what_is_shown(
        claims in prop::collection::vec((0..70_000_u32, any::<u32>(), 0..60_u64), 1..40),
        shown in prop::sample::select(vec![0.0_f32, 1.0, 7.5, 300.0, 1e9, f32::INFINITY]),
        own in 0..40_u32,
    ) {
        let mut claim = OutsideClaim::default();
        let shown = ShownLoad { requests: shown, waiting: shown / 3.0, tokens: 500.0 };
        let mut now_us = 0;
        for (requests, tokens, pause) in claims.into_iter().cycle().take(60) {
            let is = busy(requests, u64::from(tokens));
            claim.update(|claim| *claim = is, now_us);
            for _ in 0..=pause / 30 {
                now_us += 100_000;
                claim.judge(Some(shown), own, PATIENCE_US, now_us);
                let counted = claim.counted();
                prop_assert!(counted.requests <= is.requests);
                prop_assert!(counted.prefill_tokens <= is.prefill_tokens);
                prop_assert!(counted.prefills.attention <= is.prefills.attention);
                prop_assert!(counted.requests as f32 <= TIMES_SHOWN * shown.requests + UNSEEN_MAX);
            }
        }
    }
}
