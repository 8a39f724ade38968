//! One pool: where its endpoints come from, its state, and the loop that keeps the state current.

pub mod backends;
mod capabilities;
mod eds_hosts;
pub mod endpoint_source;
pub mod event_loop;
mod member;
pub mod objects;
pub mod pools_file;
pub mod startup;
pub mod watched;
pub mod writer;
