//! Raw bytes as reports and as a snapshot file: counted or refused, never a panic.

#![no_main]

use control_plane::counters::Counters;
use control_plane::persist::Saved;
use libfuzzer_sys::fuzz_target;
use proto::state::Report;
use tokio::time::Instant;

fuzz_target!(|data: &[u8]| {
    let mut counters = Counters::default();
    let (first, second) = data.split_at(data.len() / 2);
    for bytes in [data, first, second] {
        counters.report(1, &Report { counters: vec![bytes.to_vec()] }, Instant::now());
    }
    let _ = counters.totals("", Instant::now());
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = Saved::parse(text);
    }
});
