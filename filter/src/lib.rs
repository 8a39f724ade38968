//! The proxy-wasm filter. The filter runs [`exchange`] in a real proxy, and keeps a replica of the
//! daemon's state.
//!
//! `http` passes each callback of a stream to the exchange, and each result back to the proxy.
//! `root` passes ticks, wake-ups and the daemon's messages to `vm`. Only `host` calls the proxy.
//! Endpoints are picked in the crate `scheduler`, not in this crate.
#![deny(
    clippy::indexing_slicing,
    clippy::string_slice,
    clippy::arithmetic_side_effects
)]
#![cfg_attr(
    test,
    allow(
        clippy::arithmetic_side_effects,
        clippy::unwrap_used,
        clippy::indexing_slicing,
        reason = "a test fails by panicking"
    )
)]

#[cfg(target_arch = "wasm32")]
mod allocator;
#[cfg(feature = "drill")]
pub mod drill;
#[cfg(any(test, feature = "fake", feature = "drill"))]
pub mod fake;
pub mod host;
pub mod http;
pub mod metrics;
pub mod pairs;
mod resume;
pub mod root;
pub mod shared_data;
pub mod state_link;
pub mod vm;

pub use front::config;

#[cfg(target_arch = "wasm32")]
mod entry {
    use std::cell::RefCell;
    use std::rc::Rc;

    use crate::allocator::SlabAllocator;
    use crate::host::{ProxyWasm, install_logger};
    use crate::root::FilterRoot;
    use crate::vm::VmState;

    #[global_allocator]
    static ALLOCATOR: SlabAllocator = SlabAllocator::new();

    thread_local! {
        /// The state of the VM. A VM has one thread, and all its root contexts share this state.
        static VM: Rc<RefCell<VmState<ProxyWasm>>> = Rc::new(RefCell::new(VmState::new(ProxyWasm)));
    }

    proxy_wasm::main! {{
        install_logger();
        proxy_wasm::set_root_context(|id| {
            let root = FilterRoot::new(id, ProxyWasm, VM.with(Rc::clone));
            #[cfg(feature = "drill")]
            let root = crate::drill::vm_time::TimedRoot::new(root, ProxyWasm);
            Box::new(root)
        });
    }}
}
