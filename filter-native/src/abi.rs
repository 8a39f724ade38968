//! Envoy's ABI for dynamic modules, and all unsafe code of the crate.
//!
//! The declarations are written by hand from `source/extensions/dynamic_modules/abi/abi.h` of
//! Envoy, at version v0.1.0 of the ABI. Envoy 1.40 has v0.2.0. By the rules of that file, v0.2.0
//! has every function of v0.1.0. A function that is only in v0.2.0 is never called, because its
//! signature is not in that file.
//!
//! Envoy loads any module and looks functions up only when the module calls them, so a missing one
//! would crash Envoy. So the module looks all of them up at load ([`load`]), and refuses to load if
//! one is missing.
#![expect(unsafe_code, reason = "Envoy's ABI is C")]

mod calls;
#[cfg(test)]
pub(crate) mod fake;
mod hooks;
mod main_calls;

use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

pub(crate) use calls::{
    Attribute, BodyPart, HeaderKind, HeaderList, MetadataOwner, StreamHandle, StreamScheduler,
};
pub(crate) use main_calls::{ConfigHandle, ConfigScheduler, is_logged, is_validating, write_log};

/// The version of the ABI that the module reports. Envoy 1.40 logs a warning about any other.
const ABI_VERSION: &CStr = c"v0.2.0";

/// A function that came with v0.2.0 of the ABI. The module does not call it. If it is missing, this
/// Envoy is older than 1.40.
const OF_ENVOY_1_40: &CStr = c"envoy_dynamic_module_callback_http_get_timing_info";

/// Envoy's functions, once the module is loaded.
static FUNCTIONS: OnceLock<EnvoyFunctions> = OnceLock::new();

/// Bytes of Envoy, which are valid until the hook ends or the module changes what they are from.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct EnvoyBuffer {
    start: *const u8,
    length: usize,
}

/// Bytes of the module, which Envoy reads during a call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ModuleBuffer {
    start: *const u8,
    length: usize,
}

/// A header of Envoy, with the validity of [`EnvoyBuffer`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct EnvoyHeader {
    name: EnvoyBuffer,
    value: EnvoyBuffer,
}

/// A header of the module, which Envoy reads during a call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ModuleHeader {
    name: ModuleBuffer,
    value: ModuleBuffer,
}

macro_rules! envoy_functions {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)+) => {
        /// The functions of Envoy that the module calls.
        pub(crate) struct EnvoyFunctions {
            $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)+
        }

        impl EnvoyFunctions {
            /// Finds all functions. The error is the name of the first one that is missing.
            fn find(find: impl Fn(&CStr) -> *mut c_void) -> Result<Self, &'static CStr> {
                Ok(Self {
                    $($name: {
                        let function = find($symbol);
                        if function.is_null() {
                            return Err($symbol);
                        }
                        // SAFETY: Envoy exports a function under this name, with the signature that
                        // its header has (see the head of this file).
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) $(-> $result)?,
                            >(function)
                        }
                    },)+
                })
            }
        }
    };
}

// Pointers to streams, configurations and schedulers of Envoy are `*mut c_void`. C enumerations are
// `u32`.
envoy_functions! {
    log = c"envoy_dynamic_module_callback_log": fn(u32, ModuleBuffer);
    log_enabled = c"envoy_dynamic_module_callback_log_enabled": fn(u32) -> bool;
    is_validation_mode = c"envoy_dynamic_module_callback_is_validation_mode": fn() -> bool;
    define_counter = c"envoy_dynamic_module_callback_http_filter_config_define_counter":
        fn(*mut c_void, ModuleBuffer, *mut ModuleBuffer, usize, *mut usize) -> u32;
    define_gauge = c"envoy_dynamic_module_callback_http_filter_config_define_gauge":
        fn(*mut c_void, ModuleBuffer, *mut ModuleBuffer, usize, *mut usize) -> u32;
    define_histogram = c"envoy_dynamic_module_callback_http_filter_config_define_histogram":
        fn(*mut c_void, ModuleBuffer, *mut ModuleBuffer, usize, *mut usize) -> u32;
    config_increment_counter =
        c"envoy_dynamic_module_callback_http_filter_config_increment_counter":
        fn(*mut c_void, usize, *mut ModuleBuffer, usize, u64) -> u32;
    config_set_gauge = c"envoy_dynamic_module_callback_http_filter_config_set_gauge":
        fn(*mut c_void, usize, *mut ModuleBuffer, usize, u64) -> u32;
    config_record_histogram =
        c"envoy_dynamic_module_callback_http_filter_config_record_histogram_value":
        fn(*mut c_void, usize, *mut ModuleBuffer, usize, u64) -> u32;
    record_histogram = c"envoy_dynamic_module_callback_http_filter_record_histogram_value":
        fn(*mut c_void, usize, *mut ModuleBuffer, usize, u64) -> u32;
    get_headers_size = c"envoy_dynamic_module_callback_http_get_headers_size":
        fn(*mut c_void, u32) -> usize;
    get_headers = c"envoy_dynamic_module_callback_http_get_headers":
        fn(*mut c_void, u32, *mut EnvoyHeader) -> bool;
    set_header = c"envoy_dynamic_module_callback_http_set_header":
        fn(*mut c_void, u32, ModuleBuffer, ModuleBuffer) -> bool;
    send_response = c"envoy_dynamic_module_callback_http_send_response":
        fn(*mut c_void, u32, *mut ModuleHeader, usize, ModuleBuffer, ModuleBuffer);
    get_body_size = c"envoy_dynamic_module_callback_http_get_body_size":
        fn(*mut c_void, u32) -> usize;
    get_body_chunks = c"envoy_dynamic_module_callback_http_get_body_chunks":
        fn(*mut c_void, u32, *mut EnvoyBuffer) -> bool;
    get_body_chunks_size = c"envoy_dynamic_module_callback_http_get_body_chunks_size":
        fn(*mut c_void, u32) -> usize;
    append_body = c"envoy_dynamic_module_callback_http_append_body":
        fn(*mut c_void, u32, ModuleBuffer) -> bool;
    drain_body = c"envoy_dynamic_module_callback_http_drain_body":
        fn(*mut c_void, u32, usize) -> bool;
    received_buffered_request_body =
        c"envoy_dynamic_module_callback_http_received_buffered_request_body":
        fn(*mut c_void) -> bool;
    set_metadata_string = c"envoy_dynamic_module_callback_http_set_dynamic_metadata_string":
        fn(*mut c_void, ModuleBuffer, ModuleBuffer, ModuleBuffer);
    get_metadata_string = c"envoy_dynamic_module_callback_http_get_metadata_string":
        fn(*mut c_void, u32, ModuleBuffer, ModuleBuffer, *mut EnvoyBuffer) -> bool;
    get_metadata_keys_count = c"envoy_dynamic_module_callback_http_get_metadata_keys_count":
        fn(*mut c_void, u32, ModuleBuffer) -> usize;
    get_metadata_keys = c"envoy_dynamic_module_callback_http_get_metadata_keys":
        fn(*mut c_void, u32, ModuleBuffer, *mut EnvoyBuffer) -> bool;
    get_metadata_list_size = c"envoy_dynamic_module_callback_http_get_metadata_list_size":
        fn(*mut c_void, u32, ModuleBuffer, ModuleBuffer, *mut usize) -> bool;
    get_metadata_list_string = c"envoy_dynamic_module_callback_http_get_metadata_list_string":
        fn(*mut c_void, u32, ModuleBuffer, ModuleBuffer, usize, *mut EnvoyBuffer) -> bool;
    set_filter_state_bytes = c"envoy_dynamic_module_callback_http_set_filter_state_bytes":
        fn(*mut c_void, ModuleBuffer, ModuleBuffer) -> bool;
    scheduler_new = c"envoy_dynamic_module_callback_http_filter_scheduler_new":
        fn(*mut c_void) -> *mut c_void;
    scheduler_commit = c"envoy_dynamic_module_callback_http_filter_scheduler_commit":
        fn(*mut c_void, u64);
    scheduler_delete = c"envoy_dynamic_module_callback_http_filter_scheduler_delete":
        fn(*mut c_void);
    config_scheduler_new = c"envoy_dynamic_module_callback_http_filter_config_scheduler_new":
        fn(*mut c_void) -> *mut c_void;
    config_scheduler_commit =
        c"envoy_dynamic_module_callback_http_filter_config_scheduler_commit":
        fn(*mut c_void, u64);
    config_scheduler_delete =
        c"envoy_dynamic_module_callback_http_filter_config_scheduler_delete":
        fn(*mut c_void);
    get_attribute_string = c"envoy_dynamic_module_callback_http_filter_get_attribute_string":
        fn(*mut c_void, u32, *mut EnvoyBuffer) -> bool;
    get_attribute_int = c"envoy_dynamic_module_callback_http_filter_get_attribute_int":
        fn(*mut c_void, u32, *mut u64) -> bool;
    start_http_stream = c"envoy_dynamic_module_callback_http_filter_config_start_http_stream":
        fn(
            *mut c_void,
            *mut u64,
            ModuleBuffer,
            *mut ModuleHeader,
            usize,
            ModuleBuffer,
            bool,
            u64
        ) -> u32;
    reset_http_stream = c"envoy_dynamic_module_callback_http_filter_config_reset_http_stream":
        fn(*mut c_void, u64);
    stream_send_data = c"envoy_dynamic_module_callback_http_filter_config_stream_send_data":
        fn(*mut c_void, u64, ModuleBuffer, bool) -> bool;
    continue_decoding = c"envoy_dynamic_module_callback_http_filter_continue_decoding":
        fn(*mut c_void);
    get_cluster_name = c"envoy_dynamic_module_callback_http_get_cluster_name":
        fn(*mut c_void, *mut EnvoyBuffer) -> bool;
}

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, symbol: *const c_char) -> *mut c_void;
}

/// Returns the address of a symbol that this process exports; null if there is none.
fn exported(symbol: &CStr) -> *mut c_void {
    // SAFETY: a null handle (RTLD_DEFAULT) searches the process, and `symbol` ends with a zero.
    unsafe { dlsym(std::ptr::null_mut(), symbol.as_ptr()) }
}

/// Looks up Envoy's functions by `find`.
///
/// # Errors
/// Returns a text for the log if this Envoy cannot run the module.
fn load(find: impl Fn(&CStr) -> *mut c_void) -> Result<EnvoyFunctions, String> {
    let refused = |missing: &CStr| {
        format!(
            "the native picker is for Envoy 1.40 and is not loaded, because this Envoy lacks {}",
            missing.to_string_lossy()
        )
    };
    if find(OF_ENVOY_1_40).is_null() {
        return Err(refused(OF_ENVOY_1_40));
    }
    EnvoyFunctions::find(find).map_err(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_envoy_that_lacks_a_function_is_refused_with_its_name() {
        assert!(load(fake::function).is_ok());
        let without = |name: &'static CStr| {
            load(move |symbol| {
                if symbol == name {
                    std::ptr::null_mut()
                } else {
                    fake::function(symbol)
                }
            })
            .err()
            .unwrap_or_default()
        };
        assert!(without(OF_ENVOY_1_40).contains("http_get_timing_info"));
        let name = c"envoy_dynamic_module_callback_http_get_cluster_name";
        assert!(without(name).ends_with("http_get_cluster_name"));
    }
}
