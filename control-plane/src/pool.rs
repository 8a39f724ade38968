//! One pool: the source of its endpoints, its state, and the event loop that keeps the state
//! current.

mod adoption;
pub mod backends;
mod capabilities;
mod clock;
mod eds_hosts;
pub mod endpoint_source;
pub mod event_loop;
mod member;
pub mod objects;
pub mod pools_file;
pub mod startup;
mod unconfirmed;
mod view;
pub mod watched;
pub mod writer;
