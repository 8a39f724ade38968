//! The refusals of the ext_proc server itself: it has no memory for a body, a body takes too long,
//! or a client has too many streams. All other refusals come from the exchange.

use exchange::api::ApiFamily;
use exchange::json::write::JsonWriter;
use exchange::{LocalReply, headers};

use super::memory::HELD_BYTES_MAX;

/// The `retry-after` when memory is short, in seconds: a complete body is forwarded in a fraction
/// of it.
const RETRY_AFTER_S: u32 = 1;

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamRefusal {
    /// The bodies that are held take all the memory for bodies.
    Memory,
    /// The body was not complete in time.
    Slow,
    /// The client has its share of the streams.
    Streams,
}

/// One row in the table of refusals.
struct StreamRefusalRow {
    status: u16,
    code: &'static str,
    reason: &'static str,
    openai_type: &'static str,
    anthropic_type: &'static str,
    message: String,
}

// === impl StreamRefusal ===

impl StreamRefusal {
    fn row(self) -> StreamRefusalRow {
        match self {
            Self::Memory => StreamRefusalRow {
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
            Self::Slow => StreamRefusalRow {
                status: 408,
                code: "body_timeout",
                reason: "rejected-body-timeout",
                openai_type: "invalid_request_error",
                anthropic_type: "invalid_request_error",
                message: "the request's body took too long to come".to_owned(),
            },
            Self::Streams => StreamRefusalRow {
                status: 429,
                code: "too_many_streams",
                reason: "rejected-picker-streams",
                openai_type: "rate_limit_error",
                anthropic_type: "rate_limit_error",
                message: "the picker serves too many requests of this client; try again".to_owned(),
            },
        }
    }

    /// The reply in the error shape of `family`.
    #[must_use]
    pub fn reply(self, family: ApiFamily) -> LocalReply {
        let row = self.row();
        let mut set = vec![
            ("content-type", "application/json".to_owned()),
            (headers::DROPPED_REASON, row.reason.to_owned()),
        ];
        if self != Self::Slow {
            set.push(("retry-after", RETRY_AFTER_S.to_string()));
        }
        LocalReply {
            status: row.status,
            headers: set,
            body: body(family, &row),
        }
    }
}

fn body(family: ApiFamily, row: &StreamRefusalRow) -> Vec<u8> {
    let mut w = JsonWriter::default();
    match family {
        ApiFamily::OpenAi => w.object(|w| {
            w.name("error").object(|w| {
                w.name("message").string(&row.message);
                w.name("type").string(row.openai_type);
                w.name("param").null();
                w.name("code").string(row.code);
            });
        }),
        ApiFamily::Anthropic => w.object(|w| {
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
        let reply = StreamRefusal::Memory.reply(ApiFamily::OpenAi);
        let text = String::from_utf8(reply.body).unwrap();
        assert_eq!(
            (reply.status, &*text),
            (
                503,
                r#"{"error":{"message":"the picker has no memory left for this request's body: it holds at most 384 MiB for all requests; try again","type":"service_unavailable","param":null,"code":"picker_out_of_memory"}}"#
            )
        );
        assert!(reply.headers.contains(&("retry-after", "1".to_owned())));
        let reply = StreamRefusal::Slow.reply(ApiFamily::Anthropic);
        let text = String::from_utf8(reply.body).unwrap();
        assert_eq!(
            (reply.status, &*text),
            (
                408,
                r#"{"type":"error","error":{"type":"invalid_request_error","message":"the request's body took too long to come"}}"#
            )
        );
    }
}
