//! Remembers which endpoint gave an answer that it may keep in memory, for responses and
//! conversations of OpenAI's API. A request that names the id of such an answer goes to the same
//! endpoint, because no other endpoint has it.
//!
//! Other workers and proxies receive each such answer as a placement of one block, which is a mark
//! as for adapters ([`super::adapters`]). A report from another proxy may be made up, so it
//! displaces only other such reports and older answers. A client with many answers displaces its
//! own.

use scheduler::EndpointRef;

/// The maximum number of answers remembered, a power of two. Each answer takes 16 bytes, so a pool
/// whose clients use this API takes 256 KiB in each VM. A busy pool gives this many answers in some
/// minutes, and most clients take less time for their next turn. A request for a forgotten answer
/// goes to any endpoint, as every such request would without this table.
const ANSWERS_MAX: usize = 16_384;

/// The number of answers in a set of the table. The hash of an answer selects its set, where the
/// newest answer replaces the oldest, or the oldest of its client if that client has
/// [`CLIENT_WAYS`] there.
const WAYS: usize = 4;

/// The number of answers that one client can have in a full set before they displace each other.
const CLIENT_WAYS: usize = WAYS / 2;

/// The first entries of a set, this many, are only for answers that this process saw. An answer
/// that a newer one displaces there moves to the other entries.
const OWN_WAYS: usize = WAYS / 2;

/// The upper half of a mark: "Kept" in ASCII. Hashes of blocks have another.
const MARK: u64 = 0x4b65_7074_0000_0000;
const MARK_MASK: u64 = 0xffff_ffff_0000_0000;

/// The bits of a mark that come from the client's hash. The lower bits come from the answer's id.
/// Four bits are enough: a client shares its value with one other client in 16.
const CLIENT_MASK: u64 = 0xf000_0000;
const ID_BITS: u32 = CLIENT_MASK.trailing_zeros();

/// Spreads the hashes of clients over all values, because that of an IPv6 network is its address.
/// 2^64 divided by the golden ratio.
const CLIENT_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// The endpoints of stored answers, by hash of the answer's id. Empty until the first answer.
#[derive(Debug, Default)]
pub(super) struct StoredAnswers {
    sets: Vec<[Option<StoredAnswer>; WAYS]>,
}

/// The lower half of an answer's mark, and the endpoint that gave the answer.
type StoredAnswer = (u32, EndpointRef);

/// The mark of an answer to this client, whose id has this hash.
pub(super) fn mark(id: u64, client: u64) -> u64 {
    let mixed = client.wrapping_mul(CLIENT_FACTOR);
    MARK | ((mixed >> 32) & CLIENT_MASK) | (id & !(MARK_MASK | CLIENT_MASK))
}

/// Whether a block of a placement is the mark of a stored answer, not the hash of a block.
pub(super) fn is_mark(block: u64) -> bool {
    block & MARK_MASK == MARK
}

// === impl StoredAnswers ===

impl StoredAnswers {
    /// Records that the endpoint gave the answer with this mark. If `from_peer`, another proxy
    /// reported the answer.
    pub(super) fn record(&mut self, mark: u64, endpoint: EndpointRef, from_peer: bool) {
        if self.sets.is_empty() {
            self.sets = vec![[None; WAYS]; ANSWERS_MAX / WAYS];
        }
        let (key, at) = place(mark);
        let Some(set) = self.sets.get_mut(at) else {
            return;
        };
        let (own, others) = set.split_at_mut(OWN_WAYS);
        let ways = match from_peer {
            true if own.iter().flatten().any(|(other, _)| is_same(*other, key)) => return,
            true => others,
            false => &mut set[..],
        };
        let is_free = |row: &Option<StoredAnswer>| row.is_none_or(|(other, _)| is_same(other, key));
        let is_clients = |row: &Option<StoredAnswer>| {
            row.is_some_and(|(other, _)| (other ^ key) >> ID_BITS == 0)
        };
        let others_too = ways.iter().filter(|&row| is_clients(row)).count() < CLIENT_WAYS;
        let displaced = ways
            .iter()
            .position(is_free)
            .or_else(|| ways.iter().rposition(|row| others_too || is_clients(row)))
            .unwrap_or(0);
        ways.copy_within(..displaced, 1);
        if let Some(newest) = ways.first_mut() {
            *newest = Some((key, endpoint));
        }
    }

    /// The endpoint that gave the answer whose id has this hash, if that is remembered.
    pub(super) fn endpoint(&self, id: u64) -> Option<EndpointRef> {
        let (key, at) = place(mark(id, 0));
        self.sets
            .get(at)?
            .iter()
            .flatten()
            .find(|(other, _)| is_same(*other, key))
            .map(|(_, endpoint)| *endpoint)
    }
}

/// Whether two marks are of the same answer, whichever client they name.
fn is_same(one: u32, other: u32) -> bool {
    (one ^ other) << (u32::BITS - ID_BITS) == 0
}

/// The part of a mark that the table stores, and the set that it belongs to.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the lower half is the hash"
)]
fn place(mark: u64) -> (u32, usize) {
    let key = mark as u32;
    (key, key as usize % (ANSWERS_MAX / WAYS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler::{Generation, Slot, name_hash};

    fn endpoint(slot: u16) -> EndpointRef {
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(1),
        }
    }

    #[test]
    fn an_answer_is_found_by_its_id_and_the_last_endpoint_counts() {
        let mut answers = StoredAnswers::default();
        let id = name_hash("resp_1");
        assert_eq!(answers.endpoint(id), None);
        answers.record(mark(id, 0), endpoint(1), false);
        answers.record(mark(name_hash("resp_2"), 0), endpoint(2), false);
        assert_eq!(
            (answers.endpoint(id), answers.endpoint(name_hash("resp_3"))),
            (Some(endpoint(1)), None)
        );
        answers.record(mark(id, 0), endpoint(3), false);
        assert_eq!(answers.endpoint(id), Some(endpoint(3)));
    }

    #[test]
    fn the_oldest_of_a_full_set_is_forgotten_and_memory_is_bounded() {
        let mut answers = StoredAnswers::default();
        let same_set = |n: usize| (n * (ANSWERS_MAX / WAYS)) as u64;
        for n in 0..=WAYS {
            answers.record(mark(same_set(n), 0), endpoint(n as u16), false);
        }
        let found: Vec<bool> = (0..=WAYS)
            .map(|n| answers.endpoint(same_set(n)).is_some())
            .collect();
        assert_eq!(found, [false, true, true, true, true]);
        for n in 0..100_000 {
            let id = name_hash(&format!("{n}"));
            answers.record(mark(id, 0), endpoint(1), false);
        }
        assert_eq!(answers.sets.len() * WAYS, ANSWERS_MAX);
        assert!(size_of_val(answers.sets.as_slice()) <= 16 * ANSWERS_MAX);
    }

    #[test]
    fn what_others_tell_displaces_no_answer_of_this_process() {
        let mut answers = StoredAnswers::default();
        let own: Vec<u64> = (0..2_000).map(|n| name_hash(&format!("own {n}"))).collect();
        let honest = name_hash("told");
        answers.record(mark(honest, 0), endpoint(2), true);
        assert_eq!(answers.endpoint(honest), Some(endpoint(2)));
        for id in &own {
            answers.record(mark(*id, 0), endpoint(1), false);
        }
        let kept = |answers: &StoredAnswers| {
            let here = |id: &&u64| answers.endpoint(**id) == Some(endpoint(1));
            own.iter().filter(here).count()
        };
        let before = kept(&answers);
        for made_up in 0..ANSWERS_MAX as u64 {
            answers.record(mark(made_up, 0), endpoint(9), true);
        }
        for id in &own {
            answers.record(mark(*id, 0), endpoint(9), true);
        }
        // If other proxies' answers could take all ways, none of the own answers would be left.
        assert!(
            before > 1_990 && kept(&answers) > 1_900,
            "{}",
            kept(&answers)
        );
    }

    #[test]
    fn one_client_takes_at_most_half_of_a_full_set_from_others() {
        let mut answers = StoredAnswers::default();
        let own: Vec<u64> = (0..1_000).map(|n| name_hash(&format!("own {n}"))).collect();
        for id in &own {
            answers.record(mark(*id, 0), endpoint(1), false);
        }
        for n in 0..100_000 {
            let id = name_hash(&format!("other {n}"));
            answers.record(mark(id, u64::MAX), endpoint(2), false);
        }
        let here = |id: &&u64| answers.endpoint(**id) == Some(endpoint(1));
        let kept = own.iter().filter(here).count();
        // Few sets had more than two answers before.
        assert!(kept > 950, "{kept}");
        let newest = name_hash("other 99999");
        assert_eq!(answers.endpoint(newest), Some(endpoint(2)));
        answers.record(mark(own[0], u64::MAX), endpoint(3), false);
        assert_eq!(answers.endpoint(own[0]), Some(endpoint(3)));
    }

    #[test]
    fn marks_are_told_apart() {
        let marked = mark(u64::MAX, u64::MAX);
        assert!(is_mark(marked) && !is_mark(0) && !super::super::adapters::is_model_mark(marked));
        assert!(
            !super::super::crash_correlation::is_mark(marked)
                && !is_mark(super::super::adapters::model_mark("m"))
        );
    }
}
