//! Laws of the three calls of a pick: plan changes nothing, commit records at any endpoint of the
//! pool, and a plan of an older state is refused.

use exchange::{ManagedPool, Timestamp};
use pool_state::{PlacementKind, Plan, Planner};
use scheduler::latency::step::StepModel;
use scheduler::{EndpointRef, Request};

use crate::release::pool_update;

const NOW: Timestamp = Timestamp(1_000_000);
const BLOCKS: [u64; 8] = [11, 12, 13, 14, 15, 16, 17, 18];

fn pool() -> ManagedPool {
    let mut pool = ManagedPool::new(1, 1 << 12);
    pool.install(pool_update(4, 1), 7, 1_000);
    pool.install_models(StepModel::default(), None);
    pool
}

fn request(blocks: &[u64]) -> Request<'_> {
    Request {
        model: "m",
        prompt_tokens: 512,
        prefix_blocks: blocks,
        prefix_block_tokens: 64,
        ..Request::default()
    }
}

fn plan(pool: &mut ManagedPool) -> Plan {
    pool.plan(&request(&BLOCKS), NOW, &mut ()).unwrap()
}

fn endpoints(pool: &ManagedPool) -> Vec<EndpointRef> {
    let snapshot = pool.snapshot().unwrap();
    snapshot.endpoints().iter().map(|e| e.id).collect()
}

/// Returns endpoints, ledger and cache as text.
fn state(pool: &ManagedPool) -> String {
    format!("{:?}", pool.view())
}

#[test]
fn a_dropped_plan_has_changed_nothing() {
    let mut pool = pool();
    let before = state(&pool);
    drop(plan(&mut pool));
    assert_eq!(state(&pool), before);
}

#[test]
fn a_plan_is_recorded_at_any_endpoint_of_the_pool() {
    for at in endpoints(&pool()) {
        let mut pool = pool();
        let planned = plan(&mut pool);
        let picked = pool.commit(planned, &request(&BLOCKS), at, NOW).unwrap();
        assert_eq!(picked.ranked[0].0, at);
        for endpoint in endpoints(&pool) {
            let requests = pool.in_flight().load(endpoint).requests;
            assert_eq!(
                requests,
                u32::from(endpoint == at),
                "{endpoint:?} of {at:?}"
            );
        }
        pool.release(picked.hold, NOW);
        assert_eq!(plan(&mut pool).endpoint(), at, "its prompt is cached there");
    }
}

#[test]
fn an_endpoint_of_another_pool_is_refused() {
    let mut pool = pool();
    let planned = plan(&mut pool);
    let before = state(&pool);
    let unknown = EndpointRef {
        generation: scheduler::Generation(99),
        ..planned.endpoint()
    };
    pool.commit(planned, &request(&BLOCKS), unknown, NOW)
        .unwrap_err();
    assert_eq!(state(&pool), before);
}

#[test]
fn a_plan_of_an_older_state_is_refused_and_records_nothing() {
    let changes: [fn(&mut ManagedPool); 4] = [
        |pool| {
            let planned = plan(pool);
            let at = planned.endpoint();
            pool.commit(planned, &request(&BLOCKS), at, NOW).unwrap();
        },
        |pool| {
            let at = endpoints(pool)[2];
            pool.record_peer_placement(PlacementKind::Confirmed, at, &BLOCKS, NOW);
        },
        |pool| pool.install(pool_update(3, 2), 7, 1_000),
        |pool| {
            let metrics = pool.snapshot().unwrap().metrics().to_vec();
            let snapshot = pool.snapshot().unwrap();
            let refreshed = snapshot.with_metrics(snapshot.version(), metrics).unwrap();
            pool.refresh(refreshed, NOW);
        },
    ];
    for (at, change) in changes.iter().enumerate() {
        let mut pool = pool();
        let older = plan(&mut pool);
        let endpoint = older.endpoint();
        change(&mut pool);
        let before = state(&pool);
        let refused = pool.commit(older, &request(&BLOCKS), endpoint, NOW);
        assert!(refused.is_err(), "change {at}");
        assert_eq!(state(&pool), before, "change {at}");
        let planned = plan(&mut pool);
        let endpoint = planned.endpoint();
        pool.commit(planned, &request(&BLOCKS), endpoint, NOW)
            .unwrap();
    }
}

#[test]
fn two_configurations_plan_on_one_state() {
    let mut pool = pool();
    let at = endpoints(&pool)[1];
    pool.record_peer_placement(PlacementKind::Confirmed, at, &BLOCKS, NOW);
    let view = pool.view();
    for seed in 0..8 {
        let mut planner = Planner::new(seed);
        let planned = view.plan(&request(&BLOCKS), NOW, &mut (), &mut planner);
        assert_eq!(planned.unwrap().endpoint(), at);
    }
}
