//! Hostile or broken peers on the ext_proc port that send well-formed gRPC. The daemon is a
//! separate process, so that the system reports its memory and CPU. In each test a well-behaved
//! neighbour on another connection must still get its picks.

mod floods;
mod kit;
mod memory;
mod messages;
