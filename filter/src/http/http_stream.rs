//! One HTTP stream of the proxy: a [`RequestDriver`] and its host.
//!
//! The driver decides what is done, and when (see [`exchange::driver`]). The host is in
//! [`super::filter_host`].

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use exchange::bodies::{AwaitedBody, BodyRoom};
use exchange::{
    BodyProgress, FilterStatus, RequestDriver, ResponseHead, ResponseOrigin, Timestamp,
};

use super::filter_host::FilterHost;
use crate::host::{HeaderMap, Host};
use crate::pairs::HeaderPairs;
use crate::vm::VmState;
use crate::vm::parked_request::ParkedRequest;
use front::config::FilterConfig;

/// A header that Envoy sets only on responses from upstream, not on responses that Envoy or a
/// filter makes.
const UPSTREAM_TIME: &[u8] = b"x-envoy-upstream-service-time";

pub struct HttpStream<H: Host>(RefCell<StreamParts<H>>);

/// The driver and its host. No method of the host calls the driver, so one cell is enough for both.
struct StreamParts<H: Host> {
    driver: RequestDriver<FilterHost<H>>,
    host: FilterHost<H>,
}

// === impl HttpStream ===

impl<H: Host> HttpStream<H> {
    /// Makes a stream for the proxy's context `id`.
    pub fn new(
        id: u32,
        proxy: H,
        vm: Rc<RefCell<VmState<H>>>,
        config: Rc<FilterConfig>,
    ) -> Rc<Self> {
        let metrics = vm.borrow().metrics();
        Rc::new_cyclic(|stream: &Weak<Self>| {
            let host = FilterHost {
                id,
                proxy,
                vm,
                metrics,
                config,
                stream: stream.clone(),
                response_bytes: 0,
                is_ending: false,
                headers_went_on: false,
                body: AwaitedBody::None,
                kept: None,
                watch: None,
            };
            Self(RefCell::new(StreamParts {
                driver: RequestDriver::default(),
                host,
            }))
        })
    }

    pub fn request_headers(&self, end_of_stream: bool) -> FilterStatus {
        let StreamParts { driver, host } = &mut *self.0.borrow_mut();
        host.vm.borrow_mut().mark_serving();
        let bytes = host
            .proxy
            .headers(HeaderMap::Request)
            .unwrap_or_else(|e| host.failed("request headers", e));
        host.strip_headers(&bytes);
        let status = driver.request_headers(host, HeaderPairs::new(&bytes), end_of_stream);
        if !driver.awaits_body() {
            return status;
        }
        if host.body_begins(driver) == BodyRoom::None {
            return host.refuse_body(driver);
        }
        if host.config.hold_headers {
            status
        } else {
            host.let_headers_go()
        }
    }

    /// Handles a piece of the request body. So far, the body has `size` bytes.
    pub fn request_body(&self, size: usize, end_of_stream: bool) -> FilterStatus {
        let StreamParts { driver, host } = &mut *self.0.borrow_mut();
        // The driver itself refuses a body that exceeds the limit for one body.
        let counts = !end_of_stream
            && driver.awaits_body()
            && host.body.counts(size)
            && size <= host.config.settings.body_limit_bytes;
        if counts && host.body_grows(driver, size) == BodyRoom::None {
            return host.refuse_body(driver);
        }
        let progress = if end_of_stream {
            BodyProgress::Whole
        } else {
            BodyProgress::Partial
        };
        let status = driver.request_body(host, size, progress);
        if !driver.awaits_body() {
            host.body_ends();
        }
        status
    }

    pub fn request_trailers(&self) -> FilterStatus {
        let StreamParts { driver, host } = &mut *self.0.borrow_mut();
        host.body_ends();
        driver.request_trailers(host)
    }

    /// Handles the response headers, from an endpoint or from the proxy.
    pub fn response_headers(&self, end_of_stream: bool) -> FilterStatus {
        let StreamParts { driver, host } = &mut *self.0.borrow_mut();
        if !driver.is_routed() {
            return FilterStatus::Go;
        }
        let bytes = host
            .proxy
            .headers(HeaderMap::Response)
            .unwrap_or_else(|e| host.failed("response headers", e));
        // Reading a property costs as much as reading all headers, so a property is read only if it
        // can tell more. Only responses from upstream have `UPSTREAM_TIME`. If this header is
        // missing, perhaps because Envoy is configured so, the property is read. If the first
        // endpoint of the list answered, no other endpoint failed before it.
        let from_upstream = HeaderPairs::new(&bytes).any(|(name, _)| name == UPSTREAM_TIME);
        let origin = if from_upstream {
            ResponseOrigin::Upstream
        } else {
            ResponseOrigin::of_details(&host.text(&["response", "code_details"]))
        };
        let upstream = host.text(&["upstream", "address"]);
        let first = origin == ResponseOrigin::Upstream && driver.is_first_endpoint(&upstream);
        let head = ResponseHead {
            origin,
            upstream_address: (!upstream.is_empty()).then_some(upstream.as_slice()),
            attempts: if first { 1 } else { host.attempt_count() },
            end_of_stream,
            ..ResponseHead::read(HeaderPairs::new(&bytes))
        };
        driver.response_headers(host, &head)
    }

    /// Handles a piece of the response body. `size` is the length of the piece or, if the body is
    /// held, of the whole body so far.
    pub fn response_body(&self, size: usize, last: bool) -> FilterStatus {
        let StreamParts { driver, host } = &mut *self.0.borrow_mut();
        host.is_ending = last;
        driver.response_body(host, size, last)
    }

    pub fn response_trailers(&self) {
        let StreamParts { driver, host } = &mut *self.0.borrow_mut();
        driver.response_trailers(host);
    }

    pub fn end(&self) {
        let StreamParts { driver, host } = &mut *self.0.borrow_mut();
        host.body_ends();
        if let Some((client, bytes)) = host.kept.take() {
            host.with_vm(|vm| vm.watched().kept.release(client, bytes));
        }
        if let Some(watch) = host.watch.take() {
            host.with_vm(|vm| vm.watched().forget_reply(watch));
        }
        driver.end(host);
    }
}

impl<H: Host> ParkedRequest for HttpStream<H> {
    fn waits(&self) -> bool {
        self.0.borrow().driver.waits()
    }

    fn retry(&self) {
        let StreamParts { driver, host } = &mut *self.0.borrow_mut();
        let is_held = driver.waits() || driver.is_queued();
        // After the client left, the proxy no longer has the stream.
        if !(is_held || driver.is_revocable()) || host.proxy.focus(host.id).is_err() {
            return;
        }
        let now = host.proxy.now();
        if driver.resume(host, now) == FilterStatus::Go && is_held {
            host.proxy
                .resume_request()
                .unwrap_or_else(|e| host.failed("a resumption", e));
        }
    }

    fn check_reply(&self, now: Timestamp) {
        let StreamParts { driver, host } = &mut *self.0.borrow_mut();
        if driver.is_silent(now) && host.proxy.focus(host.id).is_ok() {
            driver.check_reply(host, now);
        }
    }

    fn refuse_body(&self) {
        let StreamParts { driver, host } = &mut *self.0.borrow_mut();
        if host.proxy.focus(host.id).is_ok() {
            host.refuse_body(driver);
        }
    }
}
