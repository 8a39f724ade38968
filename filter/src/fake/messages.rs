//! Makes messages from the daemon, for tests.

fn slot(address: &str) -> u32 {
    address
        .bytes()
        .fold(7_u32, |h, b| (h * 31 + u32::from(b)) % 1009)
}

/// Returns `count` different addresses of endpoints.
pub fn endpoints(count: usize) -> Vec<String> {
    let mut slots = std::collections::BTreeSet::new();
    (1..u16::MAX)
        .map(|port| format!("10.0.0.1:{port}"))
        .filter(|address| slots.insert(slot(address)))
        .take(count)
        .collect()
}

/// Returns a pool update with ready endpoints at these addresses. An address always has the same
/// identity. The pool update renames the model `alias` to `served`.
pub fn pool_update_message(pool: &str, version: scheduler::Version, addresses: &[&str]) -> Vec<u8> {
    use proto::state::{self, daemon_message::Message::PoolUpdate};
    let endpoint = |address: &&str| state::Endpoint {
        slot: slot(address),
        generation: 1,
        name: (*address).into(),
        address: (*address).into(),
        ready: true,
        age_ms: 60_000,
        ..state::Endpoint::default()
    };
    let plugin = |kind: &str| state::Plugin {
        r#type: kind.into(),
        name: kind.into(),
        parameters: vec![],
    };
    let part = |name: &str| state::ProfilePlugin {
        name: name.into(),
        weight: 1.0,
    };
    let profile = state::Profile {
        name: "test".into(),
        plugins: vec![
            part("queue-scorer"),
            part("prefix-cache-scorer"),
            part("max-score-picker"),
        ],
    };
    let pipeline = state::Pipeline {
        plugins: vec![
            plugin("queue-scorer"),
            plugin("prefix-cache-scorer"),
            plugin("max-score-picker"),
        ],
        profiles: vec![profile],
        ranked_max: 3,
        ..state::Pipeline::default()
    };
    let target = state::Target {
        model: "served".into(),
        weight: None,
    };
    let rewrite = state::Rewrite {
        models: vec!["alias".into()],
        targets: vec![target],
    };
    let pool_update = state::PoolUpdate {
        pool: pool.into(),
        version: Some(state::Version {
            term: version.term,
            sequence: version.sequence,
        }),
        endpoints: addresses.iter().map(endpoint).collect(),
        pipeline: Some(pipeline),
        objects: Some(state::Objects {
            rewrites: vec![rewrite],
            ..state::Objects::default()
        }),
        hash_secret: 1,
        staleness_max_ms: 2_000,
        ..state::PoolUpdate::default()
    };
    encode(PoolUpdate(pool_update))
}

/// Returns a metrics message with these queue depths.
pub fn metrics_message(
    pool: &str,
    version: scheduler::Version,
    sequence: u64,
    queues: &[f32],
) -> Vec<u8> {
    use proto::state::daemon_message::Message::Metrics;
    let metrics = |queue: &f32| scheduler::EndpointMetrics {
        queue_depth: Some(*queue),
        running_requests: Some(0.0),
        kv_cache_utilization: Some(0.0),
        kv_block_tokens: Some(16),
        kv_blocks: Some(1_000),
        ..scheduler::EndpointMetrics::default()
    };
    let metrics: Vec<_> = queues.iter().map(metrics).collect();
    encode(Metrics(proto::encode_metrics(
        pool, version, sequence, &metrics,
    )))
}

pub fn encode(message: proto::state::daemon_message::Message) -> Vec<u8> {
    prost::Message::encode_to_vec(&proto::state::DaemonMessage {
        message: Some(message),
    })
}
