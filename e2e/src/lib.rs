//! Support that only these tests need; everything else is in `testbed`.

pub mod books;
pub mod explain;
pub mod manifests;
pub mod slo;
