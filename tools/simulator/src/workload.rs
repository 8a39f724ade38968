//! Workloads: the requests of a run, with their times and contents.

use scheduler::Rng;
use scheduler::prefix::{BLOCK_BYTES_MIN, BLOCKS_MAX, SectionSums, block_hashes};

use crate::engine::{BLOCK_TOKENS, EngineJob};
use crate::trace::{ID_TOKENS, TraceRequest};

mod closed;
pub(crate) use closed::SESSION_BLOCK_TOKENS;

/// Requests in order of arrival. The requests of a closed session are adjacent.
#[derive(Debug)]
pub(crate) struct Workload {
    requests: Vec<WorkloadRequest>,
    blocks: Vec<u64>,
    hashes: Vec<u64>,
    /// The class of each request, or an empty list if all requests have the default class.
    classes: Vec<RequestClass>,
    /// The highest priority of a request.
    pub(crate) highest_priority: i32,
    /// Whether the clients of sessions wait for a reply before they send the next request.
    pub(crate) is_closed: bool,
    /// Whether each request of a session is sent to a random proxy.
    pub(crate) roams: bool,
}

/// The data of a request for flow control: its priority, its flow, and how well its tokens are
/// known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RequestClass {
    pub(crate) name: &'static str,
    pub(crate) priority: i32,
    pub(crate) flow: &'static str,
    /// The spread of the log-normal estimate of the prompt's tokens, or 0 if the tokens are known.
    pub(crate) prompt_error: f64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkloadRequest {
    /// The time of arrival, in ms. This time has no meaning if `pause_ms` is set.
    pub(crate) at: f64,
    /// The pause from the end of the session's previous request until this request is sent, in ms.
    /// `None` if the request is sent at the time `at`, independently of other requests.
    pub(crate) pause_ms: Option<f64>,
    pub(crate) prompt: u32,
    pub(crate) output: u32,
    /// The number of the session, which is the index of its first request.
    pub(crate) session: u32,
    /// The index of the request's first block in the workload's blocks, and the number of its
    /// blocks.
    blocks: (usize, usize),
    hashes: (usize, usize),
}

/// Draws random numbers with the scheduler's generator.
pub(crate) struct Sampler(Rng);

// === impl RequestClass ===

impl RequestClass {
    /// Returns an estimate of the tokens of a request's prompt. The estimate is right on average,
    /// and the same at each call for the same request.
    pub(crate) fn estimate(&self, request: u32, prompt: u32) -> u32 {
        if self.prompt_error <= 0.0 {
            return prompt;
        }
        let tokens = f64::from(prompt);
        Sampler::seeded(mix(u64::from(request), 919)).tokens(
            tokens,
            self.prompt_error,
            (1.0, tokens * 10.0),
        )
    }
}

// === impl Sampler ===

impl Sampler {
    pub(crate) fn seeded(seed: u64) -> Self {
        Self(Rng::seeded(mix(seed, 77)))
    }

    /// Draws a number from the uniform distribution between 0 and 1.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub(crate) fn below(&mut self, count: usize) -> usize {
        self.0.below(count)
    }

    /// Draws a number from the exponential distribution with mean 1.
    pub(crate) fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    /// Draws a number from the standard normal distribution (Box and Muller).
    pub(crate) fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.unit()).ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Draws a number from the log-normal distribution with this mean and spread, within the
    /// bounds. Returns its whole part.
    pub(crate) fn tokens(&mut self, mean: f64, spread: f64, bounds: (f64, f64)) -> u32 {
        (mean * (spread * self.normal() - spread * spread / 2.0).exp()).clamp(bounds.0, bounds.1)
            as u32
    }
}

// === impl Workload ===

impl Workload {
    pub(crate) fn from_lines(lines: &[TraceRequest]) -> Self {
        let mut requests = Vec::with_capacity(lines.len());
        let mut blocks = Vec::new();
        let mut hashes = Vec::new();
        let start = lines.first().map_or(0.0, |line| line.at);
        for (number, line) in lines.iter().enumerate() {
            let first_block = blocks.len();
            let first_hash = hashes.len();
            let content = |block: usize| match line.ids.get(block * BLOCK_TOKENS / ID_TOKENS) {
                Some(&id) => mix(id + 1, (block * BLOCK_TOKENS % ID_TOKENS) as u64),
                None => mix(0xabcd_0000_0000 + number as u64, block as u64),
            };
            blocks.extend((0..line.prompt as usize / BLOCK_TOKENS).map(content));
            hash(line.prompt as usize, content, &mut hashes);
            let TraceRequest {
                at, prompt, output, ..
            } = *line;
            let blocks = (first_block, blocks.len() - first_block);
            let hashes = (first_hash, hashes.len() - first_hash);
            requests.push(WorkloadRequest {
                at: at - start,
                pause_ms: None,
                prompt,
                output,
                session: number as u32,
                blocks,
                hashes,
            });
        }
        let highest_priority = RequestClass::default().priority;
        Self {
            requests,
            blocks,
            hashes,
            classes: Vec::new(),
            highest_priority,
            is_closed: false,
            roams: false,
        }
    }

    /// Returns a workload of several classes. The requests of each class must be in order of
    /// arrival.
    pub(crate) fn of_classes(classes: Vec<(RequestClass, Vec<TraceRequest>)>) -> Self {
        let lines = classes
            .into_iter()
            .flat_map(|(class, lines)| lines.into_iter().map(move |line| (line, class)));
        let mut lines: Vec<(TraceRequest, RequestClass)> = lines.collect();
        lines.sort_by(|(a, _), (b, _)| a.at.total_cmp(&b.at));
        let (lines, classes): (Vec<_>, Vec<_>) = lines.into_iter().unzip();
        let highest_priority = classes
            .iter()
            .map(|class: &RequestClass| class.priority)
            .max()
            .unwrap_or_default();
        Self {
            classes,
            highest_priority,
            ..Self::from_lines(&lines)
        }
    }

    pub(crate) fn class(&self, request: u32) -> RequestClass {
        self.classes
            .get(request as usize)
            .copied()
            .unwrap_or_default()
    }

    pub(crate) fn requests(&self) -> &[WorkloadRequest] {
        &self.requests
    }

    pub(crate) fn job(&self, request: u32) -> Option<EngineJob<'_>> {
        let WorkloadRequest {
            prompt,
            output,
            blocks,
            hashes,
            ..
        } = *self.requests.get(request as usize)?;
        let blocks = self.blocks.get(blocks.0..blocks.0 + blocks.1)?;
        let hashes = self.hashes.get(hashes.0..hashes.0 + hashes.1)?;
        Some(EngineJob {
            request,
            prompt,
            output,
            blocks,
            hashes,
            prefilled: false,
        })
    }
}

/// Appends the hashes that a proxy computes for a prompt. `content` gives the content of each
/// block. Blocks have the smallest allowed size.
fn hash(prompt: usize, content: impl Fn(usize) -> u64, hashes: &mut Vec<u64>) {
    let mut turns = SectionSums::new(0, BLOCK_BYTES_MIN, BLOCKS_MAX);
    for block in 0..prompt.div_ceil(BLOCK_TOKENS) {
        let tokens = (prompt - block * BLOCK_TOKENS).min(BLOCK_TOKENS);
        let text = [content(block).to_le_bytes(); BLOCK_BYTES_MIN / 8];
        turns.update(
            text.as_flattened()
                .get(..tokens * BLOCK_BYTES_MIN / BLOCK_TOKENS)
                .unwrap_or(&[]),
        );
    }
    hashes.extend(block_hashes(0, b"", b"", &[turns]));
}

/// Returns a hash of two numbers. The hash is never 0.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut rng = Rng::seeded(a.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17) ^ b);
    rng.next_u64() | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_share_what_ids_share() {
        let line = |ids: &[u64]| TraceRequest {
            prompt: 1_000,
            output: 1,
            ids: ids.to_vec(),
            ..TraceRequest::default()
        };
        let workload = Workload::from_lines(&[line(&[1, 2]), line(&[1, 3]), line(&[]), line(&[])]);
        let blocks = |request| workload.job(request).unwrap().blocks.to_vec();
        let shared = |a: u32, b: u32| {
            blocks(a)
                .iter()
                .zip(blocks(b))
                .take_while(|(a, b)| **a == *b)
                .count()
        };
        assert_eq!(
            (blocks(0).len(), shared(0, 1), shared(0, 2), shared(2, 3)),
            (15, 8, 0, 0)
        );
    }

    #[test]
    fn a_long_prompt_has_a_hash_for_every_fourth_block() {
        let of = |ids: &[u64]| TraceRequest {
            prompt: 10_000,
            output: 1,
            ids: ids.to_vec(),
            ..TraceRequest::default()
        };
        let mut other: Vec<u64> = (0..20).collect();
        other[18] = 99;
        let workload =
            Workload::from_lines(&[of(&(0..20).collect::<Vec<_>>()), of(&other), of(&[])]);
        let hashes = |request| workload.job(request).unwrap().hashes.to_vec();
        let shared = hashes(0)
            .iter()
            .zip(hashes(1))
            .take_while(|(a, b)| **a == *b)
            .count();
        // The first prompt has 128 hashes of one block each, then 7 of four blocks and one of a
        // quarter block. The prompts have 144 blocks in common.
        assert_eq!(
            (hashes(0).len(), shared, hashes(0)[0] == hashes(2)[0]),
            (128 + 8, 128 + 4, false)
        );
        assert!(
            hashes(0)
                .iter()
                .zip(hashes(1))
                .skip(shared)
                .all(|(a, b)| *a != b),
            "once apart, apart for ever"
        );
    }
}
