//! One HTTP stream of the proxy: each callback is one call into [`HttpStream`] and one translation to an [`Action`].

mod http_stream;
mod stage;

use std::cell::RefCell;
use std::rc::Rc;

pub use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;

use self::http_stream::HttpStream;
use self::stage::FilterAction;
use crate::config::FilterConfig;
use crate::host::Host;
use crate::state::VmState;

/// The context that the proxy knows. The VM also holds its content while the request is parked.
pub struct HttpStreamContext<H: Host>(Rc<HttpStream<H>>);

// === impl HttpStreamContext ===

impl<H: Host> HttpStreamContext<H> {
    /// A stream that has only just begun.
    pub fn new(id: u32, host: H, vm: Rc<RefCell<VmState<H>>>, config: Rc<FilterConfig>) -> Self {
        Self(HttpStream::new(id, host, vm, config))
    }
}

impl From<FilterAction> for Action {
    fn from(flow: FilterAction) -> Self {
        match flow {
            FilterAction::Go => Self::Continue,
            FilterAction::Hold => Self::Pause,
        }
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
        self.0.request_headers(end_of_stream).into()
    }

    fn on_http_request_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        self.0.request_body(size, end_of_stream).into()
    }

    fn on_http_request_trailers(&mut self, _: usize) -> Action {
        self.0.request_trailers().into()
    }

    fn on_http_response_headers(&mut self, _: usize, end_of_stream: bool) -> Action {
        self.0.response_headers(end_of_stream).into()
    }

    fn on_http_response_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        self.0.response_body(size, end_of_stream).into()
    }

    fn on_http_response_trailers(&mut self, _: usize) -> Action {
        self.0.response_complete();
        Action::Continue
    }
}

#[cfg(test)]
mod tests;
