//! One HTTP stream of Envoy: a [`RequestDriver`] and its host.
//!
//! Envoy calls the hooks of a stream on one thread. It may call further hooks during a call of the
//! module that answers or resumes the request. So these calls come last in a hook, when nothing of
//! the stream is borrowed.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use exchange::bodies::BodyRoom;
use exchange::{
    BodyProgress, FailureMode, FilterStatus, LocalReply, RequestDriver, ResponseHead,
    ResponseOrigin, headers,
};

use crate::abi::{Attribute, HeaderKind, StreamHandle};
use crate::module_config::ModuleConfig;
use crate::process::process;
use crate::stream_host::StreamHost;
use crate::waker::WakeReason;
use crate::worker::SharedWorker;

/// A header that Envoy sets only on responses from upstream, not on responses that Envoy or a
/// filter makes.
const UPSTREAM_TIME: &[u8] = b"x-envoy-upstream-service-time";

/// The reply to a request at which the module panicked, where `failure_mode` is `close`.
const FAILED: &str = r#"{"error":{"message":"the endpoint picker failed; retry","type":"service_unavailable","param":null,"code":503}}"#;

thread_local! {
    static WORKER: SharedWorker = process().add_worker();
}

/// What Envoy does after a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HookStatus {
    Go,
    Hold,
    /// The client got a reply of the module, so nothing goes on.
    Answered,
}

/// The kind of a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamPhase {
    Request,
    /// The module woke the stream: a held request, or one that was sent.
    Woken,
    Response,
}

pub(crate) struct NativeStream {
    parts: RefCell<DriverAndHost>,
    /// Whether a hook panicked. Then the driver may be half done, and only ends.
    is_broken: Cell<bool>,
}

/// The driver and its host. No method of the host calls the driver, so one cell is enough for both.
struct DriverAndHost {
    driver: RequestDriver<StreamHost>,
    host: StreamHost,
}

/// What Envoy must do at the end of a hook.
#[derive(Debug)]
enum LastCall {
    Nothing,
    Reply(LocalReply),
    Resume,
}

// === impl NativeStream ===

impl NativeStream {
    /// Makes a stream that has just begun, on its worker thread.
    pub(crate) fn new(handle: StreamHandle, module: Arc<ModuleConfig>) -> Self {
        let worker = WORKER.with(Arc::clone);
        Self {
            parts: RefCell::new(DriverAndHost {
                driver: RequestDriver::default(),
                host: StreamHost::new(handle, module, worker),
            }),
            is_broken: Cell::new(false),
        }
    }

    pub(crate) fn request_headers(&self, end: bool) -> HookStatus {
        self.run(|driver, host| {
            let headers = host.handle.headers(HeaderKind::Request);
            host.strip_headers(&headers);
            let status = driver.request_headers(host, headers.iter(), end);
            if driver.awaits_body() && host.body_begins(driver) == BodyRoom::None {
                return host.refuse_body(driver);
            }
            status
        })
    }

    pub(crate) fn request_body(&self, end: bool) -> HookStatus {
        self.run(|driver, host| {
            // A body that passes unread needs no size.
            let size = if driver.holds_request() {
                host.request_size()
            } else {
                0
            };
            // The driver itself refuses a body that exceeds the limit for one body.
            let counts = !end
                && driver.awaits_body()
                && host.body.counts(size)
                && size <= host.module.config.settings.body_limit_bytes;
            if counts && host.body_grows(driver, size) == BodyRoom::None {
                return host.refuse_body(driver);
            }
            let progress = if end {
                BodyProgress::Whole
            } else {
                BodyProgress::Partial
            };
            let status = driver.request_body(host, size, progress);
            if !driver.awaits_body() {
                host.body_ends();
            }
            status
        })
    }

    pub(crate) fn request_trailers(&self) -> HookStatus {
        self.run(|driver, host| {
            host.body_ends();
            driver.request_trailers(host)
        })
    }

    /// Handles the response headers, from an endpoint or from Envoy.
    pub(crate) fn response_headers(&self, end: bool) -> HookStatus {
        self.run(|driver, host| {
            if !driver.is_routed() {
                return FilterStatus::Go;
            }
            let headers = host.handle.headers(HeaderKind::Response);
            // Only responses from upstream have `UPSTREAM_TIME`. If this header is missing, perhaps
            // because Envoy is configured so, Envoy's details tell the origin.
            let from_upstream = headers.iter().any(|(name, _)| name == UPSTREAM_TIME);
            let origin = if from_upstream {
                ResponseOrigin::Upstream
            } else {
                ResponseOrigin::of_details(host.handle.attribute(Attribute::ResponseCodeDetails))
            };
            let upstream = host.handle.attribute(Attribute::UpstreamAddress).to_vec();
            let attempts = host.handle.number(Attribute::UpstreamAttempts);
            let head = ResponseHead {
                origin,
                upstream_address: (!upstream.is_empty()).then_some(upstream.as_slice()),
                attempts: u32::try_from(attempts).unwrap_or(u32::MAX),
                end_of_stream: end,
                ..ResponseHead::read(headers.iter())
            };
            driver.response_headers(host, &head)
        })
    }

    pub(crate) fn response_body(&self, end: bool) -> HookStatus {
        self.run(|driver, host| {
            let size = host.response_size(driver.restores_response());
            driver.response_body(host, size, end)
        })
    }

    pub(crate) fn response_trailers(&self) -> HookStatus {
        self.run(|driver, host| {
            driver.response_trailers(host);
            FilterStatus::Go
        })
    }

    /// Handles an event that the module sent to this stream.
    pub(crate) fn woken(&self, event: u64) {
        let Some(reason) = WakeReason::of_event(event) else {
            return;
        };
        let mut is_held = false;
        let status = self.step(|driver, host| {
            let now = host.process.now();
            match reason {
                WakeReason::Resume => {
                    is_held = driver.waits() || driver.is_queued();
                    if is_held || driver.is_revocable() {
                        return driver.resume(host, now);
                    }
                }
                WakeReason::CheckReply => {
                    if driver.is_silent(now) {
                        driver.check_reply(host, now);
                    }
                }
                WakeReason::RefuseBody => return host.refuse_body(driver),
            }
            FilterStatus::Hold
        });
        match status {
            Some((FilterStatus::Go, LastCall::Nothing)) if is_held => {
                self.last_call(LastCall::Resume);
            }
            Some((_, last_call)) => self.last_call(last_call),
            None => {}
        }
    }

    /// Handles the end of the stream.
    pub(crate) fn end(&self) {
        // A stream gives its place at the endpoint back even after one of its hooks panicked.
        if let Ok(mut parts) = self.parts.try_borrow_mut() {
            let DriverAndHost { driver, host } = &mut *parts;
            host.leave_worker();
            driver.end(host);
            host.reply = None;
        }
    }

    /// Handles the end of the stream in Envoy, which may come without [`Self::end`].
    pub(crate) fn destroy(&self) {
        if let Ok(mut parts) = self.parts.try_borrow_mut() {
            parts.host.handle.detach();
        }
        self.end();
    }

    /// Answers after a panic in a hook: a request as `failure_mode` says, a response not at all.
    pub(crate) fn after_panic(&self, phase: StreamPhase) -> HookStatus {
        let was_broken = self.is_broken.replace(true);
        let (mut handle, mode, is_held) = {
            let Ok(parts) = self.parts.try_borrow() else {
                return HookStatus::Go;
            };
            let mode = parts.host.module.config.settings.failure_mode;
            // A driver that was deciding says that it holds the request.
            let is_held = parts.driver.holds_request() || phase == StreamPhase::Request;
            (parts.host.handle.clone(), mode, is_held)
        };
        if was_broken || phase == StreamPhase::Response || !is_held {
            return HookStatus::Go;
        }
        match mode {
            FailureMode::Open => {
                handle.set_metadata("envoy.lb", "open", "1");
                if phase == StreamPhase::Woken {
                    handle.continue_request();
                }
                HookStatus::Go
            }
            FailureMode::Close => {
                let headers = [
                    ("content-type", "application/json"),
                    (headers::DROPPED_REASON, "rejected-picker-failed"),
                    ("retry-after", "1"),
                ];
                handle.send_response(503, &headers, FAILED.as_bytes());
                HookStatus::Answered
            }
        }
    }

    /// Calls `act`, and then does what Envoy must do last.
    fn run(
        &self,
        act: impl FnOnce(&mut RequestDriver<StreamHost>, &mut StreamHost) -> FilterStatus,
    ) -> HookStatus {
        match self.step(act) {
            None => HookStatus::Go,
            Some((_, LastCall::Reply(reply))) => {
                self.last_call(LastCall::Reply(reply));
                HookStatus::Answered
            }
            Some((FilterStatus::Go, _)) => HookStatus::Go,
            Some((FilterStatus::Hold, _)) => HookStatus::Hold,
        }
    }

    /// Calls `act` with the driver and its host. Returns `None` if the stream is broken, or if
    /// Envoy calls this hook during another one.
    fn step(
        &self,
        act: impl FnOnce(&mut RequestDriver<StreamHost>, &mut StreamHost) -> FilterStatus,
    ) -> Option<(FilterStatus, LastCall)> {
        if self.is_broken.get() {
            return None;
        }
        let mut parts = self.parts.try_borrow_mut().ok()?;
        let DriverAndHost { driver, host } = &mut *parts;
        let status = act(driver, host);
        let last_call = host.reply.take().map_or(LastCall::Nothing, LastCall::Reply);
        Some((status, last_call))
    }

    /// Does what comes last in a hook. Envoy may call other hooks of this stream meanwhile.
    fn last_call(&self, last_call: LastCall) {
        let Ok(parts) = self.parts.try_borrow() else {
            return;
        };
        let mut handle = parts.host.handle.clone();
        drop(parts);
        match last_call {
            LastCall::Nothing => {}
            LastCall::Resume => handle.continue_request(),
            LastCall::Reply(reply) => {
                let headers: Vec<(&str, &str)> = reply
                    .headers
                    .iter()
                    .map(|(name, value)| (*name, value.as_str()))
                    .collect();
                handle.send_response(reply.status, &headers, &reply.body);
            }
        }
    }
}

#[cfg(test)]
mod tests;
