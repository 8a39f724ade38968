//! Peers on the state port that speak the protocol well and mean ill, or are unlucky. What is looked at is another proxy: when it gets its pool update, what it
//! is told of others; and what the daemon costs.

mod counts;
mod eds;
mod flood;
mod identity;
mod kit;
mod rows;
mod sequence;
mod sequences;
mod terms;
