//! Finds entries of blocks that no endpoint has cached any more. These entries show why a part of a
//! prompt is not cached.
//!
//! An entry outlives its block. Entries of evicted blocks stay in the table until other entries
//! need their places. The entries of an endpoint that restarted or was removed stay until a sweep
//! frees them ([`PrefixIndex::sweep`]). If a prompt is found only in entries of these two kinds, an
//! endpoint has received the prompt before.

use super::index::PrefixIndex;
use super::owners::region;

/// The part of a prompt that endpoints have ever received, as a number of hashes from the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecalledLength {
    /// The longest part that an endpoint of the present pool has received; at least the `cached`
    /// hashes.
    pub given: usize,
    /// The longest part that an endpoint has received, including endpoints that have restarted or
    /// were removed; at least `given`.
    pub lost: usize,
}

/// Whether a live owner, and whether a former owner, has an entry of a block.
#[derive(Clone, Copy, Default)]
struct BlockTraces {
    live: bool,
    retired: bool,
}

impl PrefixIndex {
    /// Finds how many of these hashes, from the first, have entries. The caller knows that an
    /// endpoint has, or may have, cached the first `cached` hashes. If the next block has no entry,
    /// the search takes one probe for each region. Otherwise it is a binary search, because an
    /// endpoint that received a block also received all earlier blocks.
    pub fn recall(&self, blocks: &[u64], cached: usize) -> RecalledLength {
        let beyond = |from: usize, is_there: &dyn Fn(BlockTraces) -> bool| {
            let rest = blocks.get(from..).unwrap_or_default();
            match rest.split_first() {
                Some((&first, rest)) if is_there(self.traces(first)) => {
                    from + 1 + rest.partition_point(|&block| is_there(self.traces(block)))
                }
                _ => from,
            }
        };
        let given = beyond(cached, &|traces| traces.live);
        RecalledLength {
            given,
            lost: beyond(given, &|traces| traces.retired),
        }
    }

    fn traces(&self, block: u64) -> BlockTraces {
        let mut traces = BlockTraces::default();
        let regions = 0..self.owners.regions();
        self.table
            .fetch(regions.clone().map(|region| (block, region)));
        for of in regions {
            self.table.for_each(self.table.key(block, of), |entry| {
                if region(entry.owner) == of {
                    traces.live |= self.owners.is_live(entry.owner);
                    traces.retired |= self.owners.is_retired(entry.owner);
                }
            });
        }
        traces
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::{EndpointRef, Generation, Slot};

    fn endpoint(slot: u16, generation: u32) -> EndpointRef {
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(generation),
        }
    }

    fn prompt(number: u64, blocks: u64) -> Vec<u64> {
        (1..=blocks)
            .map(|block| (number * 10_000 + block) << 1)
            .collect()
    }

    fn cached(index: &PrefixIndex, blocks: &[u64], at: EndpointRef) -> (u32, u32) {
        let mut known = Vec::new();
        index.matched(blocks, &[at], &mut known);
        (known[0].cached, known[0].maybe_cached)
    }

    #[test]
    fn what_was_never_given_leaves_no_trace() {
        let mut index = PrefixIndex::with_capacity(100_000);
        assert_eq!(index.recall(&prompt(1, 50), 0), RecalledLength::default());
        index.record(endpoint(3, 1), &prompt(1, 50));
        assert_eq!(
            index.recall(&prompt(2, 50), 0),
            RecalledLength { given: 0, lost: 0 }
        );
        assert_eq!(index.recall(&[], 0), RecalledLength { given: 0, lost: 0 });
        assert_eq!(
            index.recall(&prompt(1, 50), 99),
            RecalledLength {
                given: 99,
                lost: 99
            }
        );
        assert_eq!(
            PrefixIndex::with_capacity(0).recall(&prompt(1, 50), 0),
            RecalledLength::default()
        );
    }

    #[test]
    fn evicted_blocks_are_recalled_as_far_as_they_were_given() {
        let mut index = PrefixIndex::with_capacity(100_000);
        let engine = endpoint(1, 1);
        index.set_capacity(engine, 1_000);
        index.record(engine, &prompt(0, 60));
        (1..60).for_each(|number| index.record(engine, &prompt(number, 100)));
        let longer = prompt(0, 80);
        assert_eq!(cached(&index, &longer, engine), (0, 0));
        assert_eq!(
            index.recall(&longer, 0),
            RecalledLength {
                given: 60,
                lost: 60
            }
        );
    }

    #[test]
    fn blocks_of_a_restarted_endpoint_are_recalled_until_a_sweep() {
        let mut index = PrefixIndex::with_capacity(100_000);
        // The entries belong to endpoints in several regions.
        (0..40)
            .for_each(|slot| index.record(endpoint(slot, 1), &prompt(1_000 + u64::from(slot), 10)));
        index.record(endpoint(33, 1), &prompt(0, 70));
        index.record(endpoint(2, 1), &prompt(0, 20));
        index.forget(endpoint(33, 1));
        assert_eq!(
            index.recall(&prompt(0, 90), 20),
            RecalledLength {
                given: 20,
                lost: 70
            }
        );
        index.record(endpoint(33, 2), &prompt(0, 5));
        assert_eq!(
            index.recall(&prompt(0, 90), 5),
            RecalledLength {
                given: 20,
                lost: 70
            }
        );
        while !index.sweep(1_000) {}
        assert_eq!(
            index.recall(&prompt(0, 90), 5),
            RecalledLength {
                given: 20,
                lost: 20
            }
        );
    }
}
