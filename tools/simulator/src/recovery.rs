//! The time that a policy needs in a changed pool until it is as good as in a pool that had the
//! changed state from the start.

use crate::measure::sorted;
use crate::world::RequestOutcome;

/// The window of the mean TTFT, and how long the mean has to stay near the reference before a
/// policy has recovered, s.
const WINDOW_S: usize = 20;
const HOLD_S: usize = 30;

/// The largest ratio to the reference that counts as near.
const NEAR: f64 = 1.1;

/// Seconds between the points of a curve, and its length.
pub(crate) const CURVE_S: usize = 5;
const CURVE_LENGTH_S: usize = 120;

/// For each second from the change on: the sum of the TTFT of the requests that arrived in it, and
/// the same sum in a pool that was like that from the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RecoverySeries(Vec<[f64; 2]>);

/// How far a policy was from the reference, and for how long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Recovery {
    /// From the change until the mean TTFT of a window is near the reference and stays so; `None`
    /// if that does not happen within the run.
    pub(crate) seconds: Option<u64>,
    /// The ratio of the worst window.
    pub(crate) worst: f64,
}

/// The recovery of a policy in a setting on a workload: of all seeds together, and of each seed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RecoveryResult {
    pub(crate) setting: String,
    pub(crate) workload: String,
    pub(crate) policy: String,
    pub(crate) all: Recovery,
    pub(crate) by_seed: Vec<Recovery>,
    /// The ratio of all seeds together, for the windows that begin 0, [`CURVE_S`], … seconds after
    /// the change.
    pub(crate) curve: Vec<f64>,
}

// === impl RecoverySeries ===

impl RecoverySeries {
    /// The series of two runs of the same arrivals; the pool changed at the arrival of request
    /// `change`.
    pub(crate) fn of(
        records: &[RequestOutcome],
        reference: &[RequestOutcome],
        change: usize,
    ) -> Self {
        let start = records.get(change).map_or(0.0, |record| record.at);
        let mut seconds: Vec<[f64; 2]> = Vec::new();
        for (record, reference) in records.iter().zip(reference).skip(change) {
            let second = ((record.at - start) / 1e3) as usize;
            seconds.resize(seconds.len().max(second + 1), [0.0; 2]);
            if let Some([ttft, without]) = seconds.get_mut(second) {
                *ttft += record.ttft;
                *without += reference.ttft;
            }
        }
        Self(seconds)
    }

    /// The sum of several seeds, up to the end of the shortest.
    pub(crate) fn together(seeds: &[&Self]) -> Self {
        let seconds = seeds.iter().map(|series| series.0.len()).min().unwrap_or(0);
        Self(
            (0..seconds)
                .map(|second| sum(seeds.iter().filter_map(|series| series.0.get(second))))
                .collect(),
        )
    }

    /// The ratio of each window, by the second it begins in.
    fn ratios(&self) -> Vec<f64> {
        let sums = self.0.windows(WINDOW_S).map(|window| sum(window.iter()));
        sums.map(|[ttft, without]| if without > 0.0 { ttft / without } else { 1.0 })
            .collect()
    }

    /// The ratio every few seconds, for the length of a plot.
    pub(crate) fn curve(&self) -> Vec<f64> {
        self.ratios()
            .into_iter()
            .take(CURVE_LENGTH_S + 1)
            .step_by(CURVE_S)
            .collect()
    }

    pub(crate) fn recovery(&self) -> Recovery {
        let ratios = self.ratios();
        let near: Vec<bool> = ratios.iter().map(|ratio| *ratio <= NEAR).collect();
        let seconds = near
            .windows(HOLD_S)
            .position(|held| held.iter().all(|near| *near));
        Recovery {
            seconds: seconds.map(|seconds| seconds as u64),
            worst: sorted(ratios.into_iter()).last().copied().unwrap_or(1.0),
        }
    }
}

fn sum<'s>(seconds: impl Iterator<Item = &'s [f64; 2]>) -> [f64; 2] {
    seconds.fold([0.0; 2], |[a, b], [c, d]| [a + c, b + d])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request a second, each with this TTFT, and ten requests before.
    fn records(ttft: impl Fn(usize) -> f64) -> Vec<RequestOutcome> {
        (0..110)
            .map(|at| RequestOutcome {
                at: at as f64 * 1e3,
                ttft: if at < 10 { 1e6 } else { ttft(at - 10) },
                ..RequestOutcome::default()
            })
            .collect()
    }

    fn recovery(ttft: impl Fn(usize) -> f64) -> Recovery {
        RecoverySeries::of(&records(ttft), &records(|_| 100.0), 10).recovery()
    }

    #[test]
    fn a_policy_that_was_never_off_recovers_at_once_whatever_was_before_the_change() {
        assert_eq!(
            recovery(|_| 100.0),
            Recovery {
                seconds: Some(0),
                worst: 1.0
            }
        );
        assert_eq!(
            recovery(|_| 50.0),
            Recovery {
                seconds: Some(0),
                worst: 0.5
            }
        );
    }

    #[test]
    fn a_policy_has_recovered_when_the_next_window_is_near() {
        // Twice as much for 30 s: of the window from second 28 on, two of twenty count double.
        assert_eq!(
            recovery(|second| if second < 30 { 200.0 } else { 100.0 }),
            Recovery {
                seconds: Some(28),
                worst: 2.0
            }
        );
        let curve = RecoverySeries::of(
            &records(|second| if second < 10 { 200.0 } else { 100.0 }),
            &records(|_| 100.0),
            10,
        )
        .curve();
        assert_eq!(
            curve.iter().take(4).copied().collect::<Vec<_>>(),
            [1.5, 1.25, 1.0, 1.0],
            "ten of twenty, then five"
        );
        assert_eq!(recovery(|_| 111.0).seconds, None, "not near");
        assert_eq!(recovery(|_| 109.0).seconds, Some(0), "near");
    }

    #[test]
    fn a_moment_near_the_reference_is_no_recovery() {
        // Off, near for the windows from second 18 to 28, off again.
        let back = recovery(|second| {
            if second < 20 || (48..52).contains(&second) {
                200.0
            } else {
                100.0
            }
        });
        assert_eq!(back.seconds, Some(50));
        assert_eq!(
            recovery(|second| if second == 99 { 1e9 } else { 100.0 }).seconds,
            Some(0),
            "the recovery was before that"
        );
    }

    #[test]
    fn seeds_add_up_to_the_end_of_the_shortest() {
        let of = |ttft: f64, length: usize| {
            let end = |records: Vec<RequestOutcome>| {
                records.into_iter().take(10 + length).collect::<Vec<_>>()
            };
            RecoverySeries::of(&end(records(|_| ttft)), &end(records(|_| 100.0)), 10)
        };
        let off = of(115.0, 100);
        let back = of(100.0, 60);
        assert_eq!(
            (off.recovery().seconds, back.recovery().seconds),
            (None, Some(0))
        );
        let both = RecoverySeries::together(&[&off, &back]);
        assert_eq!((both.0.len(), both.recovery().seconds), (60, Some(0)));
        assert_eq!(
            of(100.0, WINDOW_S + HOLD_S - 2).recovery().seconds,
            None,
            "too short to decide"
        );
    }
}
