//! One HTTP stream of the proxy: each callback is one call into [`Hosted`] and one translation to an [`Action`].

mod hosted;
mod stage;

use std::cell::RefCell;
use std::rc::Rc;

pub use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;

use self::hosted::Hosted;
use self::stage::Flow;
use crate::config::FilterConfig;
use crate::host::Host;
use crate::state::Vm;

/// The context the proxy knows. A parked request's VM holds what is in it, too.
pub struct Http<H: Host>(Rc<Hosted<H>>);

// === impl Http ===

impl<H: Host> Http<H> {
    /// A stream that has only just begun.
    pub fn new(id: u32, host: H, vm: Rc<RefCell<Vm<H>>>, config: Rc<FilterConfig>) -> Self {
        Self(Hosted::new(id, host, vm, config))
    }
}

impl From<Flow> for Action {
    fn from(flow: Flow) -> Self {
        match flow {
            Flow::Go => Self::Continue,
            Flow::Hold => Self::Pause,
        }
    }
}

impl<H: Host> Context for Http<H> {
    fn on_done(&mut self) -> bool {
        self.0.end();
        true
    }
}

impl<H: Host> HttpContext for Http<H> {
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
