//! Follows the messages of one publisher by their sequence numbers, and counts the blocks that its
//! engine has cached.
//!
//! ```text
//!  Awaited ── message 0 ─────▶ Complete ◀──────── cache cleared, publisher restarted ──┐
//!     │                            └─── gap that no replay filled ──▶ Partial ──────────┘
//!     └────── later message ────────────────────────────────────────────▲
//! ```
//! A publisher numbers its messages from 0, so a lower number than before means another process. A
//! number that is too high means lost messages, which the publisher may still have and can replay.

use std::cmp::Ordering;

use super::batch::{BatchSummary, CacheMedium};

/// Whether the counts of blocks are exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheKnowledge {
    /// No message has arrived yet.
    #[default]
    Awaited,
    /// All events since the cache was empty are counted.
    Complete,
    /// Some events are unknown, because they came before the subscription or were lost.
    Partial,
}

/// The place of a message of the live stream among those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequencePlace {
    /// The message is the next.
    Next,
    /// The message is counted already, because a replay contained it.
    Known,
    /// Messages are missing, from this number on.
    Gap { from: u64 },
}

/// How a message of the live stream arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrivedMessage {
    /// Whether a new process of the engine sent it, whose cache was empty at first.
    pub is_restart: bool,
    pub place: SequencePlace,
}

/// The differences between a batch and the batches before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CountedBatch {
    /// The number of messages before it that are lost.
    pub lost: u64,
    /// The number of removed blocks that no known event has stored.
    pub unmatched: u64,
}

/// The position in the stream of a publisher.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum StreamPosition {
    #[default]
    Start,
    /// The last live message had the number `live`. All messages before `next` are counted or lost;
    /// after a replay, `next` may be far above `live`.
    At { next: u64, live: u64 },
}

/// The state of one publisher's stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventFollower {
    position: StreamPosition,
    knowledge: CacheKnowledge,
    /// The cached blocks, by medium.
    blocks: [u64; CacheMedium::COUNT],
}

// === impl CacheKnowledge ===

impl CacheKnowledge {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Awaited => "awaited",
            Self::Complete => "complete",
            Self::Partial => "partial",
        }
    }
}

// === impl EventFollower ===

impl EventFollower {
    #[must_use]
    pub fn knowledge(&self) -> CacheKnowledge {
        self.knowledge
    }

    /// Returns the cached blocks, by medium.
    #[must_use]
    pub fn blocks(&self) -> [u64; CacheMedium::COUNT] {
        self.blocks
    }

    /// Judges the number of a message of the live stream. [`Self::count`] must follow, after a
    /// replay if there is a gap.
    pub fn arrive(&mut self, sequence: u64) -> ArrivedMessage {
        let (next, is_restart) = match self.position {
            StreamPosition::Start => {
                self.knowledge = match sequence {
                    0 => CacheKnowledge::Complete,
                    _ => CacheKnowledge::Partial,
                };
                (sequence, false)
            }
            StreamPosition::At { live, .. } if sequence <= live => {
                self.blocks = Default::default();
                self.knowledge = CacheKnowledge::Complete;
                (0, true)
            }
            StreamPosition::At { next, .. } => (next, false),
        };
        self.position = StreamPosition::At {
            next,
            live: sequence,
        };
        let place = match sequence.cmp(&next) {
            Ordering::Less => SequencePlace::Known,
            Ordering::Equal => SequencePlace::Next,
            Ordering::Greater => SequencePlace::Gap { from: next },
        };
        ArrivedMessage { is_restart, place }
    }

    /// Counts a message of the live stream or of a replay. Returns `None` if it is counted already.
    pub fn count(&mut self, sequence: u64, batch: &BatchSummary) -> Option<CountedBatch> {
        let StreamPosition::At { next, live } = self.position else {
            return None; // no message of the live stream has arrived
        };
        let lost = sequence.checked_sub(next)?;
        if lost > 0 {
            self.knowledge = CacheKnowledge::Partial;
        }
        if batch.is_cleared {
            self.blocks = Default::default();
            self.knowledge = CacheKnowledge::Complete;
        }
        let mut unmatched = 0;
        for (known, changed) in self.blocks.iter_mut().zip(batch.blocks) {
            let all = known.saturating_add(changed.stored);
            unmatched += changed.removed.saturating_sub(all);
            *known = all.saturating_sub(changed.removed);
        }
        self.position = StreamPosition::At {
            next: sequence.saturating_add(1),
            live,
        };
        Some(CountedBatch { lost, unmatched })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kv_events::batch::ChangedBlocks;

    fn batch(stored: u64, removed: u64) -> BatchSummary {
        let mut batch = BatchSummary::default();
        batch.blocks[CacheMedium::Gpu as usize] = ChangedBlocks { stored, removed };
        batch
    }

    fn cleared() -> BatchSummary {
        BatchSummary {
            is_cleared: true,
            ..BatchSummary::default()
        }
    }

    /// A message of the live stream, without a replay.
    fn live(
        follower: &mut EventFollower,
        sequence: u64,
        batch: &BatchSummary,
    ) -> (ArrivedMessage, Option<CountedBatch>) {
        let arrived = follower.arrive(sequence);
        (arrived, follower.count(sequence, batch))
    }

    fn arrived(place: SequencePlace) -> ArrivedMessage {
        ArrivedMessage {
            is_restart: false,
            place,
        }
    }

    const NOTHING: Option<CountedBatch> = Some(CountedBatch {
        lost: 0,
        unmatched: 0,
    });

    #[test]
    fn messages_from_the_first_on_count_all_blocks() {
        let mut follower = EventFollower::default();
        assert_eq!(follower.knowledge(), CacheKnowledge::Awaited);
        for (sequence, (stored, removed)) in [(17, 0), (1, 4), (0, 1)].into_iter().enumerate() {
            let seen = live(&mut follower, sequence as u64, &batch(stored, removed));
            assert_eq!(seen, (arrived(SequencePlace::Next), NOTHING));
        }
        assert_eq!(follower.knowledge(), CacheKnowledge::Complete);
        assert_eq!(follower.blocks(), [13, 0, 0]);
    }

    #[test]
    fn a_subscription_in_the_middle_is_partial_until_the_cache_is_cleared() {
        let mut follower = EventFollower::default();
        let (place, counted) = live(&mut follower, 900, &batch(2, 5));
        assert_eq!(
            place,
            arrived(SequencePlace::Next),
            "nothing was lost since"
        );
        assert_eq!(
            counted.map(|counted| counted.unmatched),
            Some(3),
            "blocks that were stored earlier"
        );
        assert_eq!(follower.knowledge(), CacheKnowledge::Partial);
        assert_eq!(follower.blocks(), [0; 3]);
        live(&mut follower, 901, &cleared());
        live(&mut follower, 902, &batch(4, 0));
        assert_eq!(follower.knowledge(), CacheKnowledge::Complete);
        assert_eq!(follower.blocks(), [4, 0, 0]);
    }

    #[test]
    fn a_gap_that_a_replay_fills_leaves_the_counts_complete() {
        let mut follower = EventFollower::default();
        live(&mut follower, 0, &batch(1, 0));
        assert_eq!(follower.arrive(3), arrived(SequencePlace::Gap { from: 1 }));
        // The publisher replays all that it has from there on, also what comes live later.
        for sequence in 1..=4 {
            assert_eq!(follower.count(sequence, &batch(1, 0)), NOTHING);
        }
        assert_eq!(follower.count(3, &batch(1, 0)), None, "counted already");
        let seen = live(&mut follower, 4, &batch(1, 0));
        assert_eq!(seen, (arrived(SequencePlace::Known), None));
        let seen = live(&mut follower, 5, &batch(1, 0));
        assert_eq!(seen, (arrived(SequencePlace::Next), NOTHING));
        assert_eq!(follower.knowledge(), CacheKnowledge::Complete);
        assert_eq!(follower.blocks(), [6, 0, 0]);
    }

    #[test]
    fn a_gap_that_stays_makes_the_counts_partial() {
        let mut follower = EventFollower::default();
        live(&mut follower, 0, &batch(1, 0));
        // The publisher does not have 1 and 2 any more.
        assert_eq!(follower.arrive(5), arrived(SequencePlace::Gap { from: 1 }));
        let lost = |count: Option<CountedBatch>| count.map(|counted| counted.lost);
        assert_eq!(lost(follower.count(3, &batch(1, 0))), Some(2));
        assert_eq!(lost(follower.count(4, &batch(1, 0))), Some(0));
        assert_eq!(lost(follower.count(5, &batch(1, 0))), Some(0));
        assert_eq!(follower.knowledge(), CacheKnowledge::Partial);
        assert_eq!(follower.blocks(), [4, 0, 0]);
    }

    #[test]
    fn a_publisher_that_starts_again_has_an_empty_cache() {
        let mut follower = EventFollower::default();
        live(&mut follower, 0, &batch(9, 0));
        live(&mut follower, 1, &batch(9, 0));
        let (seen, counted) = live(&mut follower, 0, &batch(2, 0));
        assert!(seen.is_restart);
        assert_eq!((seen.place, counted), (SequencePlace::Next, NOTHING));
        assert_eq!(follower.blocks(), [2, 0, 0]);
        assert_eq!(follower.knowledge(), CacheKnowledge::Complete);

        live(&mut follower, 1, &batch(1, 0));
        live(&mut follower, 2, &batch(1, 0));
        let seen = follower.arrive(1);
        assert!(seen.is_restart, "its first message was lost");
        assert_eq!(seen.place, SequencePlace::Gap { from: 0 });
        follower.count(0, &batch(5, 0));
        follower.count(1, &batch(1, 0));
        assert_eq!(follower.blocks(), [6, 0, 0]);
        assert_eq!(follower.knowledge(), CacheKnowledge::Complete);
    }

    proptest! {
        #[test]
        fn any_numbers_and_counts_leave_a_state(
            messages in prop::collection::vec((prop_oneof![0_u64..8, any::<u64>()], any::<(bool, u32, u32, bool)>()), 0..40),
        ) {
            let mut follower = EventFollower::default();
            let mut stored_in_all = 0_u64;
            for (sequence, (is_live, stored, removed, is_cleared)) in messages {
                if is_live {
                    follower.arrive(sequence);
                }
                let mut batch = batch(stored.into(), removed.into());
                batch.is_cleared = is_cleared;
                stored_in_all += u64::from(stored);
                let before = follower.blocks();
                let counted = follower.count(sequence, &batch);
                prop_assert!(follower.blocks()[0] <= stored_in_all);
                if counted.is_none() {
                    prop_assert_eq!(before, follower.blocks());
                    prop_assert_eq!(follower.count(sequence, &batch), None, "nor later");
                }
            }
        }
    }
}
