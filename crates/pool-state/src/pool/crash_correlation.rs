//! Finds prompts that crash engines, so that they are not sent on to the next engine.
//!
//! A lost connection is remembered with the hash of its prompt. A prompt that cost two engines
//! their connection within [`REMEMBERED_MS`] is refused, if both engines work with other prompts
//! and lost no other prompt's connection at the same moment: an engine that dies loses all its
//! connections, and it is not known which prompt is to blame.
//!
//! Other workers and proxies receive this as placements of one block, marked in the upper half as
//! adapters are ([`super::adapters`]).

use std::collections::VecDeque;

use scheduler::EndpointRef;

use super::health::EndpointHealthTable;
use scheduler::Timestamp;

/// How long a lost connection counts against its prompt, ms.
const REMEMBERED_MS: u64 = 60_000;

/// Lost connections remembered; beyond it the oldest are dropped. When so many are lost within a
/// minute, engines are dying, and no prompt is the reason.
const LOST_MAX: usize = 64;

/// Connections that one engine lost within this many ms were lost together.
const TOGETHER_MS: u64 = 100;

/// Engines that a prompt must have cost their connection.
const ENGINES: usize = 2;

/// The upper half of a mark; hashes of blocks have another.
const MARK: u64 = 0x4c6f_7374_0000_0000;
const MARK_MASK: u64 = 0xffff_ffff_0000_0000;

/// Connections lost lately, oldest first.
#[derive(Debug, Default)]
pub(super) struct CrashCorrelator {
    lost: VecDeque<LostConnection>,
}

#[derive(Clone, Copy, Debug)]
struct LostConnection {
    mark: u64,
    endpoint: EndpointRef,
    at: Timestamp,
}

pub(super) fn mark(prompt: u64) -> u64 {
    MARK | (prompt & !MARK_MASK)
}

/// Whether a block of a placement is the mark of a prompt that cost an engine its connection, not
/// the hash of a block.
pub(super) fn is_mark(block: u64) -> bool {
    block & MARK_MASK == MARK
}

// === impl CrashCorrelator ===

impl CrashCorrelator {
    /// Records that the connection to `endpoint` was lost during a request with the prompt of this
    /// mark.
    pub(super) fn record(&mut self, mark: u64, endpoint: EndpointRef, now: Timestamp) {
        if self.lost.len() >= LOST_MAX {
            self.lost.pop_front();
        }
        self.lost.push_back(LostConnection {
            mark,
            endpoint,
            at: now,
        });
    }

    /// Forgets the lost connections of a prompt that was served: it crashes no engine.
    pub(super) fn forget(&mut self, prompt: u64) {
        if !self.lost.is_empty() {
            self.lost.retain(|lost| lost.mark != mark(prompt));
        }
    }

    /// Whether the prompt of this hash cost the connection of enough engines that serve other
    /// prompts successfully.
    pub(super) fn is_crashing(
        &self,
        prompt: u64,
        health: &EndpointHealthTable,
        now: Timestamp,
    ) -> bool {
        if self.lost.is_empty() {
            return false;
        }
        let mark = mark(prompt);
        let since = Timestamp(now.0.saturating_sub(Timestamp(0).plus_ms(REMEMBERED_MS).0));
        let recent = || self.lost.iter().filter(|lost| lost.at >= since);
        let alone = |lost: &LostConnection| {
            let together = |other: &LostConnection| {
                other.endpoint == lost.endpoint
                    && other.at.ms_since(lost.at).max(lost.at.ms_since(other.at)) < TOGETHER_MS
            };
            !recent().any(|other| other.mark != mark && together(other))
        };
        let mut engines: Vec<EndpointRef> = Vec::new();
        for lost in recent().filter(|lost| lost.mark == mark) {
            if !engines.contains(&lost.endpoint)
                && alone(lost)
                && health.succeeded_with_another(lost.endpoint, prompt, since)
            {
                engines.push(lost.endpoint);
            }
        }
        engines.len() >= ENGINES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler::{Generation, Slot};

    const POISON: u64 = 0xabcd;

    fn id(slot: u16) -> EndpointRef {
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(1),
        }
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp(0).plus_ms(100_000 + ms)
    }

    fn fine(slots: &[u16]) -> EndpointHealthTable {
        let mut health = EndpointHealthTable::default();
        slots
            .iter()
            .for_each(|slot| health.record_success(id(*slot), 7, at(0)));
        health
    }

    #[test]
    fn two_engines_that_do_well_with_other_prompts_are_enough() {
        let mut crashing = CrashCorrelator::default();
        let health = fine(&[0, 1]);
        crashing.record(mark(POISON), id(0), at(1));
        crashing.record(mark(POISON), id(0), at(2));
        assert!(
            !crashing.is_crashing(POISON, &health, at(3)),
            "twice the same engine"
        );
        crashing.record(mark(POISON), id(1), at(4));
        assert!(crashing.is_crashing(POISON, &health, at(5)));
        assert!(
            !crashing.is_crashing(POISON + 1, &health, at(5)),
            "another prompt"
        );
        assert!(
            !crashing.is_crashing(POISON, &health, at(60_003)),
            "a minute later"
        );
        crashing.forget(POISON);
        assert!(
            !crashing.is_crashing(POISON, &health, at(5)),
            "an engine served it"
        );
    }

    #[test]
    fn an_engine_that_is_gone_says_nothing_of_the_prompt() {
        let mut crashing = CrashCorrelator::default();
        crashing.record(mark(POISON), id(0), at(1));
        crashing.record(mark(POISON), id(1), at(2));
        assert!(
            !crashing.is_crashing(POISON, &fine(&[0]), at(3)),
            "no prompt succeeded at the second"
        );
        crashing.record(mark(POISON + 1), id(1), at(3));
        assert!(
            !crashing.is_crashing(POISON, &fine(&[0, 1]), at(4)),
            "another prompt lost its connection at the same moment"
        );
        crashing.record(mark(POISON), id(1), at(103));
        assert!(
            crashing.is_crashing(POISON, &fine(&[0, 1]), at(104)),
            "and not this time"
        );
    }

    #[test]
    fn what_is_remembered_is_bounded_and_marks_are_known() {
        let mut crashing = CrashCorrelator::default();
        (0..1_000).for_each(|n| crashing.record(mark(n), id(0), at(n)));
        assert_eq!(crashing.lost.len(), LOST_MAX);
        assert!(
            is_mark(mark(u64::MAX))
                && !is_mark(POISON)
                && !super::super::adapters::is_model_mark(mark(POISON))
        );
    }
}
