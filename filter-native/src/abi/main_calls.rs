//! Safe calls to Envoy that are about no stream: those of a configuration, which belong to the main
//! thread, and the log.

use std::ffi::c_void;
use std::ptr::null_mut;

use front::metrics::MetricKind;

use super::calls::module_headers;
use super::{EnvoyFunctions, FUNCTIONS, ModuleBuffer};

/// One filter configuration of Envoy.
pub(crate) struct ConfigHandle {
    raw: *mut c_void,
    envoy: &'static EnvoyFunctions,
}

/// Sends events to Envoy's main thread, from any thread.
pub(crate) struct ConfigScheduler {
    raw: *mut c_void,
    envoy: &'static EnvoyFunctions,
}

// SAFETY: Envoy's functions for a configuration that are called here (metrics, streams to clusters)
// run on the main thread only; other threads only move the handle and drop it, which calls nothing.
unsafe impl Send for ConfigHandle {}
// SAFETY: Envoy's header says that events may be sent from any thread. Deleting a scheduler frees
// its memory, which any thread may do.
unsafe impl Send for ConfigScheduler {}

// === impl ConfigScheduler ===

impl ConfigScheduler {
    /// Sends an event to the main thread.
    pub(crate) fn send(&self, event: u64) {
        // SAFETY: the scheduler is deleted only when this value is dropped.
        unsafe {
            (self.envoy.config_scheduler_commit)(self.raw, event);
        }
    }
}

impl Drop for ConfigScheduler {
    fn drop(&mut self) {
        // SAFETY: nothing uses the scheduler any more.
        unsafe {
            (self.envoy.config_scheduler_delete)(self.raw);
        }
    }
}

// === impl ConfigHandle ===

impl ConfigHandle {
    /// Makes the handle of a configuration.
    ///
    /// # Safety
    /// `raw` is a filter configuration of Envoy. The handle is not used after Envoy destroys the
    /// configuration, and, except for its scheduler, only on the main thread.
    pub(super) unsafe fn new(raw: *mut c_void, envoy: &'static EnvoyFunctions) -> Self {
        Self { raw, envoy }
    }

    /// Defines a metric without labels; only while the configuration is created. `None` if Envoy
    /// refuses.
    pub(crate) fn define(&self, kind: MetricKind, name: &str) -> Option<usize> {
        let define = match kind {
            MetricKind::Counter => self.envoy.define_counter,
            MetricKind::Gauge => self.envoy.define_gauge,
            MetricKind::Histogram => self.envoy.define_histogram,
        };
        let name = ModuleBuffer::lent(name.as_bytes());
        let mut id = 0;
        // SAFETY: `raw` is a configuration of Envoy, and all buffers live during the call.
        let result = unsafe { define(self.raw, name, null_mut(), 0, &raw mut id) };
        (result == 0).then_some(id)
    }

    pub(crate) fn add(&self, counter: usize, amount: u64) {
        // SAFETY: `raw` is a configuration of Envoy. The counter has no labels.
        unsafe { (self.envoy.config_increment_counter)(self.raw, counter, null_mut(), 0, amount) };
    }

    pub(crate) fn set(&self, gauge: usize, value: u64) {
        // SAFETY: as in `add`.
        unsafe { (self.envoy.config_set_gauge)(self.raw, gauge, null_mut(), 0, value) };
    }

    pub(crate) fn record(&self, histogram: usize, value: u64) {
        // SAFETY: as in `add`.
        unsafe { (self.envoy.config_record_histogram)(self.raw, histogram, null_mut(), 0, value) };
    }

    pub(crate) fn scheduler(&self) -> Option<ConfigScheduler> {
        // SAFETY: `raw` is a configuration of Envoy.
        let scheduler = unsafe { (self.envoy.config_scheduler_new)(self.raw) };
        (!scheduler.is_null()).then_some(ConfigScheduler {
            raw: scheduler,
            envoy: self.envoy,
        })
    }

    /// Begins a request to a cluster, without a time limit and without an end. Returns the number
    /// of the stream.
    ///
    /// # Errors
    /// Returns the reason, for the log.
    pub(crate) fn start_stream(
        &self,
        cluster: &str,
        headers: &[(&str, &str)],
    ) -> Result<u64, &'static str> {
        let mut headers = module_headers(headers);
        let mut stream = 0;
        // SAFETY: `raw` is a configuration of Envoy, and all buffers live during the call.
        let result = unsafe {
            (self.envoy.start_http_stream)(
                self.raw,
                &raw mut stream,
                ModuleBuffer::lent(cluster.as_bytes()),
                headers.as_mut_ptr(),
                headers.len(),
                ModuleBuffer::NONE,
                false,
                0,
            )
        };
        match result {
            0 => Ok(stream),
            2 => Err("Envoy has no cluster of this name"),
            4 => Err("Envoy has no connection to it"),
            _ => Err("Envoy refuses the stream"),
        }
    }

    /// Sends bytes on a stream of this configuration. Returns whether the stream is open.
    pub(crate) fn send(&self, stream: u64, bytes: &[u8]) -> bool {
        // SAFETY: `raw` is a configuration of Envoy, and the buffer lives during the call.
        unsafe { (self.envoy.stream_send_data)(self.raw, stream, ModuleBuffer::lent(bytes), false) }
    }

    /// Ends a stream of this configuration.
    pub(crate) fn reset(&self, stream: u64) {
        // SAFETY: `raw` is a configuration of Envoy.
        unsafe {
            (self.envoy.reset_http_stream)(self.raw, stream);
        }
    }
}

/// Whether Envoy only checks its configuration and will not run (`--mode validate`). Only the main
/// thread may ask.
pub(crate) fn is_validating() -> bool {
    // SAFETY: the function has no arguments.
    FUNCTIONS
        .get()
        .is_some_and(|envoy| unsafe { (envoy.is_validation_mode)() })
}

/// The number of a level in Envoy: from trace = 0 to error = 4. `log` has Error = 1 to Trace = 5.
fn level_number(level: log::Level) -> u32 {
    5_u32.saturating_sub(level as u32)
}

/// Whether Envoy's log has lines of this level.
pub(crate) fn is_logged(level: log::Level) -> bool {
    // SAFETY: the function may be called from any thread.
    FUNCTIONS
        .get()
        .is_some_and(|envoy| unsafe { (envoy.log_enabled)(level_number(level)) })
}

pub(crate) fn write_log(level: log::Level, text: &str) {
    if let Some(envoy) = FUNCTIONS.get() {
        // SAFETY: the buffer lives during the call.
        unsafe {
            (envoy.log)(level_number(level), ModuleBuffer::lent(text.as_bytes()));
        }
    }
}
