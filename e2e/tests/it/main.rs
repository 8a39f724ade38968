//! The product on a real Envoy, through the very files that users mount: each test stands up a stack of its own.

mod clients;
mod shipped_config;
mod spine;
