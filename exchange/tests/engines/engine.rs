//! Engines as a proxy sees them: when the first token of a request comes, and when the others.

use scheduler::Rng;

/// Nanoseconds of a millisecond.
pub(crate) const MS: u64 = 1_000_000;

/// The longest that a hop between proxy and engine takes beyond the shortest: a tenth of what a busy machine adds.
const JITTER: u64 = MS;

/// How an engine behaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Engine {
    /// Its row in the table.
    pub(crate) name: &'static str,
    pub(crate) time: Time,
    pub(crate) metrics: Metrics,
    pub(crate) usage: bool,
    pub(crate) api: Api,
}

/// How long a request takes, in ms.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Time {
    /// All of the reply after so long.
    Constant(f64),
    /// To the first token, and from each to the next.
    PerToken { first: f64, next: f64 },
    /// So long for each token of the prompt, however many requests run.
    PerPromptToken(f64),
    /// So many requests at once, each for so long; the others wait.
    Slots { slots: usize, each: f64 },
}

/// What its `/metrics` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Metrics {
    Live,
    /// The same for ever, and not the same at each server.
    Frozen,
    Missing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    Chat,
    Embeddings,
    Rerank,
}

/// A healthy engine; each row of [`ENGINES`] differs from it.
const PLAIN: Engine =
    Engine { name: "", time: Time::PerToken { first: 150.0, next: 20.0 }, metrics: Metrics::Live, usage: true, api: Api::Chat };

/// The matrix.
pub(crate) const ENGINES: [Engine; 10] = [
    Engine { name: "answers at once", time: Time::Constant(0.2), ..PLAIN },
    Engine { name: "constant 0.3 s", time: Time::Constant(300.0), ..PLAIN },
    Engine { name: "constant per token", ..PLAIN },
    Engine { name: "no /metrics", metrics: Metrics::Missing, ..PLAIN },
    Engine { name: "frozen metrics", metrics: Metrics::Frozen, ..PLAIN },
    Engine { name: "no usage", usage: false, ..PLAIN },
    Engine { name: "embeddings", time: Time::Constant(20.0), api: Api::Embeddings, ..PLAIN },
    Engine { name: "rerank", time: Time::Constant(20.0), api: Api::Rerank, ..PLAIN },
    Engine { name: "grows with the prompt", time: Time::PerPromptToken(0.1), ..PLAIN },
    Engine { name: "four at once", time: Time::Slots { slots: 4, each: 200.0 }, ..PLAIN },
];

/// One server of a kind: when its slots are free.
#[derive(Clone, Debug, Default)]
pub(crate) struct Server {
    free: Vec<u64>,
}

impl Engine {
    /// When the first token of a request of so many prompt tokens comes, and how long after that each next one.
    pub(crate) fn answers(&self, server: &mut Server, now: u64, prompt_tokens: usize, rng: &mut Rng) -> (u64, u64) {
        let ns = |ms: f64| (ms * MS as f64) as u64;
        let now = now + JITTER / 10 + rng.below(JITTER as usize) as u64;
        match self.time {
            Time::Constant(all) => (now + ns(all), 0),
            Time::PerToken { first, next } => (now + ns(first), ns(next)),
            Time::PerPromptToken(each) => (now + ns(each * prompt_tokens as f64), 0),
            Time::Slots { slots, each } => {
                server.free.resize(slots, 0);
                let slot = server.free.iter_mut().min().unwrap();
                *slot = (*slot).max(now) + ns(each);
                (*slot, 0)
            }
        }
    }
}

impl Api {
    pub(crate) fn path(self) -> &'static [u8] {
        match self {
            Self::Chat => b"/v1/chat/completions",
            Self::Embeddings => b"/v1/embeddings",
            Self::Rerank => b"/v1/rerank",
        }
    }

    pub(crate) fn body(self, prompt: &str) -> String {
        match self {
            Self::Chat => format!(r#"{{"model":"demo","stream":true,"messages":[{{"role":"user","content":"{prompt}"}}]}}"#),
            Self::Embeddings => format!(r#"{{"model":"demo","input":"{prompt}"}}"#),
            Self::Rerank => format!(r#"{{"model":"demo","query":"q","documents":["{prompt}"]}}"#),
        }
    }
}
