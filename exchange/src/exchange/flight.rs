//! A request that was sent on: who serves it, what it costs there, what comes back.

use std::borrow::Cow;

use scheduler::latency::learn::Ended;
use scheduler::{EndpointRef, Slo};

use crate::api::Api;
use crate::headers;
use crate::load;
use crate::restore::{Names, Restorer};
use crate::sse::ResponseReader;
use crate::usage::Usage;
use pool_state::Time;
use pool_state::verdict::{BodySays, Verdict};
use pool_state::{Counted, DURATION_BOUNDS_MS, Ending, Failure, Held, Picked, Pool, Sent, Token, ms_between};

/// Who made a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// A model server.
    Upstream,
    /// The proxy, because no attempt got a response.
    Proxy,
    /// The same, and the endpoint tried last had been sent the request and lost the connection.
    Lost,
    /// The same, and the endpoint tried last did not answer in time.
    TimedOut,
    /// We did, or the proxy for a reason that is no server's fault.
    #[default]
    Ours,
}

/// What of the response headers matters.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResponseHead<'h> {
    /// Who made it.
    pub origin: Origin,
    /// HTTP status.
    pub status: u16,
    /// `ip:port` of the host of the last attempt, when known.
    pub upstream_address: Option<&'h [u8]>,
    /// Attempts made, including the last; 0 when unknown or none.
    pub attempts: u32,
    /// `content-type`.
    pub content_type: Option<&'h [u8]>,
    /// Is there a `content-encoding`? Compressed bodies are not read.
    pub encoded: bool,
    /// `content-length`.
    pub content_length: Option<usize>,
    /// `endpoint-load-metrics`, when the engine sent it.
    pub load: Option<&'h [u8]>,
    /// There is no body.
    pub end_of_stream: bool,
}

/// What becomes of a response body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResponseBody {
    /// It passes unseen.
    #[default]
    Ignore,
    /// Each piece goes to [`crate::Exchange::response_chunk`], and on as it is.
    Read,
    /// What [`crate::Exchange::response_chunk`] returns goes on in place of each piece; it must be told of the end.
    Restore,
    /// As [`Self::Restore`], but headers and body are held until the body is whole, which is then the one piece; its new length belongs
    /// into `content-length`. For bodies of at most [`HELD_BYTES_MAX`].
    Hold,
}

/// Longest unstreamed reply that is held to be given its right `content-length`, in bytes: the least that a gateway is known to buffer
/// (Envoy Gateway's default). Of a longer one `content-length` is dropped, and it goes on as it comes.
pub const HELD_BYTES_MAX: usize = 32_768;

/// What response headers ask of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResponseStep {
    /// Headers to remove.
    pub remove: Vec<&'static str>,
    /// Headers to set.
    pub set: Vec<(Cow<'static, str>, String)>,
    /// What becomes of the body.
    pub body: ResponseBody,
}

/// One routed exchange, told when it is over.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// HTTP status; 0 when the exchange ended before any response.
    pub status: u16,
    /// What the answer means.
    pub verdict: Verdict,
    /// Did a model server answer?
    pub served: bool,
    /// Attempts that failed before it.
    pub failed_attempts: u32,
    /// Pick to first token, ms; only of streamed responses.
    pub ttft_ms: Option<u64>,
    /// Pick to end, ms.
    pub duration_ms: u64,
    /// Tokens.
    pub usage: Usage,
}

/// Tokens whose mean pace is told at once: often enough to see a stream slow down, rarely enough to cost nothing.
const PACE_TOKENS: u32 = 16;

/// What of the prompt is still needed once it was sent on.
#[derive(Debug)]
pub(super) struct Prompt {
    /// Hashes of its blocks.
    pub(super) hashes: Vec<u64>,
    /// Estimated tokens.
    pub(super) tokens: u32,
    /// Bytes of its text; 0 where it has other parts.
    pub(super) text_bytes: u32,
    /// Its blocks, where a part of its tokens is as large a part of them: not where it has images, whose tokens their bytes do not tell, nor where
    /// only its beginning was hashed.
    pub(super) blocks: Option<u32>,
}

#[derive(Debug)]
pub(super) struct Flight {
    api: Api,
    counted: Counted,
    ranked: Vec<(EndpointRef, Box<str>)>,
    held: Held,
    tokens: Vec<Token>,
    prompt: Prompt,
    picked_at: Time,
    /// API and model, and credentials, as hashes.
    kind: (u64, u64),
    status: u16,
    /// The endpoint that answered.
    served_by: Option<EndpointRef>,
    served: bool,
    /// The engine broke off its reply.
    cut_off: bool,
    failed_attempts: u32,
    reader: Option<ResponseReader>,
    names: Option<Names>,
    restorer: Option<Restorer>,
    streamed: bool,
    /// Its last byte is in.
    whole: bool,
    first_token_at: Option<Time>,
    last_token_at: Option<Time>,
    /// Tokens since a moment, whose pace was not told yet.
    untold: (Time, u32),
    response_bytes: u64,
}

// === impl Origin ===

impl Origin {
    /// By Envoy's `response.code_details`. Only what names the upstream is held against it: the proxy also replies for a client's broken chunk
    /// or stalled upload, after a host was chosen.
    #[must_use]
    pub fn of_details(details: &[u8]) -> Self {
        const UNANSWERED: [&[u8]; 2] = [b"upstream_per_try_timeout", b"upstream_response_timeout"];
        const RESET: [&[u8]; 2] = [b"upstream_reset_before_response_started", b"upstream_reset_after_response_started"];
        // In braces stands the reason of a reset; these say that there was no connection to send anything by.
        const UNCONNECTED: [&[u8]; 2] = [b"connection_failure", b"connection_timeout"];
        let starts = |prefixes: &[&[u8]]| prefixes.iter().any(|prefix| details.starts_with(prefix));
        match details {
            b"via_upstream" => Self::Upstream,
            _ if starts(&RESET) && UNCONNECTED.iter().any(|reason| memchr::memmem::find(details, reason).is_some()) => Self::Proxy,
            // The proxy's own circuit breaker.
            _ if memchr::memmem::find(details, b"{overflow").is_some() => Self::Ours,
            _ if starts(&RESET) => Self::Lost,
            _ if starts(&UNANSWERED) => Self::TimedOut,
            _ => Self::Ours,
        }
    }
}

// === impl ResponseHead ===

impl<'h> ResponseHead<'h> {
    /// What the headers themselves say; names are lower-case.
    pub fn read(pairs: impl IntoIterator<Item = (&'h [u8], &'h [u8])>) -> Self {
        let mut head = Self::default();
        for (name, value) in pairs {
            match name {
                b":status" => head.status = number(value).unwrap_or(0),
                b"content-length" => head.content_length = number(value),
                b"content-type" => head.content_type = Some(value),
                b"content-encoding" => head.encoded = true,
                _ if name == headers::LOAD.as_bytes() => head.load = Some(value),
                _ => {}
            }
        }
        head
    }
}

/// Of which replies is the body read? Of errors, for the client's fault to be told from the engine's; not where the status says it all.
fn is_read(status: u16) -> bool {
    status == 200 || (matches!(status, 400..=499) && Verdict::of(status, BodySays::Error(None)) == Verdict::ClientFault)
}

fn number<N: std::str::FromStr>(value: &[u8]) -> Option<N> {
    std::str::from_utf8(value).ok()?.parse().ok()
}

/// Did the request miss its SLO? Not known where no time of it was measured, where its client broke it off, and where its failure is the client's fault.
#[expect(clippy::cast_precision_loss, reason = "the last digits of minutes in microseconds do not count")]
fn missed(slo: Slo, verdict: Verdict, ending: &Ending<'_>) -> Option<bool> {
    let late = |slo: Option<u32>, took_ms: Option<f32>| slo.zip(took_ms).map(|(us, ms)| ms * 1_000.0 > us as f32);
    match ending.ended {
        Ended::Done => match (late(slo.ttft_us, ending.ttft_ms), late(slo.tpot_us, ending.tpot_ms)) {
            (None, None) => None,
            (ttft, tpot) => Some(ttft == Some(true) || tpot == Some(true)),
        },
        Ended::Failed if verdict != Verdict::ClientFault => slo.any().then_some(true),
        Ended::Failed | Ended::Aborted => None,
    }
}

// === impl Flight ===

impl Flight {
    pub(super) fn new(api: Api, counted: Counted, picked: Picked, prompt: Prompt, kind: (u64, u64), now: Time) -> Self {
        Self {
            api,
            counted,
            ranked: picked.ranked,
            held: picked.held,
            tokens: picked.tokens,
            prompt,
            picked_at: now,
            kind,
            status: 0,
            served_by: None,
            served: false,
            cut_off: false,
            failed_attempts: 0,
            reader: None,
            names: None,
            restorer: None,
            streamed: false,
            whole: false,
            first_token_at: None,
            last_token_at: None,
            untold: (now, 0),
            response_bytes: 0,
        }
    }

    /// The model was sent under another name, which the client must not see.
    pub(super) fn renamed(mut self, names: Option<Names>) -> Self {
        self.names = names;
        self
    }

    pub(super) fn asked_first(&self, address: &[u8]) -> bool {
        self.ranked.first().is_some_and(|(_, first)| first.as_bytes() == address)
    }

    pub(super) fn response_headers(&mut self, pool: &mut Pool, head: &ResponseHead<'_>, now: Time) -> ResponseStep {
        self.status = head.status;
        self.whole = head.end_of_stream;
        let mut step = ResponseStep::default();
        if head.load.is_some() {
            step.remove.push(headers::LOAD);
        }
        self.attempts(pool, head, now);
        if head.origin != Origin::Upstream {
            return step;
        }
        self.served = true;
        if (200..300).contains(&head.status) {
            pool.counters_mut().succeeded(&mut self.counted);
        }
        self.serve(pool, head, &mut step, now);
        if self.api.is_inference() && !self.api.is_grpc() && !head.encoded && is_read(head.status) {
            self.streamed = head.content_type.is_some_and(|t| t.starts_with(b"text/event-stream"));
            self.reader = Some(ResponseReader::new(self.api, self.streamed));
            step.body = ResponseBody::Read;
            if head.status == 200 {
                self.restore(head, &mut step);
            }
        }
        step
    }

    fn restore(&mut self, head: &ResponseHead<'_>, step: &mut ResponseStep) {
        let Some(names) = self.names.take() else { return };
        self.restorer = Some(Restorer::new(names, self.api, self.streamed));
        step.body = ResponseBody::Restore;
        match head.content_length {
            Some(bytes) if bytes <= HELD_BYTES_MAX && !self.streamed => step.body = ResponseBody::Hold,
            Some(_) => step.remove.push(headers::CONTENT_LENGTH),
            None => {}
        }
    }

    /// What goes on in place of these bytes, if anything else does.
    pub(super) fn restored(&mut self, bytes: &[u8], last: bool) -> Option<&[u8]> {
        let restored = self.restorer.as_mut()?.chunk(bytes, last);
        (restored != bytes).then_some(restored)
    }

    pub(super) fn response_chunk(&mut self, pool: &mut Pool, bytes: &[u8], last: bool, now: Time) {
        self.response_bytes += bytes.len() as u64;
        self.whole |= last;
        let Some(reader) = &mut self.reader else { return };
        let progress = reader.chunk(bytes);
        if progress.first_token {
            self.first_token_at = Some(now);
            pool.first_token(&mut self.held, self.prompt.tokens, now);
            self.untold = (now, 0);
            if self.streamed {
                pool.first_token_took(&self.held, ms_between(self.picked_at, now));
            }
        }
        if progress.events > 0 {
            self.last_token_at = Some(now);
            pool.decoded(&mut self.held, progress.events, now);
            self.tell_pace(pool, progress.events, now);
        }
    }

    /// The queue of running requests hears how fast tokens come, as a mean of a few.
    #[expect(clippy::cast_precision_loss, reason = "a few tokens")]
    fn tell_pace(&mut self, pool: &mut Pool, tokens: u32, now: Time) {
        let (since, untold) = self.untold;
        // The first token is counted among those that came with it, but took its own time.
        self.untold = (since, if since == now { 0 } else { untold.saturating_add(tokens) });
        if self.untold.1 >= PACE_TOKENS && self.streamed {
            pool.tokens_took(&self.held, ms_between(since, now) / self.untold.1 as f32);
            self.untold = (now, 0);
            // A probe has shown enough: its stream may go on for minutes.
            if let Some(endpoint) = self.served_by.filter(|_| Pool::is_probe(&self.held)) {
                pool.did_well(endpoint, self.picked_at, &mut self.held, now);
            }
        }
    }

    /// The reply has begun, and its end has not been seen: the host may know who broke it off.
    pub(super) fn is_open(&self) -> bool {
        self.served && !self.whole && self.api.is_inference()
    }

    /// The engine broke off its reply.
    pub(super) fn cut_off(&mut self) {
        self.cut_off = true;
    }

    pub(super) fn end(mut self, pool: &mut Pool, now: Time) -> Outcome {
        let usage = self.reader.as_mut().map(ResponseReader::finish).unwrap_or_default();
        let verdict = self.judge(pool, now);
        let outcome = Outcome {
            status: self.status,
            verdict,
            served: self.served,
            failed_attempts: self.failed_attempts,
            ttft_ms: self.first_token_at.filter(|_| self.streamed).map(|at| at.ms_since(self.picked_at)),
            duration_ms: now.ms_since(self.picked_at),
            usage,
        };
        let ttft_ms = self.first_token_at.filter(|_| self.streamed).map(|at| ms_between(self.picked_at, at));
        let ended = self.ended(verdict);
        let ending = Ending { ended, ttft_ms, tpot_ms: self.tpot_ms(&usage), usage: &usage };
        self.count(pool, &outcome, missed(self.held.slo(), verdict, &ending));
        pool.observe_end(&self.held, &ending);
        if verdict.keeps_placement() && ended != Ended::Failed {
            pool.hit(&self.held, &usage, self.prompt.text_bytes, self.prompt.blocks);
        } else {
            pool.undo(&mut self.held, &self.prompt.hashes);
        }
        pool.release(self.held, now);
        outcome
    }

    fn prompt_hash(&self) -> u64 {
        // Of a prompt of which only the beginning was hashed, or that has images, the last hash is not of all of it.
        self.prompt.hashes.last().copied().filter(|_| self.prompt.blocks.is_some()).unwrap_or(0)
    }

    /// What the answer means, and what follows from it for the endpoint.
    fn judge(&mut self, pool: &mut Pool, now: Time) -> Verdict {
        let prompt = self.prompt_hash();
        let verdict = match &self.reader {
            _ if !self.served || !self.api.is_inference() => Verdict::Unknown,
            _ if self.cut_off => Verdict::Ill,
            // The client left before the end.
            Some(_) if !self.whole && self.status == 200 => Verdict::Unknown,
            Some(reader) => Verdict::of(self.status, reader.says()),
            None => Verdict::of(self.status, BodySays::Nothing),
        };
        let Some(endpoint) = self.served_by else { return verdict };
        if self.cut_off {
            pool.lost(endpoint, prompt, now);
        }
        pool.judged(
            endpoint,
            verdict,
            &Sent { kind: self.kind.0, credentials: self.kind.1, status: self.status, prompt, at: self.picked_at },
            &mut self.held,
            now,
        );
        verdict
    }

    /// A reply that was broken off by the client is nobody's measure.
    fn ended(&self, verdict: Verdict) -> Ended {
        match (verdict, self.served, self.status) {
            (Verdict::Success | Verdict::Strange, ..) => Ended::Done,
            // Of paths that are no inference nothing is read, so their end is not known.
            (Verdict::Unknown, true, 200) if !self.api.is_inference() => Ended::Done,
            (Verdict::Unknown, true, 200) | (Verdict::Unknown, false, 0) => Ended::Aborted,
            _ => Ended::Failed,
        }
    }

    /// Time for each token after the first, by tokens rather than by pieces, ms; of streamed responses with at least two.
    #[expect(clippy::cast_precision_loss, reason = "token counts stay far below 2^24")]
    fn tpot_ms(&self, usage: &Usage) -> Option<f32> {
        let (first, last) = self.first_token_at.filter(|_| self.streamed).zip(self.last_token_at)?;
        let further = usage.completion_tokens?.checked_sub(1).filter(|further| *further > 0)?;
        Some(ms_between(first, last) / further as f32)
    }

    /// The entries of the list before the last attempted host failed; all that were attempted, when no endpoint answered.
    fn attempts(&mut self, pool: &mut Pool, head: &ResponseHead<'_>, now: Time) {
        let attempted = usize::try_from(head.attempts).unwrap_or(usize::MAX);
        let failed = match head.origin {
            Origin::Ours => 0,
            Origin::Upstream => self.position(head.upstream_address).unwrap_or(0).min(attempted.saturating_sub(1)),
            Origin::Proxy | Origin::Lost | Origin::TimedOut => {
                self.position(head.upstream_address).map_or(0, |last| last.saturating_add(1)).min(attempted)
            }
        };
        self.failed_attempts = u32::try_from(failed).unwrap_or(u32::MAX);
        let prompt = self.prompt_hash();
        for (at, (endpoint, _)) in (1..).zip(self.ranked.iter().take(failed)) {
            // Why an attempt before the last failed is not told: one at an endpoint that is alive was lost as the last one was.
            if head.origin == Origin::Lost && (at == failed || pool.is_alive(*endpoint, now)) {
                pool.lost(*endpoint, prompt, now);
            }
            // What is no inference is tried again only where there was no connection.
            let is_refused = !self.api.is_inference() || (head.origin == Origin::Proxy && at == failed);
            let failure = if is_refused { Failure::Refused } else { Failure::Lost(prompt) };
            pool.unanswered(*endpoint, &mut self.held, failure, now);
        }
    }

    fn serve(&mut self, pool: &mut Pool, head: &ResponseHead<'_>, step: &mut ResponseStep, now: Time) {
        pool.staged(&mut self.held);
        let Some(position) = self.position(head.upstream_address) else { return };
        let Some(&(server, _)) = self.ranked.get(position) else { return };
        self.served_by = Some(server);
        if position > 0 {
            pool.moved(&mut self.held, server, &self.prompt.hashes);
        }
        pool.answered(server, self.picked_at, now);
        for Token { header, values } in &mut self.tokens {
            if let Some(value) = values.get_mut(position) {
                step.set.push((std::mem::take(header).into_string().into(), std::mem::take(value)));
            }
        }
        if let Some(load) = head.load.and_then(load::parse) {
            pool.observe(server, |metrics| load.apply(metrics));
        }
    }

    fn position(&self, address: Option<&[u8]>) -> Option<usize> {
        let address = address?;
        self.ranked.iter().position(|(_, a)| a.as_bytes() == address)
    }

    #[expect(clippy::cast_precision_loss, reason = "milliseconds and token counts stay far below 2^52")]
    fn count(&self, pool: &mut Pool, outcome: &Outcome, missed: Option<bool>) {
        let row = pool.counters_mut().ended(&self.counted);
        row.response_bytes += self.response_bytes;
        if let Some(count) = missed.and_then(|missed| row.slo.get_mut(usize::from(missed))) {
            *count += 1;
        }
        row.duration_ms.record(outcome.duration_ms as f64, &DURATION_BOUNDS_MS);
        if outcome.status >= 400 {
            row.error(outcome.status);
        }
        row.prompt_tokens += u64::from(outcome.usage.prompt_tokens.unwrap_or(0));
        row.completion_tokens += u64::from(outcome.usage.completion_tokens.unwrap_or(0));
        row.cached_tokens += u64::from(outcome.usage.cached_tokens.unwrap_or(0));
        if let Some(ttft) = outcome.ttft_ms {
            row.ttft_ms.record(ttft as f64, &DURATION_BOUNDS_MS);
        }
        if let Some(tpot_ms) = self.tpot_ms(&outcome.usage) {
            row.tpot_ms.record(f64::from(tpot_ms), &DURATION_BOUNDS_MS);
        }
    }
}
