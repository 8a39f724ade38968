//! Engines as a proxy sees them: the times of the first token of a request and of later tokens.

use scheduler::Rng;

/// Nanoseconds in a millisecond.
pub(crate) const MS: u64 = 1_000_000;

/// The range of the random delay between proxy and engine: a tenth of what a busy machine adds.
const JITTER: u64 = MS;

#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineBehaviour {
    /// The name of the engine's row in the printed table.
    pub(crate) name: &'static str,
    pub(crate) time: ServiceTime,
    pub(crate) metrics: ReportedMetrics,
    pub(crate) usage: bool,
    pub(crate) api: EngineApi,
}

/// The time that a request takes, in ms.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ServiceTime {
    /// The time until the whole reply.
    Constant(f64),
    /// The time to the first token, and from each token to the next.
    PerToken { first: f64, next: f64 },
    /// The time for each token of the prompt, which does not depend on how many requests run.
    PerPromptToken(f64),
    /// `slots` requests run at the same time, each for `each` ms. The other requests wait.
    Slots { slots: usize, each: f64 },
}

/// The values that the engine's `/metrics` reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReportedMetrics {
    Live,
    /// Values that never change, and that differ between servers.
    Frozen,
    Missing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineApi {
    Chat,
    Embeddings,
    Rerank,
}

/// A healthy engine; each row of [`ENGINES`] differs from it.
const PLAIN: EngineBehaviour = EngineBehaviour {
    name: "",
    time: ServiceTime::PerToken {
        first: 150.0,
        next: 20.0,
    },
    metrics: ReportedMetrics::Live,
    usage: true,
    api: EngineApi::Chat,
};

/// The engine whose replies take 0.2 ms.
pub(crate) const AT_ONCE: &str = "answers at once";

pub(crate) const ENGINES: [EngineBehaviour; 10] = [
    EngineBehaviour {
        name: AT_ONCE,
        time: ServiceTime::Constant(0.2),
        ..PLAIN
    },
    EngineBehaviour {
        name: "constant 0.3 s",
        time: ServiceTime::Constant(300.0),
        ..PLAIN
    },
    EngineBehaviour {
        name: "constant per token",
        ..PLAIN
    },
    EngineBehaviour {
        name: "no /metrics",
        metrics: ReportedMetrics::Missing,
        ..PLAIN
    },
    EngineBehaviour {
        name: "frozen metrics",
        metrics: ReportedMetrics::Frozen,
        ..PLAIN
    },
    EngineBehaviour {
        name: "no usage",
        usage: false,
        ..PLAIN
    },
    EngineBehaviour {
        name: "embeddings",
        time: ServiceTime::Constant(20.0),
        api: EngineApi::Embeddings,
        ..PLAIN
    },
    EngineBehaviour {
        name: "rerank",
        time: ServiceTime::Constant(20.0),
        api: EngineApi::Rerank,
        ..PLAIN
    },
    EngineBehaviour {
        name: "grows with the prompt",
        time: ServiceTime::PerPromptToken(0.1),
        ..PLAIN
    },
    EngineBehaviour {
        name: "four at once",
        time: ServiceTime::Slots {
            slots: 4,
            each: 200.0,
        },
        ..PLAIN
    },
];

/// One server of an engine: the times at which its slots become free.
#[derive(Clone, Debug, Default)]
pub(crate) struct EngineServer {
    free: Vec<u64>,
}

impl EngineBehaviour {
    /// Returns when the first token comes for a request with `prompt_tokens`, and the time from
    /// each token to the next, both in ns.
    pub(crate) fn answers(
        &self,
        server: &mut EngineServer,
        now: u64,
        prompt_tokens: usize,
        rng: &mut Rng,
    ) -> (u64, u64) {
        let ns = |ms: f64| (ms * MS as f64) as u64;
        let now = now + JITTER / 10 + rng.below(JITTER as usize) as u64;
        match self.time {
            ServiceTime::Constant(all) => (now + ns(all), 0),
            ServiceTime::PerToken { first, next } => (now + ns(first), ns(next)),
            ServiceTime::PerPromptToken(each) => (now + ns(each * prompt_tokens as f64), 0),
            ServiceTime::Slots { slots, each } => {
                server.free.resize(slots, 0);
                let slot = server.free.iter_mut().min().unwrap();
                *slot = (*slot).max(now) + ns(each);
                (*slot, 0)
            }
        }
    }
}

impl EngineApi {
    pub(crate) fn path(self) -> &'static [u8] {
        match self {
            Self::Chat => b"/v1/chat/completions",
            Self::Embeddings => b"/v1/embeddings",
            Self::Rerank => b"/v1/rerank",
        }
    }

    pub(crate) fn body(self, prompt: &str) -> String {
        match self {
            Self::Chat => format!(
                r#"{{"model":"demo","stream":true,"messages":[{{"role":"user","content":"{prompt}"}}]}}"#
            ),
            Self::Embeddings => format!(r#"{{"model":"demo","input":"{prompt}"}}"#),
            Self::Rerank => format!(r#"{{"model":"demo","query":"q","documents":["{prompt}"]}}"#),
        }
    }
}
