//! Computes how many replicas a steady load needs so that its requests rarely wait.

/// The share of requests that may wait longer than the SLO's wait.
const LATE_SHARE: f64 = 0.05;

/// The maximum utilization of the replicas in a large group. Full replicas have no room for bursts.
pub(super) const UTILIZATION_MAX: f64 = 0.95;

/// Returns the number of replicas with which at most [`LATE_SHARE`] of the requests wait longer
/// than `wait_s`, if the requests keep `busy` replicas busy. One request keeps a replica busy for
/// `request_s`. The result is at least `busy / 0.95`.
///
/// Replicas that share a picker are the servers of one M/M/N queue, in which
/// `P(wait > w) = C exp(-(N - d) w / s)` with demand `d`. The probability that a request waits at
/// all is `C = 1 / (1 + b Φ(b) / φ(b))` for `N = d + b sqrt(d)`: Halfin and Whitt, "Heavy-Traffic
/// Limits for Queues with Many Exponential Servers", Operations Research 29(3), 1981. Unlike
/// Erlang's formula it holds between whole numbers of replicas. Rounded up, the result is Erlang's
/// number, or one less if the wait is short compared with a request.
#[must_use]
pub fn staffed(busy: f64, wait_s: f64, request_s: f64) -> f64 {
    /// The largest `b` that the formula of this function needs. With this `b`, fewer than
    /// [`LATE_SHARE`] of the requests wait at all.
    const DEVIATIONS_MAX: f64 = 2.0;
    /// The number of bisections of the range: enough for all digits of a float.
    const BISECTIONS: usize = 50;
    let least = busy / UTILIZATION_MAX;
    let mut low = busy;
    let mut high = busy + DEVIATIONS_MAX * busy.sqrt();
    if high <= least || request_s <= 0.0 {
        return least;
    }
    for _ in 0..BISECTIONS {
        let middle = f64::midpoint(low, high);
        let late =
            waits((middle - busy) / busy.sqrt()) * libm::exp(-(middle - busy) * wait_s / request_s);
        (low, high) = if late > LATE_SHARE {
            (middle, high)
        } else {
            (low, middle)
        };
    }
    high.max(least)
}

/// Returns the probability `C` that a request waits at all. `deviations` is the `b` of the formula.
fn waits(deviations: f64) -> f64 {
    let density = libm::exp(-deviations * deviations / 2.0) / (2.0 * std::f64::consts::PI).sqrt();
    let below = f64::midpoint(1.0, libm::erf(deviations / std::f64::consts::SQRT_2));
    1.0 / (1.0 + deviations * below / density)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the probability that a request waits longer than `wait_s`, by Erlang's formula C.
    fn late(busy: f64, replicas: u32, wait_s: f64, request_s: f64) -> f64 {
        let blocked = (1..=replicas).fold(1.0, |blocked, n| {
            busy * blocked / (f64::from(n) + busy * blocked)
        });
        let replicas = f64::from(replicas);
        replicas * blocked / (replicas - busy * (1.0 - blocked))
            * libm::exp(-(replicas - busy) * wait_s / request_s)
    }

    #[test]
    fn rounded_up_it_is_the_number_of_erlang_or_one_less() {
        let mut differ = [0, 0];
        for hundredths in 1..=2_000 {
            let busy = f64::from(hundredths) / 100.0;
            for (at, wait_s) in [(0, 0.0), (0, 0.1), (1, 1.0), (1, 3.0)] {
                let enough = |replicas: &u32| {
                    f64::from(*replicas) >= (busy / UTILIZATION_MAX).max(busy + 1e-9)
                        && late(busy, *replicas, wait_s, 0.5) <= LATE_SHARE
                };
                let expected = f64::from((1..).find(enough).unwrap());
                let found = (staffed(busy, wait_s, 0.5) - 1e-9).ceil();
                assert!(
                    found == expected || found == expected - 1.0,
                    "{found}, not {expected}, for {busy} and {wait_s} s"
                );
                differ[at] += u32::from(found < expected);
            }
        }
        assert!(
            differ[1] < 4_000 / 20,
            "one in 20 differs where the wait is longer than a request: {differ:?}"
        );
    }

    #[test]
    fn large_groups_may_be_busier_and_none_is_full() {
        let used = [0.5, 1.0, 5.0, 50.0, 1e3, 1e15].map(|busy| busy / staffed(busy, 1.0, 0.5));
        assert!(
            used.is_sorted_by(|a, b| *a <= b + 1e-9) && used[1] < 0.6 && used[5] == UTILIZATION_MAX,
            "{used:?}"
        );
        assert_eq!([staffed(0.0, 1.0, 0.5), staffed(1.9, 1.0, 0.0)], [0.0, 2.0]);
    }

    proptest! {
        #[test]
        fn more_demand_and_a_shorter_wait_need_more_replicas(
            (busy, more) in (0.0..2e3, 0.0..10.0),
            (wait_s, longer_s) in (0.0..10.0, 0.0..10.0),
            request_s in 0.0..10.0,
        ) {
            let found = staffed(busy, wait_s, request_s);
            prop_assert!(found >= busy && found.is_finite());
            prop_assert!(staffed(busy + more, wait_s, request_s) >= found * (1.0 - 1e-9));
            prop_assert!(staffed(busy, wait_s + longer_s, request_s) <= found * (1.0 + 1e-9));
        }
    }
}
