//! Handles requests that make no progress because their client does not read.
//!
//! A proxy stops reading from endpoints while its buffer for a client is full. The streams of one
//! HTTP/2 connection share that buffer, so it may be full before a reply has begun. Then neither
//! the proxy nor the filter sees the reply. The endpoint may have ended it long ago.

use pool_state::Timestamp;

use super::{PoolUse, RequestCount, RequestDriver, RequestHost};
use crate::exchange::{AwaitedSide, RELEASE_MS, Silence};

/// The part of a reply that has arrived so far.
#[derive(Debug, Default)]
pub(super) struct ReplyFlow {
    /// Bytes of the reply so far. The headers count as one, and so does the end of a request body
    /// that is not read.
    bytes: u64,
    silence: Silence,
    /// Whether no byte passed for a long time, because the client does not read.
    is_unread: bool,
}

// === impl RequestDriver ===

impl<H: RequestHost> RequestDriver<H> {
    /// Records that a piece of the reply passes to the client.
    pub(super) fn piece_passes(&mut self, host: &mut H, size: usize) {
        self.reply_flow.bytes = self.reply_flow.bytes.saturating_add(size as u64);
        if !self.reply_flow.is_unread || size == 0 {
            return;
        }
        self.reply_flow.is_unread = false;
        let Some(pool) = &self.pool else { return };
        let exchange = &mut self.exchange;
        let since = self.reply_flow.silence.since;
        host.with_pool(pool, PoolUse::ReadResponse, since, |pool| {
            exchange.take_place_again(pool);
        });
    }

    /// Records that the last byte of a body that is not read passes to the endpoint. The request
    /// counts from now on, and so does its silence.
    pub(super) fn body_passes(&mut self, host: &mut H) {
        let Some(pool) = self.pool.as_ref().filter(|_| self.is_routed()) else {
            return;
        };
        let is_late = self.reply_flow.progresses();
        let exchange = &mut self.exchange;
        host.with_pool(pool, PoolUse::ReadResponse, host.now(), |pool| {
            if is_late {
                exchange.take_place_again(pool);
            }
            exchange.body_passed(pool);
        });
    }

    /// Whether no byte passed for so long that the host must call [`Self::check_reply`].
    #[inline(never)] // several callers, and the wasm module should be small
    pub fn is_silent(&mut self, now: Timestamp) -> bool {
        let ReplyFlow { bytes, silence, .. } = &mut self.reply_flow;
        if silence.bytes != *bytes {
            *silence = Silence {
                bytes: *bytes,
                since: now,
            };
        }
        now.ms_since(silence.since) >= RELEASE_MS && self.is_routed()
    }

    /// Checks a request or a reply without progress. If its client does not read, stops counting
    /// the request at its endpoint, and later answers it, so that the proxy resets the stream.
    pub fn check_reply(&mut self, host: &mut H, now: Timestamp) {
        if !self.is_silent(now) {
            return;
        }
        let silence = self.reply_flow.silence;
        let is_freed = self.reply_flow.is_unread;
        let after = host.settings().unread_reset_ms;
        if is_freed && (after == 0 || now.ms_since(silence.since) < after) {
            return;
        }
        let Some(pool) = &self.pool else { return };
        let exchange = &mut self.exchange;
        let (is_unread, is_new, cut) = host.with_pool(pool, PoolUse::Release, now, |pool| {
            let side = exchange.awaited(pool, silence, now);
            let is_unread = is_freed || side != AwaitedSide::Endpoint;
            let is_new = is_unread && !is_freed && exchange.free_place(pool);
            let cut = (is_freed && side == AwaitedSide::Client)
                .then(|| exchange.cut_unread(pool, now))
                .flatten();
            (is_unread, is_new, cut)
        });
        self.reply_flow.is_unread = is_unread;
        if is_new {
            host.count(Some(pool), RequestCount::Unread);
            host.release_queued(pool);
        }
        if let Some((reply, outcome)) = cut {
            host.ended(&outcome);
            self.refuse(host, reply);
        }
    }
}

// === impl ReplyFlow ===

impl ReplyFlow {
    /// Records that the request was sent.
    pub(super) fn request_sent(&mut self, now: Timestamp) {
        self.silence.since = now;
    }

    /// Records the headers of the reply, or the end of a request body that is not read. Returns
    /// whether the request had stopped counting at its endpoint.
    pub(super) fn progresses(&mut self) -> bool {
        self.bytes = self.bytes.saturating_add(1);
        std::mem::take(&mut self.is_unread)
    }
}
