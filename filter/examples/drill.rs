//! The module with the faults of `switchpoint::drill`, for tests and benchmarks.

// Links the library, whose functions the proxy calls.
use switchpoint as _;
