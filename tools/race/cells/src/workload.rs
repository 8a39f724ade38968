//! The workloads: the texts of a cell's sessions, and how often sessions arrive.
//!
//! Words have 3 to 9 letters. A word and the space after the word have 1.75 tokens of four bytes on
//! average. Replies have 30 to 200 tokens unless the workload says otherwise. Sessions arrive at
//! random (Poisson). Equal seeds give equal sessions.

use std::ops::RangeInclusive;
use std::sync::Arc;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::session::{RaceSession, SessionClass, Turn};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RaceWorkload {
    /// All sessions have one system prompt of 4,000 words. A session has 6 to 20 turns, 1.5 s
    /// apart, and each turn adds 100 to 900 words.
    Agents,
    /// Each session has one of 16 system prompts of 3,000 words, and most sessions have one of a
    /// few of these prompts. A session has 2 to 6 turns of 30 to 200 words.
    Tenants,
    /// All sessions have one system prompt of 100 words. A session has 3 to 8 turns of 20 to 600
    /// words, 6 s apart.
    Chat,
    /// Each session has one of 40 documents of 4,000 to 9,000 words, and asks 1 to 3 short
    /// questions about the document. So a few sessions have the same document.
    Documents,
    /// Sessions as in [`Self::Chat`], and beside them waves of bulk work: single prompts of 800 to
    /// 2,000 words with replies of 150 to 400 tokens.
    BatchBesideChat,
}

/// The number of tenants in [`RaceWorkload::Tenants`].
const TENANTS: usize = 16;
/// The exponent of the tenants' shares (Pareto): the largest tenant has a quarter of the sessions.
const TENANT_SKEW: f64 = 0.9;
/// The number of documents in [`RaceWorkload::Documents`].
const DOCUMENTS: usize = 40;
/// The number of prompts in one wave of bulk work.
const WAVE: usize = 12;
/// The share of the sessions that are chats, in [`RaceWorkload::BatchBesideChat`].
const CHAT_SHARE: f64 = 0.4;
/// The output tokens of a reply, except for bulk work.
const REPLY: RangeInclusive<u32> = 30..=200;
/// The output tokens of a reply for bulk work.
const BATCH_REPLY: RangeInclusive<u32> = 150..=400;

/// The texts that several sessions share.
struct SharedTexts {
    /// The system prompts: one for each tenant or document, or a single one for all sessions.
    systems: Vec<Arc<str>>,
    /// For each text, the share of the sessions that have this text or an earlier one. The last
    /// share is 1.
    cumulative: Vec<f64>,
}

// === impl RaceWorkload ===

impl RaceWorkload {
    pub const ALL: [Self; 5] = [
        Self::Agents,
        Self::Tenants,
        Self::Chat,
        Self::Documents,
        Self::BatchBesideChat,
    ];

    /// Returns the name of the workload in records and on the page.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Agents => "agents",
            Self::Tenants => "tenants",
            Self::Chat => "chat",
            Self::Documents => "documents",
            Self::BatchBesideChat => "batch beside chat",
        }
    }

    /// Returns the sessions that arrive within `arrivals_s` seconds at a rate of `per_s` sessions a
    /// second, in order of arrival.
    #[must_use]
    pub fn sessions(self, seed: u64, per_s: f64, arrivals_s: f64) -> Vec<RaceSession> {
        // Arrivals and texts have separate generators, so that another rate gives the same texts.
        let mut arrivals = SmallRng::seed_from_u64(seed.wrapping_mul(2));
        let mut texts = SmallRng::seed_from_u64(seed.wrapping_mul(2) + 1);
        let shared = self.shared(&mut texts);
        let (mut sessions, mut at_s): (Vec<RaceSession>, f64) = (Vec::new(), 0.0);
        loop {
            at_s += exponential(&mut arrivals) / per_s;
            if at_s >= arrivals_s {
                return sessions;
            }
            let batch = self == Self::BatchBesideChat && !arrivals.random_bool(CHAT_SHARE);
            if batch && !arrivals.random_bool(1.0 / WAVE as f64) {
                continue; // a whole wave arrives in place of as many single prompts
            }
            for _ in 0..if batch { WAVE } else { 1 } {
                let id = u32::try_from(sessions.len()).unwrap_or(u32::MAX);
                sessions.push(self.session(id, at_s * 1e3, batch, &shared, &mut texts));
            }
        }
    }

    fn shared(self, rng: &mut SmallRng) -> SharedTexts {
        match self {
            Self::Agents => SharedTexts::equal(vec![words(4_000, rng)]),
            Self::Tenants => {
                let shares = (1..=TENANTS).map(|rank| (rank as f64).powf(-TENANT_SKEW));
                SharedTexts::weighed((0..TENANTS).map(|_| words(3_000, rng)).collect(), shares)
            }
            Self::Chat | Self::BatchBesideChat => SharedTexts::equal(vec![words(100, rng)]),
            Self::Documents => SharedTexts::equal(
                (0..DOCUMENTS)
                    .map(|_| some_words(4_000..=9_000, rng))
                    .collect(),
            ),
        }
    }

    fn session(
        self,
        id: u32,
        start_ms: f64,
        batch: bool,
        shared: &SharedTexts,
        rng: &mut SmallRng,
    ) -> RaceSession {
        let system = shared.draw(rng);
        let (turns, said, pause_s) = match self {
            Self::Agents => (6..=20, 100..=900, 1.5),
            Self::Tenants => (2..=6, 30..=200, 3.0),
            Self::Documents => (1..=3, 20..=60, 4.0),
            Self::BatchBesideChat if batch => (1..=1, 800..=2_000, 0.0),
            Self::Chat | Self::BatchBesideChat => (3..=8, 20..=600, 6.0),
        };
        let reply = if batch { BATCH_REPLY } else { REPLY };
        let turns = (0..rng.random_range(turns)).map(|turn| Turn {
            text: some_words(said.clone(), rng),
            output_tokens: rng.random_range(reply.clone()),
            // A pause differs from the mean by up to half of the mean, as recorded pauses of people
            // do.
            pause_ms: if turn == 0 {
                0.0
            } else {
                pause_s * 1e3 * rng.random_range(0.5..1.5)
            },
        });
        let turns = turns.collect();
        let class = if batch {
            SessionClass::Batch
        } else {
            SessionClass::Interactive
        };
        RaceSession {
            id,
            start_ms,
            class,
            system,
            turns,
        }
    }
}

// === impl SharedTexts ===

impl SharedTexts {
    fn equal(systems: Vec<Arc<str>>) -> Self {
        let shares = std::iter::repeat_n(1.0, systems.len());
        Self::weighed(systems, shares)
    }

    fn weighed(systems: Vec<Arc<str>>, shares: impl Iterator<Item = f64> + Clone) -> Self {
        let all: f64 = shares.clone().sum();
        let cumulative = shares.scan(0.0, |sum, share| {
            *sum += share / all;
            Some(*sum)
        });
        Self {
            cumulative: cumulative.collect(),
            systems,
        }
    }

    fn draw(&self, rng: &mut SmallRng) -> Arc<str> {
        let at = rng.random::<f64>();
        let which = self
            .cumulative
            .partition_point(|share| *share < at)
            .min(self.systems.len().saturating_sub(1));
        self.systems.get(which).cloned().unwrap_or_default()
    }
}

/// Returns an exponentially distributed random number with mean 1.
fn exponential(rng: &mut SmallRng) -> f64 {
    -(1.0 - rng.random::<f64>()).ln()
}

fn some_words(count: RangeInclusive<usize>, rng: &mut SmallRng) -> Arc<str> {
    let count = rng.random_range(count);
    words(count, rng)
}

/// Makes `count` random words, each followed by a space.
pub(crate) fn words(count: usize, rng: &mut SmallRng) -> Arc<str> {
    let mut text = String::with_capacity(count * 8);
    for _ in 0..count {
        for _ in 0..rng.random_range(3..=9) {
            text.push(char::from(rng.random_range(b'a'..=b'z')));
        }
        text.push(' ');
    }
    text.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_sessions_and_another_seed_gives_others() {
        for workload in RaceWorkload::ALL {
            let print = |seed| {
                workload
                    .sessions(seed, 2.0, 20.0)
                    .iter()
                    .map(|s| format!("{s:?}"))
                    .collect::<String>()
            };
            assert!(
                print(1) == print(1) && print(1) != print(2),
                "{}",
                workload.name()
            );
        }
    }

    #[test]
    fn sessions_arrive_in_order_at_the_rate_and_within_the_time() {
        for workload in RaceWorkload::ALL {
            let sessions = workload.sessions(3, 4.0, 200.0);
            assert!(sessions.is_sorted_by(|a, b| a.start_ms <= b.start_ms));
            assert!(sessions.last().is_some_and(|last| last.start_ms < 200e3));
            assert!(
                (650..950).contains(&sessions.len()),
                "{}: {} sessions",
                workload.name(),
                sessions.len()
            );
            assert!(
                sessions
                    .iter()
                    .zip(0..)
                    .all(|(session, id)| session.id == id)
            );
        }
    }

    #[test]
    fn another_rate_gives_the_same_texts() {
        let first = |per_s| {
            RaceWorkload::Agents.sessions(7, per_s, 30.0)[0].turns[0]
                .text
                .clone()
        };
        assert_eq!(first(1.0), first(3.0));
    }

    #[test]
    fn a_request_has_all_that_was_said_before() {
        let session = &RaceWorkload::Agents.sessions(1, 1.0, 10.0)[0];
        let replies = ["one".to_owned(), "two".to_owned()];
        let roles: Vec<_> = session
            .messages(2, &replies)
            .iter()
            .map(|message| message.role.name())
            .collect();
        assert_eq!(
            roles,
            ["system", "user", "assistant", "user", "assistant", "user"]
        );
        let longer = session.messages(2, &replies);
        assert!(
            longer.starts_with(&session.messages(1, &replies)),
            "a prompt begins with the prompt before it"
        );
    }

    #[test]
    fn the_largest_tenant_has_a_quarter_of_the_sessions() {
        let sessions = RaceWorkload::Tenants.sessions(5, 10.0, 400.0);
        let mut counts = std::collections::BTreeMap::<&str, usize>::new();
        sessions
            .iter()
            .for_each(|session| *counts.entry(&session.system).or_default() += 1);
        let most = counts.values().max().copied().unwrap_or(0) as f64 / sessions.len() as f64;
        assert!(
            counts.len() == TENANTS && (0.2..0.35).contains(&most),
            "{most}"
        );
    }
}
