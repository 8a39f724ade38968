//! Handles requests that make too little progress because their client does not read.
//!
//! A proxy stops reading from endpoints while its buffer for a client is full. The streams of one
//! HTTP/2 connection share that buffer, so it may be full before a reply has begun. Then neither
//! the proxy nor the filter sees the reply. The endpoint may have ended it long ago.

use pool_state::Timestamp;

use super::{PoolUse, RequestCount, RequestDriver, RequestHost};
use crate::exchange::{AwaitedSide, RELEASE_MS, ReplyDelay, ReplyKind};

/// A reply makes progress while its bytes pass at a fair pace: one part in this many of the
/// greatest pace that was seen. A larger batch slows an engine down by less. A client that reads
/// slower keeps its reply, but not the place.
const PACE_PARTS: u64 = 8;

/// The greatest pace is taken to be at least this, in bytes a second. Otherwise a client that reads
/// slowly from the beginning would set the pace. An engine that streams 40 tokens a second is
/// faster.
const FASTEST_MIN: u64 = 8_192;

/// A reply that made too little progress makes enough again when its delay has fallen to this, in
/// ms.
const RESUME_MS: u64 = RELEASE_MS / 2;

/// The maximum delay of a reply, in ms, so that a reply that has its pace again soon has its place
/// again: at the greatest pace that was seen, after less than 4 s.
const DELAY_MAX_MS: u64 = 30_000;

/// The time between two checks, in ms. No pace is measured over less time.
const CHECK_MS: u64 = 1_000;

/// The part of a reply that has arrived so far.
#[derive(Debug, Default)]
pub(super) struct ReplyFlow {
    /// Bytes of the reply so far. The headers count as one, and so does the end of a request body
    /// that is not read.
    bytes: u64,
    /// How many bytes had passed at the last check, and when a check first saw this number.
    seen: u64,
    silent_since: Timestamp,
    /// The greatest number of bytes that passed in a second since the engine was last seen to work.
    fastest: u64,
    /// The reply is as late as if no byte had passed since this time.
    late_since: Timestamp,
    /// Whether the reply counts as unread, so its place is free.
    is_unread: bool,
}

// === impl RequestDriver ===

impl<H: RequestHost> RequestDriver<H> {
    /// Records that a piece of the reply passes to the client.
    pub(super) fn piece_passes(&mut self, size: usize) {
        self.reply_flow.bytes = self.reply_flow.bytes.saturating_add(size as u64);
    }

    /// Records that the last byte of a body that is not read passes to the endpoint. The request
    /// counts from now on, and so does its silence.
    pub(super) fn body_passes(&mut self, host: &mut H) {
        let Some(pool) = self.pool.as_ref().filter(|_| self.is_routed()) else {
            return;
        };
        let now = host.now();
        let is_late = self.reply_flow.progresses(now);
        let exchange = &mut self.exchange;
        host.with_pool(pool, PoolUse::ReadResponse, now, |pool| {
            if is_late {
                exchange.take_place_again(pool);
            }
            exchange.body_passed(pool);
        });
    }

    /// Whether the reply makes or made so little progress that the host must call
    /// [`Self::check_reply`].
    #[inline(never)] // several callers, and the wasm module should be small
    pub fn is_silent(&mut self, now: Timestamp) -> bool {
        let late_ms = self.late_ms(now);
        (self.reply_flow.is_unread || late_ms >= RELEASE_MS) && self.is_routed()
    }

    /// For how long the reply has made too little progress, in ms.
    #[inline(never)] // several callers, and the wasm module should be small
    fn late_ms(&mut self, now: Timestamp) -> u64 {
        self.reply_flow.look(self.exchange.reply_kind(), now);
        now.ms_since(self.reply_flow.late_since)
    }

    /// Charges the flow for the delay of a request that ends, unless the endpoint broke it off. The
    /// flow pays whether the request waited for its client or for its engine: nothing tells which,
    /// and the place was kept from others. If an engine pauses for all flows alike, their order
    /// stays.
    pub(super) fn settle_delay(&mut self, host: &mut H, now: Timestamp) {
        let late_ms = self.late_ms(now);
        let is_open = self.exchange.is_open();
        // This is a host call, so whole replies without delay make none.
        if (is_open || late_ms >= CHECK_MS) && host.endpoint_broke_off() {
            if is_open {
                self.exchange.record_cut_off();
            }
        } else {
            self.exchange.charge_delay(late_ms);
        }
    }

    /// Checks a request or a reply with too little progress. If its client does not read, stops
    /// counting the request at its endpoint, and later answers it, so that the proxy resets the
    /// stream. Counts the request again when the reply makes progress.
    pub fn check_reply(&mut self, host: &mut H, now: Timestamp) {
        if !self.is_silent(now) {
            return;
        }
        let flow = &self.reply_flow;
        let delay = ReplyDelay {
            bytes: flow.seen,
            ms: now.ms_since(flow.late_since),
        };
        let is_freed = flow.is_unread;
        let silent_ms = now.ms_since(flow.silent_since);
        let after = host.settings().unread_reset_ms;
        if is_freed && delay.ms <= RESUME_MS {
            self.take_place_again(host, now);
            return;
        }
        if is_freed && (after == 0 || silent_ms < after) {
            return;
        }
        let Some(pool) = &self.pool else { return };
        let exchange = &mut self.exchange;
        let (is_unread, cut) = host.with_pool(pool, PoolUse::Release, now, |pool| {
            let side = exchange.awaited(pool, delay, now);
            let is_unread = is_freed || side != AwaitedSide::Endpoint;
            if is_unread && !is_freed {
                exchange.free_place(pool);
            }
            let cut = (is_freed && side == AwaitedSide::Client)
                .then(|| exchange.cut_unread(pool, now))
                .flatten();
            (is_unread, cut)
        });
        self.reply_flow.is_unread = is_unread;
        if !is_unread {
            // The engine works, so the greatest pace was a burst, such as an echo of the prompt.
            self.reply_flow.fastest = 0;
        }
        if is_unread && !is_freed {
            host.count(Some(pool), RequestCount::Unread);
            host.release_queued(pool);
        }
        if let Some((reply, outcome)) = cut {
            host.ended(&outcome);
            self.refuse(host, reply);
        }
    }

    fn take_place_again(&mut self, host: &mut H, now: Timestamp) {
        self.reply_flow.is_unread = false;
        let Some(pool) = &self.pool else { return };
        let exchange = &mut self.exchange;
        host.with_pool(pool, PoolUse::ReadResponse, now, |pool| {
            exchange.take_place_again(pool);
        });
    }
}

// === impl ReplyFlow ===

impl ReplyFlow {
    /// Records that the request was sent.
    pub(super) fn request_sent(&mut self, now: Timestamp) {
        self.silent_since = now;
        self.late_since = now;
    }

    /// Looks at the bytes that passed since the last check. The delay of the reply falls by the
    /// time that its bytes take at a fair pace.
    fn look(&mut self, kind: ReplyKind, now: Timestamp) {
        let passed = self.bytes.saturating_sub(self.seen);
        if passed == 0 {
            return;
        }
        let took_ms = now.ms_since(self.silent_since).max(CHECK_MS);
        self.seen = self.bytes;
        self.silent_since = now;
        let passed = passed.min(u64::MAX / 1_000) * 1_000;
        let worth_ms = match kind {
            ReplyKind::Computed => return,
            ReplyKind::Generated => {
                self.fastest = self.fastest.max(passed / took_ms).max(FASTEST_MIN);
                passed.checked_div(self.fastest / PACE_PARTS)
            }
            ReplyKind::Upgraded => None,
        };
        let late_ms = now.ms_since(self.late_since);
        let late_ms = late_ms.saturating_sub(worth_ms.unwrap_or(late_ms));
        let late_ms = late_ms.min(DELAY_MAX_MS);
        self.late_since = Timestamp(now.0.saturating_sub(Timestamp(0).plus_ms(late_ms).0));
    }

    /// Records the headers of the reply, or the end of a request body that is not read. Returns
    /// whether the request had stopped counting at its endpoint.
    pub(super) fn progresses(&mut self, now: Timestamp) -> bool {
        self.bytes = self.bytes.saturating_add(1);
        self.late_since = now;
        std::mem::take(&mut self.is_unread)
    }
}
