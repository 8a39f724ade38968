//! Bytes that schema 3 wrote earlier stay readable and keep their meaning. These bytes are never
//! regenerated, because a reader that fails here would fail on the messages of an older daemon.

use prost::Message;
use proto::state::{self, daemon_message};
use scheduler::{Generation, Readiness, Slot, Version};

use crate::golden_values;

fn golden(name: &str) -> state::DaemonMessage {
    state::DaemonMessage::decode(golden_values::golden(name).as_slice()).unwrap()
}

#[test]
fn schema_3() {
    let Some(daemon_message::Message::PoolUpdate(pool_update)) = golden("pool_update.hex").message
    else {
        panic!("not a pool update")
    };
    let decoded = proto::pool_update(pool_update).unwrap();
    assert_eq!(
        (
            decoded.pool.as_str(),
            decoded.hash_secret,
            decoded.staleness_max_ms
        ),
        ("llama", 0x0123_4567_89ab_cdef, 5000)
    );
    let snapshot = decoded.snapshot;
    assert_eq!(
        snapshot.version(),
        Version {
            term: 1_795_276_089_863,
            sequence: 42
        }
    );
    let [a, b] = snapshot.endpoints() else {
        panic!("not two endpoints")
    };
    assert_eq!(
        (&*a.name, &*a.address, a.readiness, a.age_ms),
        ("gpu-0", "10.0.0.1:8000", Readiness::Ready, 1500)
    );
    assert_eq!((a.id.slot, a.id.generation), (Slot(3), Generation(7)));
    assert_eq!(a.labels.as_ref(), [("zone".into(), "a".into())]);
    assert_eq!(
        (&*b.name, &*b.address, b.readiness),
        ("gpu-1", "[fd00::2]:8000", Readiness::NotReady)
    );

    let Some(daemon_message::Message::Metrics(metrics)) = golden("metrics.hex").message else {
        panic!("not metrics")
    };
    assert!(
        metrics
            .columns
            .iter()
            .any(|column| column.name == "unheard_of"),
        "a name that no reader knows is ignored"
    );
    let measured = proto::metrics(&metrics, &snapshot).unwrap();
    let [a, b] = measured.metrics() else {
        panic!("not two rows")
    };
    assert_eq!(
        (a.queue_depth, a.running_requests, a.kv_cache_utilization),
        (Some(4.0), Some(17.0), Some(0.25))
    );
    assert_eq!((a.kv_block_tokens, a.kv_blocks), (Some(16), Some(2000)));
    assert_eq!(
        a.lora.as_ref().map(|l| (l.running.len(), l.max)),
        Some((1, 4))
    );
    assert_eq!(*b, scheduler::EndpointMetrics::default());
}
