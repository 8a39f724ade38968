//! Any sequence of messages of several peers on the state port: no panic, and another peer still
//! gets what it needs.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/it/hostile/sequence.rs"]
mod sequence;

fuzz_target!(|data: &[u8]| sequence::play(data));
