//! Raw bytes as reports and as a snapshot file: counted or refused, without a panic.

#![no_main]

use control_plane::state::counters::{CounterStore, VmReport};
use control_plane::state::peer::{ProxyProcess, RemoteAddress};
use control_plane::state::snapshot_file::SavedState;
use libfuzzer_sys::fuzz_target;
use prost::Message;
use proto::state::VmCounters;
use tokio::time::Instant;

fuzz_target!(|data: &[u8]| {
    let mut counters = CounterStore::default();
    let peer = ProxyProcess {
        node_id: "n".into(),
        process_id: 1,
        id: 1,
        remote: RemoteAddress::default(),
    };
    let (first, second) = data.split_at(data.len() / 2);
    for bytes in [data, first, second] {
        let report = VmCounters::decode(bytes)
            .map(VmReport::from_vm)
            .into_iter()
            .collect();
        counters.report(&peer, report, Instant::now());
    }
    let _ = counters.totals("", Instant::now());
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = SavedState::parse(text);
    }
});
