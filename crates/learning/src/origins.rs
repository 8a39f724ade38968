//! Decides how far the observations from one origin (a proxy) are trusted, if several origins
//! observe.
//!
//! The samples from each origin form its vote on how long each endpoint takes. The learner does not
//! learn from an origin whose vote is far from the median of all votes, and one sample counts only
//! up to [`STEP_MAX`] from this median. Two origins alone cannot outvote each other. From a sample
//! that no other origin confirms, the model learns the cost of a step, which is common to all
//! endpoints, but not the speed of the endpoint.
//!
//! If two votes alone exist and contradict each other, a third vote counts. For steps, it is the
//! prior: the model learns the cost only from a vote near the median of the three. For TTFT and
//! TPOT, it is the time that the step model gives for an endpoint without other requests. Two
//! proxies often see different TTFTs, so the model learns from both, but a sample counts only up to
//! [`DISPUTED_MAX`] from the median of the three. So whichever origin sends more, or observed
//! first, the models stay near the range between the third vote and the honest vote.
//!
//! If several others vote, an origin with too few samples to vote teaches no TTFT and no TPOT, and
//! no cost that contradicts their votes.
//!
//! The learner forgets everything in one case: an origin whose samples were learned unconfirmed
//! becomes silent or is outvoted, and the other samples do not fit the model. If there are no other
//! samples to compare, the learner forgets only if that origin taught most of the model. A single
//! origin is trusted completely.

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

/// The maximum difference that counts of one sample from a vote, or from the median of the votes,
/// as a logarithm. One stall does not mean that the endpoint has changed, and samples that are far
/// too long and far too short in turn look like a true vote.
const STEP_MAX: f64 = 2.0;

/// The maximum distance of a trusted vote from the median, as a logarithm: a factor of 1.5. The
/// noise of a vote is a quarter of this distance.
const APART_MAX: f64 = 0.405;

/// The value that replaces [`STEP_MAX`] for the TTFT and the TPOT if two votes contradict each
/// other: a factor of two. With a smaller factor, proxies that really see different times teach
/// less. With a larger factor, false reports teach more.
const DISPUTED_MAX: f64 = std::f64::consts::LN_2;

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
    /// Fewer than two origins have observed this time of the endpoint often enough to compare, or
    /// the two that have disagree about the TTFT or the TPOT.
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
    /// Whether the prompt waited.
    pub(crate) queued: bool,
}

/// A time that an origin observed at an endpoint.
#[derive(Debug)]
pub(crate) struct VotedSample<'o> {
    time: VotedTime,
    /// The logarithm of the observed time divided by the expected time, and the third vote if only
    /// two votes exist. `None` if the observed time cannot be compared.
    logs: Option<[f64; 2]>,
    /// The observed time. A vote changes it if it is far from the other votes.
    ms: &'o mut f32,
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

impl<'o> VotedSample<'o> {
    pub(crate) fn new(time: VotedTime, logs: Option<[f64; 2]>, ms: &'o mut f32) -> Self {
        let logs = logs.filter(|logs| logs.iter().all(|log| log.is_finite()));
        Self { time, logs, ms }
    }
}

// === impl VotedTime ===

impl VotedTime {
    pub(crate) fn of_prefill(queued: bool) -> Self {
        if queued {
            Self::QueuedPrefill
        } else {
            Self::Prefill
        }
    }

    /// Whether the time is that of a request, and not of a step.
    fn is_of_request(self) -> bool {
        matches!(self, Self::Ttft | Self::Tpot)
    }

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

    /// Takes a sample from `origin`, and changes its time if it is far from the votes. Returns how
    /// far the origin is trusted.
    pub(crate) fn vote(
        &mut self,
        origin: u64,
        endpoint: EndpointRef,
        sample: VotedSample<'_>,
        now_ms: u64,
    ) -> OriginTrust {
        let VotedSample { time, logs, ms } = sample;
        let is_alone = !self.has_others(origin, now_ms);
        let is_recent = |vote: &Vote| now_ms.saturating_sub(vote.at_ms) < ACTIVE_MS;
        let unqueued = self.votes.get(&(endpoint, VotedTime::Prefill));
        let mut unqueued = unqueued
            .filter(|_| time == VotedTime::QueuedPrefill)
            .cloned()
            .unwrap_or_default();
        let votes = self.votes.entry((endpoint, time)).or_default();
        votes.retain(is_recent);
        let at = Vote::place(votes, origin, now_ms);
        if let (Some(vote), Some([log, _])) = (votes.get_mut(at), logs) {
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
            let votes = [votes.as_slice(), &unqueued].concat();
            let (trust, change) = Self::trust(&votes, origin, time, logs);
            *ms *= libm::exp(change) as f32;
            trust
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

    /// Returns how far `origin` is trusted, and the change of its sample's logarithm that moves the
    /// sample near the votes.
    fn trust(
        votes: &[Vote],
        origin: u64,
        time: VotedTime,
        logs: Option<[f64; 2]>,
    ) -> (OriginTrust, f64) {
        let is_other = |vote: &&Vote| vote.origin != origin && vote.samples >= VOTE_FROM;
        let mut means: Vec<f64> = votes
            .iter()
            .filter(is_other)
            .map(|vote| vote.mean)
            .collect();
        let others = means.len();
        if others == 0 {
            return (OriginTrust::Unjudged, 0.0);
        }
        let own = votes.iter().find(|vote| vote.origin == origin);
        let Some((own, [log, third_log])) = own.zip(logs) else {
            return (OriginTrust::Unconfirmed, 0.0);
        };
        means.push(own.mean);
        let mut middle = median(&mut means);
        let is_apart =
            |times: f64, middle: f64| times * (own.mean - middle).abs() > time.apart_max();
        let has_vote = own.samples >= VOTE_FROM;
        let mut distance_max = STEP_MAX;
        let trust = match others {
            // The median of two votes is their mean, which is half of their distance away.
            1 if is_apart(2.0, middle) => {
                means.push(third_log);
                middle = median(&mut means);
                if time.is_of_request() {
                    distance_max = DISPUTED_MAX;
                    OriginTrust::Unjudged
                } else if is_apart(1.0, middle) {
                    OriginTrust::Contradicted
                } else {
                    OriginTrust::Unconfirmed
                }
            }
            1 if !has_vote => OriginTrust::Unjudged,
            1 if time.is_of_request() => {
                let trust = Self::share(votes, own);
                if trust != OriginTrust::Confirmed {
                    // Beyond its share, no origin widens what both agree on.
                    distance_max = DISPUTED_MAX;
                }
                trust.max(OriginTrust::Unjudged)
            }
            _ if is_apart(1.0, middle) && has_vote => OriginTrust::Outvoted,
            _ if is_apart(1.0, middle) => OriginTrust::Contradicted,
            _ if has_vote => Self::share(votes, own),
            _ => OriginTrust::Unconfirmed,
        };
        let near = log.clamp(middle - distance_max, middle + distance_max);
        (trust, near - log)
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

    /// Returns whether the votes that `which` selects fit the learned models: for each
    /// [`VotedTime`], their median over all endpoints must be near the expected time. Ignores
    /// prompts that waited. Returns `None` without votes.
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
