//! The decision, from the last byte of a body until the request goes on.

use pool_state::{ManagedPool, Timestamp};

use super::{BodyDelivery, FilterStatus, PoolUse, RequestCount, RequestDriver, RequestHost};
use crate::exchange::QueuedAttempt;
use crate::{
    Exchange, ExchangeStep, HashSettings, LocalReply, ParsedBody, RequestChanges, headers,
};

/// The maximum length of a body that the proxy may always keep for a retry. Most prompts are
/// shorter (about 16,000 tokens).
const SHORT_BODY_BYTES_MAX: usize = 64 << 10;

fn log_decision(exchange: &mut Exchange, host: &mut impl RequestHost) {
    if let Some(record) = exchange.take_record() {
        host.log_decision(&record);
    }
    if let Some(candidates) = exchange.take_candidates() {
        host.trace_decision(candidates);
    }
}

impl<H: RequestHost> RequestDriver<H> {
    pub(super) fn decide(&mut self, host: &mut H) -> FilterStatus {
        let now = host.now();
        if self.is_whole
            && let Some(read) = self.reading.finish(host, self.body_bytes)
        {
            return self.decide_read(host, read, None, now);
        }
        let body = self.body(host);
        self.decide_at(host, body, now)
    }

    /// Reads the body and sums its prompt outside of `with_pool`, so that other requests can use
    /// the pool meanwhile.
    pub(super) fn decide_at(
        &mut self,
        host: &mut H,
        body: Option<H::RequestBody>,
        now: Timestamp,
    ) -> FilterStatus {
        let read = self.exchange.read(
            body.as_ref().map_or(&[], AsRef::as_ref),
            self.reading.hashing(),
        );
        self.decide_read(host, read, body, now)
    }

    /// Decides on a body that was read. `body` is the body itself, if the host does not have it.
    fn decide_read(
        &mut self,
        host: &mut H,
        read: ParsedBody,
        mut body: Option<H::RequestBody>,
        now: Timestamp,
    ) -> FilterStatus {
        let Some(pool) = &self.pool else {
            return FilterStatus::Go;
        };
        let exchange = &mut self.exchange;
        let settings = host.settings();
        let resolved = host.with_pool(pool, PoolUse::Resolve, now, |pool| {
            read.fits(pool)
                .then(|| exchange.resolve(settings, pool, read, now))
        });
        let resolved = resolved.unwrap_or_else(|| {
            // The pool's settings changed while the body was arriving, so read it again.
            let whole = body.get_or_insert_with(|| host.take_body(self.body_bytes));
            let exchange = &mut self.exchange;
            let settings = host.settings();
            host.with_pool(pool, PoolUse::Capture, now, |pool| {
                let read = exchange.read(whole.as_ref(), HashSettings::from_pool(pool));
                exchange.resolve(settings, pool, read, now)
            })
        });
        let exchange = &mut self.exchange;
        let settings = host.settings();
        let step = match resolved {
            Ok(pending) => {
                let pending = pending.with_hashes();
                let hint = host.subset_hint();
                let (step, due) = host.with_pool(pool, PoolUse::Pick, now, |pool| {
                    (
                        exchange.pick(settings, pool, hint.as_deref(), pending, now),
                        pool.has_due(),
                    )
                });
                if due {
                    host.release_queued(pool);
                }
                step
            }
            Err(step) => step,
        };
        log_decision(&mut self.exchange, host);
        match step {
            ExchangeStep::Forward(forward) => self.forward(host, forward, body, now),
            ExchangeStep::Reply(reply) => self.refuse(host, reply),
            ExchangeStep::Hold { number } => {
                host.hold(pool, number);
                body.into_iter().for_each(|body| host.keep_body(body));
                FilterStatus::Hold
            }
            ExchangeStep::Park { deadline }
                if host.park(pool, deadline, self.exchange.client()) =>
            {
                body.into_iter().for_each(|body| host.keep_body(body));
                FilterStatus::Hold
            }
            // Too many requests wait already, so decide as at the deadline.
            ExchangeStep::Park { deadline } => {
                let body = body.or_else(|| self.body(host));
                self.decide_at(host, body, deadline)
            }
        }
    }

    /// Decides on a held request. Its body was read before, and the host needs the body only to
    /// change it.
    pub(super) fn decide_queued(&mut self, host: &mut H, now: Timestamp) -> FilterStatus {
        let Some(pool) = &self.pool else {
            return FilterStatus::Go;
        };
        let exchange = &mut self.exchange;
        let settings = host.settings();
        let held = exchange.held();
        let (attempt, mut due) = host.with_pool(pool, PoolUse::Pick, now, |pool| {
            (exchange.try_queued(settings, pool, now), pool.has_due())
        });
        let step = match attempt {
            QueuedAttempt::Nothing => None,
            QueuedAttempt::Step(step) => Some(step),
            QueuedAttempt::Claim(claimed) => {
                let is_first = host.claim(pool, now);
                let settle = |pool: &mut ManagedPool| {
                    (
                        exchange.settle_claim(settings, pool, claimed, is_first, now),
                        pool.has_due(),
                    )
                };
                let (step, still_due) = host.with_pool(pool, PoolUse::Pick, now, settle);
                due = still_due;
                Some(step)
            }
        };
        if due {
            host.release_queued(pool);
        }
        log_decision(&mut self.exchange, host);
        if let (Some((since, priority)), Some(ExchangeStep::Forward(_) | ExchangeStep::Reply(_))) =
            (held, &step)
        {
            host.log_hold(now.ms_since(since), priority);
        }
        match step {
            Some(ExchangeStep::Forward(forward)) => self.forward(host, forward, None, now),
            Some(ExchangeStep::Reply(reply)) => self.refuse(host, reply),
            Some(ExchangeStep::Hold { .. } | ExchangeStep::Park { .. }) | None => {
                FilterStatus::Hold
            }
        }
    }

    fn forward(
        &mut self,
        host: &mut H,
        mut forward: RequestChanges,
        body: Option<H::RequestBody>,
        since: Timestamp,
    ) -> FilterStatus {
        // For a retry, Envoy's router keeps the body in the same buffer as the part that is held
        // for a filter. A retry of a request that was resumed in the middle of its body would send
        // that part twice (Envoy 1.40). So such a request gets only one attempt.
        let is_cut = H::IS_FILTER && self.pieces != BodyDelivery::None && !self.is_whole;
        if is_cut || !self.may_retry(host, &forward) {
            forward.set.retain(|(name, _)| name != headers::RETRY_ON);
        }
        // A filter needs only the beginning of a body to change it.
        let changed = forward
            .body
            .as_ref()
            .filter(|_| body.is_none() && self.is_whole);
        let body = match changed.map(|edit| {
            if H::IS_FILTER {
                edit.end()
            } else {
                self.body_bytes
            }
        }) {
            Some(bytes) => Some(host.take_body(bytes)),
            None => body,
        };
        if host.forward(forward, body).is_err() {
            return self.abandon(host, since);
        }
        if let Some((pool, number)) = self.pool.as_ref().zip(self.exchange.revocable()) {
            host.watch(pool, number);
        }
        let now = host.now();
        let us = now.us_since(since);
        let counted = if self.is_routed() {
            self.reply_flow.request_sent(now);
            host.watch_reply();
            RequestCount::Picked { us }
        } else {
            RequestCount::FailedOpen
        };
        host.count(self.pool.as_ref(), counted);
        FilterStatus::Go
    }

    /// Whether the proxy may keep the request until the reply has ended, as it does for a retry.
    fn may_retry(&self, host: &mut H, forward: &RequestChanges) -> bool {
        let bytes = if self.is_whole {
            self.body_bytes
        } else {
            let declared = self.exchange.declared_bytes();
            declared.unwrap_or_else(|| host.settings().body_limit_bytes)
        };
        bytes <= SHORT_BODY_BYTES_MAX
            || !forward
                .set
                .iter()
                .any(|(name, _)| name == headers::RETRY_ON)
            || host.may_keep(self.exchange.client(), bytes)
    }

    /// Answers a running request if the pool gives it up. The proxy then ends it upstream.
    pub(super) fn give_up(&mut self, host: &mut H, now: Timestamp) -> bool {
        let Some(pool) = &self.pool else { return false };
        let exchange = &mut self.exchange;
        let (given_up, due) = host.with_pool(pool, PoolUse::Release, now, |pool| {
            (exchange.give_up(pool, now), pool.has_due())
        });
        if due {
            host.release_queued(pool);
        }
        let Some((reply, outcome)) = given_up else {
            return false;
        };
        host.ended(&outcome);
        self.refuse(host, reply);
        true
    }

    fn abandon(&mut self, host: &mut H, now: Timestamp) -> FilterStatus {
        let Some(pool) = &self.pool else {
            return FilterStatus::Go;
        };
        let exchange = &mut self.exchange;
        let reply = host.with_pool(pool, PoolUse::Release, now, |pool| {
            exchange.abandon(pool, now)
        });
        self.refuse(host, reply)
    }

    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn refuse(&mut self, host: &mut H, reply: LocalReply) -> FilterStatus {
        let counted = match reply.status {
            429 => RequestCount::Shed,
            400..=499 => RequestCount::Invalid,
            _ => RequestCount::Unavailable,
        };
        host.count(self.pool.as_ref(), counted);
        host.reply(reply);
        FilterStatus::Hold
    }
}
