//! The daemon of Switchpoint.
fn main() {}
