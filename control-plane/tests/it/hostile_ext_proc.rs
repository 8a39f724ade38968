//! Peers of the ext_proc port that speak well-formed gRPC and mean harm, or are merely broken. The daemon is a process of its own here, so that its
//! memory and CPU are what the system says they are. Each test has a well-behaved neighbour on another connection whose picks must go on.

mod floods;
mod kit;
mod memory;
mod messages;
