//! Decides how far the observations from one origin (a proxy) are trusted, if several origins
//! observe.
//!
//! The samples from each origin form its vote on how long each endpoint takes. The learner does not
//! learn from an origin whose vote is far from the median of all votes. Two origins alone cannot
//! outvote each other. From a sample that no other origin confirms, the model learns the cost of a
//! step, which is common to all endpoints, but not the speed of the endpoint.
//!
//! If two votes alone exist and contradict each other, the prior counts as a third vote: the model
//! learns the cost only from a vote near the median of the three. Which origin sends more, or
//! observed first, does not matter, and the model does not leave the range between the prior and
//! the honest vote. Nor does it learn the cost from an origin that has too few samples to vote, and
//! contradicts the other votes.
//!
//! TTFT and TPOT have votes of their own: the model learns them only if other origins confirm them,
//! if fewer than two votes exist, or if at most two origins observe. The learner forgets everything
//! in one case: an origin whose samples were learned unconfirmed becomes silent or is outvoted, and
//! the other samples do not fit the model. If there are no other samples to compare, the learner
//! forgets only if that origin taught most of the model. A single origin is trusted completely.

use std::collections::BTreeMap;

use scheduler::EndpointRef;

/// The maximum number of origins that are remembered and that vote on an endpoint. A few proxies
/// agree on a time as well as many do.
const ORIGINS_MAX: usize = 64;
pub(crate) const VOTERS_MAX: usize = 16;

/// The time after an observation for which its origin counts as observing, and the origin's vote is
/// used, in ms.
const ACTIVE_MS: u64 = 30_000;

/// The time after which an origin counts as silent, in ms: longer than a usual pause, and short
/// enough that what the silent origin alone taught is forgotten within 30 s.
pub(crate) const SILENT_MS: u64 = 20_000;

/// The minimum time between two moments at which the learner forgets everything, in ms. Without
/// this limit, an origin with false reports could prevent the learner from learning from others.
const FORGET_INTERVAL_MS: u64 = 60_000;

/// The number of samples that a vote remembers. The number is low, so that votes follow an endpoint
/// that changes.
const VOTE_SAMPLES: f64 = 8.0;

/// The minimum number of samples in a vote that is used.
const VOTE_FROM: f64 = 4.0;

/// The maximum difference of one sample from a vote that counts, as a logarithm, because one stall
/// does not mean that the endpoint has changed.
const STEP_MAX: f64 = 2.0;

/// The maximum distance of a trusted vote from the median, as a logarithm: a factor of 1.5. The
/// noise of a vote is a quarter of this distance.
const APART_MAX: f64 = 0.405;

/// The value that replaces [`APART_MAX`] for prompts that waited: a factor of 4. How long these
/// prompts waited makes their times spread more.
const QUEUED_APART_MAX: f64 = 1.386;

/// The maximum distance between a model that fits and the median of the votes, as a logarithm:
/// twice the noise of one vote. After another origin taught the model, the votes come closer to the
/// model while the model learns from them, so half of [`APART_MAX`] is used.
const FITS_MAX: f64 = APART_MAX / 2.0;

/// The maximum number of confirmed samples from one origin at each endpoint: this multiple of the
/// samples from all other origins together, and [`MORE_SAMPLES`] more. The maximum has no effect on
/// honest origins of unequal traffic, because their samples agree.
const TIMES_OTHERS: f64 = 2.0;
const MORE_SAMPLES: f64 = 8.0;

/// The factor by which each confirmed sample reduces the counts of learned samples.
const TAUGHT_KEEP: f64 = 0.98;

/// The minimum of [`OriginRow::unconfirmed`] for which everything is forgotten.
const UNCONFIRMED_MIN: u64 = 8;

/// The time of an endpoint that a vote is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum VotedTime {
    Prefill,
    /// The prefill of a prompt that waited. Compared with all prefills.
    QueuedPrefill,
    Decode,
    Ttft,
    Tpot,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum OriginTrust {
    /// Other origins contradict the observation.
    Outvoted,
    /// Other origins contradict the observation, but too few votes exist to outvote its origin.
    Contradicted,
    /// Other origins do not confirm the observation.
    Unconfirmed,
    /// Fewer than two origins have observed this time of the endpoint often enough to compare.
    Unjudged,
    Confirmed,
}

/// How far the parts of an observation are trusted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ObservationTrust {
    /// The trust in the first token and the gap, from which the step model learns.
    pub(crate) steps: OriginTrust,
    /// The trust in the TTFT and the TPOT.
    pub(crate) times: OriginTrust,
}

/// A time that an origin observed at an endpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VotedSample {
    pub(crate) time: VotedTime,
    /// The logarithm of the observed time divided by the expected time. `None` if the observed time
    /// cannot be compared.
    pub(crate) log: Option<f64>,
    /// The logarithm of the prior's time divided by the expected time. `None` if there is no prior.
    pub(crate) prior_log: Option<f64>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct OriginVotes {
    origins: BTreeMap<u64, OriginRow>,
    votes: BTreeMap<(EndpointRef, VotedTime), Vec<Vote>>,
    forgot_at_ms: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default)]
struct OriginRow {
    /// The time of the last observation from the origin.
    at_ms: u64,
    /// The number of the origin's unconfirmed samples minus the number of its confirmed samples; at
    /// least 0.
    unconfirmed: u64,
    /// The number of the origin's samples that were learned since the learner last forgot
    /// everything.
    taught: u64,
}

#[derive(Clone, Copy, Debug)]
struct Vote {
    origin: u64,
    /// The mean logarithm of the observed times as multiples of the expected times.
    mean: f64,
    samples: f64,
    /// The number of the origin's samples that were learned recently.
    taught: f64,
    at_ms: u64,
}

// === impl VotedSample ===

impl VotedSample {
    /// Creates a sample from the logarithms of the observed time and of the prior's time.
    pub(crate) fn of_step(time: VotedTime, logs: Option<[f64; 2]>) -> Self {
        Self {
            time,
            log: logs.map(|[log, _]| log),
            prior_log: logs.map(|[_, prior_log]| prior_log),
        }
    }

    /// Creates a sample of a time for which there is no prior.
    pub(crate) fn of_request(time: VotedTime, log: Option<f64>) -> Self {
        Self {
            time,
            log,
            prior_log: None,
        }
    }
}

// === impl VotedTime ===

impl VotedTime {
    /// Returns the maximum distance of a trusted vote from the median, as a logarithm.
    fn apart_max(self) -> f64 {
        match self {
            Self::QueuedPrefill => QUEUED_APART_MAX,
            Self::Prefill | Self::Decode | Self::Ttft | Self::Tpot => APART_MAX,
        }
    }
}

// === impl OriginVotes ===

impl OriginVotes {
    /// Records that an observation from `origin` arrived.
    pub(crate) fn note(&mut self, origin: u64, now_ms: u64) {
        self.origins.entry(origin).or_default().at_ms = now_ms;
        while self.origins.len() > ORIGINS_MAX {
            let oldest = self.origins.iter().min_by_key(|(_, row)| row.at_ms);
            let Some(oldest) = oldest.map(|(origin, _)| *origin) else {
                return;
            };
            self.origins.remove(&oldest);
        }
    }

    /// Returns how far `origin` is trusted in what no vote is about.
    pub(crate) fn unvoted(&self, origin: u64, now_ms: u64) -> OriginTrust {
        if self.has_others(origin, now_ms) {
            OriginTrust::Unconfirmed
        } else {
            OriginTrust::Confirmed
        }
    }

    /// Returns whether enough origins observe to outvote one of them.
    pub(crate) fn can_outvote(&self, now_ms: u64) -> bool {
        let is_active = |row: &&OriginRow| now_ms.saturating_sub(row.at_ms) < ACTIVE_MS;
        self.origins.values().filter(is_active).count() > 2
    }

    /// Takes a sample from `origin`. Returns how far the origin is trusted.
    pub(crate) fn vote(
        &mut self,
        origin: u64,
        endpoint: EndpointRef,
        sample: &VotedSample,
        now_ms: u64,
    ) -> OriginTrust {
        let is_alone = !self.has_others(origin, now_ms);
        let is_recent = |vote: &Vote| now_ms.saturating_sub(vote.at_ms) < ACTIVE_MS;
        let unqueued = self.votes.get(&(endpoint, VotedTime::Prefill));
        let mut unqueued = unqueued
            .filter(|_| sample.time == VotedTime::QueuedPrefill)
            .cloned()
            .unwrap_or_default();
        let votes = self.votes.entry((endpoint, sample.time)).or_default();
        votes.retain(is_recent);
        let at = Vote::place(votes, origin, now_ms);
        if let (Some(vote), Some(log)) = (votes.get_mut(at), sample.log) {
            vote.add(log, now_ms);
        }
        let trust = if is_alone {
            OriginTrust::Unconfirmed
        } else {
            // At other origins, no prompt may have waited. Then their votes on prompts that did not
            // wait count, so that each origin has one vote.
            let has_vote = |of: u64| {
                let mut queued = votes.iter();
                queued.any(|vote| vote.origin == of && vote.samples >= VOTE_FROM)
            };
            unqueued
                .retain(|vote| is_recent(vote) && vote.origin != origin && !has_vote(vote.origin));
            Self::trust(&[votes.as_slice(), &unqueued].concat(), origin, sample)
        };
        if trust == OriginTrust::Confirmed {
            votes.iter_mut().for_each(|vote| vote.taught *= TAUGHT_KEEP);
            if let Some(vote) = votes.get_mut(at) {
                vote.taught += 1.0;
            }
        }
        if let Some(row) = self.origins.get_mut(&origin) {
            row.taught += u64::from(trust > OriginTrust::Contradicted);
            match trust {
                OriginTrust::Confirmed => row.unconfirmed = row.unconfirmed.saturating_sub(1),
                OriginTrust::Unconfirmed | OriginTrust::Unjudged => row.unconfirmed += 1,
                OriginTrust::Outvoted | OriginTrust::Contradicted => {}
            }
        }
        if is_alone {
            OriginTrust::Confirmed
        } else {
            trust
        }
    }

    fn trust(votes: &[Vote], origin: u64, sample: &VotedSample) -> OriginTrust {
        let prior_log = sample.prior_log;
        let apart_max = sample.time.apart_max();
        let counts = |vote: &&Vote| vote.samples >= VOTE_FROM;
        let own = votes.iter().find(|vote| vote.origin == origin);
        let mut means: Vec<f64> = votes.iter().filter(counts).map(|vote| vote.mean).collect();
        let apart = |own: &Vote, means: &mut [f64]| (own.mean - median(means)).abs();
        let Some(own) = own.filter(counts) else {
            let sampled = own.filter(|own| own.samples > 0.0 && prior_log.is_some());
            let is_apart = sampled.is_some_and(|own| apart(own, &mut means) > apart_max);
            return match means.len() {
                1.. if is_apart => OriginTrust::Contradicted,
                0 | 1 => OriginTrust::Unjudged,
                _ => OriginTrust::Unconfirmed,
            };
        };
        match (means.len(), prior_log) {
            (0 | 1, _) => OriginTrust::Unjudged,
            // The median of two votes is their mean, which is half of their distance away.
            (2, _) if 2.0 * apart(own, &mut means) <= apart_max => Self::share(votes, own),
            (2, None) => OriginTrust::Unconfirmed,
            (2, Some(prior_log)) => {
                means.push(prior_log);
                if apart(own, &mut means) <= apart_max {
                    OriginTrust::Unconfirmed
                } else {
                    OriginTrust::Contradicted
                }
            }
            _ if apart(own, &mut means) <= apart_max => Self::share(votes, own),
            _ => OriginTrust::Outvoted,
        }
    }

    /// Returns the trust in an origin that agrees with the other origins. The trust depends on the
    /// origin's share of the learned samples.
    fn share(votes: &[Vote], own: &Vote) -> OriginTrust {
        let others: f64 = votes.iter().map(|vote| vote.taught).sum::<f64>() - own.taught;
        if own.taught <= TIMES_OTHERS * others + MORE_SAMPLES {
            OriginTrust::Confirmed
        } else {
            OriginTrust::Unconfirmed
        }
    }

    /// Returns whether everything must be forgotten, because unconfirmed samples from `origin` were
    /// learned, and `origin` is outvoted now.
    pub(crate) fn forgets_outvoted(&self, origin: u64, now_ms: u64) -> bool {
        let row = self.origins.get(&origin);
        row.is_some_and(|row| row.unconfirmed >= UNCONFIRMED_MIN)
            && self.may_forget(now_ms)
            && self.fits(|vote| vote.origin != origin, now_ms) == Some(false)
    }

    /// Returns whether everything must be forgotten, because unconfirmed samples from an origin
    /// were learned, and this origin is silent now while other origins observe.
    pub(crate) fn forgets_silent(&self, now_ms: u64) -> bool {
        let is_silent = |row: &OriginRow| now_ms.saturating_sub(row.at_ms) >= SILENT_MS;
        let rows = || self.origins.values();
        let is_active = |origin: u64| self.origins.get(&origin).is_some_and(|row| !is_silent(row));
        let suspects = rows().filter(|&row| row.unconfirmed >= UNCONFIRMED_MIN && is_silent(row));
        let suspect: u64 = suspects.map(|row| row.unconfirmed).sum();
        let taught: u64 = rows().map(|row| row.taught).sum();
        let is_little = 2 * suspect <= taught;
        suspect > 0
            && rows().any(|row| !is_silent(row))
            && self.may_forget(now_ms)
            && !self
                .fits(|vote| is_active(vote.origin), now_ms)
                .unwrap_or(is_little)
    }

    /// Returns whether the medians of the votes that `which` selects, over all endpoints, fit the
    /// learned models. Each time has a median of its own. Prompts that waited are ignored. Returns
    /// `None` without votes.
    fn fits(&self, which: impl Fn(&Vote) -> bool, now_ms: u64) -> Option<bool> {
        let is_recent = |vote: &&Vote| {
            vote.samples >= VOTE_FROM && now_ms.saturating_sub(vote.at_ms) < SILENT_MS
        };
        let mut times: BTreeMap<VotedTime, Vec<f64>> = BTreeMap::new();
        let waited = |time: VotedTime| time == VotedTime::QueuedPrefill;
        for ((_, time), votes) in self.votes.iter().filter(|((_, time), _)| !waited(*time)) {
            let votes = votes.iter().filter(is_recent).filter(|vote| which(vote));
            let means = times.entry(*time).or_default();
            means.extend(votes.map(|vote| vote.mean));
        }
        let fits = times.into_values().filter_map(|mut means| {
            means.sort_by(f64::total_cmp);
            let median = means.get(means.len() / 2)?;
            Some(median.abs() <= FITS_MAX)
        });
        fits.reduce(|a, b| a && b)
    }

    fn may_forget(&self, now_ms: u64) -> bool {
        self.forgot_at_ms
            .is_none_or(|at| now_ms.saturating_sub(at) >= FORGET_INTERVAL_MS)
    }

    pub(crate) fn forgot(&mut self, now_ms: u64) {
        self.forgot_at_ms = Some(now_ms);
        self.votes.clear();
        for row in self.origins.values_mut() {
            row.unconfirmed = 0;
            row.taught = 0;
        }
    }

    fn has_others(&self, origin: u64, now_ms: u64) -> bool {
        self.origins
            .iter()
            .any(|(other, row)| *other != origin && now_ms.saturating_sub(row.at_ms) < ACTIVE_MS)
    }
}

// === impl Vote ===

impl Vote {
    /// Returns the position of an origin's vote. Creates the vote if there is none.
    fn place(votes: &mut Vec<Self>, origin: u64, now_ms: u64) -> usize {
        if let Some(at) = votes.iter().position(|vote| vote.origin == origin) {
            return at;
        }
        let vote = Self {
            origin,
            mean: 0.0,
            samples: 0.0,
            taught: 0.0,
            at_ms: now_ms,
        };
        if votes.len() >= VOTERS_MAX {
            let oldest = votes.iter().enumerate().min_by_key(|(_, vote)| vote.at_ms);
            if let Some((at, _)) = oldest {
                votes.swap_remove(at);
            }
        }
        votes.push(vote);
        votes.len() - 1
    }

    fn add(&mut self, log: f64, now_ms: u64) {
        let step = if self.samples > 0.0 {
            (log - self.mean).clamp(-STEP_MAX, STEP_MAX)
        } else {
            log
        };
        self.samples = (self.samples + 1.0).min(VOTE_SAMPLES);
        self.mean += step / self.samples;
        self.at_ms = now_ms;
    }
}

/// Returns the median; of an even number of values, the mean of the two in the middle.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = |at: usize| values.get(at).copied().unwrap_or_default();
    f64::midpoint(
        middle(values.len().saturating_sub(1) / 2),
        middle(values.len() / 2),
    )
}

#[cfg(test)]
mod tests;
