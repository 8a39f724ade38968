//! A filter decodes a message to the state that the daemon encoded.

use proptest::prelude::*;
use prost::Message;
use proto::{PoolState, encode_metrics, encode_pool_update, state};
use scheduler::metrics::METRICS;
use scheduler::{ProfilePlugin, Version};

use crate::strategies::{PoolCase, any_pool, any_version, one_profile};

fn over_the_wire<M: Message + Default>(message: &M) -> M {
    M::decode(message.encode_to_vec().as_slice()).unwrap()
}

fn encode(pool: &PoolCase) -> state::PoolUpdate {
    let PoolCase {
        version,
        endpoints,
        pipeline,
        objects,
        hash_secret,
        staleness_max_ms,
        ..
    } = pool;
    encode_pool_update(PoolState {
        pool: "p",
        version: *version,
        endpoints,
        pipeline,
        objects,
        hash_secret: *hash_secret,
        staleness_max_ms: *staleness_max_ms,
    })
}

proptest! {
    #[test]
    fn a_pool_update_arrives_whole(pool in any_pool()) {
        let message = over_the_wire(&encode(&pool));
        let objects = message.objects.clone().unwrap_or_default();
        let wire = message.pipeline.clone().unwrap();
        let decoded = proto::pool_update(message).unwrap();
        prop_assert_eq!(decoded.snapshot.version(), pool.version);
        prop_assert_eq!(decoded.snapshot.endpoints(), &pool.endpoints);
        prop_assert!(decoded.snapshot.metrics().iter().all(|m| *m == scheduler::EndpointMetrics::default()));
        prop_assert_eq!((decoded.pool.as_str(), decoded.hash_secret, decoded.staleness_max_ms), ("p", pool.hash_secret, pool.staleness_max_ms));
        let same = (&objects.objectives.len(), &objects.models.len(), &objects.rewrites.len(), objects.strict_models);
        prop_assert_eq!(same, (&pool.objects.objectives.len(), &pool.objects.models.len(), &pool.objects.rewrites.len(), pool.objects.strict_models));
        let compiled = scheduler::objects::Objects::build(&pool.objects).unwrap();
        prop_assert_eq!(format!("{:?}", decoded.snapshot.objects()), format!("{compiled:?}"));
        prop_assert_eq!((wire.profile_handler, wire.saturation_detector), (pool.pipeline.profile_handler, pool.pipeline.saturation_detector));
        prop_assert_eq!(wire.ranked_max, pool.pipeline.ranked_max);
        let profiles: Vec<_> = wire.profiles.into_iter().map(|p| (p.name, p.plugins.into_iter().map(|p| (p.name, p.weight)).collect())).collect();
        let parts = |p: Vec<ProfilePlugin>| p.into_iter().map(|p| (p.name, p.weight)).collect::<Vec<_>>();
        let expected: Vec<_> = pool.pipeline.profiles.into_iter().map(|p| (p.name, parts(p.plugins))).collect();
        prop_assert_eq!(profiles, expected);
        let plugins: Vec<_> = wire.plugins.into_iter().map(|p| (p.r#type, p.name)).collect();
        let expected: Vec<_> = pool.pipeline.plugins.into_iter().map(|p| (p.plugin_type, p.name)).collect();
        prop_assert_eq!(plugins, expected);
    }

    #[test]
    fn metrics_arrive_whole_and_only_on_their_pool_update(pool in any_pool(), other in any_version(), sequence: u64) {
        let snapshot = proto::pool_update(encode(&pool)).unwrap().snapshot;
        let message = over_the_wire(&encode_metrics("p", pool.version, sequence, &pool.metrics));
        let decoded = proto::metrics(&message, &snapshot).unwrap();
        prop_assert_eq!(decoded.metrics(), &pool.metrics);
        prop_assert_eq!(decoded.endpoints(), &pool.endpoints);
        prop_assume!(other != pool.version);
        let elsewhere = encode_metrics("p", other, sequence, &pool.metrics);
        prop_assert!(matches!(proto::metrics(&elsewhere, &snapshot), Err(proto::InvalidState::OtherPoolUpdate)));
    }

    #[test]
    fn a_column_too_short_or_long_is_refused(pool in any_pool(), column in 0..METRICS.len(), longer: bool) {
        let snapshot = proto::pool_update(encode(&pool)).unwrap().snapshot;
        let mut message = encode_metrics("p", pool.version, 1, &pool.metrics);
        prop_assume!(longer || !pool.metrics.is_empty());
        let values = &mut message.columns[column].values;
        if longer { values.push(0.0) } else { values.truncate(values.len() - 1) }
        prop_assert!(matches!(proto::metrics(&message, &snapshot), Err(proto::InvalidState::ColumnLength(_))));
    }
}

#[test]
fn what_breaks_a_rule_is_refused_whole() {
    let endpoint = |slot, address: &str| state::Endpoint {
        slot,
        address: address.to_owned(),
        ready: true,
        ..Default::default()
    };
    let pool_update = |endpoints| state::PoolUpdate {
        version: Some(state::Version {
            term: 1,
            sequence: 1,
        }),
        pipeline: Some(one_profile()),
        endpoints,
        ..Default::default()
    };
    assert_eq!(
        proto::pool_update(pool_update(vec![endpoint(0, "127.0.0.1:1")]))
            .unwrap()
            .snapshot
            .version(),
        Version {
            term: 1,
            sequence: 1
        }
    );
    for endpoints in [
        vec![endpoint(0, "localhost:1")],
        vec![endpoint(70_000, "127.0.0.1:1")],
        vec![endpoint(1024, "127.0.0.1:1")],
        vec![endpoint(0, "127.0.0.1:1"), endpoint(0, "127.0.0.1:2")],
        vec![endpoint(0, "127.0.0.1:1"), endpoint(1, "127.0.0.1:1")],
    ] {
        assert!(
            proto::pool_update(pool_update(endpoints.clone())).is_err(),
            "{endpoints:?}"
        );
    }
    assert!(
        proto::pool_update(state::PoolUpdate {
            version: None,
            ..pool_update(vec![])
        })
        .is_err()
    );
    assert!(
        proto::pool_update(state::PoolUpdate {
            pipeline: None,
            ..pool_update(vec![])
        })
        .is_err()
    );
}
