//! The end of a routed request: the verdict on its endpoint, and what is counted and learned.

use pool_state::verdict::{ErrorBody, Verdict};
use pool_state::{
    DURATION_BOUNDS_MS, ManagedPool, MissedTokens, RequestEnding, SentRequest, Timestamp,
    ms_between,
};
use scheduler::Slo;
use scheduler::latency::RequestEnd;

use super::routed_request::RoutedRequest;
use crate::sse::ResponseReader;
use crate::usage::TokenUsage;

/// The result of a routed exchange.
#[derive(Clone, Debug, PartialEq)]
pub struct ExchangeOutcome {
    /// HTTP status; 0 if the exchange ended before any response.
    pub status: u16,
    /// The judgement of the endpoint by this answer.
    pub verdict: Verdict,
    /// Whether a model server answered.
    pub served: bool,
    /// Attempts that failed before the answer.
    pub failed_attempts: u32,
    /// Time from pick to first token, ms. Only for streamed responses.
    pub ttft_ms: Option<u64>,
    /// Time from pick to end, ms.
    pub duration_ms: u64,
    /// Token counts, completed by [`pool_state::PoolCounters::complete_usage`].
    pub usage: TokenUsage,
    /// Prompt tokens that the engine had to compute, by cause.
    pub missed: MissedTokens,
    /// Expected times to the first token and to the end, ms; `None` after a retry.
    pub expected_ms: Option<(f32, f32)>,
}

/// Whether the request missed its SLO, counted from the time when it could have been sent, so a
/// hold is included. `None` if no time was measured, the client broke off the request, or the
/// failure is the client's fault.
#[expect(
    clippy::cast_precision_loss,
    reason = "the last digits of minutes in microseconds do not count"
)]
fn missed(slo: Slo, verdict: Verdict, held_ms: u64, ending: &RequestEnding<'_>) -> Option<bool> {
    let late = |slo: Option<u32>, took_ms: Option<f32>| {
        slo.zip(took_ms).map(|(us, ms)| ms * 1_000.0 > us as f32)
    };
    match ending.ended {
        RequestEnd::Done => match (
            late(slo.ttft_us, ending.ttft_ms.map(|ms| ms + held_ms as f32)),
            late(slo.tpot_us, ending.tpot_ms),
        ) {
            (None, None) => None,
            (ttft, tpot) => Some(ttft == Some(true) || tpot == Some(true)),
        },
        RequestEnd::Failed if verdict != Verdict::ClientFault => slo.any().then_some(true),
        RequestEnd::Failed | RequestEnd::Aborted => None,
    }
}

// === impl RoutedRequest ===

impl RoutedRequest {
    pub(super) fn end(mut self, pool: &mut ManagedPool, now: Timestamp) -> ExchangeOutcome {
        let usage = self.usage();
        // Reports the tokens that arrived since the last report, at the time of the last token.
        if let Some(last) = self.reply.progress.last_token_at {
            self.report_progress(pool, last);
        }
        let verdict = self.judge(pool, now);
        let outcome = self.outcome(pool, verdict, usage, now);
        let ttft_ms = self
            .reply
            .progress
            .first_token_at
            .filter(|_| self.reply.streamed)
            .map(|at| ms_between(self.pick.at, at));
        let ended = self.request_end(verdict);
        let learned = TokenUsage {
            completion_tokens: self.shown_tokens(&usage),
            ..usage
        };
        let ending = RequestEnding {
            ended,
            ttft_ms,
            tpot_ms: self.tpot_ms(&learned),
            usage: &learned,
        };
        self.count(
            pool,
            &outcome,
            missed(self.pick.hold.slo(), verdict, self.pick.held_ms, &ending),
            ending.tpot_ms,
        );
        pool.observe_end(&self.pick.hold, &ending);
        if self.has_worked(verdict, ended) {
            pool.confirm_placement(&mut self.pick.hold, &self.prompt.hashes);
        }
        if verdict.keeps_placement() && ended != RequestEnd::Failed {
            pool.record_cache_hit(
                &self.pick.hold,
                &usage,
                self.prompt.text_bytes,
                self.prompt.blocks,
                self.kind.client,
            );
        } else {
            pool.undo_placement(&mut self.pick.hold, &self.prompt.hashes);
        }
        pool.release(self.pick.hold, now);
        outcome
    }

    /// The token counts that the engine reports, limited to possible values: a reply has at most as
    /// many tokens as the client allows, and as it has bytes.
    fn usage(&mut self) -> TokenUsage {
        let Some(reader) = &mut self.reply.reader else {
            return TokenUsage::default();
        };
        let usage = reader.finish();
        let bytes = u32::try_from(self.reply.bytes).unwrap_or(u32::MAX);
        let most = self
            .kind
            .reply_tokens_max
            .map_or(bytes, |max| max.min(bytes));
        TokenUsage {
            completion_tokens: usage.completion_tokens.map(|tokens| tokens.min(most)),
            ..usage
        }
    }

    /// The output tokens that others learn from: only those that the reply shows. Hidden tokens,
    /// such as reasoning that the engine does not send, are counted but not learned from.
    fn shown_tokens(&self, usage: &TokenUsage) -> Option<u32> {
        let tokens = usage.completion_tokens?;
        self.reply
            .reader
            .as_ref()
            .map(|reader| reader.possible_tokens(tokens))
    }

    /// The outcome as far as it is known before the end.
    pub(crate) fn outcome_so_far(
        &mut self,
        pool: &mut ManagedPool,
        now: Timestamp,
    ) -> ExchangeOutcome {
        let usage = self.usage();
        self.outcome(pool, Verdict::Unknown, usage, now)
    }

    fn outcome(
        &self,
        pool: &mut ManagedPool,
        verdict: Verdict,
        usage: TokenUsage,
        now: Timestamp,
    ) -> ExchangeOutcome {
        let usage = self.reply.served_by.map_or(usage, |server| {
            pool.counters_mut().complete_usage(server, usage)
        });
        ExchangeOutcome {
            status: self.reply.status,
            verdict,
            served: self.reply.served,
            failed_attempts: self.reply.failed_attempts,
            ttft_ms: self
                .reply
                .progress
                .first_token_at
                .filter(|_| self.reply.streamed)
                .map(|at| at.ms_since(self.pick.at)),
            duration_ms: now.ms_since(self.pick.at),
            usage,
            missed: self.pick.hold.missed(&usage, self.prompt.blocks),
            expected_ms: (self.reply.failed_attempts == 0).then_some(self.pick.expected_ms),
        }
    }

    pub(super) fn prompt_hash(&self) -> u64 {
        // If only the start of the prompt was hashed, or the prompt has images, the last hash does
        // not cover all of it.
        self.prompt
            .hashes
            .last()
            .copied()
            .filter(|_| self.prompt.blocks.is_some())
            .unwrap_or(0)
    }

    /// Judges the answer, and applies the verdict to the endpoint.
    fn judge(&mut self, pool: &mut ManagedPool, now: Timestamp) -> Verdict {
        let prompt = self.prompt_hash();
        let verdict = match &self.reply.reader {
            _ if !self.reply.served || !self.api.is_inference() => Verdict::Unknown,
            _ if self.reply.cut_off => Verdict::Ill,
            // The client left before the end.
            Some(_) if !self.reply.complete && self.reply.status == 200 => Verdict::Unknown,
            // The object that the client named does not exist there.
            _ if self.kind.names_id && self.reply.status == 404 => Verdict::ClientFault,
            Some(reader) => {
                Verdict::from_status(self.reply.status, reader.says(self.kind.wants_output))
            }
            None => Verdict::from_status(self.reply.status, ErrorBody::Nothing),
        };
        let Some(endpoint) = self.reply.served_by else {
            return verdict;
        };
        if self.reply.cut_off {
            pool.record_lost_connection(endpoint, prompt, self.kind.client, now);
        }
        pool.apply_verdict(
            endpoint,
            verdict,
            &SentRequest {
                kind: self.kind.accepted_as,
                credentials: self.kind.credentials,
                client: self.kind.client,
                names_id: self.kind.names_id,
                status: self.reply.status,
                // The last hash of a long prompt covers only its beginning, so long prompts with
                // the same beginning count as one prompt.
                prompt: self.prompt.hashes.last().copied().unwrap_or(0),
                at: self.pick.at,
            },
            &mut self.pick.hold,
            now,
        );
        verdict
    }

    /// Whether the answer shows that the engine processed the prompt. If the answer shows nothing,
    /// or the client did not wait for it, the placement stays unconfirmed.
    fn has_worked(&self, verdict: Verdict, ended: RequestEnd) -> bool {
        let is_whole_success = self.reply.complete && (200..300).contains(&self.reply.status);
        match verdict {
            Verdict::Success | Verdict::Strange => ended == RequestEnd::Done,
            Verdict::Unknown => is_whole_success,
            _ => false,
        }
    }

    /// Returns how the request ended, for the measurement. A reply that the client broke off gives
    /// no measurement.
    fn request_end(&self, verdict: Verdict) -> RequestEnd {
        let has_generated = || {
            self.reply
                .reader
                .as_ref()
                .is_none_or(ResponseReader::has_generated)
        };
        match (verdict, self.reply.served, self.reply.status) {
            // A reply without work does not show how long work takes.
            (Verdict::Strange, ..) if !has_generated() => RequestEnd::Aborted,
            (Verdict::Success | Verdict::Strange, ..) => RequestEnd::Done,
            // The bodies of other paths than inference are not read, so their end is not known.
            (Verdict::Unknown, true, 200) if !self.api.is_inference() => RequestEnd::Done,
            (Verdict::Unknown, true, 200) | (Verdict::Unknown, false, 0) => RequestEnd::Aborted,
            _ => RequestEnd::Failed,
        }
    }

    /// Mean time for each token after the first, in ms, by tokens rather than by pieces. `None`
    /// unless the response was streamed and has at least two tokens.
    #[expect(
        clippy::cast_precision_loss,
        reason = "token counts stay far below 2^24"
    )]
    fn tpot_ms(&self, usage: &TokenUsage) -> Option<f32> {
        let (first, last) = self
            .reply
            .progress
            .first_token_at
            .filter(|_| self.reply.streamed)
            .zip(self.reply.progress.last_token_at)?;
        let further = usage
            .completion_tokens?
            .checked_sub(1)
            .filter(|further| *further > 0)?;
        Some(ms_between(first, last) / further as f32)
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "milliseconds and token counts stay far below 2^52"
    )]
    fn count(
        &self,
        pool: &mut ManagedPool,
        outcome: &ExchangeOutcome,
        missed: Option<bool>,
        tpot_ms: Option<f32>,
    ) {
        let held_ms = self.pick.held_ms;
        let row = pool.counters_mut().count_ended(&self.counted);
        row.response_bytes += self.reply.bytes;
        if let Some(count) = missed.and_then(|missed| row.slo.get_mut(usize::from(missed))) {
            *count += 1;
        }
        row.duration_ms
            .record((held_ms + outcome.duration_ms) as f64, &DURATION_BOUNDS_MS);
        if outcome.status >= 400 {
            row.error(outcome.status);
        }
        row.tokens.add(&outcome.usage, &outcome.missed);
        if let Some(ttft) = outcome.ttft_ms {
            row.ttft_ms
                .record((held_ms + ttft) as f64, &DURATION_BOUNDS_MS);
        }
        if let Some(tpot_ms) = tpot_ms {
            row.tpot_ms.record(f64::from(tpot_ms), &DURATION_BOUNDS_MS);
        }
    }
}
