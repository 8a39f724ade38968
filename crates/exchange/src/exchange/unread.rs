//! Decides whether a reply that makes no progress waits for the endpoint or for the client.

use pool_state::{EngineCount, ManagedPool, Timestamp};

use super::response_head::{ResponseHead, ResponseOrigin, SWITCHING_PROTOCOLS};
use super::routed_request::RoutedRequest;
use super::{Exchange, ExchangeOutcome, ExchangePhase};
use crate::reply::{LocalReply, Refusal};

/// After this time without progress, in ms, the request no longer counts at its endpoint. A client
/// that reads pauses for less time, and the engine is scraped more often. Any value far below the
/// duration of a generation limits the cost for others.
pub(crate) const RELEASE_MS: u64 = 5_000;

/// The additional time for each prompt token that may not be computed yet, in ms: the time of a
/// slow prefill. Some engines do not count a request while they compute its prompt.
const PREFILL_MS_PER_TOKEN: u64 = 1;

/// If the engine has no request, a stream of at least this many bytes certainly waits for its
/// client. In the shipped files, Envoy buffers this much of an HTTP/2 stream. With fewer bytes, the
/// engine may run a tool for the request.
const STREAM_BYTES_MIN: u64 = 1_048_576;

/// A computed reply of at most this many bytes passes at once, because a proxy buffers this much of
/// a connection (`per_connection_buffer_limit_bytes` of the shipped files).
const BUFFERED_BYTES: usize = 65_536;

/// How many bytes of a reply had passed at the last check, and for how long the reply has made too
/// little progress, in ms.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplyDelay {
    pub(crate) bytes: u64,
    pub(crate) ms: u64,
}

/// How much of the request body has arrived, as far as the host knows. A client may declare a body
/// that it never sends, so a body that is not read counts only when it is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyArrival {
    /// The last byte has arrived, or there is no body.
    Whole,
    /// The host will report the last byte.
    Partial,
    /// The host may never report the last byte, because the proxy shows it no body.
    Unseen,
}

/// The conclusion when bytes of a reply pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyKind {
    /// None, because the endpoint has computed the whole reply.
    Computed,
    /// The endpoint generates the reply, if the bytes pass at its pace.
    Generated,
    /// The endpoint works. Both sides of an upgraded connection may pause.
    Upgraded,
}

/// The side that a reply waits for while it makes too little progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AwaitedSide {
    /// The endpoint, as far as is known. A long prefill or long reasoning is not the client's
    /// fault.
    Endpoint,
    /// Probably the client: it has not sent the whole body, or the engine has fewer requests than
    /// were sent to it and have not ended. But the engine may still have this request, or run a
    /// tool for it.
    ClientProbably,
    /// The client: the engine has computed the whole reply, or it has sent a long stream and has no
    /// request.
    Client,
}

// === impl Exchange ===

impl Exchange {
    /// The conclusion when bytes of the reply pass.
    pub(crate) fn reply_kind(&self) -> ReplyKind {
        match &self.phase {
            ExchangePhase::Routed(routed) if routed.is_computed => ReplyKind::Computed,
            ExchangePhase::Routed(routed) if routed.reply.status == SWITCHING_PROTOCOLS => {
                ReplyKind::Upgraded
            }
            _ => ReplyKind::Generated,
        }
    }

    /// The side that the reply waits for while it makes too little progress.
    #[cold]
    pub(crate) fn awaited(
        &self,
        pool: &ManagedPool,
        delay: ReplyDelay,
        now: Timestamp,
    ) -> AwaitedSide {
        match &self.phase {
            ExchangePhase::Routed(_)
                if self.arrival == BodyArrival::Partial && delay.bytes == 0 =>
            {
                AwaitedSide::ClientProbably
            }
            ExchangePhase::Routed(routed) => routed.awaited(pool, delay, self.reads_body(), now),
            _ => AwaitedSide::Endpoint,
        }
    }

    /// Records that the last byte of a body that was not read goes to the endpoint, which can begin
    /// with the request.
    #[cold]
    pub(crate) fn body_passed(&mut self, pool: &mut ManagedPool) {
        if let ExchangePhase::Routed(routed) = &mut self.phase
            && routed.prompt.tokens > 0
        {
            pool.set_prompt(&mut routed.pick.hold, routed.prompt.tokens);
        }
    }

    /// Records that the response headers have arrived. If they begin a generated reply, the
    /// endpoint has the body, also if the host saw no end of it: the proxy may show no body, or no
    /// trailers. A computed reply is no work any more.
    #[cold]
    pub(crate) fn body_answered(&mut self, pool: &mut ManagedPool, head: &ResponseHead<'_>) {
        let is_begun = head.origin == ResponseOrigin::Upstream
            && (200..300).contains(&head.status)
            && self.reply_kind() == ReplyKind::Generated;
        if self.arrival != BodyArrival::Whole && is_begun {
            self.arrival = BodyArrival::Whole;
            self.body_passed(pool);
        }
    }

    /// Records that the response headers have arrived. If the engine has computed a reply that may
    /// wait for its client, the request stops counting at its endpoint.
    pub(crate) fn reply_computed(&mut self, pool: &mut ManagedPool, head: &ResponseHead<'_>) {
        let is_long = head.content_length > Some(BUFFERED_BYTES);
        if let ExchangePhase::Routed(routed) = &mut self.phase
            && is_long
            && routed.is_computed
        {
            pool.suspend(&mut routed.pick.hold);
        }
    }

    /// Stops counting the request at its endpoint. Its flow pays for the place.
    #[cold]
    pub(crate) fn free_place(&mut self, pool: &mut ManagedPool) {
        self.charge_delay(RELEASE_MS);
        if let ExchangePhase::Routed(routed) = &mut self.phase {
            pool.suspend(&mut routed.pick.hold);
        }
    }

    /// Counts the request at its endpoint again, because its reply makes progress. Does nothing if
    /// the engine has computed the whole reply.
    #[cold]
    pub(crate) fn take_place_again(&mut self, pool: &mut ManagedPool) {
        if let ExchangePhase::Routed(routed) = &mut self.phase
            && !routed.is_computed
        {
            pool.resume(&mut routed.pick.hold);
        }
    }

    /// Records that the request has made no progress for `ms`. Its flow pays for the time, but not
    /// for longer than the request keeps its place.
    pub(crate) fn charge_delay(&mut self, ms: u64) {
        if let ExchangePhase::Routed(routed) = &mut self.phase {
            routed.pick.hold.charge_silence(ms.min(RELEASE_MS));
        }
    }

    /// Ends the request, because its client does not read.
    pub(crate) fn cut_unread(
        &mut self,
        pool: &mut ManagedPool,
        now: Timestamp,
    ) -> Option<(LocalReply, ExchangeOutcome)> {
        let outcome = self.end(pool, now)?;
        self.phase = ExchangePhase::Answered { uncounted: None };
        let refusal = Refusal::Unread;
        pool.counters_mut().count_dropped(refusal.reason());
        Some((refusal.reply(self.family), outcome))
    }
}

// === impl RoutedRequest ===

impl RoutedRequest {
    #[cold]
    fn awaited(
        &self,
        pool: &ManagedPool,
        delay: ReplyDelay,
        is_read: bool,
        now: Timestamp,
    ) -> AwaitedSide {
        if self.is_computed {
            return AwaitedSide::Client;
        }
        // The length of a body that is not read says little about its prefill.
        let tokens = if is_read {
            self.pick.hold.uncached_tokens()
        } else {
            0
        };
        let prefill_ms = tokens * PREFILL_MS_PER_TOKEN;
        if delay.ms < RELEASE_MS + prefill_ms {
            return AwaitedSide::Endpoint;
        }
        let is_stream = delay.bytes >= STREAM_BYTES_MIN && self.reply.status != SWITCHING_PROTOCOLS;
        match pool.engine_count(&self.pick.hold, delay.ms, now) {
            EngineCount::Nothing if is_stream => AwaitedSide::Client,
            EngineCount::Nothing | EngineCount::Fewer => AwaitedSide::ClientProbably,
            EngineCount::All => AwaitedSide::Endpoint,
        }
    }
}
