//! Sessions like those of published benchmark tables, so that users of rivals recognise them.

use std::sync::Arc;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::{IndexedRandom, SliceRandom};

use crate::session::{RaceSession, SessionClass, Turn};
use crate::workload::words;

/// The length of the arrivals in the published load test with rising rates, in s. Each rate is a
/// cell.
const LADDER_S: u32 = 60;
/// The number of system prompts in [`PublishedShape::SharedGroups`].
const GROUPS: usize = 512;
/// The number of questions for each system prompt in [`PublishedShape::SharedGroups`].
const QUESTIONS: usize = 8;
/// The output tokens of each reply of the published load test with rising rates.
const LADDER_REPLY: u32 = 128;
/// The number of sessions in [`PublishedShape::TenTurns`].
const SESSIONS: u32 = 120;
/// The number of requests of each session in [`PublishedShape::TenTurns`]: 1,200 in all sessions.
const TURNS: usize = 10;
/// The words of a short, a medium and a long text of a user in [`PublishedShape::TenTurns`]. With
/// the replies, a prompt has about 1,400 tokens on average, as published. The mix of lengths itself
/// is not published.
const TEXT_WORDS: [usize; 3] = [30, 80, 180];
/// The output tokens of a short, a medium and a long reply in [`PublishedShape::TenTurns`].
const REPLY_TOKENS: [u32; 3] = [30, 90, 180];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishedShape {
    /// The load of llm-d-benchmark pull request 1908: 512 system prompts of 2,048 tokens, each with
    /// 8 questions of 256 tokens. The questions arrive in random order at even intervals for 60 s.
    SharedGroups {
        /// The number of requests each second.
        per_s: u32,
    },
    /// The control of llm-d-benchmark pull request 1908: prompts of 2,300 tokens that share no
    /// text.
    UniquePrompts {
        /// The number of requests each second.
        per_s: u32,
    },
    /// The load of Higress pull request 4352: 1,200 requests in sessions of ten turns. Always 40
    /// sessions run, because a new session begins when one ends.
    TenTurns,
    /// A piece of a public trace, `tools/testbed/data/mooncake_conversation_10min.jsonl.gz`. The
    /// crate `race` reads the trace, because this crate reads no files.
    Recorded,
}

// === impl PublishedShape ===

impl PublishedShape {
    /// Returns the number of requests each second, or `None` if the router or a recording
    /// determines this number.
    #[must_use]
    pub const fn per_s(self) -> Option<u32> {
        match self {
            Self::SharedGroups { per_s } | Self::UniquePrompts { per_s } => Some(per_s),
            Self::TenTurns | Self::Recorded => None,
        }
    }

    /// Returns how many sessions run at the same time, or `None` if sessions do not wait for the
    /// end of others.
    #[must_use]
    pub const fn clients(self) -> Option<usize> {
        match self {
            Self::TenTurns => Some(40),
            _ => None,
        }
    }

    /// Returns the sessions, in order of arrival. For a recording the list is empty.
    #[must_use]
    pub fn sessions(self, seed: u64) -> Vec<RaceSession> {
        let rng = &mut SmallRng::seed_from_u64(seed);
        match self {
            Self::SharedGroups { per_s } => shared_groups(per_s, rng),
            // 1,314 words are 2,300 tokens, because a word has 1.75 tokens on average.
            Self::UniquePrompts { per_s } => {
                ladder(per_s, |_, rng| ("".into(), words(1_314, rng)), rng)
            }
            Self::TenTurns => (0..SESSIONS).map(|id| ten_turns(id, rng)).collect(),
            Self::Recorded => Vec::new(),
        }
    }
}

/// Returns the sessions of [`PublishedShape::SharedGroups`]. If there are more requests than
/// questions, the questions repeat.
fn shared_groups(per_s: u32, rng: &mut SmallRng) -> Vec<RaceSession> {
    // 1,170 words are the 2,048 tokens of a prompt; 146 words are the 256 tokens of a question.
    let prompts: Vec<Arc<str>> = (0..GROUPS).map(|_| words(1_170, rng)).collect();
    let mut asked: Vec<(Arc<str>, Arc<str>)> = prompts
        .iter()
        .flat_map(|prompt| std::iter::repeat_n(prompt, QUESTIONS))
        .map(|prompt| (Arc::clone(prompt), words(146, rng)))
        .collect();
    asked.shuffle(rng);
    ladder(
        per_s,
        |at, _| {
            asked
                .get(at % asked.len().max(1))
                .cloned()
                .unwrap_or_default()
        },
        rng,
    )
}

/// Returns sessions of one request each, which arrive at even intervals. `prompt` makes the system
/// prompt and the question of a request.
fn ladder(
    per_s: u32,
    prompt: impl Fn(usize, &mut SmallRng) -> (Arc<str>, Arc<str>),
    rng: &mut SmallRng,
) -> Vec<RaceSession> {
    let request = |id: u32| {
        let (system, text) = prompt(id as usize, rng);
        let turns = vec![Turn {
            text,
            output_tokens: LADDER_REPLY,
            pause_ms: 0.0,
        }];
        RaceSession {
            id,
            start_ms: f64::from(id) * 1e3 / f64::from(per_s),
            class: SessionClass::Interactive,
            system,
            turns,
        }
    };
    (0..per_s * LADDER_S).map(request).collect()
}

fn ten_turns(id: u32, rng: &mut SmallRng) -> RaceSession {
    let turns = (0..TURNS).map(|_| {
        let text = words(TEXT_WORDS.choose(rng).copied().unwrap_or_default(), rng);
        Turn {
            text,
            output_tokens: REPLY_TOKENS.choose(rng).copied().unwrap_or_default(),
            pause_ms: 0.0,
        }
    });
    RaceSession {
        id,
        start_ms: 0.0,
        class: SessionClass::Interactive,
        system: "".into(),
        turns: turns.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ladder_has_even_times_and_groups_of_eight() {
        let sessions = PublishedShape::SharedGroups { per_s: 70 }.sessions(1);
        assert_eq!(sessions.len(), 4_200);
        assert!((sessions[70].start_ms - 1e3).abs() < 1e-9);
        let mut counts = std::collections::BTreeMap::<&str, usize>::new();
        sessions[..4_096]
            .iter()
            .for_each(|session| *counts.entry(&session.system).or_default() += 1);
        assert!(counts.len() == GROUPS && counts.values().all(|count| *count == QUESTIONS));
        let tokens = (sessions[0].system.len() + sessions[0].turns[0].text.len()) / 4;
        assert!((2_200..2_400).contains(&tokens), "{tokens} tokens");
    }

    #[test]
    fn prompts_of_ten_turns_have_the_published_mean() {
        let sessions = PublishedShape::TenTurns.sessions(1);
        let reply = |turn: &Turn| "x".repeat(turn.output_tokens as usize * 4);
        let mut lengths = Vec::new();
        for session in &sessions {
            let replies: Vec<String> = session.turns.iter().map(reply).collect();
            let length = |turn| {
                session
                    .messages(turn, &replies)
                    .iter()
                    .map(|message| message.text.len())
                    .sum::<usize>()
            };
            lengths.extend((0..session.turns.len()).map(length));
        }
        let mean = lengths.iter().sum::<usize>() / lengths.len() / 4;
        assert!(
            lengths.len() == 1_200 && (1_300..1_500).contains(&mean),
            "{} prompts of {mean} tokens",
            lengths.len()
        );
    }
}
