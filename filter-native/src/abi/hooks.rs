//! The functions of the module that Envoy calls. Each catches a panic.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null;
use std::rc::Rc;
use std::sync::Arc;

use super::{
    ABI_VERSION, ConfigHandle, EnvoyBuffer, EnvoyHeader, FUNCTIONS, HeaderList, StreamHandle,
    exported, load,
};
use crate::link::{LinkEvent, StreamEvent};
use crate::logger;
use crate::module_config::ModuleConfig;
use crate::panics::caught;
use crate::process::process;
use crate::stream::{HookStatus, NativeStream, StreamPhase};

/// The results of a hook of headers or trailers: go on, or stop.
const GO: u32 = 0;
const STOP: u32 = 1;
/// The results of a hook of a body besides [`GO`]: stop and buffer the piece, or drop it.
const STOP_AND_BUFFER: u32 = 1;
const STOP_AND_DROP: u32 = 3;

fn headers_status(status: HookStatus) -> u32 {
    match status {
        HookStatus::Go => GO,
        HookStatus::Hold | HookStatus::Answered => STOP,
    }
}

fn body_status(status: HookStatus) -> u32 {
    match status {
        HookStatus::Go => GO,
        HookStatus::Hold => STOP_AND_BUFFER,
        HookStatus::Answered => STOP_AND_DROP,
    }
}

/// Returns the stream of a hook, which lives at least as long as the returned value.
///
/// # Safety
/// `module` is null, or came from `filter_new` and was not passed to `filter_destroy` before the
/// hook began.
unsafe fn stream_of(module: *const c_void) -> Option<Rc<NativeStream>> {
    if module.is_null() {
        return None;
    }
    let stream = module.cast::<NativeStream>();
    // SAFETY: the pointer came from `Rc::into_raw`, and Envoy calls all hooks of a stream on one
    // thread.
    unsafe {
        Rc::increment_strong_count(stream);
        Some(Rc::from_raw(stream))
    }
}

/// Returns the configuration of a hook.
///
/// # Safety
/// `module` came from `config_new` and was not passed to `config_destroy` before.
unsafe fn config_of(module: *const c_void) -> Arc<ModuleConfig> {
    let config = module.cast::<ModuleConfig>();
    // SAFETY: the pointer came from `Arc::into_raw`.
    unsafe {
        Arc::increment_strong_count(config);
        Arc::from_raw(config)
    }
}

/// Calls `act` with the stream of a hook. If `act` panics, the stream answers as configured.
///
/// # Safety
/// As for [`stream_of`].
unsafe fn with_stream(
    module: *const c_void,
    phase: StreamPhase,
    act: impl FnOnce(&NativeStream) -> HookStatus,
) -> HookStatus {
    // SAFETY: the caller promises it.
    let Some(stream) = (unsafe { stream_of(module) }) else {
        return HookStatus::Go;
    };
    let status = caught(|| act(&stream))
        .or_else(|| caught(|| stream.after_panic(phase)))
        .unwrap_or(HookStatus::Go);
    // Envoy may have destroyed the stream during `act`. Then this drops it.
    caught(move || drop(stream));
    status
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_program_init() -> *const c_char {
    let loaded = caught(|| {
        logger::install();
        match load(exported) {
            Ok(functions) => {
                FUNCTIONS.get_or_init(|| functions);
                true
            }
            Err(why) => {
                logger::refuse(&why);
                false
            }
        }
    });
    if loaded == Some(true) {
        CStr::as_ptr(ABI_VERSION)
    } else {
        null()
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_config_new(
    envoy: *mut c_void,
    _name: EnvoyBuffer,
    config: EnvoyBuffer,
) -> *const c_void {
    let Some(functions) = FUNCTIONS.get() else {
        return null();
    };
    let made = caught(|| {
        // SAFETY: Envoy passes its configuration and its bytes. `config_destroy` removes the
        // handle.
        let (handle, json) = unsafe { (ConfigHandle::new(envoy, functions), config.bytes()) };
        process().add_config(handle, json)
    });
    made.flatten()
        .map_or(null(), |module| Arc::into_raw(module).cast())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_config_destroy(module: *const c_void) {
    if module.is_null() {
        return;
    }
    // SAFETY: the pointer came from `config_new`, and Envoy does not use it any more.
    let config = unsafe { Arc::from_raw(module.cast::<ModuleConfig>()) };
    caught(move || process().remove_config(config.number));
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_config_scheduled(
    _envoy: *mut c_void,
    _module: *const c_void,
    _event: u64,
) {
    caught(|| process().on_tick());
}

/// Hands an event of a stream to the daemon to the link.
///
/// # Safety
/// As for [`config_of`].
unsafe fn link_event(module: *const c_void, stream: u64, event: impl FnOnce() -> StreamEvent) {
    if module.is_null() {
        return;
    }
    // SAFETY: the caller promises it.
    let config = unsafe { config_of(module) };
    caught(move || {
        process().on_link_event(LinkEvent {
            config: config.number,
            stream,
            event: event(),
        });
    });
}

/// Copies headers or trailers.
///
/// # Safety
/// Envoy set the array, which is valid during the hook.
unsafe fn copied(headers: *const EnvoyHeader, count: usize) -> HeaderList {
    if headers.is_null() || count == 0 {
        return HeaderList::default();
    }
    // SAFETY: the caller promises it.
    unsafe { HeaderList::copy(std::slice::from_raw_parts(headers, count)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_config_http_stream_headers(
    _envoy: *mut c_void,
    module: *const c_void,
    stream: u64,
    headers: *mut EnvoyHeader,
    count: usize,
    _end: bool,
) {
    // SAFETY: the arguments are Envoy's.
    unsafe {
        link_event(module, stream, || {
            StreamEvent::Headers(copied(headers, count))
        });
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_config_http_stream_data(
    _envoy: *mut c_void,
    module: *const c_void,
    stream: u64,
    data: *const EnvoyBuffer,
    count: usize,
    _end: bool,
) {
    let copy = || {
        let mut bytes = Vec::new();
        if !data.is_null() && count > 0 {
            // SAFETY: Envoy set the array and its buffers, which are valid during the hook.
            unsafe {
                let chunks = std::slice::from_raw_parts(data, count);
                chunks
                    .iter()
                    .for_each(|chunk| bytes.extend_from_slice(chunk.bytes()));
            }
        }
        StreamEvent::Data(bytes)
    };
    // SAFETY: the arguments are Envoy's.
    unsafe {
        link_event(module, stream, copy);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_config_http_stream_trailers(
    _envoy: *mut c_void,
    module: *const c_void,
    stream: u64,
    trailers: *mut EnvoyHeader,
    count: usize,
) {
    // SAFETY: the arguments are Envoy's.
    unsafe {
        link_event(module, stream, || {
            StreamEvent::Trailers(copied(trailers, count))
        });
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_config_http_stream_complete(
    _envoy: *mut c_void,
    module: *const c_void,
    stream: u64,
) {
    // SAFETY: the arguments are Envoy's.
    unsafe {
        link_event(module, stream, || StreamEvent::Ended);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_config_http_stream_reset(
    _envoy: *mut c_void,
    module: *const c_void,
    stream: u64,
    _reason: u32,
) {
    // SAFETY: the arguments are Envoy's.
    unsafe {
        link_event(module, stream, || StreamEvent::Ended);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_new(
    config: *const c_void,
    envoy: *mut c_void,
) -> *const c_void {
    let Some(functions) = FUNCTIONS.get() else {
        return null();
    };
    let made = caught(|| {
        // SAFETY: Envoy passes what `config_new` returned, and a stream. `filter_destroy` detaches
        // the handle.
        let (module, handle) = unsafe { (config_of(config), StreamHandle::new(envoy, functions)) };
        Rc::into_raw(Rc::new(NativeStream::new(handle, module)))
    });
    made.map_or(null(), <*const NativeStream>::cast)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_request_headers(
    _envoy: *mut c_void,
    module: *const c_void,
    end: bool,
) -> u32 {
    // SAFETY: the arguments are Envoy's.
    headers_status(unsafe {
        with_stream(module, StreamPhase::Request, |stream| {
            stream.request_headers(end)
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_request_body(
    _envoy: *mut c_void,
    module: *const c_void,
    end: bool,
) -> u32 {
    // SAFETY: the arguments are Envoy's.
    body_status(unsafe {
        with_stream(module, StreamPhase::Request, |stream| {
            stream.request_body(end)
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_request_trailers(
    _envoy: *mut c_void,
    module: *const c_void,
) -> u32 {
    // SAFETY: the arguments are Envoy's.
    headers_status(unsafe {
        with_stream(module, StreamPhase::Request, NativeStream::request_trailers)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_response_headers(
    _envoy: *mut c_void,
    module: *const c_void,
    end: bool,
) -> u32 {
    // SAFETY: the arguments are Envoy's.
    headers_status(unsafe {
        with_stream(module, StreamPhase::Response, |stream| {
            stream.response_headers(end)
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_response_body(
    _envoy: *mut c_void,
    module: *const c_void,
    end: bool,
) -> u32 {
    // SAFETY: the arguments are Envoy's.
    body_status(unsafe {
        with_stream(module, StreamPhase::Response, |stream| {
            stream.response_body(end)
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_response_trailers(
    _envoy: *mut c_void,
    module: *const c_void,
) -> u32 {
    // SAFETY: the arguments are Envoy's.
    headers_status(unsafe {
        with_stream(
            module,
            StreamPhase::Response,
            NativeStream::response_trailers,
        )
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_scheduled(
    _envoy: *mut c_void,
    module: *const c_void,
    event: u64,
) {
    // SAFETY: the arguments are Envoy's.
    unsafe {
        with_stream(module, StreamPhase::Woken, |stream| {
            stream.woken(event);
            HookStatus::Go
        });
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_stream_complete(
    _envoy: *mut c_void,
    module: *const c_void,
) {
    // SAFETY: the arguments are Envoy's.
    unsafe {
        with_stream(module, StreamPhase::Response, |stream| {
            stream.end();
            HookStatus::Go
        });
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_destroy(module: *const c_void) {
    if module.is_null() {
        return;
    }
    // SAFETY: the pointer came from `filter_new`, and Envoy does not use it any more.
    let stream = unsafe { Rc::from_raw(module.cast::<NativeStream>()) };
    caught(|| stream.destroy());
    caught(move || drop(stream));
}

/// Envoy calls this while the module answers a request itself, so it must not touch the stream.
#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_local_reply(
    _envoy: *mut c_void,
    _module: *const c_void,
    _status: u32,
    _details: EnvoyBuffer,
    _reset: bool,
) -> u32 {
    GO
}

/// The module has no settings for single routes: Envoy then refuses the route configuration.
#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_http_filter_per_route_config_new(
    _name: EnvoyBuffer,
    _config: EnvoyBuffer,
) -> *const c_void {
    null()
}

/// Defines hooks that Envoy needs to find and that the module does not use.
macro_rules! unused_hooks {
    ($($symbol:ident($($argument:ty),*);)+) => {
        $(#[unsafe(no_mangle)]
        unsafe extern "C" fn $symbol($(_: $argument),*) {})+
    };
}

unused_hooks! {
    envoy_dynamic_module_on_http_filter_per_route_config_destroy(*const c_void);
    envoy_dynamic_module_on_http_filter_http_callout_done(*mut c_void, *const c_void, u64, u32, *mut EnvoyHeader, usize, *mut EnvoyBuffer, usize);
    envoy_dynamic_module_on_http_filter_config_http_callout_done(*mut c_void, *const c_void, u64, u32, *mut EnvoyHeader, usize, *mut EnvoyBuffer, usize);
    envoy_dynamic_module_on_http_filter_http_stream_headers(*mut c_void, *const c_void, u64, *mut EnvoyHeader, usize, bool);
    envoy_dynamic_module_on_http_filter_http_stream_data(*mut c_void, *const c_void, u64, *const EnvoyBuffer, usize, bool);
    envoy_dynamic_module_on_http_filter_http_stream_trailers(*mut c_void, *const c_void, u64, *mut EnvoyHeader, usize);
    envoy_dynamic_module_on_http_filter_http_stream_complete(*mut c_void, *const c_void, u64);
    envoy_dynamic_module_on_http_filter_http_stream_reset(*mut c_void, *const c_void, u64, u32);
    envoy_dynamic_module_on_http_filter_downstream_above_write_buffer_high_watermark(*mut c_void, *const c_void);
    envoy_dynamic_module_on_http_filter_downstream_below_write_buffer_low_watermark(*mut c_void, *const c_void);
}
