//! Arbitrary bytes are refused or accepted, and never cause a panic.

use proptest::prelude::*;
use prost::Message;
use proto::wire_limits::{WireMessage, check};
use proto::{InvalidState, PoolState, encode_metrics, encode_pool_update, state};

use crate::strategies::{any_pool, one_profile};

fn take(bytes: &[u8]) {
    if let Ok(message) = state::DaemonMessage::decode(bytes) {
        match message.message {
            Some(state::daemon_message::Message::PoolUpdate(pool_update)) => {
                drop(proto::pool_update(pool_update));
            }
            Some(state::daemon_message::Message::Metrics(metrics)) => {
                let pool_update = state::PoolUpdate {
                    version: metrics.pool_update,
                    pipeline: Some(one_profile()),
                    ..Default::default()
                };
                if let Ok(pool_update) = proto::pool_update(pool_update) {
                    drop(proto::metrics(&metrics, &pool_update.snapshot));
                }
            }
            _ => {}
        }
    }
    if state::DaemonMessage::decode(bytes).is_ok() {
        let counted = check(WireMessage::DaemonMessage, bytes);
        assert_ne!(counted, Err(InvalidState::Malformed), "it can be decoded");
    }
    if state::ProxyMessage::decode(bytes).is_ok() {
        let counted = check(WireMessage::ProxyMessage, bytes);
        assert_ne!(counted, Err(InvalidState::Malformed), "it can be decoded");
    }
    drop(state::VmCounters::decode(bytes));
}

proptest! {
    #[test]
    fn random(bytes: Vec<u8>) {
        take(&bytes);
    }

    #[test]
    fn nearly_right(pool in any_pool(), at: prop::sample::Index, byte: u8, cut: prop::sample::Index) {
        let pool_update = encode_pool_update(PoolState {
            pool: "p",
            version: pool.version,
            endpoints: &pool.endpoints,
            pipeline: &pool.pipeline,
            objects: &pool.objects,
            hash_secret: 1,
            staleness_max_ms: 1,
        });
        let metrics = encode_metrics("p", pool.version, 1, &pool.metrics);
        for message in [state::daemon_message::Message::PoolUpdate(pool_update), state::daemon_message::Message::Metrics(metrics)] {
            let mut bytes = state::DaemonMessage { message: Some(message) }.encode_to_vec();
            let length = bytes.len();
            prop_assert_eq!(check(WireMessage::DaemonMessage, &bytes), Ok(()));
            bytes[at.index(length)] = byte;
            take(&bytes);
            take(&bytes[..cut.index(length)]);
        }
    }
}
