//! The verdict on an engine's answer. One table defines it. Failure accrual, ejection, cost,
//! learning, retries and placement all depend on it.
//!
//! | verdict | the engine answered | counts as a failure | learned from | the prompt's placement |
//! |---|---|---|---|---|
//! | success | 2xx with a body that is no error, has an end, and has generated output if the API does | no: it ends a streak | yes | is confirmed |
//! | client's fault | 400 and other 4xx, in the error shape of an API | where another endpoint accepted the same lately | no | is withdrawn |
//! | misdirected | 401, 403, 404, 501; other 4xx without such a shape | where another endpoint accepted the same lately | no | is withdrawn |
//! | overloaded | 429, 503 (tried again on the next endpoint) | yes | no | is withdrawn |
//! | ill | other 5xx, a lost connection, a stream cut off, an empty 200, a 200 with an error object | yes | no | is withdrawn |
//! | strange | 2xx without work: nothing generated, aborted, no reply of the API, or a stream that ended without its end mark | where another endpoint gave a reply to the same lately | if it generated | stays, and is confirmed if it generated |
//! | unknown | the client left, the path is not an inference path, or the body is in a format that is not read | no | no | stays, and is confirmed by a whole 2xx |
//!
//! The first token of a reply already confirms the placement. A confirmed placement is not
//! withdrawn.
//!
//! A failure is equally strong evidence against its request: `pool/health.rs` defines which
//! failures count.

/// The meaning of an engine's answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verdict {
    /// The engine served the request.
    Success,
    /// The request was wrong, and the engine's reply has the error shape of its API.
    ClientFault,
    /// The request is not for this engine: the engine does not have the model, or refuses this
    /// client.
    Misdirected,
    /// The engine has more to do than it can take.
    Overloaded,
    /// The engine is broken.
    Ill,
    /// By its status the answer is a success, but its body is not a complete reply of the API, or
    /// has no output. Such answers come from engines that sleep or shut down, echo servers, engines
    /// that leave out the end mark of streams, and proxies in front of a dead engine.
    Strange,
    /// The answer gives no information about the engine.
    #[default]
    Unknown,
}

/// The content of an answer's body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ErrorBody {
    /// The body was not read, or has no content that affects the verdict.
    #[default]
    Nothing,
    /// A complete reply.
    Reply,
    /// An error object, with the HTTP status in it, if there is one.
    Error(Option<u16>),
    /// An empty body, or a stream without any event.
    Empty,
    /// A stream that ended without the end mark of its API.
    Unfinished,
    /// The body is not a reply of the API: it is not a JSON object with a member that such a reply
    /// has, or nothing was generated, or the output is not complete.
    Strange,
    /// The body is not known to be a reply: its format is not read, the reply will be generated
    /// later, or the client wanted no output.
    Unclear,
}

/// The status that is tried again on the next endpoint. Requests with another 5xx status may have
/// had effects.
pub const RETRIED_STATUS: &str = "503";

impl Verdict {
    /// The verdict on a complete answer to an inference request, as far as the proxy knows.
    #[must_use]
    pub fn from_status(status: u16, body: ErrorBody) -> Self {
        match (status, body) {
            (200..=299, ErrorBody::Error(named)) => named
                .filter(|status| *status >= 400)
                .map_or(Self::Ill, |status| Self::from_status(status, body)),
            (200, ErrorBody::Empty) => Self::Ill,
            (200..=299, ErrorBody::Strange | ErrorBody::Unfinished) => Self::Strange,
            (200..=299, ErrorBody::Unclear) => Self::Unknown,
            (200..=299, _) => Self::Success,
            (401 | 403 | 404 | 501, _) => Self::Misdirected,
            (429 | 503, _) => Self::Overloaded,
            (400..=499, ErrorBody::Error(_)) => Self::ClientFault,
            (400..=499, _) => Self::Misdirected,
            (500..=599, _) => Self::Ill,
            _ => Self::Unknown,
        }
    }

    /// Whether the engine may have worked on the prompt and have it cached now.
    #[must_use]
    pub fn keeps_placement(self) -> bool {
        matches!(self, Self::Success | Self::Strange | Self::Unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_answer_has_one_meaning() {
        use ErrorBody::{Empty, Error, Nothing, Reply, Strange, Unclear, Unfinished};
        use Verdict::{ClientFault, Ill, Misdirected, Overloaded, Success, Unknown};
        for (status, body, verdict) in [
            (200, Reply, Success),
            (200, Nothing, Success),
            (204, Empty, Success),
            (200, Strange, Verdict::Strange),
            (200, Unclear, Unknown),
            (400, Unclear, Misdirected),
            (200, Empty, Ill),
            (200, Unfinished, Verdict::Strange),
            (200, Error(None), Ill),
            (200, Error(Some(500)), Ill),
            (200, Error(Some(400)), ClientFault),
            (200, Error(Some(429)), Overloaded),
            (200, Error(Some(200)), Ill),
            (400, Error(None), ClientFault),
            (413, Error(Some(413)), ClientFault),
            (422, Error(None), ClientFault),
            (400, Reply, Misdirected),
            (422, Empty, Misdirected),
            (401, Error(None), Misdirected),
            (403, Nothing, Misdirected),
            (404, Error(Some(404)), Misdirected),
            (429, Error(None), Overloaded),
            (500, Error(None), Ill),
            (501, Error(None), Misdirected),
            (502, Nothing, Ill),
            (503, Nothing, Overloaded),
            (504, Nothing, Ill),
            (301, Nothing, Unknown),
            (0, Nothing, Unknown),
        ] {
            assert_eq!(
                Verdict::from_status(status, body),
                verdict,
                "{status} {body:?}"
            );
        }
    }
}
