//! The callbacks of one HTTP stream. Each callback calls one method of [`HttpStream`], and
//! translates its result to an [`Action`].

mod body_room;
mod filter_host;
mod http_stream;

use std::cell::RefCell;
use std::rc::Rc;

use exchange::FilterStatus;
pub use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;

use self::http_stream::HttpStream;
use crate::host::Host;
use crate::vm::VmState;
use front::config::FilterConfig;

/// The context of the proxy. While the request is parked, the VM also refers to this stream.
pub struct HttpStreamContext<H: Host>(Rc<HttpStream<H>>);

// === impl HttpStreamContext ===

impl<H: Host> HttpStreamContext<H> {
    /// Makes the context of a stream that has just begun.
    pub fn new(id: u32, host: H, vm: Rc<RefCell<VmState<H>>>, config: Rc<FilterConfig>) -> Self {
        Self(HttpStream::new(id, host, vm, config))
    }
}

fn action(status: FilterStatus) -> Action {
    match status {
        FilterStatus::Go => Action::Continue,
        FilterStatus::Hold => Action::Pause,
    }
}

impl<H: Host> Context for HttpStreamContext<H> {
    fn on_done(&mut self) -> bool {
        self.0.end();
        true
    }
}

impl<H: Host> HttpContext for HttpStreamContext<H> {
    fn on_http_request_headers(&mut self, _: usize, end_of_stream: bool) -> Action {
        action(self.0.request_headers(end_of_stream))
    }

    fn on_http_request_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        action(self.0.request_body(size, end_of_stream))
    }

    fn on_http_request_trailers(&mut self, _: usize) -> Action {
        action(self.0.request_trailers())
    }

    fn on_http_response_headers(&mut self, _: usize, end_of_stream: bool) -> Action {
        action(self.0.response_headers(end_of_stream))
    }

    fn on_http_response_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        action(self.0.response_body(size, end_of_stream))
    }

    fn on_http_response_trailers(&mut self, _: usize) -> Action {
        self.0.response_trailers();
        Action::Continue
    }
}

#[cfg(test)]
mod tests;
