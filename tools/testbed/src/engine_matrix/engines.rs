use std::time::Duration;

use serde_json::{Value, json};

use super::bounds::AT_ONCE;
use crate::plain_engine::{AnswerDelay, PlainBehaviour, PlainMetrics, UsageReporting};

/// The number of tokens of each reply.
const OUTPUT_TOKENS: u64 = 6;

/// The behaviour of an engine, and the API of its requests.
#[derive(Clone, Debug)]
pub struct MatrixEngine {
    /// The name of the engine in tables, and of its pool.
    pub name: &'static str,
    pub(super) behaviour: PlainBehaviour,
    pub(super) api: MatrixApi,
    /// Whether requests take so long that 32 at a time are little work for the machine.
    pub(super) slow: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MatrixApi {
    Chat,
    Embeddings,
    Rerank,
}

#[must_use]
pub fn engines() -> Vec<MatrixEngine> {
    let ms = Duration::from_millis;
    let per_token = PlainBehaviour::with_delay(AnswerDelay::PerToken {
        first: ms(150),
        next: ms(20),
    });
    let chat = |name, behaviour, slow| MatrixEngine {
        name,
        behaviour,
        api: MatrixApi::Chat,
        slow,
    };
    let of = |name, api| MatrixEngine {
        name,
        behaviour: PlainBehaviour::with_delay(AnswerDelay::Constant(ms(20))),
        api,
        slow: false,
    };
    vec![
        chat(
            "constant-0.3-s",
            PlainBehaviour::with_delay(AnswerDelay::Constant(ms(300))),
            true,
        ),
        chat("constant-per-token", per_token.clone(), true),
        chat(
            "no-metrics",
            PlainBehaviour {
                metrics: PlainMetrics::Missing,
                ..per_token.clone()
            },
            true,
        ),
        chat(
            "frozen-metrics",
            PlainBehaviour {
                metrics: PlainMetrics::Frozen,
                ..per_token.clone()
            },
            true,
        ),
        chat(
            "no-usage",
            PlainBehaviour {
                usage: UsageReporting::Untold,
                ..per_token
            },
            true,
        ),
        chat(
            "four-at-once",
            PlainBehaviour::with_delay(AnswerDelay::Slots {
                slots: 4,
                each: ms(200),
            }),
            true,
        ),
        chat(
            "grows-with-prompt",
            PlainBehaviour::with_delay(AnswerDelay::PerPromptToken(Duration::from_micros(100))),
            false,
        ),
        chat(AT_ONCE, PlainBehaviour::default(), false),
        of("embeddings", MatrixApi::Embeddings),
        of("rerank", MatrixApi::Rerank),
    ]
}

// === impl MatrixApi ===

impl MatrixApi {
    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Embeddings => "/v1/embeddings",
            Self::Rerank => "/v1/rerank",
        }
    }

    pub(super) fn body(self, prompt: &str) -> Value {
        match self {
            Self::Chat => json!({
                "model": "demo", "stream": true, "max_tokens": OUTPUT_TOKENS, "messages": [{"role": "user", "content": prompt}],
            }),
            Self::Embeddings => json!({"model": "demo", "input": prompt}),
            Self::Rerank => json!({"model": "demo", "query": "q", "documents": [prompt]}),
        }
    }
}
