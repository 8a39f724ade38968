//! Finds prompts that crash engines, so that they are not sent to the next engine.
//!
//! A lost connection is remembered with the hashes of its prompt and its client. A prompt that cost
//! two engines their connection within [`REMEMBERED_MS`] is refused under two conditions. Both
//! engines work with other prompts, and neither lost another prompt's connection at the same time.
//! The second condition is necessary, because an engine that dies loses all its connections, and
//! then the prompt at fault is unknown.
//!
//! The cause of a crash may be a parameter and not the prompt. So if only one client lost
//! connections over a prompt, the prompt is refused only to that client. The prompt is refused to
//! all clients once two clients lost connections over it. As a probe, one request in each
//! [`PROBE_MS`] is sent, and is not repeated if its connection is lost. A success ends the
//! suspicion.
//!
//! Other workers and proxies receive each lost connection as a placement of one block. The block is
//! a mark, as for adapters ([`super::adapters`]). Reports from other proxies may be made up. So all
//! other proxies count as one client, and a prompt is refused only if a connection was lost here
//! too.

use std::cmp::Reverse;
use std::collections::VecDeque;

use scheduler::EndpointRef;

use super::health::EndpointHealthTable;
use scheduler::Timestamp;

/// How long a lost connection counts against its prompt, in ms.
const REMEMBERED_MS: u64 = 60_000;

/// The maximum number of lost connections that are remembered. Beyond it, the oldest of other
/// proxies is dropped, then the oldest of the client that lost the most. If several clients lose so
/// many within a minute, engines are dying, and no prompt is the reason.
const LOST_MAX: usize = 64;

/// Connections that one engine lost within this many ms count as lost together.
const TOGETHER_MS: u64 = 100;

/// A prompt is refused to a client whose requests cost this many engines their connection. It is
/// refused to all clients if the engines lost connections of [`CLIENTS`] clients.
const ENGINES: usize = 2;
const CLIENTS: usize = 2;

/// How long after a lost connection, or after a probe, a refused prompt is tried again, in ms. In
/// this time, a worker's probes cost at most one connection. A client whose prompt was refused by
/// mistake waits no longer than this.
const PROBE_MS: u64 = 5_000;

/// The upper half of a mark: "Lost" in ASCII. Hashes of blocks have another upper half.
const MARK: u64 = 0x4c6f_7374_0000_0000;
const MARK_MASK: u64 = 0xffff_ffff_0000_0000;

/// The number of bits of the client in a mark. The other bits belong to the prompt. Among
/// [`LOST_MAX`] marks, another prompt has the same bits one time in 65,000; two clients have the
/// same bits one time in 1,024.
const CLIENT_BITS: u32 = 10;
const CLIENT_MASK: u64 = (1 << CLIENT_BITS) - 1;

/// Connections lost lately, oldest first.
#[derive(Debug, Default)]
pub(super) struct CrashCorrelator {
    lost: VecDeque<LostConnection>,
}

#[derive(Clone, Copy, Debug)]
struct LostConnection {
    mark: u64,
    endpoint: EndpointRef,
    /// Whether another proxy lost the connection.
    from_peer: bool,
    at: Timestamp,
    /// The time when the prompt was last sent as a probe.
    probed_at: Option<Timestamp>,
}

/// Whether a prompt may be sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptSuspicion {
    /// No evidence speaks against the prompt.
    #[default]
    None,
    /// The prompt crashes engines, and may be tried once now.
    Probe,
    /// The prompt crashes engines.
    Crashes,
}

pub(super) fn mark(prompt: u64, client: u64) -> u64 {
    MARK | of_prompt(prompt) | (client & CLIENT_MASK)
}

/// The bits of a mark, or of its lower half, that belong to the prompt.
fn of_prompt(prompt: u64) -> u64 {
    (prompt << CLIENT_BITS) & !MARK_MASK
}

// === impl LostConnection ===

impl LostConnection {
    fn has_prompt(&self, prompt: u64) -> bool {
        self.mark & !MARK_MASK & !CLIENT_MASK == of_prompt(prompt)
    }

    fn client(&self) -> u64 {
        self.mark & CLIENT_MASK
    }
}

/// Whether a block of a placement is the mark of a prompt that cost an engine its connection, and
/// not the hash of a block.
pub(super) fn is_mark(block: u64) -> bool {
    block & MARK_MASK == MARK
}

// === impl CrashCorrelator ===

impl CrashCorrelator {
    /// Records that the connection to `endpoint` was lost during a request whose prompt has this
    /// mark. If `from_peer`, another proxy reported the loss.
    pub(super) fn record(
        &mut self,
        mark: u64,
        endpoint: EndpointRef,
        from_peer: bool,
        now: Timestamp,
    ) {
        if self.lost.len() >= LOST_MAX {
            self.lost
                .retain(|lost| now.ms_since(lost.at) <= REMEMBERED_MS);
        }
        if self.lost.len() >= LOST_MAX {
            let of_peer = self.lost.iter().position(|lost| lost.from_peer);
            if of_peer.is_none() && from_peer {
                return;
            }
            let place = of_peer.unwrap_or_else(|| self.oldest_of_most());
            self.lost.remove(place);
        }
        self.lost.push_back(LostConnection {
            mark,
            endpoint,
            from_peer,
            at: now,
            probed_at: None,
        });
    }

    /// The oldest loss of the client with the most, so that no client hides what others lost.
    fn oldest_of_most(&self) -> usize {
        let of_client = |client: u64| {
            let losses = self.lost.iter().filter(|lost| lost.client() == client);
            losses.count()
        };
        let losses = self.lost.iter().enumerate();
        losses
            .max_by_key(|(at, lost)| (of_client(lost.client()), Reverse(*at)))
            .map_or(0, |(at, _)| at)
    }

    /// Forgets the lost connections of a prompt that was served, because it crashes no engine.
    pub(super) fn forget(&mut self, prompt: u64) {
        if !self.lost.is_empty() {
            self.lost.retain(|lost| !lost.has_prompt(prompt));
        }
    }

    /// Judges the prompt with this hash, for this client. A probe is recorded, and the next one is
    /// due after [`PROBE_MS`].
    pub(super) fn judge(
        &mut self,
        prompt: u64,
        client: u64,
        health: &EndpointHealthTable,
        now: Timestamp,
    ) -> PromptSuspicion {
        if self.lost.is_empty() || !self.is_crashing(prompt, client, health, now) {
            return PromptSuspicion::None;
        }
        let lost_here = |lost: &&LostConnection| lost.has_prompt(prompt) && !lost.from_peer;
        let of_prompt = self.lost.iter().filter(lost_here);
        let tried_at = of_prompt.map(|lost| lost.probed_at.unwrap_or(lost.at).max(lost.at));
        if tried_at
            .max()
            .is_some_and(|tried| now.ms_since(tried) < PROBE_MS)
        {
            return PromptSuspicion::Crashes;
        }
        for lost in self.lost.iter_mut().filter(|lost| lost.has_prompt(prompt)) {
            lost.probed_at = Some(now);
        }
        PromptSuspicion::Probe
    }

    /// Whether the prompt cost the connection of enough engines that serve other prompts
    /// successfully. The losses must come from this client, or from enough clients.
    fn is_crashing(
        &self,
        prompt: u64,
        client: u64,
        health: &EndpointHealthTable,
        now: Timestamp,
    ) -> bool {
        let since = Timestamp(now.0.saturating_sub(Timestamp(0).plus_ms(REMEMBERED_MS).0));
        let recent = || self.lost.iter().filter(|lost| lost.at >= since);
        let alone = |lost: &LostConnection| {
            let together = |other: &LostConnection| {
                other.endpoint == lost.endpoint
                    && (lost.from_peer || !other.from_peer)
                    && other.at.ms_since(lost.at).max(lost.at.ms_since(other.at)) < TOGETHER_MS
            };
            !recent().any(|other| !other.has_prompt(prompt) && together(other))
        };
        let own = mark(prompt, client);
        let mut engines: Vec<EndpointRef> = Vec::new();
        let mut own_engines: Vec<EndpointRef> = Vec::new();
        // All other proxies together count as one client, 0.
        let mut clients: Vec<u64> = Vec::new();
        let [mut is_here, mut is_own_here] = [false; 2];
        let blamed = recent().filter(|lost| {
            lost.has_prompt(prompt)
                && alone(lost)
                && health.succeeded_with_another(lost.endpoint, prompt, since)
        });
        for lost in blamed {
            insert(&mut engines, lost.endpoint);
            insert(&mut clients, if lost.from_peer { 0 } else { lost.mark });
            is_here |= !lost.from_peer;
            if lost.mark == own {
                insert(&mut own_engines, lost.endpoint);
                is_own_here |= !lost.from_peer;
            }
        }
        (is_own_here && own_engines.len() >= ENGINES)
            || (is_here && engines.len() >= ENGINES && clients.len() >= CLIENTS)
    }
}

fn insert<T: PartialEq>(set: &mut Vec<T>, member: T) {
    if !set.contains(&member) {
        set.push(member);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler::{Generation, Slot};

    const POISON: u64 = 0xabcd;
    const ANN: u64 = 1;
    const BOB: u64 = 2;
    const EVE: u64 = 3;

    impl CrashCorrelator {
        fn is_refused(
            &mut self,
            prompt: u64,
            client: u64,
            health: &EndpointHealthTable,
            now: Timestamp,
        ) -> bool {
            self.judge(prompt, client, health, now) == PromptSuspicion::Crashes
        }
    }

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
        slots.iter().for_each(|slot| {
            health.record_success(id(*slot), 7, at(0));
        });
        health
    }

    #[test]
    fn two_engines_that_do_well_with_other_prompts_are_enough() {
        let mut crashing = CrashCorrelator::default();
        let health = fine(&[0, 1]);
        crashing.record(mark(POISON, ANN), id(0), false, at(1));
        crashing.record(mark(POISON, ANN), id(0), false, at(2));
        assert!(
            !crashing.is_refused(POISON, ANN, &health, at(3)),
            "twice the same engine"
        );
        crashing.record(mark(POISON, ANN), id(1), false, at(4));
        assert!(crashing.is_refused(POISON, ANN, &health, at(5)));
        assert!(
            !crashing.is_refused(POISON + 1, ANN, &health, at(5)),
            "another prompt"
        );
        assert!(
            !crashing.is_refused(POISON, ANN, &health, at(60_003)),
            "a minute later"
        );
        crashing.forget(POISON);
        assert!(
            !crashing.is_refused(POISON, ANN, &health, at(5)),
            "an engine served it"
        );
    }

    #[test]
    fn the_losses_of_one_client_refuse_nothing_to_another() {
        let mut crashing = CrashCorrelator::default();
        let health = fine(&[0, 1]);
        for ms in 1..20 {
            crashing.record(mark(POISON, EVE), id(u16::from(ms % 2 == 0)), false, at(ms));
        }
        assert!(!crashing.is_refused(POISON, ANN, &health, at(30)));
        assert!(crashing.is_refused(POISON, EVE, &health, at(30)));
        crashing.record(mark(POISON, BOB), id(0), false, at(40));
        assert!(
            crashing.is_refused(POISON, ANN, &health, at(50)),
            "the word of two"
        );
    }

    #[test]
    fn the_losses_of_one_client_hide_none_of_others() {
        let health = fine(&[0, 1]);
        let mut crashing = CrashCorrelator::default();
        crashing.record(mark(POISON, ANN), id(0), false, at(1));
        for prompt in 1..=64 {
            let now = at(200 * prompt);
            crashing.record(mark(POISON + prompt, EVE), id(2), false, now);
        }
        crashing.record(mark(POISON, BOB), id(1), false, at(20_000));
        assert!(crashing.is_refused(POISON, ANN, &health, at(20_001)));
        assert_eq!(crashing.lost.len(), LOST_MAX);
    }

    #[test]
    fn what_other_proxies_tell_refuses_nothing_alone_and_hides_nothing() {
        let health = fine(&[0, 1]);
        let mut crashing = CrashCorrelator::default();
        for client in 0..1_024 {
            crashing.record(mark(POISON, client), id(0), true, at(1));
            crashing.record(mark(POISON, client), id(1), true, at(2));
        }
        assert!(
            !crashing.is_refused(POISON, ANN, &health, at(10)),
            "before, it was refused to all clients"
        );
        crashing.record(mark(POISON, BOB), id(0), false, at(20));
        assert!(
            crashing.is_refused(POISON, ANN, &health, at(30)),
            "one lost here, and the word of the others"
        );
        let probes = (100..20_000).step_by(100).filter(|ms| {
            crashing.record(mark(POISON, EVE), id(1), true, at(*ms));
            crashing.judge(POISON, ANN, &health, at(*ms)) == PromptSuspicion::Probe
        });
        assert_eq!(probes.count(), 3, "told again and again, it is still tried");
        let mut crashing = CrashCorrelator::default();
        crashing.record(mark(POISON, ANN), id(0), false, at(100));
        crashing.record(mark(POISON, ANN), id(1), false, at(200));
        for made_up in 0..1_000 {
            crashing.record(mark(made_up, EVE), id(0), true, at(made_up));
            crashing.record(mark(made_up, EVE), id(1), true, at(made_up));
        }
        assert!(
            crashing.is_refused(POISON, ANN, &health, at(1_000)),
            "before, other marks hid what was lost here"
        );
        let mut crashing = CrashCorrelator::default();
        crashing.record(mark(POISON, ANN), id(0), false, at(1));
        crashing.record(mark(POISON, ANN), id(1), true, at(2));
        assert!(
            crashing.is_refused(POISON, ANN, &health, at(3)),
            "a client that comes by two proxies"
        );
    }

    #[test]
    fn a_refused_prompt_is_tried_again_once_in_a_while() {
        let mut crashing = CrashCorrelator::default();
        let health = fine(&[0, 1]);
        crashing.record(mark(POISON, ANN), id(0), false, at(1));
        crashing.record(mark(POISON, ANN), id(1), false, at(2));
        let judged = (0..20_000)
            .step_by(10)
            .map(|ms| crashing.judge(POISON, ANN, &health, at(ms)))
            .collect::<Vec<_>>();
        let probes = judged
            .iter()
            .filter(|judged| **judged == PromptSuspicion::Probe);
        assert_eq!(probes.count(), 3, "after 5, 10 and 15 s");
        assert!(!judged.contains(&PromptSuspicion::None));
    }

    #[test]
    fn an_engine_that_is_gone_says_nothing_of_the_prompt() {
        let mut crashing = CrashCorrelator::default();
        crashing.record(mark(POISON, ANN), id(0), false, at(1));
        crashing.record(mark(POISON, ANN), id(1), false, at(2));
        assert!(
            !crashing.is_refused(POISON, ANN, &fine(&[0]), at(3)),
            "no prompt succeeded at the second"
        );
        crashing.record(mark(POISON + 1, ANN), id(1), false, at(3));
        assert!(
            !crashing.is_refused(POISON, ANN, &fine(&[0, 1]), at(4)),
            "another prompt lost its connection at the same moment"
        );
        crashing.record(mark(POISON, ANN), id(1), false, at(103));
        assert!(
            crashing.is_refused(POISON, ANN, &fine(&[0, 1]), at(104)),
            "and not this time"
        );
    }

    #[test]
    fn what_is_remembered_is_bounded_and_marks_are_known() {
        let mut crashing = CrashCorrelator::default();
        (0..1_000).for_each(|n| crashing.record(mark(n, ANN), id(0), false, at(n)));
        assert_eq!(crashing.lost.len(), LOST_MAX);
        assert!(
            is_mark(mark(u64::MAX, u64::MAX))
                && !is_mark(POISON)
                && !super::super::adapters::is_model_mark(mark(POISON, ANN))
        );
    }
}
