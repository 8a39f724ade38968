//! Chooses the queued requests that are refused, so that an arriving one fits.
//!
//! Requests of lower bands are refused first. If the band of the arriving request is full, requests
//! of a flow with a larger part of the band are refused. The flow with the largest part loses its
//! newest request in the VM that holds most of its requests. If that is another VM, this VM asks it
//! to refuse the request.

use scheduler::Timestamp;
use scheduler::flow::{BandRules, FlowControl, OwnerShare, QueuedInBand, RowBand};

use super::band::QueuedEntry;
use super::other_vms::OtherBand;
use super::{FlowArrival, FlowOutcome, FlowQueues};

/// A request that was removed for an arriving one, until the arriving one is known to fit.
#[derive(Debug)]
struct DisplacedEntry {
    priority: i32,
    flow: usize,
    entry: QueuedEntry,
}

/// The limits of a band, which are never above those of all bands together.
#[inline(never)] // several callers, and the wasm module should be small
pub(super) fn limits(control: &FlowControl, priority: i32) -> Option<BandRules<'_>> {
    let rules = control.band(priority)?;
    let (max_requests, max_bytes) = control.limits();
    Some(BandRules {
        max_requests: rules.max_requests.min(max_requests),
        max_bytes: rules.max_bytes.min(max_bytes),
        ..rules
    })
}

// === impl FlowQueues ===

impl FlowQueues {
    /// Refuses other requests until the arriving one fits into this band and the queues of all VMs.
    /// Returns false, and refuses none, if it cannot fit.
    pub(super) fn find_room(
        &mut self,
        control: &FlowControl,
        arrival: &FlowArrival<'_>,
        priority: i32,
        now: Timestamp,
    ) -> bool {
        let others = self.shared.bands.clone();
        let asks = self.shared.asks.len();
        let mut displaced = Vec::new();
        let fits = loop {
            match self.lacks_room(control, arrival.bytes, priority) {
                None => break true,
                Some(band) if self.displace(control, band, arrival, priority, &mut displaced) => {}
                Some(_) => break false,
            }
        };
        if !fits {
            self.shared.bands = others;
            self.shared.asks.truncate(asks);
        }
        for DisplacedEntry {
            priority,
            flow,
            entry,
        } in displaced
        {
            if fits {
                self.refuse(priority, &entry, FlowOutcome::RejectedCapacity, now);
            } else {
                self.band_mut(priority).put_back(flow, entry);
            }
        }
        fits
    }

    /// The band that must make room for a request of this size and band; `None` if it fits.
    fn lacks_room(&self, control: &FlowControl, bytes: u64, priority: i32) -> Option<i32> {
        let fits = |queued: QueuedInBand, (max_requests, max_bytes): (u64, u64)| {
            queued.requests < max_requests && queued.bytes.saturating_add(bytes) <= max_bytes
        };
        let rules = limits(control, priority)?;
        let in_band = self.queued_between(priority, priority);
        if !fits(in_band, (rules.max_requests, rules.max_bytes)) {
            return Some(priority);
        }
        let in_all = self.queued_between(i32::MIN, i32::MAX);
        if fits(in_all, control.limits()) {
            return None;
        }
        let lowest = self.bands.iter().rfind(|band| band.queued > 0);
        let lowest = lowest.map_or(priority, |band| band.priority.min(priority));
        Some(self.shared.lowest(lowest))
    }

    /// The requests with priorities from `lowest` to `highest` that all VMs hold.
    #[inline(never)] // several callers, and the wasm module should be small
    fn queued_between(&self, lowest: i32, highest: i32) -> QueuedInBand {
        let mut sum = self.shared.queued(lowest, highest);
        for band in &self.bands {
            if (lowest..=highest).contains(&band.priority) {
                sum.requests += band.queued as u64;
                sum.bytes = sum.bytes.saturating_add(band.bytes);
            }
        }
        sum
    }

    /// Takes out a request of the flow that has most of the band, or asks another VM to do so. In
    /// the band of the arriving request, that flow must have more than the flow of the arriving
    /// request would have. Returns false if there is no such request.
    fn displace(
        &mut self,
        control: &FlowControl,
        priority: i32,
        arrival: &FlowArrival<'_>,
        arriving: i32,
        displaced: &mut Vec<DisplacedEntry>,
    ) -> bool {
        let Some(rules) = limits(control, priority) else {
            return false;
        };
        let mut shares = self.band_mut(priority).shares.clone();
        for other in self.shared.in_band(priority) {
            shares.add(other.row.largest);
        }
        let owner = if priority == arriving {
            let more = OwnerShare {
                owner: arrival.flow_id(),
                requests: 1,
                bytes: arrival.bytes,
            };
            match shares.above(more, &rules) {
                Some(owner) => owner,
                None => return false,
            }
        } else {
            shares.largest(&rules).owner
        };
        let here = self.band_mut(priority).shares.requests_of(owner);
        let there = self
            .shared
            .in_band(priority)
            .filter(|other| {
                let largest = other.row.largest;
                largest.owner == owner && largest.requests > here
            })
            .max_by_key(|other| other.row.largest.requests);
        if let Some(other) = there {
            other.take(1);
            let vm = other.vm;
            self.shared.asks.push((vm, priority));
            return true;
        }
        let Some((flow, entry)) = self.band_mut(priority).take_newest_of(owner) else {
            return false;
        };
        displaced.push(DisplacedEntry {
            priority,
            flow,
            entry,
        });
        true
    }

    /// Refuses the requests that other VMs asked this one to refuse.
    pub(super) fn refuse_asked(
        &mut self,
        control: &FlowControl,
        asks: impl Iterator<Item = (i32, u64)>,
        now: Timestamp,
    ) {
        for (priority, asked) in asks {
            let Some(rules) = limits(control, priority) else {
                return;
            };
            let band = self.band_mut(priority);
            for _ in std::mem::replace(&mut band.refused, asked)..asked {
                let band = self.band_mut(priority);
                let owner = band.shares.largest(&rules).owner;
                if let Some((_, entry)) = band.take_newest_of(owner) {
                    self.refuse(priority, &entry, FlowOutcome::RejectedCapacity, now);
                }
            }
        }
    }
}

// === impl OtherBand ===

impl OtherBand {
    /// Records that `requests` requests left the flow that has most of the band.
    pub(super) fn take(&mut self, requests: u64) {
        let RowBand {
            queued, largest, ..
        } = &mut self.row;
        let requests = requests.min(largest.requests);
        let bytes = largest.bytes / largest.requests.max(1) * requests;
        largest.requests -= requests;
        largest.bytes -= bytes;
        queued.requests = queued.requests.saturating_sub(requests);
        queued.bytes = queued.bytes.saturating_sub(bytes);
    }
}
