//! A recorded workload: arrival times, lengths, and shared prefixes of prompts.
//!
//! The trace has no text. Each block of 512 prompt tokens has an id. If two blocks have the same
//! id, their text is the same, and so is the text before both blocks in their prompts. So prompts
//! are generated from the ids, block by block: prefixes that requests shared in the recording are
//! shared again.

use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

use flate2::read::GzDecoder;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::Deserialize;

/// The number of prompt tokens in a block of the trace.
pub(crate) const BLOCK_TOKENS: usize = 512;

/// The number of bytes that the simulated servers count as one token.
const BYTES_PER_TOKEN: usize = 4;

/// The step of the recorded arrival times, in ms. [`read`] spreads the arrivals of a step uniformly
/// at random within the step.
const QUANTUM_MS: u64 = 3_000;

/// The maximum length of a line, in bytes. The longest prompts of these traces have a few thousand
/// block ids.
const LINE_BYTES_MAX: u64 = 1 << 20;

#[derive(Clone, Debug)]
pub struct Arrival {
    /// Time since the start of the trace.
    pub at: Duration,
    pub prompt_tokens: usize,
    pub output_tokens: usize,
    /// One id per block of the prompt.
    pub blocks: Vec<u64>,
}

#[derive(Deserialize)]
struct TraceLine {
    timestamp: u64,
    input_length: usize,
    output_length: usize,
    hash_ids: Vec<u64>,
}

/// Reads a gzipped trace, one JSON object per line, in order of arrival. `seed` determines how
/// arrivals are spread within each step of `QUANTUM_MS`.
///
/// # Errors
/// Fails if the file cannot be read, or a line does not have the format of the trace.
pub fn read(path: &Path, seed: u64) -> io::Result<Vec<Arrival>> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut reader = BufReader::new(GzDecoder::new(std::fs::File::open(path)?));
    let mut arrivals = Vec::new();
    let mut line = String::new();
    while (&mut reader).take(LINE_BYTES_MAX).read_line(&mut line)? > 0 {
        let row: TraceLine = serde_json::from_str(&line)?;
        arrivals.push(Arrival {
            at: Duration::from_millis(row.timestamp + rng.random_range(0..QUANTUM_MS)),
            prompt_tokens: row.input_length,
            output_tokens: row.output_length,
            blocks: row.hash_ids,
        });
        line.clear();
    }
    arrivals.sort_by_key(|a| a.at);
    Ok(arrivals)
}

// === impl Arrival ===

impl Arrival {
    /// Returns the prompt: made-up words for each block id, cut to the recorded length.
    #[must_use]
    pub fn prompt(&self) -> String {
        let mut text = String::with_capacity(self.prompt_tokens * BYTES_PER_TOKEN);
        for &id in &self.blocks {
            push_block(id, &mut text);
        }
        text.truncate(self.prompt_tokens * BYTES_PER_TOKEN);
        text
    }

    /// Returns the body of a streamed chat request with this prompt.
    #[must_use]
    pub fn chat_body(&self, model: &str) -> Vec<u8> {
        serde_json::json!({
            "model": model,
            "stream": true,
            "stream_options": {"include_usage": true},
            "max_tokens": self.output_tokens,
            "ignore_eos": true,
            "messages": [{"role": "user", "content": self.prompt()}],
        })
        .to_string()
        .into_bytes()
    }
}

/// Appends made-up words for a block. Each token has [`BYTES_PER_TOKEN`] bytes: three lower-case
/// letters and a space, which need no escaping.
fn push_block(id: u64, text: &mut String) {
    let mut rng = SmallRng::seed_from_u64(id);
    for _ in 0..BLOCK_TOKENS {
        for _ in 0..BYTES_PER_TOKEN - 1 {
            text.push(char::from(rng.random_range(b'a'..=b'z')));
        }
        text.push(' ');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrival(blocks: &[u64], tokens: usize) -> Arrival {
        Arrival {
            at: Duration::ZERO,
            prompt_tokens: tokens,
            output_tokens: 1,
            blocks: blocks.to_vec(),
        }
    }

    #[test]
    fn equal_ids_begin_alike_and_lengths_are_kept() {
        let a = arrival(&[1, 2, 3], 1_500).prompt();
        let b = arrival(&[1, 2, 9], 1_100).prompt();
        assert_eq!((a.len(), b.len()), (6_000, 4_400));
        assert_eq!(a[..4_096], b[..4_096]);
        assert_ne!(a[4_096..4_400], b[4_096..]);
    }

    #[test]
    fn the_committed_trace_is_whole() {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("data/mooncake_conversation_10min.jsonl.gz");
        let trace = read(&path, 1).unwrap();
        assert_eq!(trace.len(), 1_750);
        assert!(
            trace
                .iter()
                .all(|a| a.blocks.len() == a.prompt_tokens.div_ceil(BLOCK_TOKENS))
        );
        assert!(trace.windows(2).all(|w| w[0].at <= w[1].at));
    }
}
