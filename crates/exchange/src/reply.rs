//! Replies that Switchpoint makes itself, in the error shape of the API that was called.

use std::borrow::Cow;

use pool_state::PickRefusal;
use pool_state::queues::{FlowOutcome, QueueRefusal};
use scheduler::{Decision, ShedReason, UnavailableReason};

use crate::api::ApiFamily;
use crate::body::BodyError;
use crate::headers;
use crate::json::write::JsonWriter;

/// The `Retry-After` of a 429, in seconds. A second is long enough for a queue to move, and short
/// enough to be useful.
const RETRY_AFTER_S: u32 = 1;

/// The maximum number of bytes of a header's value that an error message repeats: enough to
/// recognise the value.
const QUOTED_BYTES_MAX: usize = 64;

/// The drop reasons that several refusals share.
const INVALID: &str = "invalid-request";
const NO_ENDPOINTS: &str = "rejected-no-endpoints";
const SATURATED: &str = "rejected-saturated";

/// A complete local reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalReply {
    pub status: u16,
    /// Headers besides the status.
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
}

/// The reason why a request is refused. The status says who has to change something, the client
/// (4xx) or the operator of the pool (5xx), and whether a retry makes sense.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The body breaks a rule of its API.
    Body(BodyError),
    /// The body has this `content-encoding`, which is not decoded here.
    Encoded(Box<str>),
    /// The body is larger than the limit, in bytes.
    TooLarge(usize),
    /// The scheduler found no endpoint.
    Unavailable(UnavailableReason),
    /// The scheduler sheds the request.
    Shed(ShedReason),
    /// The request names a scheduling profile that does not exist.
    UnknownProfile(Box<str>),
    /// The pool does not serve the model.
    UnknownModel(Box<str>),
    /// A header has an invalid value.
    Header {
        /// The name of the header.
        name: &'static str,
        /// The required form of the value, as in "must be a number".
        must_be: &'static str,
    },
    /// The pool requires an SLO from every request, and this request has none.
    SloMissing,
    /// Two engines lost their connection over this prompt within a minute, while they served other
    /// prompts successfully.
    CrashingPrompt,
    /// The request was held, or would have to be held, and is refused.
    Queue(QueueRefusal),
    /// The request was running, and was ended for a more important request.
    GivenUp {
        /// The time after which to try again, in seconds.
        retry_after_s: u32,
    },
    /// There is no room for another incomplete body.
    NoRoomForBody {
        /// Whether this body has been arriving for a long time.
        is_slow: bool,
    },
    /// The client does not read the reply. The client gets a reset instead of this reply.
    Unread,
    /// The proxy never received state.
    NoState,
    /// The proxy refused the change that the request needs.
    Unsent,
}

/// One row in the table of refusals.
struct RefusalRow {
    status: u16,
    code: &'static str,
    reason: &'static str,
    message: Cow<'static, str>,
}

// === impl Refusal ===

impl From<PickRefusal> for Refusal {
    fn from(refusal: PickRefusal) -> Self {
        match refusal {
            PickRefusal::NoState => Self::NoState,
            PickRefusal::CrashingPrompt => Self::CrashingPrompt,
            PickRefusal::UnknownModel(model) => Self::UnknownModel(model),
            PickRefusal::Queue(why) => Self::Queue(why),
            PickRefusal::Decision(decision) => {
                Self::from_decision(&decision).unwrap_or(Self::NoState)
            }
        }
    }
}

impl Refusal {
    /// Returns the reason why `decision` does not route its request; `None` if it does.
    pub(crate) fn from_decision(decision: &Decision) -> Option<Self> {
        match decision {
            Decision::Route(_) => None,
            Decision::Shed(why) => Some(Self::Shed(*why)),
            Decision::Unavailable(why) => Some(Self::Unavailable(*why)),
            Decision::UnknownProfile(name) => Some(Self::UnknownProfile(name.clone())),
        }
    }

    /// The drop reason for the dropped-reason header, logs and metrics.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        self.row().reason
    }

    /// Returns the reply in the error shape of `family`.
    #[must_use]
    pub fn reply(&self, family: ApiFamily) -> LocalReply {
        let row = self.row();
        let mut headers = vec![
            ("content-type", "application/json".to_owned()),
            (headers::DROPPED_REASON, row.reason.to_owned()),
        ];
        match self {
            Self::Queue(QueueRefusal { retry_after_s, .. }) | Self::GivenUp { retry_after_s } => {
                headers.push(("retry-after", retry_after_s.to_string()));
            }
            _ if row.status == 429 || matches!(self, Self::NoRoomForBody { .. }) => {
                headers.push(("retry-after", RETRY_AFTER_S.to_string()));
            }
            _ => {}
        }
        LocalReply {
            status: row.status,
            headers,
            body: body(family, &row),
        }
    }

    fn row(&self) -> RefusalRow {
        match self {
            Self::Body(error) => row(400, code(error), INVALID, error.to_string()),
            Self::Encoded(encoding) => row(
                415,
                "unsupported_encoding",
                INVALID,
                format!(
                    "content-encoding {:?} is not read here; send the body without it",
                    shortened(encoding)
                ),
            ),
            Self::TooLarge(limit) => row(
                413,
                "request_too_large",
                "request-too-large",
                format!("request body is larger than the limit of {limit} bytes"),
            ),
            Self::UnknownProfile(name) => row(
                400,
                "unknown_profile",
                INVALID,
                format!("no scheduling profile is named {:?}", shortened(name)),
            ),
            Self::UnknownModel(model) => row(
                404,
                "model_not_found",
                "unknown-model",
                format!("the model {:?} does not exist here", shortened(model)),
            ),
            Self::Header { name, must_be } => row(
                400,
                "invalid_header",
                INVALID,
                format!("the header {name} must be {must_be}"),
            ),
            Self::SloMissing => slo_missing_row(),
            Self::Unavailable(why) => unavailable_row(*why),
            Self::Shed(why) => shed_row(*why),
            Self::Queue(QueueRefusal { outcome, .. }) => queued_row(*outcome),
            Self::CrashingPrompt => row(
                502,
                "crashing_prompt",
                "rejected-crashing-prompt",
                "this prompt made two model servers drop their connection within a minute, while other prompts did well there; change it, or try again in a minute",
            ),
            Self::Unsent => row(
                500,
                "not_rewritten",
                "proxy-failed",
                "the gateway could not send the request under its model's name",
            ),
            // llm-d gives this reason for every cause.
            Self::GivenUp { .. } => row(
                429,
                "evicted",
                "evicted",
                "the request was given up for a more important one; try again later",
            ),
            Self::NoRoomForBody { is_slow } => no_room_row(*is_slow),
            Self::Unread => unread_row(),
            Self::NoState => row(
                503,
                "not_ready",
                NO_ENDPOINTS,
                "the gateway does not know its model servers yet; try again",
            ),
        }
    }
}

fn slo_missing_row() -> RefusalRow {
    let [ttft, tpot] = [headers::SLO_TTFT, headers::SLO_TPOT].map(|[_, seed]| seed);
    let message = format!("every request here must say its SLO in ms: by {ttft}, {tpot} or both");
    row(400, "missing_slo", INVALID, message)
}

fn unread_row() -> RefusalRow {
    row(
        408,
        "unread_reply",
        "unread-reply",
        "the client did not read the reply",
    )
}

fn no_room_row(is_slow: bool) -> RefusalRow {
    let reason = "bodies-in-progress";
    if is_slow {
        row(
            408,
            "request_too_slow",
            reason,
            "the request came too slowly while the gateway had too many unfinished ones; send it faster, or try again later",
        )
    } else {
        row(
            413,
            "request_too_large",
            reason,
            "the gateway has no room for this request now, beside your other unfinished ones; try again later",
        )
    }
}

fn row(
    status: u16,
    code: &'static str,
    reason: &'static str,
    message: impl Into<Cow<'static, str>>,
) -> RefusalRow {
    RefusalRow {
        status,
        code,
        reason,
        message: message.into(),
    }
}

fn unavailable_row(why: UnavailableReason) -> RefusalRow {
    let (code, message) = match why {
        UnavailableReason::NoReadyEndpoint => ("no_ready_endpoint", "no model server is ready"),
        UnavailableReason::SubsetEmpty => (
            "no_eligible_endpoint",
            "no ready model server is in the subset allowed for this request",
        ),
        UnavailableReason::ModelNotServed => (
            "no_eligible_endpoint",
            "no ready model server serves this model now; try again",
        ),
        UnavailableReason::Filtered => (
            "no_eligible_endpoint",
            "no ready model server is eligible for this request",
        ),
    };
    row(503, code, NO_ENDPOINTS, message)
}

fn shed_row(why: ShedReason) -> RefusalRow {
    let (code, message) = match why {
        ShedReason::Saturated => (
            "saturated",
            "the model servers are saturated; try again later",
        ),
        ShedReason::Slo => (
            "slo_unattainable",
            "no model server could serve the request within the SLOs now; try again later",
        ),
        ShedReason::Admitter => (
            "not_admitted",
            "the request was not admitted; try again later",
        ),
    };
    row(429, code, SATURATED, message)
}

/// The row of a request that flow control gave up.
fn queued_row(outcome: FlowOutcome) -> RefusalRow {
    match outcome {
        FlowOutcome::RejectedCapacity => row(
            429,
            "saturated",
            SATURATED,
            "too many requests wait; try again later",
        ),
        FlowOutcome::EvictedTtl => row(
            429,
            "queue_timeout",
            "rejected-ttl-expired",
            "the request waited too long; try again later",
        ),
        FlowOutcome::RejectedNoEndpoints | FlowOutcome::EvictedNoEndpoints => row(
            503,
            "no_ready_endpoint",
            NO_ENDPOINTS,
            "no model server became ready in time",
        ),
        _ => row(
            503,
            "not_queued",
            "rejected-shutting-down",
            "the gateway gave up its queue; try again",
        ),
    }
}

/// Shortens a client's text to the length that an error message repeats.
fn shortened(words: &str) -> &str {
    let end = (0..=words.len().min(QUOTED_BYTES_MAX))
        .rev()
        .find(|&end| words.is_char_boundary(end))
        .unwrap_or(0);
    words.get(..end).unwrap_or_default()
}

/// Returns the machine-readable error code for the reply.
fn code(error: &BodyError) -> &'static str {
    match error {
        BodyError::NotGrpc => "invalid_grpc",
        BodyError::InvalidForm(_) => "invalid_form",
        BodyError::InvalidJson { .. } => "invalid_json",
        BodyError::TooDeep { .. } => "nested_too_deep",
        BodyError::NotAnObject => "not_an_object",
        BodyError::MissingModel | BodyError::ModelNotAString | BodyError::EmptyModel => {
            "missing_model"
        }
    }
}

fn body(family: ApiFamily, row: &RefusalRow) -> Vec<u8> {
    let kind = match (family, row.status) {
        (ApiFamily::Anthropic, 503) => "overloaded_error",
        (ApiFamily::Anthropic, 500 | 502) => "api_error",
        (ApiFamily::OpenAi, 500 | 502) => "server_error",
        (ApiFamily::Anthropic, 404) => "not_found_error",
        (ApiFamily::Anthropic, 413) => "request_too_large",
        (_, 429) => "rate_limit_error",
        (ApiFamily::OpenAi, 503) => "service_unavailable",
        (_, _) => "invalid_request_error",
    };
    let mut w = JsonWriter::default();
    match family {
        ApiFamily::OpenAi => w.object(|w| {
            w.name("error").object(|w| {
                w.name("message").string(&row.message);
                w.name("type").string(kind);
                w.name("param").null();
                w.name("code").string(row.code);
            });
        }),
        ApiFamily::Anthropic => w.object(|w| {
            w.name("type").string("error");
            w.name("error").object(|w| {
                w.name("type").string(kind);
                w.name("message").string(&row.message);
            });
        }),
    }
    w.finish().into_bytes()
}

/// Returns the reply for the ready path.
#[must_use]
pub fn ready(ready: bool) -> LocalReply {
    let (status, body) = if ready {
        (200, r#"{"ready":true}"#)
    } else {
        (503, r#"{"ready":false}"#)
    };
    LocalReply {
        status,
        headers: vec![("content-type", "application/json".to_owned())],
        body: body.as_bytes().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(refusal: &Refusal, family: ApiFamily) -> String {
        let reply = refusal.reply(family);
        format!(
            "{} {}",
            reply.status,
            String::from_utf8(reply.body).unwrap()
        )
    }

    #[test]
    fn errors_have_the_shape_of_their_api() {
        let refusal = Refusal::Unavailable(UnavailableReason::NoReadyEndpoint);
        assert_eq!(
            text(&refusal, ApiFamily::OpenAi),
            r#"503 {"error":{"message":"no model server is ready","type":"service_unavailable","param":null,"code":"no_ready_endpoint"}}"#
        );
        assert_eq!(
            text(&refusal, ApiFamily::Anthropic),
            r#"503 {"type":"error","error":{"type":"overloaded_error","message":"no model server is ready"}}"#
        );
    }

    #[test]
    fn a_shed_request_is_told_when_to_come_back() {
        let reply = Refusal::Shed(ShedReason::Saturated).reply(ApiFamily::OpenAi);
        assert_eq!(reply.status, 429);
        assert!(reply.headers.contains(&("retry-after", "1".to_owned())));
        assert!(
            reply
                .headers
                .contains(&(headers::DROPPED_REASON, "rejected-saturated".to_owned()))
        );
    }

    #[test]
    fn an_unknown_model_is_not_found_and_named() {
        let refusal = Refusal::UnknownModel("gpt".into());
        assert_eq!(
            text(&refusal, ApiFamily::OpenAi),
            r#"404 {"error":{"message":"the model \"gpt\" does not exist here","type":"invalid_request_error","param":null,"code":"model_not_found"}}"#
        );
        assert_eq!(
            text(&refusal, ApiFamily::Anthropic),
            r#"404 {"type":"error","error":{"type":"not_found_error","message":"the model \"gpt\" does not exist here"}}"#
        );
        assert!(
            !refusal
                .reply(ApiFamily::OpenAi)
                .headers
                .iter()
                .any(|(name, _)| *name == "retry-after"),
            "the same again will not help"
        );
    }

    #[test]
    fn an_encoding_that_is_not_read_is_named() {
        let expected = r#"415 {"error":{"message":"content-encoding \"br\" is not read here; send the body without it""#;
        assert!(text(&Refusal::Encoded("br".into()), ApiFamily::OpenAi).starts_with(expected));
    }

    #[test]
    fn the_limit_is_named() {
        assert!(text(&Refusal::TooLarge(1000), ApiFamily::OpenAi).contains("limit of 1000 bytes"));
    }
}
