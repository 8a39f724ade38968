//! Prompts that were sent to endpoints, until they are published to other workers and proxies.

use std::collections::VecDeque;

use proto::placements::PlacementKind;
use scheduler::EndpointRef;

/// The maximum number of hashes in placements that wait to be published. A host takes the
/// placements after each pick. If it does not, the oldest are dropped and counted.
const QUEUED_BLOCKS_MAX: usize = 4 * scheduler::prefix::BLOCKS_MAX;

/// A prompt that was sent to an endpoint, or a mark that other VMs keep for the endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The evidence for the placement. A mark counts as confirmed.
    pub kind: PlacementKind,
    pub endpoint: EndpointRef,
    /// The hashes of the prompt's blocks, first block first, or a single mark, which is not a hash.
    /// A mark means the model of a request that was sent to the endpoint (`pool/adapters.rs`), a
    /// prompt that cost the endpoint its connection (`pool/crash_correlation.rs`), an answer that
    /// the endpoint may keep (`pool/stored_answers.rs`), or an answer that failed
    /// (`pool/shared_streak.rs`). The upper half of a mark is a constant for each of these
    /// meanings.
    pub blocks: Box<[u64]>,
    /// How many of the blocks, from the first, the endpoint had cached before, as estimated.
    pub known: u32,
}

/// Placements that wait to be published.
#[derive(Debug, Default)]
pub(super) struct PlacementQueue {
    /// Whether the host publishes them.
    enabled: bool,
    placements: VecDeque<Placement>,
    blocks: usize,
    /// The number of placements that were dropped in favour of newer ones.
    dropped: u64,
}

// === impl PlacementQueue ===

impl PlacementQueue {
    pub(super) fn push(
        &mut self,
        kind: PlacementKind,
        endpoint: EndpointRef,
        blocks: &[u64],
        known: u32,
    ) {
        if !self.enabled {
            return;
        }
        // A placement without blocks still counts as a request. The prompt of that request is not
        // read, or is shorter than a block.
        self.blocks += blocks.len().max(1);
        self.placements.push_back(Placement {
            kind,
            endpoint,
            blocks: blocks.into(),
            known,
        });
        while self.blocks > QUEUED_BLOCKS_MAX {
            let Some(oldest) = self.placements.pop_front() else {
                return;
            };
            self.blocks -= oldest.blocks.len().max(1);
            self.dropped += 1;
        }
    }

    /// Sets whether placements are kept for publishing.
    pub(super) fn set_enabled(&mut self, wanted: bool) {
        if self.enabled != wanted {
            *self = Self {
                enabled: wanted,
                dropped: self.dropped,
                ..Self::default()
            };
        }
    }

    /// The placements since the last call.
    pub(super) fn take(&mut self) -> VecDeque<Placement> {
        self.blocks = 0;
        std::mem::take(&mut self.placements)
    }

    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }
}
