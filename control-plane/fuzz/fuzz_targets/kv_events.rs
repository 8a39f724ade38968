//! Raw bytes as messages of KV events: no panic, and no more blocks than there are bytes.

#![no_main]

use control_plane::kv_events::batch::BatchSummary;
use control_plane::kv_events::follower::EventFollower;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|messages: Vec<(u64, bool, &[u8])>| {
    let mut follower = EventFollower::default();
    let mut bytes = 0;
    for (sequence, is_live, payload) in messages {
        let Ok(batch) = BatchSummary::decode(payload) else {
            continue;
        };
        bytes += payload.len() as u64;
        if is_live {
            follower.arrive(sequence);
        }
        follower.count(sequence, &batch);
        assert!(follower.blocks().iter().sum::<u64>() <= bytes);
    }
});
