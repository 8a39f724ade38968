//! Safe calls to Envoy about one stream.
//!
//! Bytes that Envoy returns are valid until the hook ends or the module changes what they are from.
//! So a method that returns them borrows its handle, and a method that changes something needs the
//! handle mutably.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use super::{EnvoyBuffer, EnvoyFunctions, EnvoyHeader, ModuleBuffer, ModuleHeader};

/// The maximum number of items of a list in metadata that are read: more items cannot name more
/// endpoints of a pool.
const LIST_ITEMS_MAX: usize = 4_096;

/// The response code details of the module's own replies, which `standalone.yaml` leaves unchanged.
/// Without details, Envoy sets `dynamic_module`.
const REPLY_DETAILS: &str = "switchpoint";

/// A stream of Envoy. It is used only in hooks of this stream, on the stream's worker thread: a
/// pointer makes the type neither `Send` nor `Sync`. After [`Self::detach`], calls do nothing and
/// return nothing.
#[derive(Clone)]
pub(crate) struct StreamHandle {
    raw: *mut c_void,
    envoy: &'static EnvoyFunctions,
}

/// Sends events to a stream, from any thread. Envoy drops an event if its stream has ended.
pub(crate) struct StreamScheduler {
    raw: *mut c_void,
    envoy: &'static EnvoyFunctions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeaderKind {
    Request = 0,
    Response = 2,
}

/// A part of a body. A hook of a body gets a received piece; earlier pieces that the module held
/// are buffered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyPart {
    ReceivedRequest = 0,
    BufferedRequest = 1,
    ReceivedResponse = 2,
    BufferedResponse = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MetadataOwner {
    Stream = 0,
    Route = 1,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attribute {
    ResponseCodeDetails = 16,
    UpstreamAddress = 41,
    UpstreamAttempts = 53,
}

/// A copy of all headers of a message.
#[derive(Debug, Default)]
pub(crate) struct HeaderList {
    bytes: Vec<u8>,
    /// The end of each name and of its value in `bytes`.
    ends: Vec<(usize, usize)>,
}

// SAFETY: Envoy's header says that events may be sent from any thread. Deleting a scheduler frees
// its memory, which any thread may do.
unsafe impl Send for StreamScheduler {}

impl EnvoyBuffer {
    pub(super) const NONE: Self = Self {
        start: null(),
        length: 0,
    };

    /// Returns the bytes.
    ///
    /// # Safety
    /// Envoy set this buffer, and the bytes are valid for `'a`.
    pub(super) unsafe fn bytes<'a>(self) -> &'a [u8] {
        if self.start.is_null() || self.length == 0 {
            return &[];
        }
        // SAFETY: the caller promises it.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }
}

impl ModuleBuffer {
    pub(super) const NONE: Self = Self {
        start: null(),
        length: 0,
    };

    pub(super) fn lent(bytes: &[u8]) -> Self {
        Self {
            start: bytes.as_ptr(),
            length: bytes.len(),
        }
    }
}

// === impl HeaderList ===

impl HeaderList {
    pub(crate) fn push(&mut self, name: &[u8], value: &[u8]) {
        self.bytes.extend_from_slice(name);
        let name_end = self.bytes.len();
        self.bytes.extend_from_slice(value);
        self.ends.push((name_end, self.bytes.len()));
    }

    /// Returns the names and values in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> + Clone {
        self.ends.iter().scan(0, |start, &(name, value)| {
            let pair = (self.bytes.get(*start..name)?, self.bytes.get(name..value)?);
            *start = value;
            Some(pair)
        })
    }

    /// Copies headers of Envoy.
    ///
    /// # Safety
    /// Envoy set the headers, and they are still valid.
    pub(super) unsafe fn copy(headers: &[EnvoyHeader]) -> Self {
        let mut list = Self::default();
        for header in headers {
            // SAFETY: the caller promises it.
            unsafe { list.push(header.name.bytes(), header.value.bytes()) };
        }
        list
    }
}

// === impl StreamHandle ===

impl StreamHandle {
    /// Makes the handle of a stream.
    ///
    /// # Safety
    /// `raw` is a stream of Envoy, or null. The handle is detached before the stream is destroyed.
    pub(super) unsafe fn new(raw: *mut c_void, envoy: &'static EnvoyFunctions) -> Self {
        Self { raw, envoy }
    }

    /// Makes all later calls do nothing, because Envoy destroys the stream.
    pub(crate) fn detach(&mut self) {
        self.raw = null_mut();
    }

    fn raw(&self) -> Option<*mut c_void> {
        (!self.raw.is_null()).then_some(self.raw)
    }

    pub(crate) fn headers(&self, kind: HeaderKind) -> HeaderList {
        let Some(raw) = self.raw() else {
            return HeaderList::default();
        };
        // SAFETY: `raw` is a stream of Envoy (see `new`).
        let count = unsafe { (self.envoy.get_headers_size)(raw, kind as u32) };
        let none = EnvoyHeader {
            name: EnvoyBuffer::NONE,
            value: EnvoyBuffer::NONE,
        };
        let mut headers = vec![none; count];
        // SAFETY: `raw` is a stream of Envoy, and `headers` has room for all of its headers.
        if count == 0
            || !unsafe { (self.envoy.get_headers)(raw, kind as u32, headers.as_mut_ptr()) }
        {
            return HeaderList::default();
        }
        // SAFETY: Envoy has just set the headers, and nothing was changed since.
        unsafe { HeaderList::copy(&headers) }
    }

    /// Sets a header in place of all its values. Returns whether Envoy did so.
    pub(crate) fn set_header(&mut self, kind: HeaderKind, name: &str, value: &[u8]) -> bool {
        self.change_header(kind, name.as_bytes(), ModuleBuffer::lent(value))
    }

    /// Removes all values of a header.
    pub(crate) fn remove_header(&mut self, kind: HeaderKind, name: &[u8]) -> bool {
        self.change_header(kind, name, ModuleBuffer::NONE)
    }

    fn change_header(&mut self, kind: HeaderKind, name: &[u8], value: ModuleBuffer) -> bool {
        self.raw().is_some_and(|raw| {
            // SAFETY: `raw` is a stream of Envoy, and the buffers live during the call. A null
            // value removes the header.
            unsafe { (self.envoy.set_header)(raw, kind as u32, ModuleBuffer::lent(name), value) }
        })
    }

    pub(crate) fn body_size(&self, part: BodyPart) -> usize {
        self.raw().map_or(0, |raw| {
            // SAFETY: `raw` is a stream of Envoy.
            unsafe { (self.envoy.get_body_size)(raw, part as u32) }
        })
    }

    /// Returns the pieces of a part of a body, in order.
    pub(crate) fn body(&self, part: BodyPart) -> Vec<&[u8]> {
        let Some(raw) = self.raw() else {
            return Vec::new();
        };
        // SAFETY: `raw` is a stream of Envoy.
        let count = unsafe { (self.envoy.get_body_chunks_size)(raw, part as u32) };
        let mut chunks = vec![EnvoyBuffer::NONE; count];
        // SAFETY: `raw` is a stream of Envoy, and `chunks` has room for all of its chunks.
        if count == 0
            || !unsafe { (self.envoy.get_body_chunks)(raw, part as u32, chunks.as_mut_ptr()) }
        {
            return Vec::new();
        }
        // SAFETY: Envoy has set the chunks, and they are valid while `self` is borrowed.
        chunks
            .into_iter()
            .map(|chunk| unsafe { chunk.bytes() })
            .collect()
    }

    /// Whether the received piece of the request is what another filter buffered, so that both
    /// parts are the same bytes.
    pub(crate) fn is_received_buffered(&self) -> bool {
        self.raw().is_some_and(|raw| {
            // SAFETY: `raw` is a stream of Envoy.
            unsafe { (self.envoy.received_buffered_request_body)(raw) }
        })
    }

    /// Replaces a part of a body. Returns whether Envoy did so.
    pub(crate) fn replace_body(&mut self, part: BodyPart, bytes: &[u8]) -> bool {
        let size = self.body_size(part);
        self.raw().is_some_and(|raw| {
            // SAFETY: `raw` is a stream of Envoy, and the buffer lives during the call.
            unsafe {
                (self.envoy.drain_body)(raw, part as u32, size)
                    && (self.envoy.append_body)(raw, part as u32, ModuleBuffer::lent(bytes))
            }
        })
    }

    /// Sets a text in the stream's metadata.
    pub(crate) fn set_metadata(&mut self, namespace: &str, key: &str, value: &str) {
        if let Some(raw) = self.raw() {
            let [namespace, key, value] =
                [namespace, key, value].map(|text| ModuleBuffer::lent(text.as_bytes()));
            // SAFETY: `raw` is a stream of Envoy, and the buffers live during the call.
            unsafe {
                (self.envoy.set_metadata_string)(raw, namespace, key, value);
            }
        }
    }

    /// Returns a text in metadata.
    pub(crate) fn metadata(
        &self,
        source: MetadataOwner,
        namespace: &str,
        key: &str,
    ) -> Option<&[u8]> {
        let raw = self.raw()?;
        let [namespace, key] = [namespace, key].map(|text| ModuleBuffer::lent(text.as_bytes()));
        let mut value = EnvoyBuffer::NONE;
        // SAFETY: `raw` is a stream of Envoy, and all buffers live during the call. The value is
        // valid while `self` is borrowed.
        unsafe {
            let found = (self.envoy.get_metadata_string)(
                raw,
                source as u32,
                namespace,
                key,
                &raw mut value,
            );
            found.then(|| value.bytes())
        }
    }

    /// Whether the stream's metadata have a value of any kind.
    pub(crate) fn has_metadata(&self, namespace: &str, key: &str) -> bool {
        let Some(raw) = self.raw() else { return false };
        let source = MetadataOwner::Stream as u32;
        let namespace = ModuleBuffer::lent(namespace.as_bytes());
        // SAFETY: `raw` is a stream of Envoy, and the buffer lives during the call.
        let count = unsafe { (self.envoy.get_metadata_keys_count)(raw, source, namespace) };
        let mut keys = vec![EnvoyBuffer::NONE; count];
        // SAFETY: as above, and `keys` has room for all keys. They are valid during this method.
        count > 0
            && unsafe {
                (self.envoy.get_metadata_keys)(raw, source, namespace, keys.as_mut_ptr())
                    && keys.iter().any(|known| known.bytes() == key.as_bytes())
            }
    }

    /// Returns the texts of a list in the stream's metadata; `None` if there is no list. Items of
    /// other kinds are left out.
    pub(crate) fn metadata_list(&self, namespace: &str, key: &str) -> Option<Vec<&[u8]>> {
        let raw = self.raw()?;
        let source = MetadataOwner::Stream as u32;
        let [namespace, key] = [namespace, key].map(|text| ModuleBuffer::lent(text.as_bytes()));
        let mut count = 0;
        // SAFETY: `raw` is a stream of Envoy, and all buffers live during the call.
        if !unsafe {
            (self.envoy.get_metadata_list_size)(raw, source, namespace, key, &raw mut count)
        } {
            return None;
        }
        let item = |index| {
            let mut value = EnvoyBuffer::NONE;
            // SAFETY: as above. The value is valid while `self` is borrowed.
            unsafe {
                let found = (self.envoy.get_metadata_list_string)(
                    raw,
                    source,
                    namespace,
                    key,
                    index,
                    &raw mut value,
                );
                found.then(|| value.bytes())
            }
        };
        Some((0..count.min(LIST_ITEMS_MAX)).filter_map(item).collect())
    }

    /// Sets a filter state, which access logs and spans may show. Returns whether Envoy did so.
    pub(crate) fn set_filter_state(&mut self, key: &str, value: &[u8]) -> bool {
        self.raw().is_some_and(|raw| {
            // SAFETY: `raw` is a stream of Envoy, and the buffers live during the call.
            unsafe {
                (self.envoy.set_filter_state_bytes)(
                    raw,
                    ModuleBuffer::lent(key.as_bytes()),
                    ModuleBuffer::lent(value),
                )
            }
        })
    }

    /// Returns an attribute; empty if the stream does not have it.
    pub(crate) fn attribute(&self, attribute: Attribute) -> &[u8] {
        let mut value = EnvoyBuffer::NONE;
        let found = self.raw().is_some_and(|raw| {
            // SAFETY: `raw` is a stream of Envoy, and `value` lives during the call.
            unsafe { (self.envoy.get_attribute_string)(raw, attribute as u32, &raw mut value) }
        });
        if found {
            // SAFETY: Envoy has set the value, which is valid while `self` is borrowed.
            unsafe { value.bytes() }
        } else {
            &[]
        }
    }

    /// Returns an attribute that is a number; 0 if the stream does not have it.
    pub(crate) fn number(&self, attribute: Attribute) -> u64 {
        let mut value = 0;
        let found = self.raw().is_some_and(|raw| {
            // SAFETY: `raw` is a stream of Envoy, and `value` lives during the call.
            unsafe { (self.envoy.get_attribute_int)(raw, attribute as u32, &raw mut value) }
        });
        if found { value } else { 0 }
    }

    /// Returns the name of the cluster of the request's route.
    pub(crate) fn cluster_name(&self) -> Option<&[u8]> {
        let raw = self.raw()?;
        let mut name = EnvoyBuffer::NONE;
        // SAFETY: `raw` is a stream of Envoy. The name is valid while `self` is borrowed.
        unsafe { (self.envoy.get_cluster_name)(raw, &raw mut name).then(|| name.bytes()) }
    }

    /// Records a value in a histogram of the stream's configuration.
    pub(crate) fn record(&self, histogram: usize, value: u64) {
        if let Some(raw) = self.raw() {
            // SAFETY: `raw` is a stream of Envoy. The histogram has no labels.
            unsafe { (self.envoy.record_histogram)(raw, histogram, null_mut(), 0, value) };
        }
    }

    /// Makes a scheduler for events of this stream.
    pub(crate) fn scheduler(&self) -> Option<StreamScheduler> {
        // SAFETY: the raw pointer is a stream of Envoy.
        let scheduler = unsafe { (self.envoy.scheduler_new)(self.raw()?) };
        (!scheduler.is_null()).then_some(StreamScheduler {
            raw: scheduler,
            envoy: self.envoy,
        })
    }

    /// Answers the request. Envoy may call other hooks of this stream before this returns.
    pub(crate) fn send_response(&mut self, status: u16, headers: &[(&str, &str)], body: &[u8]) {
        let Some(raw) = self.raw() else { return };
        let mut headers = module_headers(headers);
        // SAFETY: `raw` is a stream of Envoy, and all buffers live during the call.
        unsafe {
            (self.envoy.send_response)(
                raw,
                status.into(),
                headers.as_mut_ptr(),
                headers.len(),
                ModuleBuffer::lent(body),
                ModuleBuffer::lent(REPLY_DETAILS.as_bytes()),
            );
        }
    }

    /// Lets a held request go on. Envoy may call other hooks of this stream before this returns.
    pub(crate) fn continue_request(&mut self) {
        if let Some(raw) = self.raw() {
            // SAFETY: `raw` is a stream of Envoy.
            unsafe {
                (self.envoy.continue_decoding)(raw);
            }
        }
    }
}

pub(super) fn module_headers(headers: &[(&str, &str)]) -> Vec<ModuleHeader> {
    headers
        .iter()
        .map(|(name, value)| ModuleHeader {
            name: ModuleBuffer::lent(name.as_bytes()),
            value: ModuleBuffer::lent(value.as_bytes()),
        })
        .collect()
}

// === impl StreamScheduler ===

impl StreamScheduler {
    /// Sends an event to the stream, whose hook runs later on the stream's worker.
    pub(crate) fn send(&self, event: u64) {
        // SAFETY: the scheduler is deleted only when this value is dropped.
        unsafe {
            (self.envoy.scheduler_commit)(self.raw, event);
        }
    }
}

impl Drop for StreamScheduler {
    fn drop(&mut self) {
        // SAFETY: nothing uses the scheduler any more.
        unsafe {
            (self.envoy.scheduler_delete)(self.raw);
        }
    }
}
