//! The requests that the other VMs of the process hold, as far as this VM knows.

use scheduler::Timestamp;
use scheduler::flow::{QueuedInBand, RowBand, SharedOrder};

/// The state of the other VMs, as far as this VM knows it.
#[derive(Debug, Default)]
pub(super) struct SharedQueues {
    pub(super) others: OtherVms,
    pub(super) round: RoundState,
    /// Whether room was made since the reports of the other VMs were last read, while no VM was
    /// known to hold requests.
    pub(super) room_unclaimed: bool,
    /// Whether a load report of another VM has changed since the last round.
    pub(super) rows_changed: bool,
    /// Whether the order must be read.
    pub(super) look: bool,
    /// The requests that the other VMs hold.
    pub(super) bands: Vec<OtherBand>,
    /// The VMs that must refuse a request, each with the priority of its band, until the order has
    /// these entries.
    pub(super) asks: Vec<(u64, i32)>,
}

/// The requests of a band that another VM holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct OtherBand {
    pub(super) vm: u64,
    /// The rank of that VM's first request of the band; infinite if another band comes first there.
    rank: f64,
    pub(super) row: RowBand,
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

/// The round of the order, in which all VMs try their requests, as this VM sees it.
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

    /// The requests of a band that the other VMs hold.
    pub(super) fn in_band(&mut self, priority: i32) -> impl Iterator<Item = &mut OtherBand> {
        self.bands
            .iter_mut()
            .filter(move |other| other.row.queued.priority == priority)
    }

    /// The requests with priorities from `lowest` to `highest` that the other VMs hold.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn queued(&self, lowest: i32, highest: i32) -> QueuedInBand {
        let mut sum = QueuedInBand::default();
        for OtherBand { row, .. } in &self.bands {
            if (lowest..=highest).contains(&row.queued.priority) {
                sum.requests = sum.requests.saturating_add(row.queued.requests);
                sum.bytes = sum.bytes.saturating_add(row.queued.bytes);
            }
        }
        sum
    }

    /// The lowest priority: `own`, or that of a request in another VM.
    pub(super) fn lowest(&self, own: i32) -> i32 {
        self.bands
            .iter()
            .filter(|other| other.row.queued.requests > 0)
            .fold(own, |lowest, other| lowest.min(other.row.queued.priority))
    }

    /// The lowest rank of a band in another VM.
    pub(super) fn lowest_rank(&self, priority: i32) -> Option<f64> {
        let ranks = self.bands.iter().map(|other| {
            let is_first = other.row.queued.priority == priority;
            if is_first { other.rank } else { f64::INFINITY }
        });
        Some(ranks.fold(f64::INFINITY, f64::min)).filter(|rank| rank.is_finite())
    }

    pub(super) fn forget_bands(&mut self) {
        self.bands.clear();
    }

    /// Reads the other VMs' rows. Requests that a VM was asked to refuse no longer count.
    pub(super) fn read(&mut self, order: &SharedOrder, vm: u64, now: Timestamp) {
        self.bands.clear();
        for row in order.rivals(vm, now) {
            for band in &row.bands {
                let mut other = OtherBand {
                    vm: row.vm,
                    rank: row
                        .first
                        .filter(|tag| tag.priority == band.queued.priority)
                        .map_or(f64::INFINITY, |tag| tag.rank),
                    row: *band,
                };
                let is_asked = |ask: &&(u64, i32)| **ask == (row.vm, band.queued.priority);
                other.take(band.refuse + self.asks.iter().filter(is_asked).count() as u64);
                self.bands.push(other);
            }
        }
    }

    /// Asks the other VMs to refuse requests.
    pub(super) fn write_asks(&self, order: &mut SharedOrder) {
        for (vm, priority) in &self.asks {
            let row = order.rows.iter_mut().find(|row| row.vm == *vm);
            if let Some(band) = row.and_then(|row| row.band_mut(*priority)) {
                band.refuse += 1;
            }
        }
    }
}
