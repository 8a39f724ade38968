//! Limits how much of an endpoint's cache each origin may fill in the prefix index of other
//! proxies.
//!
//! A peer can report placements that no engine ever had. Other proxies cannot recognise this. So
//! placements of an origin beyond its share of the endpoint's capacity are sent to them as claims
//! ([`PlacementKind::OverShare`]). A claim counts as cached there, but displaces no placement of
//! others.
//!
//! The placements that count are the last ones at the endpoint. They cover between half of its
//! capacity and all of it. If an origin is over its share, its processes that place little stay
//! confirmed: those within an equal part of the share.

use std::collections::BTreeMap;

use pool_state::peers::EncodedPlacements;
use proto::placements::{self, EncodedPlacement, PlacementKind};
use scheduler::prefix::{BLOCK_BYTES_DEFAULT, STRIDE, is_wide};
use scheduler::{EndpointMetrics, EndpointRef};

use crate::pool::writer::PoolView;
use crate::state::peer::Origin;

/// The part of an endpoint's capacity that one origin may fill, as one in this many. If two proxies
/// pick, most placements of each are claims, and last as long as before. If more than four place
/// equally, all placements are confirmed. One of them that lies then takes a quarter from the
/// others.
const SHARES: u32 = 4;

/// The capacity of an endpoint whose KV cache is unknown, in blocks: the default of the prefix
/// index.
const CAPACITY_DEFAULT: u32 = 31_250;

/// Tokens of a block of the prefix index: four bytes of text are about one token. With other block
/// sizes the shares are larger or smaller than a quarter by that factor.
const BLOCK_TOKENS: u64 = BLOCK_BYTES_DEFAULT as u64 / 4;

/// The shares at the endpoints of one pool.
#[derive(Debug, Default)]
pub(super) struct PlacementShares {
    /// The revisions of the view that the endpoints and capacities are from.
    revision: u64,
    metrics_revision: u64,
    endpoints: BTreeMap<EndpointRef, EndpointShares>,
}

/// The peer that places.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlacingPeer<'a> {
    pub(super) process_id: u64,
    pub(super) origin: &'a Origin,
    /// The number of processes of that origin, at least one.
    pub(super) processes: u32,
}

/// The last placements at one endpoint, in blocks. Only processes of the pool have a row.
#[derive(Debug)]
struct EndpointShares {
    capacity: u32,
    blocks: u32,
    by_origin: BTreeMap<Origin, u32>,
    by_process: BTreeMap<u64, u32>,
}

// === impl PlacementShares ===

impl PlacementShares {
    /// Takes over the endpoints of the pool and their capacities.
    pub(super) fn follow(&mut self, view: &PoolView) {
        if self.revision == view.revision && self.metrics_revision == view.metrics_revision {
            return;
        }
        self.revision = view.revision;
        self.metrics_revision = view.metrics_revision;
        let mut before = std::mem::take(&mut self.endpoints);
        for (member, metrics) in view.members.iter().zip(view.metrics.iter()) {
            let mut shares = before.remove(&member.id).unwrap_or_default();
            shares.capacity = capacity(metrics);
            self.endpoints.insert(member.id, shares);
        }
    }

    /// Divides confirmed placements of a peer into those within its share and the others.
    pub(super) fn divide(&mut self, placements: &[u8], peer: PlacingPeer<'_>) -> EncodedPlacements {
        let mut divided = EncodedPlacements::default();
        for placement in placements::split(placements) {
            let is_within = self
                .endpoints
                .get_mut(&placement.endpoint)
                .is_none_or(|shares| shares.place(blocks(&placement), peer));
            let kind = if is_within {
                PlacementKind::Confirmed
            } else {
                PlacementKind::OverShare
            };
            divided.append(kind, placement.endpoint, &placement.hashes());
        }
        divided
    }
}

// === impl EndpointShares ===

impl Default for EndpointShares {
    fn default() -> Self {
        Self {
            capacity: CAPACITY_DEFAULT,
            blocks: 0,
            by_origin: BTreeMap::new(),
            by_process: BTreeMap::new(),
        }
    }
}

impl EndpointShares {
    /// Counts a placement. Returns whether it is within the share of its peer.
    fn place(&mut self, blocks: u32, peer: PlacingPeer<'_>) -> bool {
        self.blocks = self.blocks.saturating_add(blocks);
        if !self.by_origin.contains_key(peer.origin) {
            self.by_origin.insert(peer.origin.clone(), 0);
        }
        let add = |count: Option<&mut u32>| {
            count.map_or(blocks, |count| {
                *count = count.saturating_add(blocks);
                *count
            })
        };
        let of_origin = add(self.by_origin.get_mut(peer.origin));
        let of_process = add(Some(self.by_process.entry(peer.process_id).or_default()));
        let share = self.capacity / SHARES;
        let is_within = of_origin <= share || of_process <= share / peer.processes.max(1);
        while self.blocks >= self.capacity.max(1) {
            self.halve();
        }
        is_within
    }

    fn halve(&mut self) {
        self.blocks /= 2;
        self.by_origin.retain(|_, blocks| {
            *blocks /= 2;
            *blocks > 0
        });
        self.by_process.retain(|_, blocks| {
            *blocks /= 2;
            *blocks > 0
        });
    }
}

/// The blocks of an endpoint's KV cache.
fn capacity(metrics: &EndpointMetrics) -> u32 {
    let tokens = metrics
        .kv_blocks
        .zip(metrics.kv_block_tokens)
        .map(|(blocks, tokens)| u64::from(blocks) * u64::from(tokens));
    tokens.map_or(CAPACITY_DEFAULT, |tokens| {
        u32::try_from(tokens / BLOCK_TOKENS).unwrap_or(u32::MAX)
    })
}

/// The number of blocks in a placement.
fn blocks(placement: &EncodedPlacement<'_>) -> u32 {
    let words = placement.blocks.iter();
    let blocks = words.map(|word| match is_wide(u64::from_le_bytes(*word)) {
        true => STRIDE,
        false => 1,
    });
    u32::try_from(blocks.sum::<usize>()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler::{Generation, Slot};

    const CAPACITY: u32 = 8_000;

    const AT: EndpointRef = EndpointRef {
        slot: Slot(1),
        generation: Generation(1),
    };

    fn origin(last: u8) -> Origin {
        Origin {
            certificate: None,
            address: Some([10, 0, 0, last].into()),
        }
    }

    fn shares() -> PlacementShares {
        let shares = EndpointShares {
            capacity: CAPACITY,
            ..EndpointShares::default()
        };
        PlacementShares {
            endpoints: BTreeMap::from([(AT, shares)]),
            ..PlacementShares::default()
        }
    }

    /// Places 100 blocks 50 times. Returns the share that stays confirmed, in percent.
    fn confirmed(
        shares: &mut PlacementShares,
        process_id: u64,
        origin: &Origin,
        processes: u32,
    ) -> usize {
        let mut written = Vec::new();
        (0..50).for_each(|block| placements::push(&mut written, AT, &[block << 1; 100]));
        let peer = PlacingPeer {
            process_id,
            origin,
            processes,
        };
        let divided = shares.divide(&written, peer);
        assert_eq!(divided.each().count(), 50, "nothing is lost");
        2 * placements::each(&divided.placements).count()
    }

    #[test]
    fn beyond_a_quarter_of_the_capacity_an_origin_only_claims() {
        let mut shares = shares();
        assert_eq!(
            confirmed(&mut shares, 1, &origin(1), 1),
            40,
            "2,000 of 5,000"
        );
        let of_other = confirmed(&mut shares, 2, &origin(2), 1);
        assert!(of_other >= 40, "each has its own: {of_other}");
        for _ in 0..20 {
            confirmed(&mut shares, 1, &origin(1), 1);
        }
        assert_eq!(confirmed(&mut shares, 1, &origin(1), 1), 0, "still");
        let elsewhere = EndpointRef {
            slot: Slot(2),
            ..AT
        };
        let mut written = Vec::new();
        placements::push(&mut written, elsewhere, &[2; 100]);
        let peer = PlacingPeer {
            process_id: 1,
            origin: &origin(1),
            processes: 1,
        };
        assert_eq!(
            shares.divide(&written, peer).placements,
            written,
            "proxies ignore what is no endpoint of the pool"
        );
    }

    #[test]
    fn a_process_cannot_take_the_share_of_another_of_its_origin_or_have_more_by_many() {
        let mut shares = shares();
        let host = origin(1);
        for _ in 0..20 {
            confirmed(&mut shares, 1, &host, 4);
            let mut written = Vec::new();
            placements::push(&mut written, AT, &[2; 100]);
            let honest = PlacingPeer {
                process_id: 2,
                origin: &host,
                processes: 4,
            };
            let divided = shares.divide(&written, honest);
            assert!(divided.claims.is_empty(), "it places little");
        }
        let mut shares = self::shares();
        let all: usize = (0..100)
            .map(|process_id| confirmed(&mut shares, process_id, &host, 100))
            .sum();
        assert!(all < 200, "of 10,000 percent: {all}");
    }

    /// If more origins than shares place equally, none is over its share.
    #[test]
    fn of_eight_even_peers_none_is_over_its_share() {
        let mut shares = shares();
        for _ in 0..100 {
            for last in 0..8 {
                let mut written = Vec::new();
                placements::push(&mut written, AT, &[2; 100]);
                let peer = PlacingPeer {
                    process_id: u64::from(last),
                    origin: &origin(last),
                    processes: 1,
                };
                assert!(shares.divide(&written, peer).claims.is_empty());
            }
        }
        let counted = &shares.endpoints[&AT];
        assert!(counted.by_origin.len() == 8 && counted.by_process.len() == 8);
        assert!(counted.blocks < CAPACITY);
    }
}
