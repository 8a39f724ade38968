//! One pool: the source of its endpoints, its state, and the event loop that keeps the state
//! current.

mod clock;
pub mod discovery_source;
pub mod event_loop;
mod instance_metadata;
mod member;
pub mod objects;
pub mod pools_file;
pub mod sources;
pub mod startup;
mod view;
pub mod writer;
