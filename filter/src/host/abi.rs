//! The proxy-wasm ABI: every call to the ABI is in this file.
#![expect(unsafe_code, reason = "the proxy-wasm ABI is C")]

use std::ptr::null_mut;

use super::{
    BodyBuffer, HeaderMap, Host, HostError, MetricKind, Result, SharedValue, Timestamp,
    WriteCondition, percent_decoded,
};

/// A token that the host never gives to a write, because the host's counter of tokens does not get
/// so far. A write with this token succeeds only if the key has no value.
const ABSENT: u32 = u32::MAX;
/// The id of WASI's monotonic clock.
const MONOTONIC: u32 = 1;
const REALTIME: u32 = 0;
/// The `grpc_status` of a reply that is not gRPC.
const NOT_GRPC: i32 = -1;
/// The number that selects the request in `proxy_continue_stream`.
const REQUEST: u32 = 0;

#[link(wasm_import_module = "env")]
unsafe extern "C" {
    fn proxy_log(level: u32, text: *const u8, size: usize) -> u32;
    fn proxy_get_log_level(level: *mut u32) -> u32;
    fn proxy_get_shared_data(
        key: *const u8,
        key_size: usize,
        data: *mut *mut u8,
        size: *mut usize,
        cas: *mut u32,
    ) -> u32;
    fn proxy_set_shared_data(
        key: *const u8,
        key_size: usize,
        data: *const u8,
        size: usize,
        cas: u32,
    ) -> u32;
    fn proxy_register_shared_queue(name: *const u8, size: usize, queue: *mut u32) -> u32;
    fn proxy_enqueue_shared_queue(queue: u32, data: *const u8, size: usize) -> u32;
    fn proxy_dequeue_shared_queue(queue: u32, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_grpc_send(stream: u32, data: *const u8, size: usize, end: u32) -> u32;
    fn proxy_grpc_cancel(stream: u32) -> u32;
    fn proxy_get_status(code: *mut u32, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_get_property(
        path: *const u8,
        path_size: usize,
        data: *mut *mut u8,
        size: *mut usize,
    ) -> u32;
    fn proxy_set_property(
        path: *const u8,
        path_size: usize,
        value: *const u8,
        value_size: usize,
    ) -> u32;
    fn proxy_get_header_map_pairs(map: u32, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_replace_header_map_value(
        map: u32,
        key: *const u8,
        key_size: usize,
        data: *const u8,
        size: usize,
    ) -> u32;
    fn proxy_remove_header_map_value(map: u32, key: *const u8, key_size: usize) -> u32;
    fn proxy_get_buffer_bytes(
        buffer: u32,
        start: usize,
        max_size: usize,
        data: *mut *mut u8,
        size: *mut usize,
    ) -> u32;
    fn proxy_set_buffer_bytes(
        buffer: u32,
        start: usize,
        size: usize,
        data: *const u8,
        data_size: usize,
    ) -> u32;
    #[rustfmt::skip]
    fn proxy_send_local_response(
        status: u32,
        details: *const u8,
        details_size: usize,
        body: *const u8,
        body_size: usize,
        headers: *const u8,
        headers_size: usize,
        grpc_status: i32,
    ) -> u32;
    fn proxy_continue_stream(side: u32) -> u32;
    fn proxy_set_effective_context(context: u32) -> u32;
    fn proxy_set_tick_period_milliseconds(period_ms: u32) -> u32;
    fn proxy_define_metric(kind: u32, name: *const u8, size: usize, metric: *mut u32) -> u32;
    fn proxy_increment_metric(metric: u32, offset: i64) -> u32;
    fn proxy_record_metric(metric: u32, value: u64) -> u32;
}

#[link(wasm_import_module = "wasi_snapshot_preview1")]
unsafe extern "C" {
    fn clock_time_get(clock: u32, precision: u64, time: *mut u64) -> u16;
    fn random_get(data: *mut u8, size: usize) -> u16;
}

/// The real host: the proxy that runs the module.
#[derive(Clone, Copy, Debug)]
pub struct ProxyWasm;

struct Logger;

/// Sends `log` and panics to the host's log.
pub fn install_logger() {
    std::panic::set_hook(Box::new(|info| {
        write_log(log::Level::Error, &format!("panic: {info}"));
    }));
    // The result is ignored, because the logger is already set when this function is called again
    // in one VM.
    let _ = log::set_logger(&Logger);
    // The level is fixed at first, because the host's log level cannot be read yet: while a module
    // starts, all but a few host calls trap.
    log::set_max_level(log::LevelFilter::Info);
}

fn write_log(level: log::Level, text: &str) {
    // `log` has levels from Error = 1 to Trace = 5, while the host has trace = 0 to error = 4.
    let level = 5_u32.saturating_sub(level as u32);
    // SAFETY: the pointer and size are those of `text`. The result is ignored, so a line that the
    // host refuses is lost.
    let _ = unsafe { proxy_log(level, text.as_ptr(), text.len()) };
}

fn check(status: u32) -> Result<()> {
    if status == 0 {
        Ok(())
    } else {
        Err(HostError(status))
    }
}

fn number(call: impl FnOnce(*mut u32) -> u32) -> Result<u32> {
    let mut number = 0;
    check(call(&raw mut number)).map(|()| number)
}

/// Makes a call that returns bytes. The host writes the bytes to memory that it got from the
/// module's allocator.
fn bytes(call: impl FnOnce(*mut *mut u8, *mut usize) -> u32) -> Result<Vec<u8>> {
    let mut data = null_mut();
    let mut size = 0;
    check(call(&raw mut data, &raw mut size))?;
    if data.is_null() {
        return Ok(Vec::new());
    }
    // SAFETY: the host got `data` from `proxy_on_memory_allocate(size)`, which is a `Vec` of
    // capacity and length `size`, filled it, and keeps no pointer to it.
    Ok(unsafe { Vec::from_raw_parts(data, size, size) })
}

// SAFETY of every call below: pointers and sizes belong to live slices or to locals, and the host
// uses them only during the call.
impl Host for ProxyWasm {
    fn now(&self) -> Timestamp {
        let mut time = 0;
        let _ = unsafe { clock_time_get(MONOTONIC, 1, &raw mut time) };
        Timestamp(time)
    }

    fn unix_ms(&self) -> u64 {
        let mut time = 0;
        let _ = unsafe { clock_time_get(REALTIME, 1, &raw mut time) };
        time / 1_000_000
    }

    fn entropy(&self) -> u64 {
        let mut bits = [0_u8; 8];
        let _ = unsafe { random_get(bits.as_mut_ptr(), bits.len()) };
        u64::from_le_bytes(bits)
    }

    fn shared(&self, key: &str) -> Result<Option<SharedValue>> {
        let mut token = 0;
        let read = bytes(|data, size| unsafe {
            proxy_get_shared_data(key.as_ptr(), key.len(), data, size, &raw mut token)
        });
        match read {
            Ok(bytes) => Ok(Some(SharedValue { bytes, token })),
            Err(HostError::NOT_FOUND) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn share(&self, key: &str, value: &[u8], expect: WriteCondition) -> Result<()> {
        #[cfg(feature = "drill")]
        crate::drill::wrote(self, key);
        let cas = match expect {
            WriteCondition::Any => 0,
            WriteCondition::Absent => ABSENT,
            WriteCondition::Token(token) => token,
        };
        check(unsafe {
            proxy_set_shared_data(key.as_ptr(), key.len(), value.as_ptr(), value.len(), cas)
        })
    }

    fn queue_register(&self, name: &str) -> Result<u32> {
        number(|queue| unsafe { proxy_register_shared_queue(name.as_ptr(), name.len(), queue) })
    }

    fn queue_push(&self, queue: u32, item: &[u8]) -> Result<()> {
        check(unsafe { proxy_enqueue_shared_queue(queue, item.as_ptr(), item.len()) })
    }

    fn queue_pop(&self, queue: u32) -> Result<Option<Vec<u8>>> {
        const EMPTY: HostError = HostError(7);
        match bytes(|data, size| unsafe { proxy_dequeue_shared_queue(queue, data, size) }) {
            Ok(item) => Ok(Some(item)),
            Err(EMPTY) => Ok(None),
            Err(error) => Err(error),
        }
    }

    // Calls the SDK, which registers the stream for its dispatcher. The SDK panics on the status
    // for a bad argument. The host returns that status only for a `GrpcService` that it cannot use,
    // and `state_link/connection.rs` builds only a usable `GrpcService`.
    fn stream_open(&self, upstream: &str, service: &str, method: &str) -> Result<u32> {
        proxy_wasm::hostcalls::open_grpc_stream(upstream, service, method, Vec::new())
            .map_err(|status| HostError(status as u32))
    }

    fn stream_send(&self, stream: u32, message: &[u8]) -> Result<()> {
        check(unsafe { proxy_grpc_send(stream, message.as_ptr(), message.len(), 0) })
    }

    fn stream_cancel(&self, stream: u32) -> Result<()> {
        check(unsafe { proxy_grpc_cancel(stream) })
    }

    // Calls the SDK, which registers the call for its dispatcher. The SDK panics only on statuses
    // that the host never returns for this call.
    fn call(
        &self,
        cluster: &str,
        headers: &[(&str, &str)],
        body: &[u8],
        timeout_ms: u64,
    ) -> Result<u32> {
        let timeout = std::time::Duration::from_millis(timeout_ms);
        let call = proxy_wasm::hostcalls::dispatch_http_call(
            cluster,
            headers.to_vec(),
            Some(body),
            Vec::new(),
            timeout,
        );
        call.map_err(|status| HostError(status as u32))
    }

    fn stream_status(&self) -> String {
        let mut code = 0;
        let text = bytes(|data, size| unsafe { proxy_get_status(&raw mut code, data, size) })
            .unwrap_or_default();
        percent_decoded(&text)
    }

    fn property(&self, path: &[&str]) -> Result<Option<Vec<u8>>> {
        let path = path.join("\0");
        match bytes(|data, size| unsafe {
            proxy_get_property(path.as_ptr(), path.len(), data, size)
        }) {
            Ok(value) => Ok(Some(value)),
            Err(HostError::NOT_FOUND) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn property_set(&self, name: &str, value: &[u8]) -> Result<()> {
        check(unsafe { proxy_set_property(name.as_ptr(), name.len(), value.as_ptr(), value.len()) })
    }

    fn headers(&self, map: HeaderMap) -> Result<Vec<u8>> {
        bytes(|data, size| unsafe { proxy_get_header_map_pairs(map as u32, data, size) })
    }

    fn header_set(&self, map: HeaderMap, name: &str, value: &[u8]) -> Result<()> {
        check(unsafe {
            proxy_replace_header_map_value(
                map as u32,
                name.as_ptr(),
                name.len(),
                value.as_ptr(),
                value.len(),
            )
        })
    }

    fn header_remove(&self, map: HeaderMap, name: &str) -> Result<()> {
        check(unsafe { proxy_remove_header_map_value(map as u32, name.as_ptr(), name.len()) })
    }

    fn buffer(&self, buffer: BodyBuffer, start: usize, size: usize) -> Result<Vec<u8>> {
        match bytes(|data, read| unsafe {
            proxy_get_buffer_bytes(buffer as u32, start, size, data, read)
        }) {
            // The host returns this status for a body without bytes.
            Err(HostError::NOT_FOUND) => Ok(Vec::new()),
            read => read,
        }
    }

    fn buffer_replace(&self, buffer: BodyBuffer, size: usize, bytes: &[u8]) -> Result<()> {
        check(unsafe {
            proxy_set_buffer_bytes(buffer as u32, 0, size, bytes.as_ptr(), bytes.len())
        })
    }

    fn reply(&self, status: u16, headers: &[u8], body: &[u8]) -> Result<()> {
        let no_details = std::ptr::null();
        let h = headers;
        let status = u32::from(status);
        check(unsafe {
            proxy_send_local_response(
                status,
                no_details,
                0,
                body.as_ptr(),
                body.len(),
                h.as_ptr(),
                h.len(),
                NOT_GRPC,
            )
        })
    }

    fn resume_request(&self) -> Result<()> {
        check(unsafe { proxy_continue_stream(REQUEST) })
    }

    fn focus(&self, context: u32) -> Result<()> {
        check(unsafe { proxy_set_effective_context(context) })
    }

    fn tick_period(&self, period_ms: u32) -> Result<()> {
        check(unsafe { proxy_set_tick_period_milliseconds(period_ms) })
    }

    fn metric(&self, kind: MetricKind, name: &str) -> Result<u32> {
        number(|metric| unsafe {
            proxy_define_metric(kind as u32, name.as_ptr(), name.len(), metric)
        })
    }

    fn metric_add(&self, metric: u32, amount: i64) -> Result<()> {
        check(unsafe { proxy_increment_metric(metric, amount) })
    }

    fn metric_record(&self, metric: u32, value: u64) -> Result<()> {
        check(unsafe { proxy_record_metric(metric, value) })
    }

    fn follow_log_level(&self) {
        use log::LevelFilter::{Debug, Error, Info, Off, Trace, Warn};
        let level = number(|level| unsafe { proxy_get_log_level(level) }).unwrap_or(2);
        let filters = [Trace, Debug, Info, Warn, Error];
        let filter = usize::try_from(level)
            .ok()
            .and_then(|level| filters.get(level).copied())
            .unwrap_or(Off);
        log::set_max_level(filter);
    }
}

impl log::Log for Logger {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            write_log(record.level(), &record.args().to_string());
        }
    }

    fn flush(&self) {}
}
