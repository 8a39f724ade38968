//! A session: a client that sends one request after another. Each request contains the conversation
//! so far.

use std::sync::Arc;

/// The turns of one client.
#[derive(Clone, Debug)]
pub struct RaceSession {
    /// The number of the session within the run, from 0 in order of arrival.
    pub id: u32,
    /// The time at which the session's first request is sent, in ms after the start of the run.
    pub start_ms: f64,
    pub class: SessionClass,
    /// The system prompt, or an empty text if the session has none.
    pub system: Arc<str>,
    /// The client's requests in order. A session has at least one request.
    pub turns: Vec<Turn>,
}

/// One request of a session.
#[derive(Clone, Debug)]
pub struct Turn {
    /// The text of the user's new message. The request also contains all earlier messages.
    pub text: Arc<str>,
    /// The number of tokens of the reply. The request makes the engine generate exactly this
    /// number.
    pub output_tokens: u32,
    /// The time from the end of the previous reply until this request is sent, in ms. The first
    /// request of a session has 0.
    pub pause_ms: f64,
}

/// The kinds of clients. One workload mixes both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SessionClass {
    /// A person or an agent, who waits for the reply.
    Interactive,
    /// Bulk work, for whose replies no client waits.
    Batch,
}

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The operator, who wrote the system prompt.
    System,
    /// The client, which sends the prompt.
    User,
    /// The model, which answers.
    Assistant,
}

/// One message of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    pub role: Role,
    pub text: &'a str,
}

// === impl RaceSession ===

impl RaceSession {
    /// Returns the messages of the request of turn `turn` (from 0). `replies` are the replies of
    /// the earlier turns, in order. A missing reply counts as empty.
    pub fn messages<'a>(&'a self, turn: usize, replies: &'a [String]) -> Vec<Message<'a>> {
        let system = (!self.system.is_empty()).then_some(Message {
            role: Role::System,
            text: &self.system,
        });
        let mut messages: Vec<Message<'_>> = system.into_iter().collect();
        for (at, said) in self.turns.iter().take(turn + 1).enumerate() {
            messages.push(Message {
                role: Role::User,
                text: &said.text,
            });
            if at < turn {
                messages.push(Message {
                    role: Role::Assistant,
                    text: replies.get(at).map_or("", String::as_str),
                });
            }
        }
        messages
    }
}

// === impl SessionClass ===

impl SessionClass {
    /// Returns the name of the class in records.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Interactive => "interactive",
            Self::Batch => "batch",
        }
    }
}

// === impl Role ===

impl Role {
    /// Returns the name of the role in a chat request.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}
