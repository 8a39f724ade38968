//! The proxy-wasm filter: a thin adapter of exchange and a replica of the daemon state.
