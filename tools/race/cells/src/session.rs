//! A session: a client that sends one request after another. Each request contains the conversation
//! so far.

use std::sync::Arc;

/// The turns of one client.
#[derive(Clone, Debug)]
pub struct RaceSession {
    /// The number of the session within the run, from 0 in order of arrival.
    pub id: u32,
    /// When its first request is sent, ms after the start of the run.
    pub start_ms: f64,
    /// What kind of client it is.
    pub class: SessionClass,
    /// The system prompt; empty if there is none.
    pub system: Arc<str>,
    /// The requests of the client in order; at least one.
    pub turns: Vec<Turn>,
}

/// One request of a session.
#[derive(Clone, Debug)]
pub struct Turn {
    /// The text of the user's message; the request also has everything before it.
    pub text: Arc<str>,
    /// Tokens of the reply. The request makes the engine generate exactly this number.
    pub output_tokens: u32,
    /// Time from the end of the previous reply until this request is sent, ms. 0 for the first
    /// request.
    pub pause_ms: f64,
}

/// The kinds of clients of a workload that mixes two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SessionClass {
    /// A person or an agent waits for the reply.
    Interactive,
    /// No client waits: bulk work.
    Batch,
}

/// The speaker of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The operator's system prompt.
    System,
    /// The client.
    User,
    /// The model.
    Assistant,
}

/// One message of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// The speaker.
    pub role: Role,
    pub text: &'a str,
}

// === impl RaceSession ===

impl RaceSession {
    /// The messages of the request of turn `turn` (from 0). `replies` are the replies of the
    /// earlier turns, in order; a missing reply is treated as empty.
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
    /// The name of the class in records.
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
    /// The name of the role in a chat request.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}
