//! The cells of the race: which sessions arrive at which time at which engines.
//!
//! A cell is a workload, a load and a set of engines. The race plays a cell with real routers in
//! real time, and the simulator plays it in virtual time. Both get the same sessions for the same
//! seed. This crate uses no clock and no socket.

mod cell;
mod published;
mod session;
mod workload;

pub use cell::{Cell, CellChange, CellEngine, CellEngines, CellSource, EngineSpeed};
pub use published::PublishedShape;
pub use session::{Message, RaceSession, Role, SessionClass, Turn};
pub use workload::RaceWorkload;
