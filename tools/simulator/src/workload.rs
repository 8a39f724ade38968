//! Workloads: real traces, rotated and jittered by the seed, and synthetic ones. Times are at the
//! trace's own rate; a run compresses them.

use std::collections::BTreeMap;

use scheduler::Rng;
use scheduler::prefix::{BLOCK_BYTES_MIN, BLOCKS_MAX, SectionSums, block_hashes};

use crate::engine::{BLOCK_TOKENS, EngineJob};
use crate::trace::{self, ID_TOKENS, ServeGenClient, TraceRequest};

mod closed;
pub(crate) use closed::SESSION_BLOCK_TOKENS;

/// Requests in order of arrival; those of a closed session one after another.
#[derive(Debug)]
pub(crate) struct Workload {
    requests: Vec<WorkloadRequest>,
    blocks: Vec<u64>,
    hashes: Vec<u64>,
    /// Requests a second at its own rate.
    pub(crate) rate: f64,
    /// The class of each request; empty if there is only the default.
    classes: Vec<RequestClass>,
    /// The highest priority of a request.
    pub(crate) highest_priority: i32,
    /// Whether it has sessions whose clients wait for replies.
    pub(crate) is_closed: bool,
    /// Whether each request of a session may come to another proxy.
    pub(crate) roams: bool,
}

/// What flow control knows of a request: its priority and its fairness id.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RequestClass {
    pub(crate) name: &'static str,
    pub(crate) priority: i32,
    pub(crate) flow: &'static str,
    /// The spread of an estimate of its prompt tokens, log-normal; 0 if they are known.
    pub(crate) prompt_error: f64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkloadRequest {
    /// Arrival at the workload's own rate, ms. Of no meaning where `pause_ms` is set.
    pub(crate) at: f64,
    /// The time from the end of the request before it, which is of the same session, until it is
    /// sent, ms. `None` if it is sent at `at`, whatever happened to others.
    pub(crate) pause_ms: Option<f64>,
    pub(crate) prompt: u32,
    pub(crate) output: u32,
    pub(crate) adapter: u16,
    /// The first request of its session.
    pub(crate) session: u32,
    /// The place of its blocks and of its hashes: the first of them, and how many there are.
    blocks: (usize, usize),
    hashes: (usize, usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkloadKind {
    /// Mooncake's conversations: long prompts, a third of them seen before.
    Conversation,
    /// Mooncake's synthetic mix: long prompts, two thirds of them seen before.
    PrefixHeavy,
    /// Azure's code completion: bursts of short requests, nothing shared.
    Code,
    /// Azure's conversations: steady, nothing shared.
    Chat,
    /// 150 tenants, each with a system prompt of 5,632 tokens; every question is new.
    Tenants,
    /// Like `Tenants`, with five questions for each tenant, which repeat.
    TenantsRepeated,
    /// Like `Tenants`, with a few large tenants and many small ones.
    TenantsZipf,
    /// Agents: 3 to 30 turns, about a second apart. Each prompt has all earlier turns and a tool's
    /// answer.
    Agents,
    /// The clients of ServeGen, each with its own bursts and lengths; nothing shared.
    Clients,
    /// 64 LoRA adapters, each with a system prompt of 512 tokens; a few of them get most requests.
    Adapters,
    /// Four assistants, each with a system prompt of 1,024 tokens: conversations of eight turns, a
    /// second or two apart, with short replies.
    Assistants,
}

/// Finds the sessions of a trace. Traces do not have them: a prompt that begins with all of an
/// earlier one (except its last, incomplete id) belongs to the same session.
#[derive(Default)]
struct SessionCounts(BTreeMap<u64, u32>);

/// Draws random numbers with the scheduler's generator.
pub(crate) struct Sampler(Rng);

// === impl SessionCounts ===

impl SessionCounts {
    /// More ids than a system prompt has.
    const IDS_MIN: usize = 2;

    /// The session of the next line: the line's own number if it continues none.
    fn of(&mut self, line: &TraceRequest, number: u32) -> u32 {
        let whole = line
            .ids
            .get(..line.prompt as usize / ID_TOKENS)
            .unwrap_or(&line.ids);
        let longest = whole
            .iter()
            .skip(Self::IDS_MIN - 1)
            .rev()
            .find_map(|id| self.0.get(id));
        let session = longest.copied().unwrap_or(number);
        if let Some(last) = whole.last().filter(|_| whole.len() >= Self::IDS_MIN) {
            self.0.insert(*last, session);
        }
        session
    }
}

// === impl RequestClass ===

impl RequestClass {
    /// An estimate of the tokens of a request's prompt, right on average; the same each time.
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

    /// Uniform in 0..1.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub(crate) fn below(&mut self, count: usize) -> usize {
        self.0.below(count)
    }

    /// Exponential with mean 1.
    pub(crate) fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    /// Standard normal (Box and Muller).
    pub(crate) fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.unit()).ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Gamma with this shape and mean 1 (Marsaglia and Tsang).
    fn gamma(&mut self, shape: f64) -> f64 {
        let raised = if shape < 1.0 {
            (1.0 - self.unit()).powf(1.0 / shape)
        } else {
            1.0
        };
        let d = if shape < 1.0 { shape + 1.0 } else { shape } - 1.0 / 3.0;
        loop {
            let normal = self.normal();
            let cube = (1.0 + normal / (9.0 * d).sqrt()).powi(3);
            if cube > 0.0
                && (1.0 - self.unit()).ln() < 0.5 * normal * normal + d - d * cube + d * cube.ln()
            {
                return d * cube * raised / shape;
            }
        }
    }

    /// A position, drawn with probabilities in proportion to these shares.
    fn among(&mut self, shares: &[f64]) -> usize {
        let mut left = self.unit() * shares.iter().sum::<f64>();
        let drawn = shares.iter().position(|share| {
            left -= share;
            left <= 0.0
        });
        drawn.unwrap_or(shares.len().saturating_sub(1))
    }

    /// A whole number, log-normal with this mean and spread, within the bounds.
    pub(crate) fn tokens(&mut self, mean: f64, spread: f64, bounds: (f64, f64)) -> u32 {
        (mean * (spread * self.normal() - spread * spread / 2.0).exp()).clamp(bounds.0, bounds.1)
            as u32
    }
}

// === impl WorkloadKind ===

impl WorkloadKind {
    pub(crate) const MAIN: [Self; 5] = [
        Self::Conversation,
        Self::PrefixHeavy,
        Self::Code,
        Self::Chat,
        Self::Tenants,
    ];
    pub(crate) const FURTHER: [Self; 5] = [
        Self::TenantsRepeated,
        Self::TenantsZipf,
        Self::Agents,
        Self::Assistants,
        Self::Clients,
    ];

    pub(crate) fn all() -> impl Iterator<Item = Self> {
        Self::MAIN
            .into_iter()
            .chain(Self::FURTHER)
            .chain([Self::Adapters])
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Conversation => "conversation",
            Self::PrefixHeavy => "prefix-heavy",
            Self::Code => "code",
            Self::Chat => "chat",
            Self::Tenants => "tenants",
            Self::TenantsRepeated => "tenants-repeated",
            Self::TenantsZipf => "tenants-zipf",
            Self::Agents => "agents",
            Self::Assistants => "assistants",
            Self::Clients => "clients",
            Self::Adapters => "adapters",
        }
    }

    /// The highest rate that eight Llama 8B engines on H100 sustain under any policy, requests a
    /// second. Loads are shares of it. A rate is sustained if the median TTFT of the last 30 % of
    /// arrivals stays under 5 s.
    pub(crate) fn capacity(self) -> f64 {
        match self {
            Self::Conversation => 12.6,
            Self::PrefixHeavy => 18.0,
            Self::Code => 182.0,
            Self::Chat => 209.0,
            Self::Tenants | Self::TenantsRepeated | Self::TenantsZipf => 18.7,
            Self::Agents => 60.0,
            Self::Assistants => 570.0,
            Self::Clients => 1_900.0,
            Self::Adapters => 200.0,
        }
    }

    pub(crate) fn load(self, seed: u64) -> Result<Workload, String> {
        let dice = &mut Sampler::seeded(mix(seed, self as u64 + 1));
        let lines = match self {
            Self::Conversation => {
                let mut lines = trace::mooncake("conversation")?;
                // The trace's clock ticks every 3 s.
                lines
                    .iter_mut()
                    .for_each(|line| line.at += dice.unit() * 3_000.0);
                rotated(lines, dice)
            }
            Self::PrefixHeavy => rotated(trace::mooncake("synthetic")?, dice),
            Self::Code => copies(&trace::azure("code")?, 6, dice),
            Self::Chat => copies(&trace::azure("conv")?, 2, dice),
            Self::Tenants => tenants(None, 0.0, dice),
            Self::TenantsRepeated => tenants(Some(5), 0.0, dice),
            Self::TenantsZipf => tenants(None, 1.0, dice),
            Self::Agents => agents(dice),
            Self::Assistants => assistants(dice),
            Self::Clients => clients(&trace::servegen()?, dice),
            Self::Adapters => adapters(dice),
        };
        Ok(Workload::of(&lines))
    }
}

// === impl Workload ===

impl Workload {
    pub(crate) fn of(lines: &[TraceRequest]) -> Self {
        let mut requests = Vec::with_capacity(lines.len());
        let mut blocks = Vec::new();
        let mut hashes = Vec::new();
        let mut sessions = SessionCounts::default();
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
                at,
                prompt,
                output,
                adapter,
                ..
            } = *line;
            let blocks = (first_block, blocks.len() - first_block);
            let hashes = (first_hash, hashes.len() - first_hash);
            let session = sessions.of(line, number as u32);
            requests.push(WorkloadRequest {
                at: at - start,
                pause_ms: None,
                prompt,
                output,
                adapter,
                session,
                blocks,
                hashes,
            });
        }
        let span_s = requests.last().map_or(1.0, |last| last.at / 1e3).max(1e-3);
        let rate = requests.len().saturating_sub(1) as f64 / span_s;
        let highest_priority = RequestClass::default().priority;
        Self {
            requests,
            blocks,
            hashes,
            rate,
            classes: Vec::new(),
            highest_priority,
            is_closed: false,
            roams: false,
        }
    }

    /// A workload of several classes: the lines of each, in order of arrival.
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
            ..Self::of(&lines)
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
            adapter,
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
            adapter,
            prefilled: false,
        })
    }
}

/// Appends the hashes that a proxy computes for a prompt whose blocks have this content. A block
/// has the smallest number of bytes that a block may have.
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

/// A hash of two numbers, never 0.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut rng = Rng::seeded(a.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17) ^ b);
    rng.next_u64() | 1
}

fn in_order(mut lines: Vec<TraceRequest>) -> Vec<TraceRequest> {
    lines.sort_by(|a, b| a.at.total_cmp(&b.at));
    lines
}

/// The trace from a random place on; the part before that place follows its end.
fn rotated(mut lines: Vec<TraceRequest>, dice: &mut Sampler) -> Vec<TraceRequest> {
    let (first, last) = lines
        .iter()
        .fold((f64::INFINITY, 0.0_f64), |(first, last), line| {
            (first.min(line.at), last.max(line.at))
        });
    let span = last - first + 1_000.0;
    let shift = dice.unit() * span;
    lines
        .iter_mut()
        .for_each(|line| line.at = (line.at - first + shift) % span);
    in_order(lines)
}

/// Several copies of a trace, each from another place on. They share no prompt.
fn copies(lines: &[TraceRequest], count: usize, dice: &mut Sampler) -> Vec<TraceRequest> {
    in_order(
        (0..count)
            .flat_map(|_| rotated(lines.to_vec(), dice))
            .collect(),
    )
}

/// Shared system prompts of 11 ids, questions of 1,568 tokens, about 1,000 tokens of output,
/// Poisson arrivals. `questions` is the number of different questions of a tenant.
fn tenants(questions: Option<usize>, zipf: f64, dice: &mut Sampler) -> Vec<TraceRequest> {
    const TENANTS: usize = 150;
    const REQUESTS: u64 = 12_000;
    let shares = zipf_shares(TENANTS, zipf);
    let mut at = 0.0;
    let line = |number: u64| {
        at += dice.exponential() * 1e3;
        let tenant = dice.among(&shares) as u64;
        let question = questions.map_or(1_000_000 + number, |count| {
            tenant * 1_000 + dice.below(count) as u64
        });
        let output = dice.tokens(1_000.0, 0.3, (50.0, 4_000.0));
        let system = (0..11).map(|id| 10_000_000 + tenant * 64 + id);
        TraceRequest {
            at,
            prompt: 7_200,
            output,
            ids: system
                .chain((0..4).map(|id| 1_000_000_000 + question * 64 + id))
                .collect(),
            adapter: 0,
        }
    };
    (0..REQUESTS).map(line).collect()
}

/// The weight of each of `count`, in falling order; equal weights if `zipf` is 0.
fn zipf_shares(count: usize, zipf: f64) -> Vec<f64> {
    (1..=count).map(|rank| (rank as f64).powf(-zipf)).collect()
}

/// Poisson arrivals; the adapter of each by Zipf's law. Prompts of about 1,500 tokens; a third of
/// them are the adapter's system prompt.
fn adapters(dice: &mut Sampler) -> Vec<TraceRequest> {
    const REQUESTS: u64 = 12_000;
    let shares = zipf_shares(64, 1.0);
    let mut at = 0.0;
    let line = |number: u64| {
        at += dice.exponential() * 1e3;
        let adapter = dice.among(&shares) as u64 + 1;
        let prompt = ID_TOKENS as u32 + dice.tokens(1_000.0, 0.8, (20.0, 8_000.0));
        let own =
            (1..u64::from(prompt).div_ceil(ID_TOKENS as u64)).map(|id| (number + 1) << 20 | id);
        let ids = std::iter::once(adapter).chain(own).collect();
        TraceRequest {
            at,
            prompt,
            output: dice.tokens(200.0, 0.6, (10.0, 1_000.0)),
            ids,
            adapter: adapter as u16,
        }
    };
    (0..REQUESTS).map(line).collect()
}

/// The requests of every client: in each window as many as its rate says, with Gamma-distributed
/// gaps. They are thinned to about 60,000 in all.
fn clients(clients: &[ServeGenClient], dice: &mut Sampler) -> Vec<TraceRequest> {
    const REQUESTS: f64 = 60_000.0;
    const WINDOW_MS: f64 = 600_000.0;
    let all: f64 = clients
        .iter()
        .flat_map(|client| &client.windows)
        .map(|[rate, _]| rate * WINDOW_MS / 1e3)
        .sum();
    let mut lines = Vec::new();
    for client in clients {
        let drawn = |quantiles: &[u32], dice: &mut Sampler| {
            quantiles
                .get(dice.below(quantiles.len()))
                .copied()
                .unwrap_or(1)
                .max(1)
        };
        // The time from the window's beginning to the next request, in units of the mean gap.
        let mut ahead = dice.unit();
        for (number, &[rate, spread]) in client.windows.iter().enumerate() {
            let count = rate * WINDOW_MS / 1e3 / all * REQUESTS;
            while ahead < count {
                let at = (number as f64 + ahead / count) * WINDOW_MS;
                let prompt = drawn(&client.prompt, dice);
                let output = drawn(&client.output, dice);
                lines.push(TraceRequest {
                    at,
                    prompt,
                    output,
                    ..TraceRequest::default()
                });
                ahead += dice.gamma(1.0 / spread.clamp(0.1, 10.0).powi(2));
            }
            ahead -= count;
        }
    }
    in_order(lines)
}

/// Sessions with random arrivals. The prompt of a turn has all earlier turns; the next turn comes
/// when a tool has run.
fn agents(dice: &mut Sampler) -> Vec<TraceRequest> {
    const SESSIONS: u64 = 1_200;
    let mut lines = Vec::new();
    let mut begins = 0.0;
    for session in 0..SESSIONS {
        begins += dice.exponential() * 4_000.0;
        let mut at = begins;
        let mut prompt = f64::from(dice.tokens(6_000.0, 0.8, (1_000.0, 40_000.0)));
        for _ in 0..3 + dice.below(28) {
            let output = dice.tokens(250.0, 0.7, (20.0, 2_000.0));
            let ids = (0..(prompt as u64).div_ceil(ID_TOKENS as u64))
                .map(|id| (session + 1) << 20 | id)
                .collect();
            lines.push(TraceRequest {
                at,
                prompt: prompt as u32,
                output,
                ids,
                adapter: 0,
            });
            prompt =
                (prompt + f64::from(output) + f64::from(dice.tokens(900.0, 1.0, (50.0, 12_000.0))))
                    .min(120_000.0);
            at += 2_000.0 + f64::from(output) * 12.0 + dice.exponential() * 3_000.0;
        }
    }
    in_order(lines)
}

/// The prompt of each turn has all earlier turns and 512 tokens more. Conversations begin so often
/// that 120 are in progress at a time.
fn assistants(dice: &mut Sampler) -> Vec<TraceRequest> {
    const CONVERSATIONS: u64 = 2_000;
    const TURNS: u64 = 8;
    const APART_MS: f64 = 1_500.0;
    let mut lines = Vec::new();
    let mut begins = 0.0;
    for conversation in 0..CONVERSATIONS {
        begins += dice.exponential() * TURNS as f64 * APART_MS / 120.0;
        let mut at = begins;
        let assistant = dice.below(4) as u64;
        for turn in 1..=TURNS {
            let said = (0..turn).map(|turn| (conversation + 1) << 20 | turn);
            let ids: Vec<u64> = [2 * assistant, 2 * assistant + 1]
                .into_iter()
                .chain(said)
                .collect();
            let output = 16 + dice.below(32) as u32;
            lines.push(TraceRequest {
                at,
                prompt: (ids.len() * ID_TOKENS) as u32,
                output,
                ids,
                adapter: 0,
            });
            at += APART_MS * (2.0 / 3.0 + dice.unit() * 2.0 / 3.0);
        }
    }
    in_order(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_workload_and_another_is_another() {
        for kind in WorkloadKind::all() {
            let times = |seed| {
                kind.load(seed)
                    .unwrap()
                    .requests()
                    .iter()
                    .map(|request| request.at)
                    .collect::<Vec<_>>()
            };
            let once = times(1);
            assert!(once == times(1) && once != times(2), "{}", kind.name());
            assert!(once.is_sorted() && once[0] == 0.0);
        }
    }

    #[test]
    fn blocks_share_what_ids_share() {
        let line = |ids: &[u64]| TraceRequest {
            prompt: 1_000,
            output: 1,
            ids: ids.to_vec(),
            ..TraceRequest::default()
        };
        let workload = Workload::of(&[line(&[1, 2]), line(&[1, 3]), line(&[]), line(&[])]);
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
    fn a_prompt_that_repeats_all_of_an_earlier_one_continues_its_session() {
        let of = |prompt, ids: &[u64]| TraceRequest {
            prompt,
            output: 1,
            ids: ids.to_vec(),
            ..TraceRequest::default()
        };
        let lines = [
            of(1_600, &[1, 2, 3, 4]),
            of(1_600, &[1, 2, 5, 6]),
            of(2_700, &[1, 2, 3, 7, 8, 9]),
            of(3_000, &[1, 2, 3, 7, 8, 10]),
            of(600, &[1, 11]),
            of(1_100, &[1, 12, 13]),
        ];
        let sessions: Vec<u32> = Workload::of(&lines)
            .requests()
            .iter()
            .map(|request| request.session)
            .collect();
        assert_eq!(sessions, [0, 1, 0, 0, 4, 5]);
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
        let workload = Workload::of(&[of(&(0..20).collect::<Vec<_>>()), of(&other), of(&[])]);
        let hashes = |request| workload.job(request).unwrap().hashes.to_vec();
        let shared = hashes(0)
            .iter()
            .zip(hashes(1))
            .take_while(|(a, b)| **a == *b)
            .count();
        // 128 blocks, then 7 times four and the quarter block left over; they agree on 144 blocks.
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

    #[test]
    fn gamma_draws_have_mean_one_and_the_requested_spread() {
        for spread in [0.3, 1.0, 2.0] {
            let dice = &mut Sampler::seeded(3);
            let drawn: Vec<f64> = (0..40_000)
                .map(|_| dice.gamma(1.0 / (spread * spread)))
                .collect();
            let mean = drawn.iter().sum::<f64>() / drawn.len() as f64;
            let variance =
                drawn.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / drawn.len() as f64;
            assert!(
                (mean - 1.0).abs() < 0.05 && (variance.sqrt() / spread - 1.0).abs() < 0.08,
                "{spread}: {mean} {variance}"
            );
        }
    }
}
