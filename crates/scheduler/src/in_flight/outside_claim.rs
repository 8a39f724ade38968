//! The load that other proxies claim at an endpoint, compared with the load that the endpoint
//! itself shows.
//!
//! The scrape of an endpoint counts the requests of all proxies. The claims that other proxies send
//! are newer, so a claim is counted in full until a scrape could have shown the claimed requests. A
//! claim that scrapes do not confirm is *refuted*. After that, at most the load that the scrape
//! shows beyond the load of this process is counted for the other proxies. So a proxy that sends
//! false reports, or repeats old reports or those of others, can make an endpoint seem busy for a
//! few seconds, but not permanently.
//!
//! The comparison uses averages, because a scrape is a sample: requests begin and end between two
//! scrapes. The difference between the claim and [`TIMES_SHOWN`] times the shown load is added up
//! over time, as a share of the largest recent load. The sum of these differences is the time for
//! which the claim was unconfirmed. The next scrape confirms an honest claim, and the sum falls
//! again. Earlier claims only slow down how the sum falls, so a short large claim does not make a
//! later false claim seem small.

use super::{ATTENTION_UNIT, EndpointLoad, InFlight, PendingPrefills};
use crate::endpoint::EndpointRef;
use crate::metrics::EndpointMetrics;
use crate::slo::Slo;

/// The maximum of the load that other proxies claim, as a multiple of the load that a scrape shows
/// beyond that of this process. The claim may be larger than the shown load, because requests are
/// on their way and the scrape is a little older. If claims are false by this factor, the loads of
/// equally loaded endpoints seem to differ by less than a third.
const TIMES_SHOWN: f32 = 1.5;

/// The maximum number of claimed requests beyond [`TIMES_SHOWN`] that are counted before a scrape
/// shows these requests. By default, an engine runs this many requests at the same time, so an
/// endpoint with more is full anyway.
const UNSEEN_MAX: f32 = 256.0;

/// The maximum of the tokens of a claimed request on average, as a multiple of the tokens of a
/// usual request. More tokens count as further requests. The lengths of prompts differ, so only
/// sums over an endpoint are compared.
const TIMES_TOKENS: f32 = 4.0;

/// The minimum number of tokens of a usual request. The minimum is this high, because fewer tokens
/// cost an engine little.
const TOKENS_MIN: f32 = 1_024.0;

/// The time for which the largest recent claim or shown load is used, in µs: as long as several
/// bursts.
const LARGEST_US: f32 = 10_000_000.0;

/// The minimum of the largest recent claim or shown load, in requests, because a single short
/// request often lies between two scrapes.
const LARGEST_MIN: f32 = 2.0;

/// The minimum speed at which the unconfirmed time falls while scrapes confirm the claim, or other
/// proxies claim nothing. Within 30 s after a false claim was refuted, claims are included in full
/// again.
const RECOVERY: f32 = 0.1;

/// The longest time between two scrapes after which claims are compared, in µs. If the time was
/// longer, scrapes were lost, and the last claim may be too old.
const JUDGED_US_MAX: u64 = 500_000;

/// The load that an endpoint shows in a scrape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShownLoad {
    /// The number of requests that run or wait at the endpoint.
    pub requests: f32,
    /// The number of these `requests` that wait.
    pub waiting: f32,
    /// The number of tokens of a usual request.
    pub tokens: f32,
}

/// The load that the other proxies claim to have at one endpoint.
#[derive(Clone, Debug, Default)]
pub(super) struct OutsideClaim {
    claim: EndpointLoad,
    /// The part of the claim that is added to the load.
    counted: EndpointLoad,
    /// The lowest SLOs that the other proxies claim.
    pub(super) slo: Slo,
    /// The load that the endpoint shows beyond the load of this process; `None` if unknown.
    shown: Option<ShownLoad>,
    standing: ClaimStanding,
    /// The claim, summed over the time since the last comparison with a scrape, in requests times
    /// µs.
    sum: f32,
    /// The time up to which `sum` includes the claim.
    summed_us: u64,
    judged_us: u64,
    /// The time for which the claim was unconfirmed, in µs: see the module.
    unconfirmed_us: f32,
    /// The largest recent claim, in requests.
    largest_claim: f32,
    /// The largest recent load that scrapes confirm, in requests.
    largest_shown: f32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ClaimStanding {
    #[default]
    Believed,
    Refuted,
}

// === impl InFlight ===

impl InFlight {
    /// Compares the load that other proxies claim with the new metrics of an endpoint, which
    /// arrived at `now_us`. A claim may be unconfirmed for `patience_us`.
    pub fn judge_claims(
        &mut self,
        endpoint: EndpointRef,
        metrics: &EndpointMetrics,
        patience_us: u64,
        now_us: u64,
    ) {
        if self.others.has_claims() {
            let own = self.own(endpoint).requests;
            let shown = ShownLoad::from_metrics(metrics, self.prompt_tokens);
            self.others.judge(endpoint, shown, own, patience_us, now_us);
        }
    }

    pub fn outside_requests(&self) -> u64 {
        self.others.outside_requests()
    }
}

// === impl ShownLoad ===

impl ShownLoad {
    /// Returns the load in an endpoint's metrics; `None` if it is unknown. A usual request has as
    /// many tokens as the requests that run at the endpoint have on average, or `prompt_tokens` if
    /// that is more.
    pub(super) fn from_metrics(metrics: &EndpointMetrics, prompt_tokens: f32) -> Option<Self> {
        let valid = |value: Option<f32>| value.filter(|value| value.is_finite() && *value >= 0.0);
        let running = valid(metrics.running_requests)?;
        let waiting = valid(metrics.queue_depth).unwrap_or(0.0);
        let blocks = metrics.kv_blocks.zip(metrics.kv_block_tokens);
        let cached = valid(metrics.kv_cache_utilization)
            .zip(blocks)
            .map_or(0.0, |(used, (blocks, tokens))| {
                used.min(1.0) * blocks as f32 * tokens as f32
            });
        Some(Self {
            requests: running + waiting,
            waiting,
            tokens: (cached / running.max(1.0)).max(prompt_tokens),
        })
    }

    /// Returns the load beyond `own` requests of this process, but at least half of the shown load,
    /// because the requests of this process may still be on their way.
    fn beside(self, own: u32) -> Self {
        let others = |shown: f32| (shown - own as f32).max(shown / 2.0);
        Self {
            requests: others(self.requests),
            tokens: self.tokens.max(TOKENS_MIN),
            ..self
        }
    }
}

// === impl OutsideClaim ===

impl OutsideClaim {
    pub(super) fn counted(&self) -> &EndpointLoad {
        &self.counted
    }

    pub(super) fn update(&mut self, change: impl FnOnce(&mut EndpointLoad), now_us: u64) {
        self.sum_until(now_us);
        change(&mut self.claim);
        self.counted = self.limited();
    }

    /// Records that other proxies claim nothing any more. The results of earlier comparisons with
    /// scrapes stay.
    pub(super) fn clear(&mut self) {
        self.claim = EndpointLoad::default();
        self.counted = EndpointLoad::default();
        self.slo = Slo::default();
    }

    /// Compares the claim with a new scrape. The process has `own` requests at the endpoint. A
    /// claim may be unconfirmed for `patience_us`.
    pub(super) fn judge(
        &mut self,
        shown: Option<ShownLoad>,
        own: u32,
        patience_us: u64,
        now_us: u64,
    ) {
        self.sum_until(now_us);
        let passed_us = now_us.saturating_sub(self.judged_us).min(JUDGED_US_MAX) as f32;
        self.judged_us = now_us;
        let sum = std::mem::take(&mut self.sum);
        if shown.is_some() || self.standing == ClaimStanding::Believed {
            self.shown = shown.map(|shown| shown.beside(own));
        }
        // The scrape is used only if it shows the requests of this process: otherwise it is too
        // old, or counts something else.
        let is_current = |shown: &ShownLoad| own as f32 <= TIMES_SHOWN * shown.requests + 1.0;
        if passed_us > 0.0
            && let Some(beside) = shown.filter(is_current).map(|shown| shown.beside(own))
        {
            let most = TIMES_SHOWN * beside.requests;
            let claimed = (sum / passed_us).min(most + UNSEEN_MAX);
            self.weigh(claimed, most, passed_us, patience_us as f32);
        }
        self.counted = self.limited();
    }

    /// Changes the unconfirmed time by the difference between the claim and `most`, the maximum
    /// that scrapes confirm.
    fn weigh(&mut self, claimed: f32, most: f32, passed_us: f32, patience_us: f32) {
        let kept = (1.0 - passed_us / LARGEST_US).max(0.0);
        self.largest_claim = (kept * self.largest_claim).max(claimed);
        self.largest_shown = (kept * self.largest_shown).max(most).max(LARGEST_MIN);
        let beyond = claimed - most;
        let pace = if beyond > 0.0 {
            beyond / self.largest_shown.max(claimed)
        } else {
            (beyond / self.largest_shown.max(self.largest_claim)).min(-RECOVERY)
        };
        self.unconfirmed_us = (self.unconfirmed_us + pace * passed_us).clamp(0.0, patience_us);
        if self.unconfirmed_us >= patience_us {
            self.standing = ClaimStanding::Refuted;
        } else if self.unconfirmed_us <= patience_us / 2.0 {
            self.standing = ClaimStanding::Believed;
        }
    }

    fn sum_until(&mut self, now_us: u64) {
        let passed_us = now_us.saturating_sub(self.summed_us).min(JUDGED_US_MAX);
        self.summed_us = self.summed_us.max(now_us);
        self.sum += passed_us as f32 * self.size();
    }

    /// Returns the claim as a number of requests. A request with more tokens than usual counts as
    /// several requests.
    fn size(&self) -> f32 {
        let EndpointLoad {
            requests,
            prefill_tokens,
            decode_tokens,
            prefills,
            ..
        } = self.claim;
        let tokens = prefill_tokens
            .max(decode_tokens.saturating_add(prefills.prompt_tokens))
            .max(prefills.uncached_tokens);
        let usual = self.shown.map_or(TOKENS_MIN, |shown| shown.tokens);
        (requests.max(prefills.prompts) as f32).max(tokens as f32 / (TIMES_TOKENS * usual))
    }

    /// Returns the part of the claim that is added to the load.
    fn limited(&self) -> EndpointLoad {
        let Some(shown) = self.shown else {
            return self.claim;
        };
        match self.standing {
            ClaimStanding::Believed => {
                let most = TIMES_SHOWN * shown.requests + UNSEEN_MAX;
                at_most(self.claim, most, most, TIMES_TOKENS * shown.tokens)
            }
            ClaimStanding::Refuted => {
                at_most(self.claim, shown.requests, shown.waiting, shown.tokens)
            }
        }
    }
}

/// Returns `load` with at most this many requests and waiting prompts, and this many tokens for
/// each.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counts, which a cast limits to the range"
)]
fn at_most(load: EndpointLoad, requests: f32, prompts: f32, tokens: f32) -> EndpointLoad {
    let PendingPrefills {
        prompts: claimed_prompts,
        prompt_tokens,
        uncached_tokens,
        attention,
    } = load.prefills;
    let all = (requests * tokens) as u64;
    let pending = (prompts * tokens) as u64;
    let prompt_tokens = prompt_tokens.min(pending);
    let uncached_tokens = uncached_tokens.min(prompt_tokens);
    // Of all ways to divide a total of tokens, a single prompt causes the most attention work.
    let attention_max = uncached_tokens
        .saturating_mul(2)
        .saturating_mul(prompt_tokens);
    EndpointLoad {
        requests: load.requests.min(requests as u32),
        prefill_tokens: load.prefill_tokens.min(pending),
        decode_tokens: load.decode_tokens.min(all),
        prefills: PendingPrefills {
            prompts: claimed_prompts.min(prompts as u32),
            prompt_tokens,
            uncached_tokens,
            attention: attention.min(attention_max.div_ceil(ATTENTION_UNIT)),
        },
        ..load
    }
}

#[cfg(test)]
mod tests;
