//! The root context, which reads the configuration, and passes ticks, wake-ups and the daemon's
//! messages to the VM.

use std::cell::RefCell;
use std::rc::Rc;

use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::ContextType;

use crate::host::{BodyBuffer, Host};
use crate::http::HttpStreamContext;
use crate::resume::{check_streams, release_queued, retry};
use crate::state_link::CallResponse;
use crate::vm::{TICK_MS, VmState};
use front::config::FilterConfig;

/// A root context: one plugin configuration in one VM.
pub struct FilterRoot<H: Host> {
    id: u32,
    host: H,
    vm: Rc<RefCell<VmState<H>>>,
    config: Rc<FilterConfig>,
}

// === impl FilterRoot ===

impl<H: Host> FilterRoot<H> {
    /// Creates a root context without a configuration, which lets every request pass.
    pub fn new(id: u32, host: H, vm: Rc<RefCell<VmState<H>>>) -> Self {
        Self {
            id,
            host,
            vm,
            config: Rc::default(),
        }
    }

    /// Reads a configuration of `size` bytes. The error is a text for the log.
    fn configure(&mut self, size: usize) -> Result<(), String> {
        self.host.follow_log_level();
        let bytes = self
            .host
            .buffer(BodyBuffer::Configuration, 0, size)
            .map_err(|e| format!("the configuration could not be read: {e}"))?;
        let config = FilterConfig::parse(&bytes).map_err(|e| e.to_string())?;
        self.host
            .tick_period(TICK_MS)
            .map_err(|e| format!("the proxy gave no timer: {e}"))?;
        self.config = Rc::new(config);
        self.vm
            .borrow_mut()
            .configure(self.id, Rc::clone(&self.config));
        Ok(())
    }
}

impl<H: Host> Context for FilterRoot<H> {
    fn on_done(&mut self) -> bool {
        self.vm.borrow_mut().remove_root(self.id);
        true
    }

    fn on_grpc_stream_message(&mut self, stream: u32, size: usize) {
        let due = self
            .vm
            .borrow_mut()
            .on_stream_message(self.id, stream, size);
        retry(&self.vm, due);
        release_queued(&self.vm);
    }

    fn on_grpc_stream_close(&mut self, stream: u32, code: u32) {
        let why = format!(
            "the stream ended: {} (gRPC status {code})",
            self.host.stream_status()
        );
        self.vm.borrow_mut().on_stream_closed(self.id, stream, &why);
    }

    fn on_http_call_response(&mut self, call: u32, headers: usize, size: usize, _trailers: usize) {
        let answer = if headers == 0 {
            CallResponse::default()
        } else {
            CallResponse::read(&self.host, size)
        };
        let due = self.vm.borrow_mut().on_call_response(self.id, call, answer);
        retry(&self.vm, due);
        release_queued(&self.vm);
    }
}

impl<H: Host> RootContext for FilterRoot<H> {
    fn on_configure(&mut self, size: usize) -> bool {
        let outcome = self.configure(size);
        if let Err(why) = &outcome {
            log::error!("configuration refused: {why}");
        }
        outcome.is_ok()
    }

    fn on_tick(&mut self) {
        let due = self.vm.borrow_mut().tick(self.id);
        retry(&self.vm, due);
        check_streams(&self.vm, self.host.now());
        release_queued(&self.vm);
    }

    fn on_queue_ready(&mut self, queue: u32) {
        let due = self.vm.borrow_mut().on_wake(queue);
        retry(&self.vm, due);
        check_streams(&self.vm, self.host.now());
        release_queued(&self.vm);
    }

    fn create_http_context(&self, id: u32) -> Option<Box<dyn HttpContext>> {
        Some(Box::new(HttpStreamContext::new(
            id,
            self.host.clone(),
            Rc::clone(&self.vm),
            Rc::clone(&self.config),
        )))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}
