//! The streak of failures at an endpoint, shared by the workers of a process. If each worker had
//! its own streak, a broken endpoint would fail a whole streak of requests for each worker.
//!
//! The other workers receive a failure, a good answer to a client in a streak (again every few
//! seconds), and a success that ends a streak, as placements of one block, with a kind for each of
//! the three. The block is no hash of a prompt but a *mark*: its upper 32 bits are a constant, as
//! for adapters ([`super::adapters`]). For a failure, the lower 32 bits identify the request and
//! its client, so one request that fails through several workers counts once. For an answer or a
//! success, they identify the client, so a worker that sees only one client learns that there are
//! others. A mark never leaves the process, because other proxies may be hostile.

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

/// A request failed at the endpoint.
pub(super) const FAILED: PlacementKind = PlacementKind::Confirmed;

/// The endpoint answers a client while it fails for others.
pub(super) const ANSWERED: PlacementKind = PlacementKind::Unconfirmed;

/// A success ended the endpoint's streak.
pub(super) const ENDED: PlacementKind = PlacementKind::Withdrawn;

/// Whether a block of a placement is the mark of a failure or a success, not the hash of a block.
pub(super) fn is_mark(block: u64) -> bool {
    block & MARK_MASK == MARK
}

/// Reports an event to the other workers.
#[inline(never)] // several callers, and the wasm module should be small
pub(super) fn publish(
    placements: &mut PlacementQueue,
    kind: PlacementKind,
    endpoint: EndpointRef,
    mark: WitnessMark,
) {
    let mark = MARK | u64::from(mark.0);
    placements.push(kind, endpoint, &[mark], KNOWN);
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
        ENDED => {
            if mark != WitnessMark::default() {
                health.note_client(mark.client(), now);
            }
            health.end_streak(endpoint);
        }
        ANSWERED => {
            health.note_answer(endpoint, mark.client(), now);
        }
        _ => health.record_peer_failure(endpoint, mark, now),
    }
}

#[cfg(test)]
mod tests {
    use scheduler::{Generation, Slot};

    use super::super::health::FailureWeight;
    use super::super::witnesses::{RequestFailure, Witness};
    use super::*;

    #[test]
    fn an_endpoint_that_answers_others_through_another_worker_stays_whatever_one_client_does() {
        let [endpoint, other] = [0, 1].map(|slot| EndpointRef {
            slot: Slot(slot),
            generation: Generation(1),
        });
        let is_ejected = |hears| {
            let mut health = EndpointHealthTable::default();
            (0..100).any(|n| {
                let now = Timestamp(0).plus_ms(20_000 + n * 500);
                for client in 1..=3 {
                    health.note_client(WitnessMark::of_client(client), now);
                }
                health.record_success(other, 7, now);
                if hears {
                    let mark = MARK | u64::from(WitnessMark::of_client(2).0);
                    receive(&mut health, ANSWERED, endpoint, mark, now);
                }
                let failure = RequestFailure::Answer(Witness::Prompt(n), 1);
                health.record_failure(endpoint, failure, now) == FailureWeight::Ejects
            })
        };
        assert_eq!([true, false].map(is_ejected), [false, true]);
    }
}
