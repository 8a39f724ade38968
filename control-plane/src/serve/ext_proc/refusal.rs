//! What a request is refused for that only this front knows: its own memory, and how long a body may take. All other refusals are the exchange's.

use exchange::api::Family;
use exchange::json::write::Writer;
use exchange::{Reply, headers};

use super::memory::HELD_BYTES_MAX;

/// How long a client is asked to wait when memory is short, in seconds: a body that is complete is gone in a fraction of it.
const RETRY_AFTER_S: u32 = 1;

/// Why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Bodies under way take all the memory that there is for them.
    Memory,
    /// The body did not come to its end in time.
    Slow,
}

/// One row of the table of refusals.
struct Row {
    status: u16,
    code: &'static str,
    reason: &'static str,
    openai_type: &'static str,
    anthropic_type: &'static str,
    message: String,
}

// === impl Refusal ===

impl Refusal {
    fn row(self) -> Row {
        match self {
            Self::Memory => Row {
                status: 503,
                code: "picker_out_of_memory",
                reason: "rejected-picker-memory",
                openai_type: "service_unavailable",
                anthropic_type: "overloaded_error",
                message: format!(
                    "the picker has no memory left for this request's body: it holds at most {} MiB for all requests; try again",
                    HELD_BYTES_MAX >> 20
                ),
            },
            Self::Slow => Row {
                status: 408,
                code: "body_timeout",
                reason: "rejected-body-timeout",
                openai_type: "invalid_request_error",
                anthropic_type: "invalid_request_error",
                message: "the request's body took too long to come".to_owned(),
            },
        }
    }

    /// The reply in the error shape of `family`.
    #[must_use]
    pub fn reply(self, family: Family) -> Reply {
        let row = self.row();
        let mut set = vec![("content-type", "application/json".to_owned()), (headers::DROPPED_REASON, row.reason.to_owned())];
        if row.status == 503 {
            set.push(("retry-after", RETRY_AFTER_S.to_string()));
        }
        Reply { status: row.status, headers: set, body: body(family, &row) }
    }
}

fn body(family: Family, row: &Row) -> Vec<u8> {
    let mut w = Writer::default();
    match family {
        Family::OpenAi => w.object(|w| {
            w.name("error").object(|w| {
                w.name("message").string(&row.message);
                w.name("type").string(row.openai_type);
                w.name("param").null();
                w.name("code").string(row.code);
            });
        }),
        Family::Anthropic => w.object(|w| {
            w.name("type").string("error");
            w.name("error").object(|w| {
                w.name("type").string(row.anthropic_type);
                w.name("message").string(&row.message);
            });
        }),
    }
    w.finish().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_have_the_shape_of_their_api() {
        let reply = Refusal::Memory.reply(Family::OpenAi);
        let text = String::from_utf8(reply.body).unwrap();
        assert_eq!(
            (reply.status, &*text),
            (
                503,
                r#"{"error":{"message":"the picker has no memory left for this request's body: it holds at most 384 MiB for all requests; try again","type":"service_unavailable","param":null,"code":"picker_out_of_memory"}}"#
            )
        );
        assert!(reply.headers.contains(&("retry-after", "1".to_owned())));
        let reply = Refusal::Slow.reply(Family::Anthropic);
        let text = String::from_utf8(reply.body).unwrap();
        assert_eq!(
            (reply.status, &*text),
            (408, r#"{"type":"error","error":{"type":"invalid_request_error","message":"the request's body took too long to come"}}"#)
        );
    }
}
