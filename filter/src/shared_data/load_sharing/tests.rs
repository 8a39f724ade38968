//! Tests with several VMs of one process in memory. Each VM has separate streams.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use proptest::prelude::*;
use scheduler::in_flight::EndpointLoad;
use scheduler::{EndpointRef, Version};

use super::receive::*;
use super::*;
use crate::fake::{FakeHost, pool_update_message};
use crate::host::BodyBuffer;
use crate::http::{Context, HttpContext, HttpStreamContext};
use crate::vm::{TICK_MS, VmState};
use front::config::FilterConfig;

const ADDRESSES: [&str; 3] = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"];
const DESTINATION: &str = "x-gateway-destination-endpoint";

type SharedVm = Rc<RefCell<VmState<FakeHost>>>;

/// A process whose VMs all have a pool update of three endpoints.
struct SharingWorld {
    host: FakeHost,
    config: Rc<FilterConfig>,
    workers: Vec<SharedVm>,
    streams: Cell<u32>,
}

impl SharingWorld {
    fn new(workers: usize, more: &str) -> Self {
        let config =
            format!(r#"{{"pools": [{{"name": "default"}}], "prefix_entries": 4096{more}}}"#);
        let config = Rc::new(FilterConfig::parse(config.as_bytes()).unwrap());
        let mut world = Self {
            host: FakeHost::new(),
            config,
            workers: Vec::new(),
            streams: Cell::new(10),
        };
        let version = Version {
            term: 1,
            sequence: 1,
        };
        let store = super::super::snapshot_store::SharedSnapshotStore::new("default");
        store
            .publish_pool_update(
                &world.host,
                1,
                version,
                &pool_update_message("default", version, &ADDRESSES),
                world.host.now(),
            )
            .unwrap();
        world.workers = (0..workers).map(|_| world.worker()).collect();
        // After two ticks, the first VM leads, and all VMs know each other.
        world.tick();
        world.tick();
        world
    }

    fn worker(&self) -> SharedVm {
        let mut vm = VmState::new(self.host.clone());
        vm.configure(1, Rc::clone(&self.config));
        Rc::new(RefCell::new(vm))
    }

    fn tick(&self) {
        for worker in &self.workers {
            worker.borrow_mut().tick(1);
        }
        self.host.pass_ms(u64::from(TICK_MS));
    }

    /// Sends a request to a worker. Returns the stream of the request and its ranked list.
    fn request(&self, worker: usize, prompt: &str) -> (HttpStreamContext<FakeHost>, Vec<String>) {
        self.streams.set(self.streams.get() + 1);
        let vm = Rc::clone(&self.workers[worker]);
        let mut stream = HttpStreamContext::new(
            self.streams.get(),
            self.host.clone(),
            vm,
            Rc::clone(&self.config),
        );
        let body = format!(r#"{{"model":"m","prompt":"{prompt}"}}"#);
        *self.host.http.request.borrow_mut() = vec![
            (":method".into(), "POST".into()),
            (":path".into(), "/v1/completions".into()),
        ];
        self.host
            .http
            .buffers
            .borrow_mut()
            .insert(BodyBuffer::RequestBody as u32, body.clone().into());
        let _ = stream.on_http_request_headers(2, false);
        let _ = stream.on_http_request_body(body.len(), true);
        let headers = self.host.http.request.borrow();
        let list = headers
            .iter()
            .find(|(name, _)| name == DESTINATION)
            .map(|(_, list)| list.clone())
            .unwrap();
        (stream, list.split(',').map(str::to_owned).collect())
    }

    fn respond(
        &self,
        stream: &mut HttpStreamContext<FakeHost>,
        details: &str,
        upstream: &str,
        attempts: u64,
    ) {
        let mut properties = self.host.properties.borrow_mut();
        properties.insert("response.code_details".into(), details.into());
        properties.insert("upstream.address".into(), upstream.into());
        properties.insert(
            "upstream.request_attempt_count".into(),
            attempts.to_le_bytes().into(),
        );
        drop(properties);
        *self.host.http.response.borrow_mut() = vec![(":status".into(), "200".into())];
        let _ = stream.on_http_response_headers(1, false);
    }

    /// Returns the load that a worker knows, summed over all endpoints.
    fn known(&self, worker: usize) -> EndpointLoad {
        let replica = self.workers[worker].borrow().replica("default").unwrap();
        let replica = replica.borrow();
        let endpoints = replica.pool.snapshot().unwrap().endpoints();
        endpoints.iter().fold(EndpointLoad::default(), |sum, e| {
            sum.with(replica.pool.in_flight().load(e.id))
        })
    }

    /// Makes a worker read the other VMs' load, as before each pick, and returns the load that the
    /// worker then knows.
    fn look(&self, worker: usize) -> EndpointLoad {
        let vm = self.workers[worker].borrow();
        let replica = vm.replica("default").unwrap();
        vm.receive_loads(
            &mut replica.borrow_mut(),
            self.host.now(),
            SharingOccasion::Pick,
        );
        drop(vm);
        self.known(worker)
    }

    /// Returns a worker's estimate of the cached blocks of a prompt at the best endpoint.
    fn matched(&self, worker: usize, blocks: &[u64]) -> u32 {
        let replica = self.workers[worker].borrow().replica("default").unwrap();
        let replica = replica.borrow();
        let mut out = Vec::new();
        let refs: Vec<EndpointRef> = replica
            .pool
            .snapshot()
            .unwrap()
            .endpoints()
            .iter()
            .map(|e| e.id)
            .collect();
        replica.pool.prefixes().matched(blocks, &refs, &mut out);
        out.into_iter().map(|known| known.cached).max().unwrap()
    }
}

#[test]
fn a_pick_is_known_to_the_others_at_their_next_pick_and_its_end_too() {
    let world = SharingWorld::new(4, "");
    let (mut stream, _) = world.request(0, &"x".repeat(4_000));
    world.host.pass_ms(ROWS_MS);
    for worker in 0..4 {
        let known = world.look(worker);
        assert_eq!(
            (known.requests, known.prefill_tokens),
            (1, 1_000),
            "worker {worker}"
        );
    }
    stream.on_done();
    world.host.pass_ms(ROWS_MS);
    assert!((0..4).all(|worker| world.look(worker) == EndpointLoad::default()));
}

#[test]
fn sixty_four_workers_are_of_one_mind_and_one_that_is_lost_takes_only_its_own_along() {
    let mut world = SharingWorld::new(64, "");
    let streams: Vec<_> = (0..64)
        .map(|worker| world.request(worker, &format!("{worker}")))
        .collect();
    world.host.pass_ms(ROWS_MS);
    assert!((0..64).all(|worker| world.look(worker).requests == 64));
    let keys = |world: &SharingWorld| {
        world
            .host
            .shared
            .borrow()
            .keys()
            .filter(|key| key.contains("/row/"))
            .count()
    };
    assert_eq!(keys(&world), 64);
    world.workers[63] = world.worker();
    world.host.pass_ms(ROW_EXPIRY_MS);
    world.tick();
    world.host.pass_ms(ROWS_MS);
    assert!((0..63).all(|worker| world.look(worker).requests == 63));
    for (mut stream, _) in streams {
        stream.on_done();
    }
    world.host.pass_ms(ROWS_MS);
    assert!((0..63).all(|worker| world.look(worker) == EndpointLoad::default()));
    assert!(keys(&world) <= 65, "a VM slot is used again");
}

#[test]
fn nothing_is_counted_twice_however_often_it_is_told() {
    let world = SharingWorld::new(3, "");
    let streams: Vec<_> = (0..3)
        .flat_map(|worker| (0..5).map(move |i| (worker, i)))
        .map(|(w, i)| world.request(w, &format!("{i}")))
        .collect();
    for _ in 0..20 {
        world.tick();
        world.host.pass_ms(ROWS_MS);
        assert!((0..3).all(|worker| world.look(worker).requests == 15));
    }
    drop(streams);
}

#[test]
fn looks_are_no_closer_than_two_ms() {
    let world = SharingWorld::new(2, "");
    world.look(1);
    let _stream = world.request(0, "x");
    world.host.pass_ms(ROWS_MS - 1);
    assert_eq!(world.look(1).requests, 0);
    world.host.pass_ms(1);
    assert_eq!(world.look(1).requests, 1);
}

/// Checks that all 192 workers of the largest hosts share their loads, and that the cost of reading
/// these loads is bounded and not quadratic in the number of workers.
#[test]
fn of_many_workers_all_are_heard_and_none_looks_at_more_than_so_many_rows_a_millisecond() {
    let world = SharingWorld::new(193, "");
    let streams: Vec<_> = (0..193)
        .map(|worker| world.request(worker, &format!("{worker}")))
        .collect();
    world.tick();
    world.host.pass_ms(6);
    assert!((0..193).all(|worker| world.look(worker).requests == 193));
    let before = world.host.reads.get();
    for _ in 0..60 {
        world.host.pass_ms(1);
        world.look(0);
    }
    let rows = u64::from(world.host.reads.get() - before);
    assert!(
        (9 * 192..60 * ROWS_A_MS + 400).contains(&rows),
        "{rows} rows in 60 ms"
    );
    drop(streams);
}

#[test]
fn sharing_switched_off_tells_and_hears_nothing() {
    let world = SharingWorld::new(2, r#", "sharing": false"#);
    let _stream = world.request(0, &"x".repeat(4_000));
    world.tick();
    world.host.pass_ms(ROWS_MS);
    assert_eq!((world.look(0).requests, world.look(1).requests), (1, 0));
    assert!(
        world
            .host
            .shared
            .borrow()
            .keys()
            .all(|key| !key.contains("/row/") && !key.contains("/ring/"))
    );
}

#[test]
fn once_sharing_is_switched_off_nobody_else_counts_any_more() {
    let world = SharingWorld::new(3, "");
    let _theirs = world.request(0, &"x".repeat(4_000));
    world.host.pass_ms(ROWS_MS);
    assert_eq!(world.look(1).requests, 1);
    let alone = FilterConfig::parse(
        br#"{"pools": [{"name": "default"}], "prefix_entries": 4096, "sharing": false}"#,
    )
    .unwrap();
    world.workers[1].borrow_mut().configure(1, Rc::new(alone));
    world.host.pass_ms(ROWS_MS);
    assert_eq!((world.look(1).requests, world.look(2).requests), (0, 1));
    world.workers[1]
        .borrow_mut()
        .configure(1, Rc::clone(&world.config));
    world.host.pass_ms(ROWS_MS);
    assert_eq!(world.look(1).requests, 1, "and on again");
}

#[test]
fn a_vm_that_trapped_leaves_no_ghosts_and_its_vm_slot_no_row() {
    let mut world = SharingWorld::new(3, "");
    let _ghosts: Vec<_> = (0..10).map(|i| world.request(2, &format!("{i}"))).collect();
    world.host.pass_ms(ROWS_MS);
    assert_eq!(world.look(1).requests, 10);
    // The memory of the VM is lost, and its streams get no more callbacks. A new VM immediately
    // replaces the lost VM.
    world.workers[2] = world.worker();
    let _alive = world.request(2, "mine");
    world.host.pass_ms(ROW_EXPIRY_MS);
    world.tick();
    world.host.pass_ms(ROWS_MS);
    assert_eq!(
        (
            world.look(0).requests,
            world.look(1).requests,
            world.look(2).requests
        ),
        (1, 1, 1)
    );
}

#[test]
fn a_new_vm_counts_from_its_first_request_and_knows_what_there_is() {
    let mut world = SharingWorld::new(2, "");
    let prompt = "long ".repeat(1_000);
    let _old = world.request(0, &prompt);
    world.workers.push(world.worker());
    let _new = world.request(2, "new");
    world.tick();
    world.host.pass_ms(ROWS_MS);
    assert_eq!(
        (0..3)
            .map(|worker| world.look(worker).requests)
            .collect::<Vec<_>>(),
        [2, 2, 2]
    );
}

#[test]
fn a_long_silent_owner_counts_again_when_it_speaks() {
    let world = SharingWorld::new(2, "");
    let _stream = world.request(0, "x");
    world.host.pass_ms(ROW_EXPIRY_MS + ROWS_MS);
    assert_eq!(world.look(1).requests, 0, "it may be dead");
    world.workers[0].borrow_mut().tick(1);
    world.host.pass_ms(ROWS_MS);
    assert_eq!(world.look(1).requests, 1);
}

#[test]
fn what_fails_at_one_worker_is_left_out_by_all_until_anyone_has_an_answer() {
    let world = SharingWorld::new(4, "");
    let (mut stream, list) = world.request(0, "x");
    let (mut under_way, _) = world.request(1, "y");
    world.respond(&mut stream, "via_upstream", &list[1], 2);
    world.host.pass_ms(ROWS_MS);
    for worker in 0..4 {
        let (_, others) = world.request(worker, "z");
        assert!(!others.contains(&list[0]), "worker {worker}: {others:?}");
    }
    world.respond(&mut under_way, "via_upstream", &list[0], 1);
    world.host.pass_ms(ROWS_MS);
    for worker in 0..4 {
        assert!(
            world.request(worker, "z").1.contains(&list[0]),
            "worker {worker}"
        );
    }
}

#[test]
fn a_placement_is_known_to_the_others_within_ten_ms_and_the_leader_keeps_none() {
    let mut world = SharingWorld::new(3, "");
    let prompt = "once upon a time ".repeat(200);
    let _stream = world.request(1, &prompt);
    let blocks = {
        let ring = world.host.shared.borrow();
        let (_, (segment, _)) = ring.iter().find(|(key, _)| key.contains("/ring/")).unwrap();
        let words: Vec<u64> = segment
            .as_chunks::<8>()
            .0
            .iter()
            .map(|word| u64::from_le_bytes(*word))
            .collect();
        words[4..].to_vec()
    };
    assert!(blocks.len() > 10);
    world.host.pass_ms(RINGS_AT_PICK_MS);
    world.look(2);
    assert_eq!(world.matched(2, &blocks), blocks.len() as u32);
    // A tick of the leader creates no prefix index.
    world.tick();
    let leader = world.workers[0].borrow().replica("default").unwrap();
    assert_eq!(leader.borrow().pool.prefixes().bytes(), 0);
    // A worker that starts later reads the current state.
    world.workers.push(world.worker());
    world.tick();
    assert_eq!(world.matched(3, &blocks), blocks.len() as u32);
}

#[test]
fn workers_that_lost_each_others_rings_agree_by_a_hash_for_as_long_as_news_counts() {
    let homes = |rings_lost: bool, later_ms: u64| {
        let world = SharingWorld::new(3, "");
        let prompt = |number: usize| format!("{number} once upon a time ").repeat(200);
        // Worker 2 reads worker 1's ring at its first pick, so worker 1 must write again after that
        // pick.
        for (number, worker) in [1, 2, 1].into_iter().enumerate() {
            world.request(worker, &prompt(number)).0.on_done();
        }
        if rings_lost {
            world
                .host
                .shared
                .borrow_mut()
                .retain(|key, _| !key.contains("/ring/"));
        }
        for ms in [RINGS_AT_PICK_MS, later_ms] {
            world.host.pass_ms(ms);
            for worker in [1, 2] {
                world.look(worker);
            }
        }
        // The clock stands still from this point on, so neither worker sees the other's picks.
        [1, 2].map(|worker| {
            let home = |number: usize| {
                let (mut stream, list) = world.request(worker, &prompt(number));
                stream.on_done();
                list[0].clone()
            };
            (10..30).map(home).collect::<Vec<String>>()
        })
    };
    let agree = |[one, two]: [Vec<String>; 2]| one == two;
    assert!(
        !agree(homes(false, 0)),
        "if nothing was lost, each worker spreads cold prompts by itself"
    );
    assert!(agree(homes(true, 0)));
    assert!(agree(homes(true, proto::SHARE_EXPIRY_MS - 1)));
    assert!(!agree(homes(true, proto::SHARE_EXPIRY_MS)));
}

#[test]
fn garbage_where_rows_are_counts_nothing() {
    let world = SharingWorld::new(2, "");
    let _stream = world.request(0, "x");
    for vm_slot in 0..5 {
        world
            .host
            .share(&key("default", vm_slot), &[0xff; 77], WriteCondition::Any)
            .unwrap();
    }
    world.host.pass_ms(ROWS_MS);
    assert_eq!(world.look(1).requests, 0);
    world.tick();
    world.host.pass_ms(ROWS_MS);
    assert_eq!(world.look(1).requests, 1, "written over at the next tick");
}

#[test]
fn keys_are_a_fixed_set() {
    let world = SharingWorld::new(3, "");
    for i in 0..400 {
        let (mut stream, _) = world.request(i % 3, &format!("{i} ").repeat(2_000));
        world.host.pass_ms(3);
        stream.on_done();
    }
    let keys = |part: &str| {
        world
            .host
            .shared
            .borrow()
            .keys()
            .filter(|key| key.contains(part))
            .count()
    };
    assert_eq!(keys("/row/"), 3);
    assert!(keys("/ring/") <= 3 * 128);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Checks that all workers know the same sum of open requests, whatever the order in which
    /// requests begin and end at the workers, and that every report is empty in the end.
    #[test]
    fn all_agree_and_in_the_end_nothing_is_left(steps in prop::collection::vec((0..3_usize, any::<bool>(), 0..2_u8, 0..300_u64), 1..60)) {
        let world = SharingWorld::new(3, "");
        let mut open: Vec<HttpStreamContext<FakeHost>> = Vec::new();
        for (worker, begins, what, ms) in steps {
            if begins || open.is_empty() {
                let (mut stream, list) = world.request(worker, "some prompt");
                match what {
                    0 => world.respond(&mut stream, "via_upstream", list.last().unwrap(), list.len() as u64),
                    _ => world.respond(&mut stream, "upstream_reset_before_response_started", &list[0], 1),
                }
                open.push(stream);
            } else {
                open.swap_remove(usize::from(what) % open.len()).on_done();
            }
            world.host.pass_ms(ms);
            world.tick();
            world.host.pass_ms(ROWS_MS);
            prop_assert!((0..3).all(|worker| world.look(worker).requests as usize == open.len()));
        }
        for mut stream in open {
            stream.on_done();
        }
        world.host.pass_ms(ROWS_MS);
        for worker in 0..3 {
            prop_assert_eq!(world.look(worker), EndpointLoad::default());
            let replica = world.workers[worker].borrow().replica("default").unwrap();
            prop_assert_eq!(replica.borrow().pool.in_flight().rows().count(), 0);
            prop_assert!(replica.borrow().sharing.own.report.is_idle());
        }
    }
}

mod outside;
