//! Compares two routers by the requests of the sessions that both served. The figures are means and
//! percentiles, and their ratios with intervals of 95 %.
//!
//! The interval is a bootstrap over the sessions of all seeds. Sessions are drawn with replacement,
//! and each drawn session counts for both routers. So the differences between sessions, which
//! exceed those between routers, cancel out. (Efron and Tibshirani, An Introduction to the
//! Bootstrap, 1993, chapters 8 and 13.)

use std::collections::BTreeMap;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::record::{RequestRecord, RunRecord};

/// The number of draws of the bootstrap. With so many draws, the ends of an interval of 95 % vary
/// by a tenth of the interval's width.
const DRAWS: usize = 1_000;
/// The seed of the bootstrap's draws. The seed is fixed, so that printing a page twice gives the
/// same result.
const SEED: u64 = 1;

/// A figure that is computed from a set of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RaceFigure {
    /// The mean time from the request until the last byte.
    EndToEndMean,
    /// The mean time from the request until the first token.
    FirstTokenMean,
    /// The 99th percentile of the time from the request until the first token.
    FirstTokenP99,
    /// The mean time between two tokens of a reply.
    PerTokenMean,
    /// The 99th percentile of the time between two tokens of a reply.
    PerTokenP99,
}

/// The part of a run's requests that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachePhase {
    /// The requests of sessions that arrived in the first quarter of the arrivals.
    Cold,
    /// The requests of all other sessions.
    Warm,
}

/// The ratio of Switchpoint's figure to another router's, with an interval of 95 %.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterRatio {
    pub ratio: f64,
    pub low: f64,
    pub high: f64,
}

/// The result of comparing Switchpoint with another router by one figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RaceVerdict {
    Faster,
    /// The interval contains 1, or the difference is not larger than between two runs of the same
    /// router.
    Equal,
    Slower,
}

/// The requests of one session at each router.
#[derive(Debug, Default)]
struct SessionPair<'a> {
    ours: Vec<&'a RequestRecord>,
    theirs: Vec<&'a RequestRecord>,
}

// === impl CachePhase ===

impl CachePhase {
    /// Returns the requests of a run that belong to this phase.
    pub fn requests<'a>(
        self,
        run: &'a RunRecord,
    ) -> impl Iterator<Item = &'a RequestRecord> + use<'a> {
        run.requests
            .iter()
            .filter(move |request| request.cold == (self == Self::Cold))
    }
}

// === impl RaceFigure ===

impl RaceFigure {
    pub const ALL: [Self; 5] = [
        Self::EndToEndMean,
        Self::FirstTokenMean,
        Self::FirstTokenP99,
        Self::PerTokenMean,
        Self::PerTokenP99,
    ];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::EndToEndMean => "end to end",
            Self::FirstTokenMean => "TTFT mean",
            Self::FirstTokenP99 => "TTFT p99",
            Self::PerTokenMean => "TPOT mean",
            Self::PerTokenP99 => "TPOT p99",
        }
    }

    /// Returns the figure of these requests, in ms, or NaN without requests.
    pub fn compute<'a>(self, requests: impl Iterator<Item = &'a RequestRecord>) -> f64 {
        match self {
            Self::EndToEndMean => mean(requests.map(|request| request.e2e_ms)),
            Self::FirstTokenMean => mean(requests.map(|request| request.ttft_ms)),
            Self::FirstTokenP99 => {
                percentile(requests.map(|request| request.ttft_ms).collect(), 0.99)
            }
            Self::PerTokenMean => mean(requests.filter_map(|request| request.tpot_ms)),
            Self::PerTokenP99 => percentile(
                requests.filter_map(|request| request.tpot_ms).collect(),
                0.99,
            ),
        }
    }

    /// Returns the ratio of this figure in the runs `ours` to this figure in the runs `theirs`. The
    /// ratio is below 1 if `ours` are faster. Compares only the sessions that are in both, and
    /// returns `None` if no session is in both.
    #[must_use]
    pub fn ratio(
        self,
        row: CachePhase,
        ours: &[&RunRecord],
        theirs: &[&RunRecord],
    ) -> Option<RouterRatio> {
        let pairs = pairs(row, ours, theirs);
        if pairs.is_empty() {
            return None;
        }
        let figure = |chosen: &[&SessionPair<'_>]| {
            self.compute(chosen.iter().flat_map(|pair| pair.ours.iter().copied()))
                / self.compute(chosen.iter().flat_map(|pair| pair.theirs.iter().copied()))
        };
        let mut rng = SmallRng::seed_from_u64(SEED);
        let all: Vec<&SessionPair<'_>> = pairs.iter().collect();
        let mut draws: Vec<f64> = (0..DRAWS)
            .map(|_| {
                figure(
                    &all.iter()
                        .filter_map(|_| all.get(rng.random_range(0..all.len())).copied())
                        .collect::<Vec<_>>(),
                )
            })
            .collect();
        draws.sort_by(f64::total_cmp);
        let at = |share: f64| {
            draws
                .get((share * (DRAWS - 1) as f64).round() as usize)
                .copied()
                .unwrap_or(f64::NAN)
        };
        Some(RouterRatio {
            ratio: figure(&all),
            low: at(0.025),
            high: at(0.975),
        })
    }
}

/// Returns the sessions that are in the runs of both routers, by seed and session number.
fn pairs<'a>(
    row: CachePhase,
    ours: &[&'a RunRecord],
    theirs: &[&'a RunRecord],
) -> Vec<SessionPair<'a>> {
    let mut pairs = BTreeMap::<(u64, u32), SessionPair<'a>>::new();
    for run in ours {
        row.requests(run).for_each(|request| {
            pairs
                .entry((run.seed, request.session))
                .or_default()
                .ours
                .push(request);
        });
    }
    for run in theirs {
        row.requests(run).for_each(|request| {
            pairs
                .entry((run.seed, request.session))
                .or_default()
                .theirs
                .push(request);
        });
    }
    pairs
        .into_values()
        .filter(|pair| !pair.ours.is_empty() && !pair.theirs.is_empty())
        .collect()
}

// === impl RouterRatio ===

impl RouterRatio {
    /// Judges the ratio. `same` is the ratio of Switchpoint to itself (A against A), if a second
    /// run measured it. The routers differ if the interval excludes 1, and if the ratio is also
    /// further from 1 than both ends of the interval of A against A.
    #[must_use]
    pub fn verdict(self, same: Option<Self>) -> RaceVerdict {
        let noise = same.map_or(0.0, |same| same.low.ln().abs().max(same.high.ln().abs()));
        if (self.low..=self.high).contains(&1.0) || self.ratio.ln().abs() <= noise {
            RaceVerdict::Equal
        } else if self.ratio < 1.0 {
            RaceVerdict::Faster
        } else {
            RaceVerdict::Slower
        }
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    sum / count
}

/// Returns the percentile `share` (0 to 1) of the values by nearest rank, or NaN without values.
#[must_use]
pub fn percentile(mut values: Vec<f64>, share: f64) -> f64 {
    let rank = (share * values.len() as f64).ceil() as usize;
    let at = rank.saturating_sub(1).min(values.len().saturating_sub(1));
    if values.is_empty() {
        return f64::NAN;
    }
    *values.select_nth_unstable_by(at, f64::total_cmp).1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::RequestTokens;

    /// Returns a run of 60 sessions of four requests. The base times of the sessions differ by up
    /// to a factor of ten, as with real sessions. `change` computes a request's time from the base
    /// time and the request's number.
    fn run(router: &str, change: impl Fn(f64, u32) -> f64) -> RunRecord {
        let request = |number: u32| {
            let base = 100.0 * (1.0 + f64::from(number / 4 % 10));
            RequestRecord {
                session: number / 4,
                turn: number % 4,
                cold: number < 60,
                class: "interactive".into(),
                sent_ms: 0.0,
                late_ms: 0.0,
                ttft_ms: change(base, number) / 10.0,
                e2e_ms: change(base, number),
                tpot_ms: Some(20.0),
                tokens: RequestTokens {
                    prompt: 1,
                    cached: 0,
                    output: 2,
                },
                failure: None,
            }
        };
        let cell = "cell".into();
        let router = router.into();
        let version = String::new();
        let requests = (0..240).map(request).collect();
        RunRecord {
            cell,
            seed: 1,
            router,
            version,
            side_by_side: 1,
            arrivals_s: 1.0,
            requests,
            engines: Vec::new(),
        }
    }

    /// Returns the base time with noise of ±3 %, which depends on the request's number and `salt`.
    fn noisy(base: f64, number: u32, salt: u32) -> f64 {
        base * (0.97 + 0.06 * f64::from((number * 7 + salt * 13) % 11) / 10.0)
    }

    #[test]
    fn a_router_is_equal_to_itself() {
        let [one, other] =
            [1, 2].map(|salt| run("ours", move |base, number| noisy(base, number, salt)));
        let ratio = RaceFigure::EndToEndMean
            .ratio(CachePhase::Warm, &[&one], &[&other])
            .expect("pairs");
        assert_eq!(ratio.verdict(None), RaceVerdict::Equal, "{ratio:?}");
    }

    #[test]
    fn a_router_that_adds_20_ms_is_seen_although_sessions_differ_tenfold() {
        let [one, again] =
            [1, 2].map(|salt| run("ours", move |base, number| noisy(base, number, salt)));
        let slower = run("slower", |base, number| noisy(base, number, 3) + 20.0);
        let same = RaceFigure::EndToEndMean.ratio(CachePhase::Warm, &[&one], &[&again]);
        let ratio = RaceFigure::EndToEndMean
            .ratio(CachePhase::Warm, &[&one], &[&slower])
            .expect("pairs");
        assert_eq!(ratio.verdict(same), RaceVerdict::Faster, "{ratio:?}");
        let back = RaceFigure::EndToEndMean
            .ratio(CachePhase::Warm, &[&slower], &[&one])
            .expect("pairs");
        assert_eq!(back.verdict(same), RaceVerdict::Slower);
    }

    #[test]
    fn a_router_that_drops_requests_is_seen_in_the_mean() {
        let one = run("ours", |base, number| noisy(base, number, 1));
        let dropping = run(
            "dropping",
            |base, number| if number % 20 == 0 { 60_000.0 } else { base },
        );
        let ratio = RaceFigure::EndToEndMean
            .ratio(CachePhase::Warm, &[&one], &[&dropping])
            .expect("pairs");
        assert!(
            ratio.verdict(None) == RaceVerdict::Faster && ratio.ratio < 0.5,
            "{ratio:?}"
        );
    }

    #[test]
    fn rows_are_told_apart_and_only_common_sessions_count() {
        let mut one = run("ours", |base, _| base);
        let other = run("other", |base, _| base);
        assert_eq!(
            CachePhase::Cold.requests(&one).count() + CachePhase::Warm.requests(&one).count(),
            240
        );
        one.requests.retain(|request| request.session % 10 != 9);
        let ratio = RaceFigure::EndToEndMean
            .ratio(CachePhase::Warm, &[&one], &[&other])
            .expect("pairs");
        assert!((ratio.ratio - 1.0).abs() < 1e-9, "{ratio:?}");
        one.requests.clear();
        assert_eq!(
            RaceFigure::EndToEndMean.ratio(CachePhase::Warm, &[&one], &[&other]),
            None
        );
    }

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(
            [0.5, 0.99, 1.0].map(|share| percentile(values.clone(), share)),
            [50.0, 99.0, 100.0]
        );
        assert!(percentile(Vec::new(), 0.5).is_nan());
    }
}
