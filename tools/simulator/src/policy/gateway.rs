//! Models two gateways of other projects after their documents and behaviour, not after their code.
//!
//! **smg**: SGLang's gateway (smg-project/smg) 1.13 with its policy `cache_aware` and its defaults,
//! for chat requests over HTTP, with its index `tree`. The sources are the repository's main branch
//! of 22 August 2026, its pull requests #2161 (choice among holders, spill gate) and #2341
//! (expected wait), and the help text of 1.13.0.
//!
//! 1. The gateway remembers the text of every prompt that it sent to a worker. A prompt matches the
//!    longest text that any worker got. At most eight workers are holders of the match.
//! 2. If the match is more than 0.3 of the prompt, the holder with the lowest expected wait is
//!    chosen. The worker with the lowest expected wait of all is chosen instead if the holder's
//!    requests in flight exceed 1.5 times the mean of all workers, and exceed the mean by more than
//!    a margin. The margin is 64 requests, but at most two standard deviations of a Poisson number
//!    with that mean, and at least 4.
//! 3. With a shorter match, the worker with the lowest expected wait of all is chosen.
//! 4. The expected wait is (tokens queued + tokens in flight) / throughput + 0.15 k / (1 - k) s,
//!    where k is the KV use. The gateway polls workers every 10 s for queue and KV use. A request
//!    is in flight until its reply is complete. The gateway takes 1,024 tokens for a request and
//!    2,000 tokens a second for the throughput, because vLLM's metrics report neither. Workers with
//!    8 waiting requests or a KV use of 0.8 are left out while another worker is below these
//!    limits.
//! 5. Every minute the least recently used text is forgotten while there are more than 67,108,864
//!    characters in all.
//!
//! A request that was sent before the last poll counts twice: as a request in flight, and in the
//! polled load. smg's help text does not say so. But of the rules that we tried, this rule is the
//! only one with which waves of requests wait as long in the simulator as in the race with real
//! gateways (`tools/race`).
//!
//! The model leaves out `overlap-decay`, `selection-temperature`, `cache-index hash` and thresholds
//! of KV use, which are all off by default. It also leaves out the warm-up of workers in the first
//! minute.
//!
//! **vllm-router** (vllm-project/router) 0.1.17 with its policy `cache_aware`. The key of a chat
//! request is only `session_params.session_id` (issue #219 of the project). OpenAI's clients send
//! requests without this field. Such requests match nothing, so the gateway sends them to the first
//! of the workers with the fewest requests in flight.

use std::collections::BTreeMap;

use scheduler::Rng;

use super::baseline::{PolicyView, lowest};
use crate::workload::mix;

/// The state that a policy keeps between picks.
#[derive(Debug, Default)]
pub(crate) struct PolicyMemory {
    texts: TextTree,
    polls: LoadPolls,
    /// The time when the policy last evicted text, in ms.
    evicted: f64,
}

/// The texts that each worker got. A node stands for a block of text together with all text before
/// the block, so the prefixes of a text are the nodes on its path.
#[derive(Debug, Default)]
struct TextTree {
    /// For each node, the number of the prompt with which each worker last got the node. Numbers
    /// grow with every prompt.
    nodes: BTreeMap<u64, BTreeMap<usize, u64>>,
    prompts: u64,
    /// The number of pairs of a node and a worker that has the node.
    size: usize,
}

/// The workers' load at the last poll.
#[derive(Debug, Default)]
struct LoadPolls {
    polled: Option<f64>,
    workers: BTreeMap<usize, PolledLoad>,
}

#[derive(Clone, Copy, Debug, Default)]
struct PolledLoad {
    waiting: f64,
    kv_use: f64,
}

const MATCH_MIN: f64 = 0.3;
const HOLDERS_MAX: usize = 8;
const SPILL_REL: f64 = 1.5;
const SPILL_ABS: f64 = 64.0;
const SPILL_ABS_MIN: f64 = 4.0;
const SPILL_DEVIATIONS: f64 = 2.0;

const POLL_MS: f64 = 10_000.0;
const REQUEST_TOKENS: f64 = 1_024.0;
const TOKENS_PER_S: f64 = 2_000.0;
const KV_PRESSURE_S: f64 = 0.15;
const KV_USE_MAX: f64 = 0.999;
const OVERLOAD_WAITING: f64 = 8.0;
const OVERLOAD_KV_USE: f64 = 0.8;

const EVICTION_MS: f64 = 60_000.0;
/// The maximum number of characters of all texts, and the number of characters of a token.
const CHARACTERS_MAX: usize = 1 << 26;
const TOKEN_CHARACTERS: usize = 4;

// === impl TextTree ===

impl TextTree {
    /// Returns the nodes of a prompt, from its beginning to its end.
    fn path(blocks: &[u64]) -> Vec<u64> {
        blocks
            .iter()
            .scan(0, |chain, &block| {
                *chain = mix(*chain, block);
                Some(*chain)
            })
            .collect()
    }

    /// Returns how many nodes of the path are in the tree. Also returns at most [`HOLDERS_MAX`] of
    /// the `workers` that got the last of these nodes.
    fn longest(&self, path: &[u64], workers: &[usize]) -> (usize, Vec<usize>) {
        let matched = path
            .iter()
            .take_while(|node| self.nodes.contains_key(node))
            .count();
        let last = matched
            .checked_sub(1)
            .and_then(|at| path.get(at))
            .and_then(|node| self.nodes.get(node));
        let holders = last
            .into_iter()
            .flat_map(BTreeMap::keys)
            .copied()
            .take(HOLDERS_MAX);
        (
            matched,
            holders.filter(|holder| workers.contains(holder)).collect(),
        )
    }

    fn insert(&mut self, path: &[u64], worker: usize) {
        self.prompts += 1;
        for node in path {
            self.size += usize::from(
                self.nodes
                    .entry(*node)
                    .or_default()
                    .insert(worker, self.prompts)
                    .is_none(),
            );
        }
    }

    /// Evicts the least recently used nodes beyond `most`. A node is used whenever a longer text is
    /// used, so the ends of texts are evicted first.
    fn evict(&mut self, most: usize) {
        let beyond = self.size.saturating_sub(most);
        let mut uses: Vec<u64> = self
            .nodes
            .values()
            .flat_map(BTreeMap::values)
            .copied()
            .collect();
        uses.sort_unstable();
        let Some(&oldest_kept) = uses.get(beyond).filter(|_| beyond > 0) else {
            return;
        };
        self.nodes.retain(|_, workers| {
            workers.retain(|_, used| *used >= oldest_kept);
            !workers.is_empty()
        });
        self.size = self.nodes.values().map(BTreeMap::len).sum();
    }
}

// === impl LoadPolls ===

impl LoadPolls {
    /// Polls the workers if the last poll is at least [`POLL_MS`] old.
    fn refresh(&mut self, view: &PolicyView<'_, '_>, workers: &[usize]) {
        if self
            .polled
            .is_some_and(|polled| view.now < polled + POLL_MS)
        {
            return;
        }
        self.polled = Some(view.now);
        let polled = workers.iter().map(|&at| {
            let (waiting, kv_use) = view.reported(at);
            (at, PolledLoad { waiting, kv_use })
        });
        self.workers = polled.collect();
    }

    fn load_of(&self, worker: usize) -> PolledLoad {
        self.workers.get(&worker).copied().unwrap_or_default()
    }

    /// Returns the expected wait at a worker with `in_flight` requests in flight, in s.
    fn wait_s(&self, worker: usize, in_flight: f64) -> f64 {
        let PolledLoad { waiting, kv_use } = self.load_of(worker);
        let used = kv_use.clamp(0.0, KV_USE_MAX);
        (waiting + in_flight) * REQUEST_TOKENS / TOKENS_PER_S + KV_PRESSURE_S * used / (1.0 - used)
    }

    fn is_overloaded(&self, worker: usize) -> bool {
        self.load_of(worker).waiting >= OVERLOAD_WAITING
            || self.load_of(worker).kv_use >= OVERLOAD_KV_USE
    }
}

// === impl PolicyMemory ===

impl PolicyMemory {
    /// Returns the position of the worker that smg picks. `ready` has the positions of the ready
    /// workers.
    pub(super) fn pick_smg(
        &mut self,
        view: &PolicyView<'_, '_>,
        ready: &[usize],
        rng: &mut Rng,
    ) -> Option<usize> {
        self.polls.refresh(view, ready);
        let block_tokens = view.engines.first()?.spec().block_tokens;
        if view.now >= self.evicted + EVICTION_MS {
            self.texts
                .evict(CHARACTERS_MAX / (block_tokens * TOKEN_CHARACTERS));
            self.evicted = view.now;
        }
        let able: Vec<usize> = ready
            .iter()
            .copied()
            .filter(|&at| !self.polls.is_overloaded(at))
            .collect();
        let able = if able.is_empty() { ready } else { &able };
        let path = TextTree::path(
            view.job
                .blocks
                .get(..view.job.prompt as usize / block_tokens)
                .unwrap_or(view.job.blocks),
        );
        let polls = &self.polls;
        let soonest = |workers: &[usize], rng: &mut Rng| {
            lowest(workers, &|at| polls.wait_s(at, view.own_requests(at)), rng)
        };
        let (matched, holders) = self.texts.longest(&path, able);
        let is_match = matched as f64 > MATCH_MIN * path.len() as f64;
        let holder = if is_match {
            soonest(&holders, rng)
        } else {
            None
        };
        let loads: Vec<(usize, f64)> = able.iter().map(|&at| (at, view.own_requests(at))).collect();
        let picked = match holder {
            Some(holder) if !is_beyond(&loads, holder) => holder,
            _ => soonest(able, rng)?,
        };
        self.texts.insert(&path, picked);
        Some(picked)
    }
}

/// Whether a worker has so many more requests in flight than the mean that its match does not
/// count.
fn is_beyond(loads: &[(usize, f64)], worker: usize) -> bool {
    let mean = loads.iter().map(|(_, load)| load).sum::<f64>() / loads.len().max(1) as f64;
    let margin = (SPILL_DEVIATIONS * mean.sqrt()).clamp(SPILL_ABS_MIN, SPILL_ABS);
    loads
        .iter()
        .any(|&(at, load)| at == worker && load > SPILL_REL * mean && load > mean + margin)
}

/// Returns the position of the worker that vllm-router picks. `ready` has the positions of the
/// ready workers.
pub(super) fn pick_vllm_router(view: &PolicyView<'_, '_>, ready: &[usize]) -> Option<usize> {
    ready
        .iter()
        .copied()
        .min_by(|a, b| view.own_requests(*a).total_cmp(&view.own_requests(*b)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [usize; 3] = [0, 1, 2];

    #[test]
    fn the_longest_text_of_any_worker_matches_and_all_its_holders_count() {
        let mut tree = TextTree::default();
        let [short, long, other] = [&[1, 2][..], &[1, 2, 3, 4], &[9, 2]].map(TextTree::path);
        assert_eq!(tree.longest(&long, &ALL), (0, Vec::new()));
        tree.insert(&short, 0);
        tree.insert(&long, 2);
        assert_eq!(tree.longest(&long, &ALL), (4, vec![2]));
        assert_eq!(tree.longest(&short, &ALL), (2, vec![0, 2]));
        assert_eq!(
            tree.longest(&short, &[0]),
            (2, vec![0]),
            "a worker that is not ready is no holder"
        );
        assert_eq!(
            tree.longest(&other, &ALL).0,
            0,
            "equal blocks after another beginning are another text"
        );
    }

    #[test]
    fn the_least_recently_used_ends_are_forgotten_first() {
        let mut tree = TextTree::default();
        let [first, second] = [&[1, 2, 3][..], &[1, 5, 6]].map(TextTree::path);
        tree.insert(&first, 0);
        tree.insert(&second, 0);
        assert_eq!(tree.size, 5);
        tree.evict(5);
        assert_eq!((tree.size, tree.longest(&first, &ALL).0), (5, 3));
        tree.evict(3);
        assert_eq!(
            (
                tree.size,
                tree.longest(&first, &ALL).0,
                tree.longest(&second, &ALL).0
            ),
            (3, 1, 3)
        );
    }

    #[test]
    fn a_match_counts_until_its_worker_has_many_more_requests_than_the_mean() {
        let loads = |busy: f64| [(0, busy), (1, 4.0), (2, 4.0), (3, 4.0)];
        assert!(
            !is_beyond(&loads(10.0), 0),
            "4.5 above the mean of 5.5, and less than two deviations"
        );
        assert!(is_beyond(&loads(12.0), 0), "6 above the mean of 6");
        assert!(!is_beyond(&loads(12.0), 1));
        assert!(
            !is_beyond(&[(0, 4.0), (1, 0.0)], 0),
            "a few requests are never too many"
        );
    }
}
