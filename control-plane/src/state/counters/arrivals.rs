//! The requests that arrived in a pool since the last call, as the growth of the counts of each VM.
//!
//! A total of cumulative counts would jump when a proxy connects to a restarted daemon, because the
//! proxy's VMs count since their own start. So the first report of a VM only sets its baseline.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use scheduler::{Generation, Slot};

use super::totals::ENDPOINTS_KNOWN_MAX;
use super::{CounterTotals, MODELS_MAX, ModelTotals, OTHER, Origin, TotalsLabel};

/// The maximum number of owners whose arrivals are counted one by one.
pub(crate) const OWNERS_MAX: usize = 64;

/// The origin that stands for all owners beyond [`OWNERS_MAX`]. No client has this address.
const OTHER_OWNERS: Origin = Origin {
    certificate: None,
    address: Some(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
};

/// The requests of an owner in a pool that were picked or ended in a period.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PoolArrivals {
    /// The number of picked requests, by endpoint.
    pub picked: BTreeMap<(Generation, Slot), u64>,
    /// The requests that ended, by the name of the model in the request to the endpoint.
    pub ended: BTreeMap<String, EndedRequests>,
    /// The number of requests that the proxies refused.
    pub refused: u64,
}

/// Requests that ended without an error, and their tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndedRequests {
    pub requests: u64,
    pub prompt_tokens: u64,
    /// The number of prompt tokens that the engine had cached.
    pub cached_tokens: u64,
    pub output_tokens: u64,
}

// === impl PoolArrivals ===

impl PoolArrivals {
    /// Returns the row of an owner, or of all owners beyond the limit.
    pub(super) fn of_owner(rows: &mut BTreeMap<Origin, Self>, owner: Origin) -> &mut Self {
        let has_room = rows.len() < OWNERS_MAX || rows.contains_key(&owner);
        let owner = if has_room { owner } else { OTHER_OWNERS };
        rows.entry(owner).or_default()
    }

    /// Adds the counts of a VM between two reports.
    pub(super) fn add(&mut self, before: &CounterTotals, now: &CounterTotals) {
        for (id, row) in &now.endpoints {
            let more = row
                .picked
                .saturating_sub(before.endpoints.get(id).map_or(0, |row| row.picked));
            let has_room = self.picked.len() < ENDPOINTS_KNOWN_MAX || self.picked.contains_key(id);
            if more > 0 && has_room {
                let picked = self.picked.entry(*id).or_default();
                *picked = picked.saturating_add(more);
            }
        }
        let refused = |totals: &CounterTotals| {
            totals
                .dropped
                .values()
                .fold(0_u64, |sum, count| sum.saturating_add(*count))
        };
        self.refused = self
            .refused
            .saturating_add(refused(now).saturating_sub(refused(before)));
        // The counts of models without a row of their own any more are part of `other` now. The
        // requests of these models arrived before.
        let moved = before
            .models
            .iter()
            .filter(|(label, _)| !now.models.contains_key(label))
            .map(|(_, row)| EndedRequests::from_row(row))
            .fold(EndedRequests::default(), EndedRequests::with);
        for (label, row) in &now.models {
            let mut more = EndedRequests::from_row(row).without(
                before
                    .models
                    .get(label)
                    .map(EndedRequests::from_row)
                    .unwrap_or_default(),
            );
            if *label == TotalsLabel::other() {
                more = more.without(moved);
            }
            if more == EndedRequests::default() {
                continue;
            }
            let room = self.ended.len() < MODELS_MAX || self.ended.contains_key(&label.target);
            let target = if room { label.target.as_str() } else { OTHER };
            let ended = self.ended.entry(target.to_owned()).or_default();
            *ended = ended.with(more);
        }
    }
}

// === impl EndedRequests ===

impl EndedRequests {
    fn from_row(row: &ModelTotals) -> Self {
        let errors = row
            .errors
            .values()
            .fold(0_u64, |sum, count| sum.saturating_add(*count));
        Self {
            requests: row.duration_ms.count().saturating_sub(errors),
            prompt_tokens: row.prompt_tokens,
            cached_tokens: row.cached_tokens,
            output_tokens: row.completion_tokens,
        }
    }

    /// Returns the sum of both values.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        self.each(other, u64::saturating_add)
    }

    fn without(self, other: Self) -> Self {
        self.each(other, u64::saturating_sub)
    }

    fn each(self, other: Self, of: fn(u64, u64) -> u64) -> Self {
        Self {
            requests: of(self.requests, other.requests),
            prompt_tokens: of(self.prompt_tokens, other.prompt_tokens),
            cached_tokens: of(self.cached_tokens, other.cached_tokens),
            output_tokens: of(self.output_tokens, other.output_tokens),
        }
    }
}
