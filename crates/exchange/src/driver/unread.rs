//! Handles replies that make no progress because their client does not read.
//!
//! A proxy stops reading from an endpoint while its buffer for the client is full, so neither the
//! proxy nor the filter sees the end of such a reply. The endpoint may have ended the reply long
//! ago.

use pool_state::Timestamp;

use super::{FilterStatus, PoolUse, RequestCount, RequestDriver, RequestHost};
use crate::exchange::AwaitedSide;

/// From this number of bytes of a reply on, a pause may be caused by the client. It is half of the
/// smallest buffer of a known gateway (Envoy Gateway's default), because headers and framing are in
/// the buffer too. With fewer bytes, the proxy still reads, so the endpoint causes the pause.
const WATCHED_BYTES_MIN: u64 = 16_384;

/// How long no byte must pass before the place of the request is freed. It is longer than a reading
/// client pauses, and longer than the pause of a scrape that shows what the engine has. Any value
/// far below the length of a generation limits what the place costs others.
const RELEASE_MS: u64 = 5_000;

/// The part of a reply that has arrived so far.
#[derive(Debug, Default)]
pub(super) struct ReplyFlow {
    bytes: u64,
    state: ReplyFlowState,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ReplyFlowState {
    /// The reply is short so far.
    #[default]
    Short,
    /// The host checks the reply from time to time.
    Watched(Silence),
    /// No byte passed for a long time, because the client does not read.
    Unread(Silence),
}

/// The time since when a reply has this many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Silence {
    bytes: u64,
    since: Timestamp,
}

/// Whether the host must continue to check a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyCheck {
    /// The host calls [`RequestDriver::check_reply`] again.
    Again,
    /// The stream has ended, or has a local reply. For that reply the proxy resets the stream.
    Ended,
}

// === impl RequestDriver ===

impl<H: RequestHost> RequestDriver<H> {
    /// Records that a piece of the reply passes to the client.
    pub(super) fn piece_passes(&mut self, host: &mut H, size: usize) {
        self.reply_flow.bytes = self.reply_flow.bytes.saturating_add(size as u64);
        match self.reply_flow.state {
            ReplyFlowState::Short
                if self.reply_flow.bytes >= WATCHED_BYTES_MIN && self.is_routed() =>
            {
                self.reply_flow.state =
                    ReplyFlowState::Watched(self.reply_flow.silence(host.now()));
                host.watch_reply();
            }
            ReplyFlowState::Unread(silence) if size > 0 => {
                self.reply_flow.state = ReplyFlowState::Watched(silence);
                let Some(pool) = &self.pool else { return };
                let exchange = &mut self.exchange;
                host.with_pool(pool, PoolUse::ReadResponse, silence.since, |pool| {
                    exchange.take_place_again(pool);
                });
            }
            ReplyFlowState::Short | ReplyFlowState::Watched(_) | ReplyFlowState::Unread(_) => {}
        }
    }

    /// Checks a reply that the host watches. If no byte passes because the client does not read,
    /// frees the place of the request, and later answers it.
    pub fn check_reply(&mut self, host: &mut H, now: Timestamp) -> ReplyCheck {
        if !self.is_routed() {
            return ReplyCheck::Ended;
        }
        match self.reply_flow.state {
            ReplyFlowState::Short => {}
            ReplyFlowState::Watched(silence) if silence.bytes != self.reply_flow.bytes => {
                self.reply_flow.state = ReplyFlowState::Watched(self.reply_flow.silence(now));
            }
            ReplyFlowState::Watched(silence) => {
                if now.ms_since(silence.since) >= RELEASE_MS && self.free_unread(host, now) {
                    self.reply_flow.state = ReplyFlowState::Unread(silence);
                }
            }
            ReplyFlowState::Unread(silence) => {
                let after = host.settings().unread_reset_ms;
                if after > 0 && now.ms_since(silence.since) >= after && self.cut_unread(host, now) {
                    return ReplyCheck::Ended;
                }
            }
        }
        ReplyCheck::Again
    }

    /// Frees the place of a request whose client does not read. Returns false if the endpoint may
    /// be the reason.
    fn free_unread(&mut self, host: &mut H, now: Timestamp) -> bool {
        let Some(pool) = &self.pool else { return false };
        let bytes = self.reply_flow.bytes;
        let exchange = &mut self.exchange;
        let (awaited, is_new, due) = host.with_pool(pool, PoolUse::Respond, now, |pool| {
            let awaited = exchange.awaited(pool, bytes, now);
            let is_new = awaited != AwaitedSide::Endpoint && exchange.free_place(pool);
            (awaited, is_new, pool.has_due())
        });
        if is_new {
            host.count(self.pool.as_ref(), RequestCount::Unread);
        }
        if let Some(pool) = self.pool.as_ref().filter(|_| due) {
            host.release_queued(pool);
        }
        awaited != AwaitedSide::Endpoint
    }

    /// Ends a request whose client certainly does not read.
    fn cut_unread(&mut self, host: &mut H, now: Timestamp) -> bool {
        let Some(pool) = &self.pool else { return false };
        let bytes = self.reply_flow.bytes;
        let exchange = &mut self.exchange;
        let cut = host.with_pool(pool, PoolUse::Release, now, |pool| {
            (exchange.awaited(pool, bytes, now) == AwaitedSide::Client)
                .then(|| exchange.cut_unread(pool, now))
                .flatten()
        });
        let Some((reply, outcome)) = cut else {
            return false;
        };
        host.ended(&outcome);
        self.refuse(host, reply) == FilterStatus::Hold
    }
}

// === impl ReplyFlow ===

impl ReplyFlow {
    fn silence(&self, since: Timestamp) -> Silence {
        Silence {
            bytes: self.bytes,
            since,
        }
    }
}
