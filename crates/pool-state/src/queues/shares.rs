//! The shares of a full band. Their owners are flows: fairness ids, or clients.
//! A share binds only against others: one owner alone may fill the band.

use scheduler::flow::BandRules;

/// The requests and bytes that an owner has in a band.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OwnerShare {
    pub(super) owner: u64,
    pub(super) requests: u64,
    pub(super) bytes: u64,
}

/// The shares of all owners that have a request in a band.
#[derive(Debug, Default)]
pub(super) struct OwnerShares(Vec<OwnerShare>);

// === impl OwnerShare ===

impl OwnerShare {
    /// The part of the band's limits that is used.
    #[expect(clippy::cast_precision_loss, reason = "a part, not an account")]
    fn part(&self, rules: &BandRules<'_>) -> f64 {
        let requests = self.requests as f64 / rules.max_requests as f64;
        let bytes = self.bytes as f64 / rules.max_bytes as f64;
        requests.max(bytes)
    }
}

// === impl OwnerShares ===

impl OwnerShares {
    pub(super) fn add(&mut self, owner: u64, bytes: u64) {
        let at = self.0.iter().position(|share| share.owner == owner);
        let at = at.unwrap_or_else(|| {
            self.0.push(OwnerShare {
                owner,
                ..OwnerShare::default()
            });
            self.0.len() - 1
        });
        if let Some(share) = self.0.get_mut(at) {
            share.requests = share.requests.saturating_add(1);
            share.bytes = share.bytes.saturating_add(bytes);
        }
    }

    pub(super) fn remove(&mut self, owner: u64, bytes: u64) {
        let Some(at) = self.0.iter().position(|share| share.owner == owner) else {
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

    /// The owner with the largest part, if that is larger than the part that `owner` would have
    /// with one more request of `bytes` bytes.
    pub(super) fn above(&self, owner: u64, bytes: u64, rules: &BandRules<'_>) -> Option<u64> {
        let own = self.0.iter().find(|share| share.owner == owner);
        let own = own.copied().unwrap_or_default();
        let own = OwnerShare {
            requests: own.requests.saturating_add(1),
            bytes: own.bytes.saturating_add(bytes),
            ..own
        };
        let parts = self.0.iter().map(|share| (share.part(rules), share.owner));
        let (largest, other) = parts.max_by(|(a, _), (b, _)| a.total_cmp(b))?;
        (other != owner && largest > own.part(rules)).then_some(other)
    }
}
