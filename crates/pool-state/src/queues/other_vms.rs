//! The requests that the other VMs of the process hold, as far as this VM knows.

use scheduler::Timestamp;
use scheduler::flow::{QueuedInBand, SharedOrder};

/// The state of the other VMs, as far as this VM knows it.
#[derive(Debug, Default)]
pub(super) struct SharedQueues {
    pub(super) others: OtherVms,
    pub(super) round: RoundState,
    /// Whether room was made for which no VM was known to wait, since the reports of the others
    /// were last read.
    pub(super) room_unclaimed: bool,
    /// A load report of another VM has changed since the last round.
    pub(super) rows_changed: bool,
    /// Whether the order must be read.
    pub(super) look: bool,
    /// The requests that the others hold, by band, and the lowest rank there.
    bands: Vec<(QueuedInBand, f64)>,
    /// Requests that other VMs must refuse, until they are asked to.
    pub(super) evict: u64,
    /// How many requests this VM has refused because others asked it to.
    pub(super) evicted: u64,
}

/// The state of the other VMs of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum OtherVms {
    /// No other VM serves requests.
    #[default]
    None,
    /// Other VMs serve requests, and hold none.
    Idle,
    /// At least one other VM holds requests.
    Holding,
}

/// The round of the order of all VMs, as this VM sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum RoundState {
    /// No new round is needed.
    #[default]
    Quiet,
    /// Room may have been made: a round must begin.
    Due,
    /// A round has begun but is not written yet.
    Begun,
    /// A round has begun but is not written yet, and room may have been made since.
    BegunAndDue,
}

// === impl RoundState ===

impl RoundState {
    pub(super) fn is_due(self) -> bool {
        matches!(self, Self::Due | Self::BegunAndDue)
    }

    pub(super) fn is_begun(self) -> bool {
        matches!(self, Self::Begun | Self::BegunAndDue)
    }

    /// Records that room may have been made.
    pub(super) fn room_changed(&mut self) {
        *self = if self.is_begun() {
            Self::BegunAndDue
        } else {
            Self::Due
        };
    }

    /// Records that the order was read again. A round that was begun but not written is not in it.
    pub(super) fn reread(&mut self) {
        if self.is_begun() {
            *self = Self::Due;
        }
    }

    /// Records that the order was written.
    pub(super) fn written(&mut self) {
        *self = if self.is_due() {
            Self::Due
        } else {
            Self::Quiet
        };
    }
}

// === impl SharedQueues ===

impl SharedQueues {
    pub(super) fn is_due(&self) -> bool {
        self.round.is_due() || self.look
    }

    /// The requests that the others hold of a band.
    pub(super) fn queued(&self, priority: i32) -> QueuedInBand {
        self.bands
            .iter()
            .map(|(band, _)| *band)
            .find(|band| band.priority == priority)
            .unwrap_or_default()
    }

    /// The requests that the others hold in all.
    pub(super) fn queued_in_all(&self) -> QueuedInBand {
        let add = |sum: QueuedInBand, (band, _): &(QueuedInBand, f64)| QueuedInBand {
            requests: sum.requests.saturating_add(band.requests),
            bytes: sum.bytes.saturating_add(band.bytes),
            ..sum
        };
        self.bands.iter().fold(QueuedInBand::default(), add)
    }

    /// The requests that the others hold of this priority or a higher one.
    pub(super) fn queued_from(&self, priority: i32) -> u64 {
        self.bands
            .iter()
            .filter(|(band, _)| band.priority >= priority)
            .map(|(band, _)| band.requests)
            .sum()
    }

    /// The lowest band that another VM holds.
    pub(super) fn lowest(&self) -> Option<i32> {
        self.bands
            .iter()
            .filter(|(band, _)| band.requests > 0)
            .map(|(band, _)| band.priority)
            .min()
    }

    /// The lowest rank of a band in another VM.
    pub(super) fn lowest_rank(&self, priority: i32) -> Option<f64> {
        self.bands
            .iter()
            .find(|(band, rank)| band.priority == priority && rank.is_finite())
            .map(|(_, rank)| *rank)
    }

    /// Makes another VM refuse the newest request of its lowest band, if that band is below
    /// `priority` and the lowest of all. Returns false if there is none.
    pub(super) fn evict_below(&mut self, priority: i32, own_lowest: Option<i32>) -> bool {
        let lowest = self
            .bands
            .iter_mut()
            .map(|(band, _)| band)
            .filter(|band| band.requests > 0)
            .min_by_key(|band| band.priority);
        let Some(band) = lowest.filter(|band| {
            band.priority < priority && own_lowest.is_none_or(|own| band.priority < own)
        }) else {
            return false;
        };
        let bytes = band.bytes / band.requests;
        band.requests -= 1;
        band.bytes -= bytes;
        self.evict += 1;
        true
    }

    pub(super) fn forget_bands(&mut self) {
        self.bands.clear();
    }

    /// Applies the contents of the other rows.
    pub(super) fn read(&mut self, order: &SharedOrder, vm: u64, now: Timestamp) {
        self.bands.clear();
        for row in order.rivals(vm, now) {
            for queued in &row.bands {
                let rank = row
                    .first
                    .filter(|tag| tag.priority == queued.priority)
                    .map_or(f64::INFINITY, |tag| tag.rank);
                match self
                    .bands
                    .iter_mut()
                    .find(|(band, _)| band.priority == queued.priority)
                {
                    Some((band, lowest)) => {
                        band.requests = band.requests.saturating_add(queued.requests);
                        band.bytes = band.bytes.saturating_add(queued.bytes);
                        *lowest = lowest.min(rank);
                    }
                    None => self.bands.push((*queued, rank)),
                }
            }
        }
    }
}
