//! Handles the reply: its headers, its pieces and its end.

use pool_state::Timestamp;

use super::{FilterStatus, PoolUse, RequestDriver, RequestHost};
use crate::{ResponseBody, ResponseHead, ResponseStep};

// === impl RequestDriver ===

impl<H: RequestHost> RequestDriver<H> {
    /// Handles the response headers, from an endpoint or from the proxy.
    pub fn response_headers(&mut self, host: &mut H, head: &ResponseHead<'_>) -> FilterStatus {
        let Some(pool) = self.pool.as_ref().filter(|_| self.is_routed()) else {
            host.send_response_headers(ResponseStep::default());
            return FilterStatus::Go;
        };
        let exchange = &mut self.exchange;
        let now = host.now();
        let is_late = self.reply_flow.progresses(now);
        let (step, due) = host.with_pool(pool, PoolUse::Respond, now, |pool| {
            if is_late {
                exchange.take_place_again(pool);
            }
            let step = exchange.response_headers(pool, head, now);
            if !H::IS_FILTER {
                exchange.body_answered(pool, head);
            }
            exchange.reply_computed(pool, head);
            (step, pool.has_due())
        });
        if due {
            host.release_queued(pool);
        }
        self.response = step.body;
        host.send_response_headers(step);
        if head.end_of_stream {
            self.end(host);
        } else if self.response == ResponseBody::Hold {
            return FilterStatus::Hold;
        }
        FilterStatus::Go
    }

    /// Handles a piece of the response body. `size` is its length or, if the body is held, the
    /// length of the whole body so far.
    pub fn response_body(&mut self, host: &mut H, size: usize, last: bool) -> FilterStatus {
        match self.response {
            ResponseBody::Hold if !last => {
                self.response_bytes = size;
                return FilterStatus::Hold;
            }
            ResponseBody::Ignore => {}
            ResponseBody::Read if size == 0 && !last => {}
            ResponseBody::Read | ResponseBody::Restore | ResponseBody::Hold => {
                self.read_response(host, size, last);
            }
        }
        if last {
            self.end(host); // the client may read much later
        } else {
            self.piece_passes(size);
        }
        FilterStatus::Go
    }

    /// Handles the last piece that the host can show of a reply, which goes on.
    pub fn response_cut_off(&mut self, host: &mut H, size: usize) {
        if self.response != ResponseBody::Ignore {
            self.read_response(host, size, true);
        }
    }

    /// Handles the response trailers, the end of the reply.
    pub fn response_trailers(&mut self, host: &mut H) {
        match self.response {
            ResponseBody::Ignore => {}
            ResponseBody::Hold if self.response_bytes > 0 => {
                self.read_response(host, self.response_bytes, true);
            }
            ResponseBody::Read | ResponseBody::Restore | ResponseBody::Hold => {
                self.response = ResponseBody::Ignore;
                let Some(pool) = &self.pool else { return };
                let exchange = &mut self.exchange;
                let now = host.now();
                let rest = host.with_pool(pool, PoolUse::ReadResponse, now, |pool| {
                    exchange.response_chunk(pool, &[], true, now)
                });
                if let Some(rest) = rest {
                    host.append_response(rest);
                }
                self.trace_outcome(host, now);
            }
        }
        self.end(host);
    }

    fn read_response(&mut self, host: &mut H, size: usize, last: bool) {
        let held = self.response == ResponseBody::Hold;
        if last {
            self.response = ResponseBody::Ignore;
        }
        let Some(pool) = &self.pool else { return };
        let bytes = host.take_response_body(size);
        let exchange = &mut self.exchange;
        let now = host.now();
        let due = exchange.read_chunk(bytes.as_ref(), last, now)
            && host.with_pool(pool, PoolUse::ReadResponse, now, |pool| {
                exchange.report_progress(pool, now);
                pool.has_due()
            });
        if due {
            host.release_queued(pool);
        }
        if last {
            self.trace_outcome(host, now);
        }
        let restored = self.exchange.restore_chunk(bytes.as_ref(), last);
        host.send_response_body(bytes, restored, held);
    }

    /// Puts the outcome of a traced request into its span.
    fn trace_outcome(&mut self, host: &mut H, now: Timestamp) {
        let Some(pool) = self.pool.as_ref().filter(|_| self.exchange.is_traced()) else {
            return;
        };
        let exchange = &mut self.exchange;
        if let Some(outcome) = host.with_pool(pool, PoolUse::ReadResponse, now, |pool| {
            exchange.outcome_so_far(pool, now)
        }) {
            host.trace_outcome(&outcome);
        }
    }
}
