//! The streak of failures at an endpoint, shared by the workers of a process. If each worker had
//! its own streak, a broken endpoint would fail a whole streak of requests for each worker.
//!
//! The other workers receive a failure, and a success that ends a streak, as placements of one
//! block. This block is no hash of a prompt but a *mark*: its upper 32 bits are a constant, as for
//! adapters ([`super::adapters`]). For a failure, the lower 32 bits identify the request and its
//! client, so one request that fails through several workers counts once. For a success, they
//! identify the client, so a worker that sees only one client learns that there are others. A mark
//! never leaves the process, because other proxies may be hostile.

use proto::placements::PlacementKind;
use scheduler::{EndpointRef, Timestamp};

use super::health::EndpointHealthTable;
use super::placements::PlacementQueue;
use super::witnesses::WitnessMark;

/// The upper half of a mark: "Fail" in ASCII. Hashes of blocks have another.
const MARK: u64 = 0x4661_696c_0000_0000;
const MARK_MASK: u64 = 0xffff_ffff_0000_0000;

/// How many of a mark's blocks count as known to other proxies: its only block, so the mark is not
/// sent to them.
const KNOWN: u32 = 1;

/// Whether a block of a placement is the mark of a failure or a success, not the hash of a block.
pub(super) fn is_mark(block: u64) -> bool {
    block & MARK_MASK == MARK
}

/// Reports to the other workers that a request failed at the endpoint.
pub(super) fn publish_failure(
    placements: &mut PlacementQueue,
    endpoint: EndpointRef,
    mark: WitnessMark,
) {
    let mark = MARK | u64::from(mark.0);
    placements.push(PlacementKind::Confirmed, endpoint, &[mark], KNOWN);
}

/// Reports to the other workers that a success ended the endpoint's streak.
pub(super) fn publish_success(
    placements: &mut PlacementQueue,
    endpoint: EndpointRef,
    client: WitnessMark,
) {
    let mark = MARK | u64::from(client.0);
    placements.push(PlacementKind::Withdrawn, endpoint, &[mark], KNOWN);
}

/// Applies a mark from another worker.
pub(super) fn receive(
    health: &mut EndpointHealthTable,
    kind: PlacementKind,
    endpoint: EndpointRef,
    mark: u64,
    now: Timestamp,
) {
    let mark = WitnessMark((mark & !MARK_MASK) as u32);
    match kind {
        PlacementKind::Withdrawn => {
            if mark != WitnessMark::default() {
                health.note_client(mark.client(), now);
            }
            health.end_streak(endpoint);
        }
        _ => health.record_peer_failure(endpoint, mark, now),
    }
}
