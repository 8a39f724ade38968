//! The sessions of the race as a workload. Sessions are closed: a client sends its next request
//! only after the reply to its last request.
//!
//! A prompt is the text into which the testbed's model server renders a chat request. A token has
//! four bytes. A request's engine blocks contain the prompt and the reply, because the next prompt
//! of the session repeats the reply.

use race_cells::{RaceSession, Role};
use scheduler::Rng;
use scheduler::prefix::{BLOCK_BYTES_DEFAULT, BLOCKS_MAX, SectionSums, block_hashes};

use super::{RequestClass, Workload, WorkloadRequest, mix};

/// The tokens of a KV block, as in the engines of the race.
pub(crate) const SESSION_BLOCK_TOKENS: usize = 16;

const TOKEN_BYTES: usize = 4;
const BLOCK_BYTES: usize = SESSION_BLOCK_TOKENS * TOKEN_BYTES;

/// The text of a session so far, with the checksums that a proxy computes for this text.
struct SessionText {
    text: Vec<u8>,
    sums: SectionSums,
    /// The number of bytes of the text that the checksums cover.
    summed: usize,
}

// === impl SessionText ===

impl SessionText {
    fn from_system(system: &str) -> Self {
        let mut text = Self {
            text: Vec::new(),
            sums: SectionSums::new(0, BLOCK_BYTES_DEFAULT, BLOCKS_MAX),
            summed: 0,
        };
        text.say(Role::System, system);
        text
    }

    fn say(&mut self, role: Role, text: &str) {
        self.text
            .extend_from_slice(format!("<|{}|>{text}\n", role.name()).as_bytes());
    }

    /// Appends the chat template's tag `<|assistant|>`, after which the model writes its reply.
    fn ask(&mut self) {
        self.text
            .extend_from_slice(format!("<|{}|>", Role::Assistant.name()).as_bytes());
    }

    /// Appends a reply of `tokens` tokens. The text of the reply depends only on the seed.
    fn reply(&mut self, tokens: u32, seed: u64) {
        let mut rng = Rng::seeded(seed);
        for _ in 0..tokens {
            let letters = rng.next_u64().to_le_bytes();
            self.text.extend(
                letters
                    .iter()
                    .take(TOKEN_BYTES - 1)
                    .map(|letter| b'a' + letter % 26),
            );
            self.text.push(b' ');
        }
    }

    /// Returns the hashes that a proxy computes for the text so far.
    fn hashes(&mut self) -> Vec<u64> {
        self.sums
            .update(self.text.get(self.summed..).unwrap_or(&[]));
        self.summed = self.text.len();
        block_hashes(0, b"", b"", std::slice::from_ref(&self.sums))
    }

    fn tokens(&self) -> u32 {
        u32::try_from(self.text.len().div_ceil(TOKEN_BYTES)).unwrap_or(u32::MAX)
    }
}

// === impl Workload ===

impl Workload {
    /// Returns a workload of closed sessions, in order of arrival. Each later request of a session
    /// is sent after the end of the last reply and a pause.
    pub(crate) fn of_sessions(sessions: &[RaceSession]) -> Self {
        let mut requests = Vec::new();
        let mut blocks = Vec::new();
        let mut hashes = Vec::new();
        for session in sessions {
            let mut text = SessionText::from_system(&session.system);
            let first = requests.len();
            let first_block = blocks.len();
            for (number, turn) in session.turns.iter().enumerate() {
                text.say(Role::User, &turn.text);
                text.ask();
                let prompt = text.tokens();
                let of_prompt = text.hashes();
                text.reply(
                    turn.output_tokens,
                    mix(u64::from(session.id), number as u64),
                );
                requests.push(WorkloadRequest {
                    at: session.start_ms,
                    pause_ms: (number > 0).then_some(turn.pause_ms),
                    prompt,
                    output: turn.output_tokens.max(1),
                    session: u32::try_from(first).unwrap_or(u32::MAX),
                    blocks: (first_block, text.text.len() / BLOCK_BYTES),
                    hashes: (hashes.len(), of_prompt.len()),
                });
                hashes.extend(of_prompt);
                text.text.push(b'\n');
            }
            blocks.extend(chained(&text.text));
        }
        let highest_priority = RequestClass::default().priority;
        Self {
            requests,
            blocks,
            hashes,
            classes: Vec::new(),
            highest_priority,
            is_closed: true,
            roams: false,
        }
    }
}

/// Returns a hash for each full block. The hash covers the block and all blocks before it.
fn chained(text: &[u8]) -> impl Iterator<Item = u64> + '_ {
    let (blocks, _) = text.as_chunks::<BLOCK_BYTES>();
    blocks.iter().scan(0, |chain, block| {
        let (words, _) = block.as_chunks::<8>();
        *chain = words
            .iter()
            .fold(*chain, |hash, word| mix(hash, u64::from_le_bytes(*word)));
        Some(*chain)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use race_cells::RaceWorkload;

    #[test]
    fn a_prompt_repeats_the_prompt_and_the_reply_before_it() {
        let sessions = RaceWorkload::Agents.sessions(1, 1.0, 10.0);
        let workload = Workload::of_sessions(&sessions);
        assert_eq!(
            workload.requests().len(),
            sessions
                .iter()
                .map(|session| session.turns.len())
                .sum::<usize>()
        );
        let jobs: Vec<_> = (0..sessions[0].turns.len() as u32)
            .map(|turn| workload.job(turn).unwrap())
            .collect();
        for pair in jobs.windows(2) {
            assert!(
                pair[1].blocks.starts_with(pair[0].blocks)
                    && pair[1].prompt > pair[0].prompt + pair[0].output
            );
            assert_eq!(
                pair[0].blocks.len(),
                (pair[0].prompt + pair[0].output) as usize / SESSION_BLOCK_TOKENS
            );
            let shared = pair[0]
                .hashes
                .iter()
                .zip(pair[1].hashes)
                .take_while(|(a, b)| a == b)
                .count();
            assert!(
                shared + 1 >= pair[0].hashes.len(),
                "a proxy finds all but the last block of the prompt before"
            );
        }
    }

    #[test]
    fn sessions_share_their_system_prompt_and_no_more() {
        let sessions = RaceWorkload::Agents.sessions(1, 1.0, 20.0);
        let workload = Workload::of_sessions(&sessions);
        let second = sessions[0].turns.len() as u32;
        let [one, other] = [0, second].map(|request| workload.job(request).unwrap().blocks);
        let shared = one.iter().zip(other).take_while(|(a, b)| a == b).count();
        assert_eq!(
            shared,
            (sessions[0].system.len() + "<|system|>\n<|user|>".len()) / BLOCK_BYTES
        );
        assert!(one.iter().skip(shared).all(|block| !other.contains(block)));
    }
}
