//! The recent answers of an endpoint.

use scheduler::Timestamp;

/// The window of an endpoint's failure rate, in ms. The window is long enough for some answers at
/// one request a second, and short enough to forget old answers.
pub(super) const WINDOW_MS: u64 = 10_000;

/// An endpoint may fail this many times as often as the others, because endpoints never fail
/// equally often.
pub(super) const TIMES_OTHERS: f32 = 2.0;

/// The counts of an endpoint's answers in the current half of the window and in the half before it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AnswerWindow {
    half: u64,
    now: AnswerCounts,
    before: AnswerCounts,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AnswerCounts {
    pub(super) good: f32,
    pub(super) bad: f32,
    /// The bad answers to clients without a recent success. `bad` includes them.
    pub(super) outsiders: f32,
}

// === impl AnswerWindow ===

impl AnswerWindow {
    pub(super) fn counts_at(&mut self, now: Timestamp) -> &mut AnswerCounts {
        let half = now.ms_since(Timestamp(0)) / (WINDOW_MS / 2);
        if half != self.half {
            self.before = if half == self.half + 1 {
                self.now
            } else {
                AnswerCounts::default()
            };
            self.now = AnswerCounts::default();
            self.half = half;
        }
        &mut self.now
    }

    pub(super) fn answers(&self, now: Timestamp) -> AnswerCounts {
        let mut window = *self;
        let now = *window.counts_at(now);
        AnswerCounts {
            good: now.good + window.before.good,
            bad: now.bad + window.before.bad,
            outsiders: now.outsiders + window.before.outsiders,
        }
    }
}

// === impl AnswerCounts ===

impl AnswerCounts {
    pub(super) fn count(self) -> f32 {
        self.good + self.bad
    }

    /// The share of the answers that are failures.
    pub(super) fn failure_rate(self) -> f32 {
        if self.count() > 0.0 {
            self.bad / self.count()
        } else {
            0.0
        }
    }

    /// The number of failures beyond [`TIMES_OTHERS`] times the number that the failure rate of
    /// `others` predicts.
    pub(super) fn excess_over(self, others: Self) -> f32 {
        self.bad - TIMES_OTHERS * self.count() * others.failure_rate()
    }
}
