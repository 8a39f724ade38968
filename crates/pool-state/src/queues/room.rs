//! Limits the room that a request of a band may take, and charges its flow.

use scheduler::Timestamp;
use scheduler::flow::{BandRank, FlowControl, FlowCost, RoomLimits};

use super::band::{BandQueue, FlowRef};
use super::{FlowOutcome, FlowQueues, RATE_MS};

/// How long a band counts as in use after its last request, in ms. The highest band in use may fill
/// an endpoint completely. After a pause of this length, the next lower band may do so.
const BAND_IDLE_MS: u64 = 60_000;

/// The maximum number of tokens that a band behind higher bands saves up from its minimum share:
/// enough for a few long prompts.
const CREDIT_TOKENS_MAX: f64 = 50_000.0;

/// The properties of a request that the queues record when it is sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SentFlow {
    /// The hash of the fairness id, or of the client.
    pub(crate) flow: u64,
    pub(crate) priority: i32,
    pub(crate) was_queued: bool,
    pub(crate) prompt_tokens: u32,
    pub(crate) cost: FlowCost,
}

/// The charge of a request that was sent, until it ends.
#[derive(Clone, Copy, Debug)]
pub struct FlowCharge {
    pub(super) flow: FlowRef,
    prompt_tokens: u32,
    output: f64,
    /// For how long the request kept its place without progress, in ms.
    pub(crate) silent_ms: u64,
    /// Whether it was sent for its band's minimum share.
    pub(super) owed: bool,
}

// === impl FlowCharge ===

impl FlowCharge {
    pub(crate) fn is_owed(&self) -> bool {
        self.owed
    }
}

// === impl FlowQueues ===

impl FlowQueues {
    /// The limits for a request of this priority, and whether its band is tried for its minimum
    /// share.
    pub(crate) fn limits(
        &mut self,
        control: &FlowControl,
        priority: i32,
        now: Timestamp,
    ) -> RoomLimits {
        let in_use = |band: &&BandQueue| band.queued > 0 || now.ms_since(band.seen) < BAND_IDLE_MS;
        let mut highest = priority;
        let mut lowest = priority;
        let mut higher = 0;
        let mut bands = 0;
        for band in self.bands.iter().filter(in_use) {
            bands += 1;
            higher += usize::from(band.priority > priority);
            highest = highest.max(band.priority);
            lowest = lowest.min(band.priority);
        }
        let rank = BandRank {
            higher,
            bands: bands.max(1),
            priorities: (priority, highest, lowest),
        };
        let band = self.bands.iter_mut().find(|band| band.priority == priority);
        let (owed, turn) = band.map_or((false, 0), BandQueue::next_turn);
        let ceiling = control
            .usage_limit()
            .filter(|_| !owed)
            .map(|policy| policy.ceiling(rank, turn));
        let ceiling = ceiling.unwrap_or(RoomLimits::ALL.ceiling);
        RoomLimits {
            critical: priority >= highest || owed,
            ceiling,
            share: self.outside.share(),
        }
    }

    /// Charges the flow of a request that is sent now.
    pub(crate) fn charge(
        &mut self,
        control: &FlowControl,
        sent: &SentFlow,
        now: Timestamp,
    ) -> Option<FlowCharge> {
        let SentFlow { priority, cost, .. } = *sent;
        let rules = control.band(priority)?;
        let tokens = cost.tokens();
        for band in self
            .bands
            .iter_mut()
            .filter(|band| band.priority < priority && band.queued > 0)
        {
            let share = control
                .band(band.priority)
                .map_or(0.0, |rules| rules.fairness.minimum_share());
            // The band gets its share of all tokens, including its own.
            band.credit = (band.credit + share / (1.0 - share) * tokens).min(CREDIT_TOKENS_MAX);
        }
        let since_ms = now.us_since(self.sent.1) as f64 / 1_000.0;
        self.sent = (self.sent.0 * (1.0 - since_ms / RATE_MS).max(0.0) + 1.0, now);
        let rival = self.shared.lowest_rank(priority);
        if !sent.was_queued {
            self.outside.took_room(priority);
        }
        let band = self.band_mut(priority);
        band.seen = now;
        let owed = band.tried_owed;
        band.credit = (band.credit - tokens).max(0.0);
        let flow = band.flow_ref(sent.flow);
        if !sent.was_queued {
            band.counters.count(FlowOutcome::Dispatched, 0);
            band.pass(flow.at, rules.fairness);
        }
        band.charge(flow.at, rules.fairness, cost, rival, now);
        Some(FlowCharge {
            flow,
            prompt_tokens: sent.prompt_tokens,
            output: cost.output,
            silent_ms: 0,
            owed,
        })
    }

    /// Corrects the charge of a request that has ended with `context_tokens` of prompt and output;
    /// 0 if it had no first token. Each ms in which it kept its place without progress costs a
    /// token. Otherwise requests that are short, and held for nothing, would take most of the room.
    pub(crate) fn settle(
        &mut self,
        control: &FlowControl,
        charge: FlowCharge,
        context_tokens: u64,
    ) {
        let output = match context_tokens {
            0 => charge.output,
            tokens => tokens.saturating_sub(u64::from(charge.prompt_tokens)) as f64,
        };
        let rules = control.band(charge.flow.priority);
        let band = self
            .bands
            .iter_mut()
            .find(|band| band.priority == charge.flow.priority);
        if let (Some(band), Some(rules)) = (band, rules) {
            let more = output - charge.output + charge.silent_ms as f64;
            band.settle(charge.flow, rules.fairness, more);
        }
    }
}
