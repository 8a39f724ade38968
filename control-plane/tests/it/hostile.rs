//! Hostile or broken peers on the state port that use the protocol correctly. The tests check what
//! another proxy notices (when it gets its pool update, and what it gets from other proxies), and
//! what the daemon's work costs.

mod counts;
mod eds;
mod flood;
mod identity;
mod kit;
mod limits;
mod rows;
mod sequence;
mod sequences;
mod terms;
