//! A fake Envoy in memory, for tests, also under a sanitizer. It has one entry for each function
//! that the module calls. Envoy always validates here, so no thread ticks and no link opens.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use super::{
    EnvoyBuffer, EnvoyFunctions, EnvoyHeader, FUNCTIONS, ModuleBuffer, ModuleHeader, OF_ENVOY_1_40,
    load,
};
use crate::abi::{ConfigHandle, StreamHandle};
use crate::module_config::ModuleConfig;
use crate::panics::lock;
use crate::process::process;
use crate::stream::NativeStream;

type Bytes = Vec<u8>;

/// A stream of the fake Envoy. The module holds its address, so it stays in its box.
#[derive(Default)]
pub(crate) struct FakeStream {
    /// The headers by number of the map: request 0, response 2.
    pub(crate) headers: RefCell<BTreeMap<u32, Vec<(Bytes, Bytes)>>>,
    /// The parts of bodies by their numbers in `BodyPart`.
    pub(crate) bodies: RefCell<BTreeMap<u32, Bytes>>,
    /// The metadata of the stream (0) and of the route (1), by namespace and key.
    pub(crate) metadata: RefCell<BTreeMap<(u32, Bytes, Bytes), Bytes>>,
    pub(crate) filter_state: RefCell<BTreeMap<Bytes, Bytes>>,
    pub(crate) attributes: RefCell<BTreeMap<u32, Bytes>>,
    pub(crate) cluster: RefCell<Bytes>,
    /// The status and the body of the reply that the module sent.
    pub(crate) reply: RefCell<Option<(u32, Bytes)>>,
    /// How often the module resumed the request.
    pub(crate) resumed: Cell<u32>,
    /// The events that were sent to the stream.
    pub(crate) events: Arc<Mutex<Vec<u64>>>,
}

/// A stream and the module's part of it.
pub(crate) struct FakeExchange {
    pub(crate) envoy: Box<FakeStream>,
    pub(crate) module: Rc<NativeStream>,
}

// === impl FakeExchange ===

impl FakeExchange {
    pub(crate) fn new(config: &Arc<ModuleConfig>) -> Self {
        let envoy = Box::<FakeStream>::default();
        let raw = (&raw const *envoy).cast_mut().cast::<c_void>();
        // SAFETY: the stream lives in its box until this value is dropped, which detaches it.
        let handle = unsafe { StreamHandle::new(raw, functions()) };
        Self {
            envoy,
            module: Rc::new(NativeStream::new(handle, Arc::clone(config))),
        }
    }

    /// Returns the value of a request header at the end.
    pub(crate) fn request_header(&self, name: &str) -> Option<String> {
        let headers = self.envoy.headers.borrow();
        let found = headers
            .get(&0)?
            .iter()
            .find(|(known, _)| known == name.as_bytes())?;
        Some(String::from_utf8_lossy(&found.1).into_owned())
    }

    /// Returns a value of the stream's metadata.
    pub(crate) fn metadata(&self, namespace: &str, key: &str) -> Option<String> {
        let metadata = self.envoy.metadata.borrow();
        let at = (0, Bytes::from(namespace), Bytes::from(key));
        let value = metadata.get(&at)?;
        Some(String::from_utf8_lossy(value).into_owned())
    }

    /// Takes the events that were sent to the stream, and delivers them.
    pub(crate) fn deliver_events(&self) -> Vec<u64> {
        let events = std::mem::take(&mut *lock(&self.envoy.events));
        events.iter().for_each(|event| self.module.woken(*event));
        events
    }
}

impl Drop for FakeExchange {
    fn drop(&mut self) {
        self.module.destroy();
    }
}

/// Returns the fake's functions.
pub(crate) fn functions() -> &'static EnvoyFunctions {
    FUNCTIONS.get_or_init(|| load(function).unwrap())
}

/// Makes a configuration as Envoy does.
pub(crate) fn config(json: &str) -> Option<Arc<ModuleConfig>> {
    // SAFETY: the fake's functions of a configuration do not read the pointer.
    let handle = unsafe { ConfigHandle::new(null_mut(), functions()) };
    process().add_config(handle, json.as_bytes())
}

/// Returns the fake's function of this name; null if it has none.
pub(crate) fn function(symbol: &CStr) -> *mut c_void {
    let name = symbol.to_bytes();
    let short = name
        .strip_prefix(b"envoy_dynamic_module_callback_")
        .unwrap_or(name);
    match short {
        b"log" => log as *mut c_void,
        b"log_enabled" => log_enabled as *mut c_void,
        b"is_validation_mode" => is_validation_mode as *mut c_void,
        b"http_filter_config_define_counter"
        | b"http_filter_config_define_gauge"
        | b"http_filter_config_define_histogram" => define as *mut c_void,
        b"http_filter_config_increment_counter"
        | b"http_filter_config_set_gauge"
        | b"http_filter_config_record_histogram_value"
        | b"http_filter_record_histogram_value" => measure as *mut c_void,
        b"http_get_headers_size" => get_headers_size as *mut c_void,
        b"http_get_headers" => get_headers as *mut c_void,
        b"http_set_header" => set_header as *mut c_void,
        b"http_send_response" => send_response as *mut c_void,
        b"http_get_body_size" => get_body_size as *mut c_void,
        b"http_get_body_chunks" => get_body_chunks as *mut c_void,
        b"http_get_body_chunks_size" => get_body_chunks_size as *mut c_void,
        b"http_append_body" => append_body as *mut c_void,
        b"http_drain_body" => drain_body as *mut c_void,
        b"http_received_buffered_request_body" => is_received_buffered as *mut c_void,
        b"http_set_dynamic_metadata_string" => set_metadata as *mut c_void,
        b"http_get_metadata_string" => get_metadata as *mut c_void,
        b"http_get_metadata_keys_count" => keys_count as *mut c_void,
        b"http_get_metadata_keys" => keys as *mut c_void,
        b"http_get_metadata_list_size" => list_size as *mut c_void,
        b"http_get_metadata_list_string" => list_string as *mut c_void,
        b"http_set_filter_state_bytes" => set_filter_state as *mut c_void,
        b"http_filter_scheduler_new" => scheduler_new as *mut c_void,
        b"http_filter_scheduler_commit" | b"http_filter_config_scheduler_commit" => {
            scheduler_commit as *mut c_void
        }
        b"http_filter_scheduler_delete" | b"http_filter_config_scheduler_delete" => {
            scheduler_delete as *mut c_void
        }
        b"http_filter_config_scheduler_new" => config_scheduler_new as *mut c_void,
        b"http_filter_get_attribute_string" => get_attribute as *mut c_void,
        b"http_filter_get_attribute_int" => get_number as *mut c_void,
        b"http_filter_config_start_http_stream" => start_stream as *mut c_void,
        b"http_filter_config_reset_http_stream" => reset_stream as *mut c_void,
        b"http_filter_config_stream_send_data" => stream_send as *mut c_void,
        b"http_filter_continue_decoding" => continue_decoding as *mut c_void,
        b"http_get_cluster_name" => cluster_name as *mut c_void,
        _ if symbol == OF_ENVOY_1_40 => log as *mut c_void, // never called
        _ => null_mut(),
    }
}

/// Returns a stream of the fake.
///
/// # Safety
/// `raw` came from a [`FakeExchange`] that lives.
unsafe fn stream<'a>(raw: *mut c_void) -> &'a FakeStream {
    // SAFETY: the caller promises it.
    unsafe { &*raw.cast::<FakeStream>() }
}

impl ModuleBuffer {
    /// Copies the bytes.
    ///
    /// # Safety
    /// The module set the buffer for this call.
    unsafe fn copied(self) -> Bytes {
        if self.start.is_null() {
            return Bytes::new();
        }
        // SAFETY: the caller promises it.
        unsafe { std::slice::from_raw_parts(self.start, self.length).to_vec() }
    }
}

fn lend(bytes: &[u8]) -> EnvoyBuffer {
    EnvoyBuffer {
        start: bytes.as_ptr(),
        length: bytes.len(),
    }
}

unsafe extern "C" fn log(_: u32, _: ModuleBuffer) {}

unsafe extern "C" fn log_enabled(_: u32) -> bool {
    true
}

unsafe extern "C" fn is_validation_mode() -> bool {
    true
}

unsafe extern "C" fn define(
    _: *mut c_void,
    _: ModuleBuffer,
    _: *mut ModuleBuffer,
    _: usize,
    id: *mut usize,
) -> u32 {
    // SAFETY: the module passes a place for the number.
    unsafe { *id = 1 };
    0
}

unsafe extern "C" fn measure(
    _: *mut c_void,
    _: usize,
    _: *mut ModuleBuffer,
    _: usize,
    _: u64,
) -> u32 {
    0
}

unsafe extern "C" fn get_headers_size(raw: *mut c_void, map: u32) -> usize {
    // SAFETY: `raw` is a stream of the fake.
    let headers = unsafe { stream(raw) }.headers.borrow();
    headers.get(&map).map_or(0, Vec::len)
}

unsafe extern "C" fn get_headers(raw: *mut c_void, map: u32, out: *mut EnvoyHeader) -> bool {
    // SAFETY: `raw` is a stream of the fake, and `out` has room for all headers.
    unsafe {
        let headers = stream(raw).headers.borrow();
        for (index, (name, value)) in headers.get(&map).into_iter().flatten().enumerate() {
            *out.add(index) = EnvoyHeader {
                name: lend(name),
                value: lend(value),
            };
        }
    }
    true
}

unsafe extern "C" fn set_header(
    raw: *mut c_void,
    map: u32,
    name: ModuleBuffer,
    value: ModuleBuffer,
) -> bool {
    // SAFETY: `raw` is a stream of the fake, and the module set the buffers.
    unsafe {
        let mut headers = stream(raw).headers.borrow_mut();
        let headers = headers.entry(map).or_default();
        let name = name.copied();
        headers.retain(|(known, _)| *known != name);
        if !value.start.is_null() {
            headers.push((name, value.copied()));
        }
    }
    true
}

unsafe extern "C" fn send_response(
    raw: *mut c_void,
    status: u32,
    _: *mut ModuleHeader,
    _: usize,
    body: ModuleBuffer,
    _: ModuleBuffer,
) {
    // SAFETY: `raw` is a stream of the fake, and the module set the buffer.
    unsafe { *stream(raw).reply.borrow_mut() = Some((status, body.copied())) };
}

unsafe extern "C" fn get_body_size(raw: *mut c_void, part: u32) -> usize {
    // SAFETY: `raw` is a stream of the fake.
    let bodies = unsafe { stream(raw) }.bodies.borrow();
    bodies.get(&part).map_or(0, Vec::len)
}

unsafe extern "C" fn get_body_chunks_size(raw: *mut c_void, part: u32) -> usize {
    // SAFETY: `raw` is a stream of the fake.
    usize::from(unsafe { get_body_size(raw, part) } > 0)
}

unsafe extern "C" fn get_body_chunks(raw: *mut c_void, part: u32, out: *mut EnvoyBuffer) -> bool {
    // SAFETY: `raw` is a stream of the fake, and `out` has room for a chunk if there is one.
    unsafe {
        let bodies = stream(raw).bodies.borrow();
        if let Some(body) = bodies.get(&part).filter(|body| !body.is_empty()) {
            *out = lend(body);
        }
    }
    true
}

unsafe extern "C" fn append_body(raw: *mut c_void, part: u32, bytes: ModuleBuffer) -> bool {
    // SAFETY: `raw` is a stream of the fake, and the module set the buffer.
    unsafe {
        let mut bodies = stream(raw).bodies.borrow_mut();
        bodies.entry(part).or_default().extend(bytes.copied());
    }
    true
}

unsafe extern "C" fn drain_body(raw: *mut c_void, part: u32, size: usize) -> bool {
    // SAFETY: `raw` is a stream of the fake.
    let mut bodies = unsafe { stream(raw) }.bodies.borrow_mut();
    let body = bodies.entry(part).or_default();
    body.drain(..size.min(body.len()));
    true
}

unsafe extern "C" fn is_received_buffered(_: *mut c_void) -> bool {
    false
}

unsafe extern "C" fn set_metadata(
    raw: *mut c_void,
    namespace: ModuleBuffer,
    key: ModuleBuffer,
    value: ModuleBuffer,
) {
    // SAFETY: `raw` is a stream of the fake, and the module set the buffers.
    unsafe {
        let key = (0, namespace.copied(), key.copied());
        stream(raw)
            .metadata
            .borrow_mut()
            .insert(key, value.copied());
    }
}

unsafe extern "C" fn get_metadata(
    raw: *mut c_void,
    source: u32,
    namespace: ModuleBuffer,
    key: ModuleBuffer,
    out: *mut EnvoyBuffer,
) -> bool {
    // SAFETY: `raw` is a stream of the fake, and the module set the buffers and the place.
    unsafe {
        let key = (source, namespace.copied(), key.copied());
        let metadata = stream(raw).metadata.borrow();
        let found = metadata.get(&key);
        if let Some(value) = found {
            *out = lend(value);
        }
        found.is_some()
    }
}

unsafe extern "C" fn keys_count(raw: *mut c_void, source: u32, namespace: ModuleBuffer) -> usize {
    // SAFETY: `raw` is a stream of the fake, and the module set the buffer.
    unsafe {
        let namespace = namespace.copied();
        let metadata = stream(raw).metadata.borrow();
        let keys = metadata.keys();
        keys.filter(|(from, of, _)| (*from, of) == (source, &namespace))
            .count()
    }
}

unsafe extern "C" fn keys(
    raw: *mut c_void,
    source: u32,
    namespace: ModuleBuffer,
    out: *mut EnvoyBuffer,
) -> bool {
    // SAFETY: `raw` is a stream of the fake, the module set the buffer, and `out` has room.
    unsafe {
        let namespace = namespace.copied();
        let metadata = stream(raw).metadata.borrow();
        let keys = metadata.keys();
        let keys = keys.filter(|(from, of, _)| (*from, of) == (source, &namespace));
        for (index, (_, _, key)) in keys.enumerate() {
            *out.add(index) = lend(key);
        }
    }
    true
}

unsafe extern "C" fn list_size(
    _: *mut c_void,
    _: u32,
    _: ModuleBuffer,
    _: ModuleBuffer,
    _: *mut usize,
) -> bool {
    false
}

unsafe extern "C" fn list_string(
    _: *mut c_void,
    _: u32,
    _: ModuleBuffer,
    _: ModuleBuffer,
    _: usize,
    _: *mut EnvoyBuffer,
) -> bool {
    false
}

unsafe extern "C" fn set_filter_state(
    raw: *mut c_void,
    key: ModuleBuffer,
    value: ModuleBuffer,
) -> bool {
    // SAFETY: `raw` is a stream of the fake, and the module set the buffers.
    unsafe {
        let mut state = stream(raw).filter_state.borrow_mut();
        state.insert(key.copied(), value.copied());
    }
    true
}

unsafe extern "C" fn scheduler_new(raw: *mut c_void) -> *mut c_void {
    // SAFETY: `raw` is a stream of the fake.
    let events = Arc::clone(&unsafe { stream(raw) }.events);
    Box::into_raw(Box::new(events)).cast()
}

unsafe extern "C" fn config_scheduler_new(_: *mut c_void) -> *mut c_void {
    Box::into_raw(Box::<Arc<Mutex<Vec<u64>>>>::default()).cast()
}

unsafe extern "C" fn scheduler_commit(raw: *mut c_void, event: u64) {
    // SAFETY: `raw` came from one of the functions above.
    lock(unsafe { &*raw.cast::<Arc<Mutex<Vec<u64>>>>() }).push(event);
}

unsafe extern "C" fn scheduler_delete(raw: *mut c_void) {
    // SAFETY: `raw` came from one of the functions above, and is not used any more.
    drop(unsafe { Box::from_raw(raw.cast::<Arc<Mutex<Vec<u64>>>>()) });
}

unsafe extern "C" fn get_attribute(raw: *mut c_void, id: u32, out: *mut EnvoyBuffer) -> bool {
    // SAFETY: `raw` is a stream of the fake, and the module passes a place.
    unsafe {
        let attributes = stream(raw).attributes.borrow();
        let found = attributes.get(&id);
        if let Some(value) = found {
            *out = lend(value);
        }
        found.is_some()
    }
}

unsafe extern "C" fn get_number(_: *mut c_void, _: u32, out: *mut u64) -> bool {
    // SAFETY: the module passes a place.
    unsafe { *out = 1 };
    true
}

unsafe extern "C" fn start_stream(
    _: *mut c_void,
    _: *mut u64,
    _: ModuleBuffer,
    _: *mut ModuleHeader,
    _: usize,
    _: ModuleBuffer,
    _: bool,
    _: u64,
) -> u32 {
    2
}

unsafe extern "C" fn reset_stream(_: *mut c_void, _: u64) {}

unsafe extern "C" fn stream_send(_: *mut c_void, _: u64, _: ModuleBuffer, _: bool) -> bool {
    false
}

unsafe extern "C" fn continue_decoding(raw: *mut c_void) {
    // SAFETY: `raw` is a stream of the fake.
    let resumed = &unsafe { stream(raw) }.resumed;
    resumed.set(resumed.get() + 1);
}

unsafe extern "C" fn cluster_name(raw: *mut c_void, out: *mut EnvoyBuffer) -> bool {
    // SAFETY: `raw` is a stream of the fake, and the module passes a place.
    unsafe { *out = lend(&stream(raw).cluster.borrow()) };
    true
}
