//! Computes the mean of the requests that arrive, from counters that only grow.

use std::collections::VecDeque;

use super::{RequestMix, known};

/// The maximum number of samples kept: one each second for longer than [`TrafficWindow::LONG_S`].
const SAMPLES_MAX: usize = 128;

/// Counts of requests and tokens since a fixed start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TrafficTotals {
    pub picked: f64,
    /// The number of requests that ended with a reported usage.
    pub ended: f64,
    pub prompt_tokens: f64,
    /// The number of cached prompt tokens of the ended requests.
    pub cached_tokens: f64,
    pub output_tokens: f64,
}

/// The counts of the last minute.
#[derive(Clone, Debug, Default)]
pub struct TrafficWindow {
    /// The counts with their time in seconds, oldest first.
    samples: VecDeque<(f64, TrafficTotals)>,
}

// === impl TrafficWindow ===

impl TrafficWindow {
    /// The length of the window for means, in seconds. Enough requests arrive in this time that
    /// their lengths average out.
    pub const LONG_S: f64 = 60.0;

    /// The length of the window that notices a burst, in seconds.
    pub const SHORT_S: f64 = 20.0;

    /// The minimum number of ended requests in the window for a mean. With fewer requests, the mean
    /// is over all requests since the start.
    const ENDED_MIN: f64 = 20.0;

    /// Adds the counts at a time, in seconds. Ignores a time that is not later than the last
    /// recorded time.
    pub fn record(&mut self, at_s: f64, totals: TrafficTotals) {
        if self.samples.back().is_some_and(|(last, _)| at_s <= *last) || !at_s.is_finite() {
            return;
        }
        self.samples.push_back((at_s, totals));
        // The oldest sample that is kept is the last sample before the window.
        while self.samples.len() > SAMPLES_MAX
            || self
                .samples
                .get(1)
                .is_some_and(|(second, _)| at_s - second >= Self::LONG_S)
        {
            self.samples.pop_front();
        }
    }

    /// Returns the mean of the requests in the window. The rate is the higher of two rates: over
    /// the whole window, and over the newest part of the window. `output_tokens` is the mean output
    /// if no request has ended yet.
    pub fn mix(&self, output_tokens: f64) -> RequestMix {
        let Some((_, newest)) = self.samples.back() else {
            return RequestMix {
                output_tokens,
                ..RequestMix::default()
            };
        };
        let oldest = self.samples.front().map_or(*newest, |(_, oldest)| *oldest);
        let recent = newest.ended - oldest.ended >= Self::ENDED_MIN;
        let since = if recent {
            oldest
        } else {
            TrafficTotals::default()
        };
        let ended = known(newest.ended - since.ended);
        let mean = |of: fn(&TrafficTotals) -> f64| known(of(newest) - of(&since)) / ended.max(1.0);
        let prompt_tokens = mean(|totals| totals.prompt_tokens);
        RequestMix {
            per_second: self.rate(Self::LONG_S).max(self.rate(Self::SHORT_S)),
            prompt_tokens,
            uncached_tokens: known(prompt_tokens - mean(|totals| totals.cached_tokens)),
            output_tokens: if ended > 0.0 {
                mean(|totals| totals.output_tokens)
            } else {
                output_tokens
            },
        }
    }

    /// Returns whether the samples cover a time that is long enough to notice arrivals.
    pub fn is_measured(&self) -> bool {
        self.samples
            .front()
            .zip(self.samples.back())
            .is_some_and(|((first, _), (last, _))| last - first >= Self::SHORT_S)
    }

    /// Returns the requests picked per second, over the samples of the last `seconds`.
    fn rate(&self, seconds: f64) -> f64 {
        let Some((now, newest)) = self.samples.back() else {
            return 0.0;
        };
        let Some((then, oldest)) = self
            .samples
            .iter()
            .rev()
            .find(|(at, _)| now - at >= seconds)
            .or(self.samples.front())
        else {
            return 0.0;
        };
        known((newest.picked - oldest.picked) / (now - then).max(f64::MIN_POSITIVE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(requests: f64) -> TrafficTotals {
        let tokens = |each: f64| requests * each;
        TrafficTotals {
            picked: requests,
            ended: requests,
            prompt_tokens: tokens(1_000.0),
            cached_tokens: tokens(250.0),
            output_tokens: tokens(80.0),
        }
    }

    #[test]
    fn the_mean_of_the_last_minute_and_the_rate_of_a_burst() {
        let mut window = TrafficWindow::default();
        assert_eq!(
            window.mix(200.0),
            RequestMix {
                output_tokens: 200.0,
                ..RequestMix::default()
            }
        );
        window.record(0.0, TrafficTotals::default());
        assert_eq!(
            window.mix(200.0),
            RequestMix {
                output_tokens: 200.0,
                ..RequestMix::default()
            }
        );
        assert!(!window.is_measured());
        let mut requests = 0.0;
        for second in 1..=300 {
            requests += if second > 280 { 50.0 } else { 10.0 };
            window.record(f64::from(second), totals(requests));
        }
        assert!(window.is_measured());
        let found = window.mix(200.0);
        assert_eq!(
            found,
            RequestMix {
                per_second: 50.0,
                prompt_tokens: 1_000.0,
                uncached_tokens: 750.0,
                output_tokens: 80.0
            }
        );
        (301..=341).for_each(|second| window.record(f64::from(second), totals(requests)));
        let found = window.mix(200.0).per_second;
        assert!(
            (found - 1_000.0 / 60.0).abs() < 1.0,
            "the burst is over, but in the window: {found}"
        );
        (342..=420).for_each(|second| window.record(f64::from(second), totals(requests)));
        assert_eq!(
            window.mix(200.0),
            RequestMix {
                per_second: 0.0,
                ..window.mix(0.0)
            }
        );
        assert_eq!(
            window.mix(200.0).prompt_tokens,
            1_000.0,
            "the means of all requests stay"
        );
    }

    #[test]
    fn counts_that_fall_and_times_that_go_back_do_no_harm() {
        let mut window = TrafficWindow::default();
        for (at, requests) in [
            (5.0, 100.0),
            (6.0, 50.0),
            (6.0, 1e9),
            (4.0, 1e9),
            (f64::NAN, 1e9),
        ] {
            window.record(at, totals(requests));
        }
        assert_eq!(window.mix(1.0).per_second, 0.0);
        (0..10_000).for_each(|at| window.record(10.0 + f64::from(at) / 100.0, totals(1e4)));
        assert!(window.samples.len() <= SAMPLES_MAX);
    }
}
