//! A request that was sent to an endpoint: the served endpoint, the request's cost there, and the
//! reply.

use std::borrow::Cow;

use scheduler::EndpointRef;

use super::reply_progress::ReplyProgress;
use super::response_head::{ResponseHead, ResponseOrigin, SWITCHING_PROTOCOLS};
use crate::api::RequestApi;
use crate::headers;
use crate::load;
use crate::restore::{ModelNameRestorer, ModelNames};
use crate::sse::ResponseReader;
use pool_state::Timestamp;
use pool_state::verdict::{ErrorBody, Verdict};
use pool_state::{
    CountedRequest, LedgerHold, ManagedPool, RecordedPick, RequestFailure, SessionTokenHeader,
    ms_between,
};

/// How the host handles a response body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResponseBody {
    /// The body passes unseen.
    #[default]
    Ignore,
    /// Each piece goes to [`crate::Exchange::response_chunk`] and passes unchanged.
    Read,
    /// The result of [`crate::Exchange::response_chunk`] replaces each piece. The last call must
    /// say that it is the last.
    Restore,
    /// Like [`Self::Restore`], but headers and body are held until the body is complete, and passed
    /// as one piece. Its new length goes into `content-length`. Only bodies of at most
    /// [`HELD_BYTES_MAX`] are held.
    Hold,
}

/// The longest unstreamed reply that is held to correct its `content-length`, in bytes. This is
/// Envoy Gateway's default buffer; no known gateway has a smaller one. A longer reply loses its
/// `content-length` and passes as it arrives.
pub const HELD_BYTES_MAX: usize = 32_768;

/// The changes that the host must make to the response headers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResponseStep {
    pub remove: Vec<&'static str>,
    pub set: Vec<(Cow<'static, str>, String)>,
    /// How to handle the body.
    pub body: ResponseBody,
}

/// The properties of the prompt that are needed after it was sent.
#[derive(Debug)]
pub(super) struct SentPrompt {
    /// Hashes of the prompt's blocks.
    pub(super) hashes: Vec<u64>,
    /// Estimated tokens.
    pub(super) tokens: u32,
    /// Bytes of the text; 0 if the prompt has other parts.
    pub(super) text_bytes: u32,
    /// Number of blocks, if tokens are spread evenly over them. `None` if only the start of the
    /// prompt was hashed, or if it has images, whose bytes do not show how many tokens they become.
    pub(super) blocks: Option<u32>,
}

/// The properties that decide whether endpoints accept a request, and what a reply to it must have.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestKind {
    /// API and model, and whether the reply is streamed, as a hash.
    pub(super) accepted_as: u64,
    /// The client's credentials, as a hash.
    pub(super) credentials: u64,
    /// The client, as a hash.
    pub(super) client: u64,
    /// Whether the body names an object that an engine may have stored.
    pub(super) names_id: bool,
    /// Whether the client wants at least one token.
    pub(super) wants_output: bool,
    /// Maximum number of tokens of the reply, if the client sets a limit.
    pub(super) reply_tokens_max: Option<u32>,
}

/// A request that was sent to a picked endpoint, until its end.
#[derive(Debug)]
pub(crate) struct RoutedRequest {
    pub(super) api: RequestApi,
    pub(super) kind: RequestKind,
    pub(super) counted: CountedRequest,
    pub(super) prompt: SentPrompt,
    pub(super) pick: SentPick,
    pub(super) reply: ReplyState,
    /// Whether the engine had computed the whole reply when it sent the headers.
    pub(super) is_computed: bool,
    /// Names of the model, if it was sent under a name that the client must not see.
    pub(super) names: Option<ModelNames>,
    pub(super) restorer: Option<ModelNameRestorer>,
}

#[derive(Debug)]
pub(super) struct SentPick {
    pub(super) at: Timestamp,
    /// How long flow control had held the request, which is a part of the time that its client
    /// waited.
    pub(super) held_ms: u64,
    pub(super) ranked: Vec<(EndpointRef, Box<str>)>,
    pub(super) hold: LedgerHold,
    pub(super) tokens: Vec<SessionTokenHeader>,
    pub(super) expected_ms: (f32, f32),
}

/// The properties of a reply that are known so far.
#[derive(Debug)]
pub(super) struct ReplyState {
    /// The HTTP status; 0 before any reply.
    pub(super) status: u16,
    /// The endpoint that answered, if it is in the ranked list.
    pub(super) served_by: Option<EndpointRef>,
    /// Whether a model server answered.
    pub(super) served: bool,
    /// Whether the engine broke off its reply.
    pub(super) cut_off: bool,
    pub(super) failed_attempts: u32,
    pub(super) streamed: bool,
    /// Whether the last byte of the reply has arrived.
    pub(super) complete: bool,
    pub(super) bytes: u64,
    pub(super) reader: Option<ResponseReader>,
    pub(super) progress: ReplyProgress,
}

/// Whether the body of a reply with this status is read. Errors are read to distinguish the
/// client's fault from the engine's, except where the status alone decides.
fn is_read(status: u16) -> bool {
    status == 200
        || (matches!(status, 400..=499)
            && Verdict::from_status(status, ErrorBody::Error(None)) == Verdict::ClientFault)
}

// === impl ReplyState ===

impl ReplyState {
    fn new(now: Timestamp) -> Self {
        Self {
            status: 0,
            served_by: None,
            served: false,
            cut_off: false,
            failed_attempts: 0,
            streamed: false,
            complete: false,
            bytes: 0,
            reader: None,
            progress: ReplyProgress::new(now),
        }
    }
}

// === impl RoutedRequest ===

impl RoutedRequest {
    pub(super) fn new(
        api: RequestApi,
        counted: CountedRequest,
        picked: RecordedPick,
        prompt: SentPrompt,
        kind: RequestKind,
        now: Timestamp,
    ) -> Self {
        let RecordedPick {
            ranked,
            hold,
            tokens,
            expected_ms,
            ..
        } = picked;
        let pick = SentPick {
            at: now,
            held_ms: 0,
            ranked,
            hold,
            tokens,
            expected_ms,
        };
        Self {
            api,
            kind,
            counted,
            prompt,
            pick,
            reply: ReplyState::new(now),
            is_computed: false,
            names: None,
            restorer: None,
        }
    }

    /// Sets the names of a model that was sent under another name, which the client must not see.
    pub(super) fn with_model_names(mut self, names: Option<ModelNames>) -> Self {
        self.names = names;
        self
    }

    pub(super) fn set_queued(&mut self, ms: u64) {
        self.pick.held_ms = ms;
    }

    pub(super) fn is_first_endpoint(&self, address: &[u8]) -> bool {
        self.pick
            .ranked
            .first()
            .is_some_and(|(_, first)| first.as_bytes() == address)
    }

    /// The number of the request, if it may be given up.
    pub(super) fn revocable(&self) -> Option<u64> {
        self.pick.hold.revocable()
    }

    /// Whether the pool gives the request up, and when its client may try again, in seconds.
    pub(super) fn take_revoked(&self, pool: &mut ManagedPool) -> Option<u32> {
        pool.take_revoked(&self.pick.hold)
    }

    pub(super) fn response_headers(
        &mut self,
        pool: &mut ManagedPool,
        head: &ResponseHead<'_>,
        now: Timestamp,
    ) -> ResponseStep {
        pool.record_first_byte(&mut self.pick.hold);
        self.reply.status = head.status;
        self.reply.complete = head.end_of_stream;
        let mut step = ResponseStep::default();
        if head.load.is_some() {
            step.remove.push(headers::LOAD);
        }
        self.attempts(pool, head, now);
        if head.origin != ResponseOrigin::Upstream {
            return step;
        }
        self.reply.served = true;
        if (200..300).contains(&head.status) {
            pool.count_success(&mut self.counted, self.kind.client, now);
        }
        self.serve(pool, head, &mut step, now);
        self.reply.streamed = head
            .content_type
            .is_some_and(|t| t.starts_with(b"text/event-stream"));
        let is_json = || {
            head.content_type
                .is_some_and(|t| t.starts_with(b"application/json"))
        };
        self.is_computed = head.status != SWITCHING_PROTOCOLS
            && (head.content_length.is_some() || self.api.is_inference() && is_json());
        if self.api == RequestApi::Task
            && head.status == 200
            && !head.encoded
            && (self.reply.streamed || is_json())
        {
            self.restore(head, &mut step);
        }
        if self.api.is_inference() && !self.api.is_grpc() && !head.encoded && is_read(head.status) {
            self.reply.reader = Some(ResponseReader::new(self.api, self.reply.streamed));
            step.body = ResponseBody::Read;
            if head.status == 200 {
                self.restore(head, &mut step);
            }
        }
        step
    }

    fn restore(&mut self, head: &ResponseHead<'_>, step: &mut ResponseStep) {
        let Some(names) = self.names.take() else {
            return;
        };
        self.restorer = Some(ModelNameRestorer::new(names, self.api, self.reply.streamed));
        step.body = ResponseBody::Restore;
        match head.content_length {
            Some(bytes) if bytes <= HELD_BYTES_MAX && !self.reply.streamed && !head.go_first => {
                step.body = ResponseBody::Hold;
            }
            Some(_) => step.remove.push(headers::CONTENT_LENGTH),
            None => {}
        }
    }

    /// Returns the bytes that replace `bytes`, if they change.
    pub(super) fn restore_chunk(&mut self, bytes: &[u8], last: bool) -> Option<&[u8]> {
        let restored = self.restorer.as_mut()?.chunk(bytes, last);
        (restored != bytes).then_some(restored)
    }

    /// Reads a piece of the reply. Returns whether [`Self::report_progress`] must follow.
    pub(super) fn read_chunk(&mut self, bytes: &[u8], last: bool, now: Timestamp) -> bool {
        self.reply.bytes += bytes.len() as u64;
        self.reply.complete |= last;
        let Some(reader) = &mut self.reply.reader else {
            return false;
        };
        let progress = &mut self.reply.progress;
        progress.add_chunk(&reader.chunk(bytes), now);
        if self.api.stores() && self.reply.status == 200 {
            if last {
                let _ = reader.finish(); // an unstreamed reply shows its id only now
            }
            if let Some(answer) = self.reply.served_by.zip(reader.take_stored_id()) {
                progress.add_stored(answer);
            }
        }
        last || progress.is_report_due(now)
    }

    /// Reports to the pool what the reply has shown since the last report.
    pub(super) fn report_progress(&mut self, pool: &mut ManagedPool, now: Timestamp) {
        let reported = self.reply.progress.take_unreported(now);
        if let Some((server, id)) = reported.stored {
            pool.record_stored_answer(server, id, self.kind.client);
        }
        if reported.first_token {
            if self.reply.status == 200 {
                pool.confirm_placement(&mut self.pick.hold, &self.prompt.hashes);
            }
            pool.record_first_token(&mut self.pick.hold, self.prompt.tokens, now);
            if self.reply.streamed {
                pool.record_ttft(&self.pick.hold, ms_between(self.pick.at, now));
            }
        }
        if reported.tokens > 0 {
            pool.record_output(&mut self.pick.hold, reported.tokens, now);
            let tokens = self.pick.hold.tokens_until_measured();
            self.reply.progress.measure_after(tokens);
        }
        let pace_ms = self.reply.progress.take_pace(&reported, now);
        if let Some(pace_ms) = pace_ms.filter(|_| self.reply.streamed) {
            self.publish_pace(pool, pace_ms, now);
        }
    }

    /// Publishes the mean pace of a few tokens to the queue of running requests.
    fn publish_pace(&mut self, pool: &mut ManagedPool, pace_ms: f32, now: Timestamp) {
        pool.record_tpot(&self.pick.hold, pace_ms);
        // The tokens of a probe show that the endpoint works. Its stream may last for minutes more.
        if let Some(endpoint) = self
            .reply
            .served_by
            .filter(|_| ManagedPool::is_probe(&self.pick.hold))
        {
            pool.record_success(endpoint, self.pick.at, &mut self.pick.hold, now);
        }
    }

    /// Whether the reply has begun and its end was not seen. The host may know which side broke it
    /// off.
    pub(super) fn is_open(&self) -> bool {
        self.reply.served && !self.reply.complete && self.api.is_inference()
    }

    /// Records that the engine broke off its reply.
    pub(super) fn record_cut_off(&mut self) {
        self.reply.cut_off = true;
    }

    /// Records the failed attempts: the entries of the ranked list before the last attempted host,
    /// or all attempted entries if no endpoint answered.
    fn attempts(&mut self, pool: &mut ManagedPool, head: &ResponseHead<'_>, now: Timestamp) {
        let attempted = usize::try_from(head.attempts).unwrap_or(usize::MAX);
        let failed = match head.origin {
            ResponseOrigin::Ours => 0,
            ResponseOrigin::Upstream => self
                .position(head.upstream_address)
                .unwrap_or(0)
                .min(attempted.saturating_sub(1)),
            ResponseOrigin::Proxy | ResponseOrigin::Lost | ResponseOrigin::TimedOut => self
                .position(head.upstream_address)
                .map_or(0, |last| last.saturating_add(1))
                .min(attempted),
        };
        self.reply.failed_attempts = u32::try_from(failed).unwrap_or(u32::MAX);
        let prompt = self.prompt_hash();
        // If another endpoint served the request, the request is not the reason for the failures.
        let is_served =
            head.origin == ResponseOrigin::Upstream && (200..300).contains(&head.status);
        let client = (!is_served).then_some(self.kind.client);
        for (at, (endpoint, _)) in (1..).zip(self.pick.ranked.iter().take(failed)) {
            // Envoy does not report why an earlier attempt failed. If the endpoint works, a lost
            // connection is assumed, as for the last attempt.
            if head.origin == ResponseOrigin::Lost
                && (at == failed || pool.is_alive(*endpoint, now))
            {
                pool.record_lost_connection(*endpoint, prompt, self.kind.client, now);
            }
            let is_refused = match head.origin {
                ResponseOrigin::Proxy if at == failed => true,
                ResponseOrigin::Lost | ResponseOrigin::TimedOut if at == failed => false,
                // A request that is not inference is retried only if there was no connection.
                _ => !self.api.is_inference(),
            };
            let failure = if is_refused {
                RequestFailure::Refused
            } else {
                RequestFailure::Lost(prompt, client)
            };
            pool.record_unanswered(*endpoint, &mut self.pick.hold, failure, now);
        }
    }

    fn serve(
        &mut self,
        pool: &mut ManagedPool,
        head: &ResponseHead<'_>,
        step: &mut ResponseStep,
        now: Timestamp,
    ) {
        pool.finish_earlier_stages(&mut self.pick.hold);
        let Some(position) = self.position(head.upstream_address) else {
            return;
        };
        let Some(&(server, _)) = self.pick.ranked.get(position) else {
            return;
        };
        self.reply.served_by = Some(server);
        if position > 0 {
            pool.move_pick(&mut self.pick.hold, server, &self.prompt.hashes);
        }
        let is_good = self.api.is_inference() && (200..300).contains(&head.status);
        let client = is_good.then_some(self.kind.client);
        pool.record_answer(server, client, self.pick.at, now);
        for SessionTokenHeader { header, values } in &mut self.pick.tokens {
            if let Some(value) = values.get_mut(position) {
                step.set.push((
                    std::mem::take(header).into_string().into(),
                    std::mem::take(value),
                ));
            }
        }
        if let Some(load) = head.load.and_then(load::parse) {
            pool.observe(server, |metrics| load.apply(metrics));
        }
    }

    fn position(&self, address: Option<&[u8]>) -> Option<usize> {
        let address = address?;
        self.pick
            .ranked
            .iter()
            .position(|(_, a)| a.as_bytes() == address)
    }
}
