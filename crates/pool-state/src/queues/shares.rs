//! The shares of a full band. Each share belongs to a flow: a fairness id, or a client. A share
//! limits its owner only while others have requests. One owner alone may fill the band.

use scheduler::flow::{BandRules, OwnerShare};

/// The shares of all owners that have a request in a band.
#[derive(Clone, Debug, Default)]
pub(super) struct OwnerShares(Vec<OwnerShare>);

/// The part of the band's limits that an owner uses.
#[expect(clippy::cast_precision_loss, reason = "a part, not an account")]
fn part(share: OwnerShare, rules: &BandRules<'_>) -> f64 {
    let requests = share.requests as f64 / rules.max_requests as f64;
    let bytes = share.bytes as f64 / rules.max_bytes as f64;
    requests.max(bytes)
}

// === impl OwnerShares ===

impl OwnerShares {
    #[inline(never)] // several callers, and the wasm module should be small
    fn at(&self, owner: u64) -> Option<usize> {
        self.0.iter().position(|share| share.owner == owner)
    }

    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn add(&mut self, more: OwnerShare) {
        match self.at(more.owner).and_then(|at| self.0.get_mut(at)) {
            Some(share) => {
                share.requests = share.requests.saturating_add(more.requests);
                share.bytes = share.bytes.saturating_add(more.bytes);
            }
            None => self.0.push(more),
        }
    }

    pub(super) fn remove(&mut self, owner: u64, bytes: u64) {
        let Some(at) = self.at(owner) else {
            return;
        };
        if let Some(share) = self.0.get_mut(at) {
            share.requests = share.requests.saturating_sub(1);
            share.bytes = share.bytes.saturating_sub(bytes);
            if share.requests == 0 {
                self.0.swap_remove(at);
            }
        }
    }

    pub(super) fn requests_of(&self, owner: u64) -> u64 {
        self.at(owner)
            .and_then(|at| self.0.get(at))
            .map_or(0, |share| share.requests)
    }

    /// The owner with the largest part.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn largest(&self, rules: &BandRules<'_>) -> OwnerShare {
        let mut largest = OwnerShare::default();
        let mut most = 0.0;
        for share in &self.0 {
            let part = part(*share, rules);
            if part > most {
                most = part;
                largest = *share;
            }
        }
        largest
    }

    /// The owner with the largest part, if that is larger than the part that another owner would
    /// have with this much more.
    pub(super) fn above(mut self, more: OwnerShare, rules: &BandRules<'_>) -> Option<u64> {
        let largest = self.largest(rules);
        self.add(more);
        let at = self.at(more.owner)?;
        let own = part(*self.0.get(at)?, rules);
        (largest.owner != more.owner && part(largest, rules) > own).then_some(largest.owner)
    }
}
