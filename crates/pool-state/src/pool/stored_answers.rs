//! Remembers which endpoint gave an answer that it may keep in memory, for responses and
//! conversations of OpenAI's API. A request that names the id of such an answer goes to the same
//! endpoint, because no other endpoint has it.
//!
//! Other workers and proxies receive each such answer as a placement of one block, which is a mark
//! as for adapters ([`super::adapters`]). A report from another proxy may be made up, so it
//! displaces only other such reports and older answers.

use scheduler::EndpointRef;

/// The maximum number of answers remembered, a power of two. Each answer takes 16 bytes, so a pool
/// whose clients use this API takes 256 KiB in each VM. A busy pool gives this many answers in some
/// minutes, and most clients take less time for their next turn. A request for a forgotten answer
/// goes to any endpoint, as every such request would without this table.
const ANSWERS_MAX: usize = 16_384;

/// The number of answers in a set of the table. The hash of an answer selects its set, where the
/// newest answer replaces the oldest.
const WAYS: usize = 4;

/// The first entries of a set, this many, are only for answers that this process saw. An answer
/// that a newer one displaces there moves to the other entries.
const OWN_WAYS: usize = WAYS / 2;

/// The upper half of a mark: "Kept" in ASCII. Hashes of blocks have another.
const MARK: u64 = 0x4b65_7074_0000_0000;
const MARK_MASK: u64 = 0xffff_ffff_0000_0000;

/// The endpoints of stored answers, by hash of the answer's id. Empty until the first answer.
#[derive(Debug, Default)]
pub(super) struct StoredAnswers {
    sets: Vec<[Option<(u32, EndpointRef)>; WAYS]>,
}

/// The mark of an answer whose id has this hash.
pub(super) fn mark(id: u64) -> u64 {
    MARK | (id & !MARK_MASK)
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
            true if own.iter().flatten().any(|(other, _)| *other == key) => return,
            true => others,
            false => &mut set[..],
        };
        let is_free = |row: &Option<(u32, EndpointRef)>| row.is_none_or(|(other, _)| other == key);
        let displaced = ways.iter().position(is_free).unwrap_or(ways.len() - 1);
        ways.copy_within(..displaced, 1);
        if let Some(newest) = ways.first_mut() {
            *newest = Some((key, endpoint));
        }
    }

    /// The endpoint that gave the answer whose id has this hash, if that is remembered.
    pub(super) fn endpoint(&self, id: u64) -> Option<EndpointRef> {
        let (key, at) = place(mark(id));
        self.sets
            .get(at)?
            .iter()
            .flatten()
            .find(|(other, _)| *other == key)
            .map(|(_, endpoint)| *endpoint)
    }
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
        answers.record(mark(id), endpoint(1), false);
        answers.record(mark(name_hash("resp_2")), endpoint(2), false);
        assert_eq!(
            (answers.endpoint(id), answers.endpoint(name_hash("resp_3"))),
            (Some(endpoint(1)), None)
        );
        answers.record(mark(id), endpoint(3), false);
        assert_eq!(answers.endpoint(id), Some(endpoint(3)));
    }

    #[test]
    fn the_oldest_of_a_full_set_is_forgotten_and_memory_is_bounded() {
        let mut answers = StoredAnswers::default();
        let same_set = |n: usize| (n * (ANSWERS_MAX / WAYS)) as u64;
        for n in 0..=WAYS {
            answers.record(mark(same_set(n)), endpoint(n as u16), false);
        }
        let found: Vec<bool> = (0..=WAYS)
            .map(|n| answers.endpoint(same_set(n)).is_some())
            .collect();
        assert_eq!(found, [false, true, true, true, true]);
        (0..100_000_u64)
            .for_each(|n| answers.record(mark(name_hash(&n.to_string())), endpoint(1), false));
        assert_eq!(answers.sets.len() * WAYS, ANSWERS_MAX);
        assert!(size_of_val(answers.sets.as_slice()) <= 16 * ANSWERS_MAX);
    }

    #[test]
    fn what_others_tell_displaces_no_answer_of_this_process() {
        let mut answers = StoredAnswers::default();
        let own: Vec<u64> = (0..2_000).map(|n| name_hash(&format!("own {n}"))).collect();
        let honest = name_hash("told");
        answers.record(mark(honest), endpoint(2), true);
        assert_eq!(answers.endpoint(honest), Some(endpoint(2)));
        for id in &own {
            answers.record(mark(*id), endpoint(1), false);
        }
        let kept = |answers: &StoredAnswers| {
            let here = |id: &&u64| answers.endpoint(**id) == Some(endpoint(1));
            own.iter().filter(here).count()
        };
        let before = kept(&answers);
        for made_up in 0..ANSWERS_MAX as u64 {
            answers.record(mark(made_up), endpoint(9), true);
        }
        for id in &own {
            answers.record(mark(*id), endpoint(9), true);
        }
        // If other proxies' answers could take all ways, none of the own answers would be left.
        assert!(
            before > 1_990 && kept(&answers) > 1_900,
            "{}",
            kept(&answers)
        );
    }

    #[test]
    fn marks_are_told_apart() {
        let marked = mark(u64::MAX);
        assert!(is_mark(marked) && !is_mark(0) && !super::super::adapters::is_model_mark(marked));
        assert!(
            !super::super::crash_correlation::is_mark(marked)
                && !is_mark(super::super::adapters::model_mark("m"))
        );
    }
}
