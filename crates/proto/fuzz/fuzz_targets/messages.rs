//! Reads raw bytes as a message of either side. The bytes are refused or accepted without a panic,
//! and metrics are applied to the last accepted pool update.

#![no_main]

use libfuzzer_sys::fuzz_target;
use prost::Message;
use proto::state::{self, daemon_message};

fuzz_target!(|data: &[u8]| {
    let (first, second) = data.split_at(data.len() / 2);
    let mut snapshot = None;
    // The body of a call: messages that are taken from it and put back give the same bytes.
    let mut rest = data;
    let mut again = Vec::new();
    while let Some((message, after)) = proto::frames::take(rest) {
        proto::frames::push(&mut again, message);
        rest = after;
    }
    assert_eq!(again, data[..data.len() - rest.len()]);
    for bytes in [data, first, second] {
        let _ = state::ProxyMessage::decode(bytes);
        let _ = state::VmCounters::decode(bytes);
        match state::DaemonMessage::decode(bytes)
            .ok()
            .and_then(|m| m.message)
        {
            Some(daemon_message::Message::PoolUpdate(pool_update)) => {
                snapshot = proto::pool_update(pool_update)
                    .ok()
                    .map(|r| r.snapshot)
                    .or(snapshot)
            }
            Some(daemon_message::Message::Metrics(metrics)) => {
                if let Some(onto) = &snapshot
                    && let Ok(measured) = proto::metrics(&metrics, onto)
                {
                    assert_eq!(measured.metrics().len(), onto.endpoints().len());
                }
            }
            Some(daemon_message::Message::LearnedModels(learned)) => {
                if let Ok(learned) = proto::learned(learned) {
                    let again =
                        proto::encode_learned(&learned).expect("no larger than what was taken");
                    assert_eq!(proto::learned(again), Ok(learned));
                }
            }
            _ => {}
        }
    }
});
