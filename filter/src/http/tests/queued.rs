//! Requests that flow control holds in several workers of one process.

use prost::Message;
use proto::state::{self, daemon_message::Message::PoolUpdate};

use super::*;
use crate::fake::{FakeCall, encode};
use crate::resume::release_queued;
use crate::shared_data::load_sharing::SharingOccasion;

const SEATS: f64 = 1.0;
const LOADED: &str = "10.0.0.1:8000";

/// Workers of one process whose pool has two endpoints that have room for one request each.
struct Workers(Vec<HttpWorld>);

/// A pool update with flow control. Requests of the objective `batch` may be given up for others.
fn update(version: Version, seats: f64) -> Vec<u8> {
    let bytes = pool_update_message("default", version, &[LOADED, "10.0.0.2:8000"]);
    let message = state::DaemonMessage::decode(bytes.as_slice())
        .unwrap()
        .message;
    let Some(PoolUpdate(mut update)) = message else {
        panic!("{message:?}")
    };
    let pipeline = update.pipeline.as_mut().unwrap();
    let seats = state::Parameter {
        name: "maxConcurrency".into(),
        value: Some(state::parameter::Value::Number(seats)),
    };
    let eviction = state::Parameter {
        name: "eviction".into(),
        value: Some(state::parameter::Value::Flag(true)),
    };
    for (kind, parameters) in [
        ("concurrency-detector", vec![seats]),
        (scheduler::flow::FLOW_CONTROL, vec![eviction]),
    ] {
        pipeline.plugins.push(state::Plugin {
            r#type: kind.into(),
            name: kind.into(),
            parameters,
        });
    }
    pipeline.saturation_detector = "concurrency-detector".into();
    let batch = state::Objective {
        name: "batch".into(),
        priority: -10,
    };
    update.objects.as_mut().unwrap().objectives.push(batch);
    encode(PoolUpdate(update))
}

impl Workers {
    fn new(count: u32) -> Self {
        let first =
            HttpWorld::new(r#"{"pools": [{"name": "default"}], "objective_header": "trust"}"#);
        let version = Version {
            term: 1,
            sequence: 1,
        };
        let store = crate::shared_data::snapshot_store::SharedSnapshotStore::new("default");
        store
            .publish_pool_update(
                &first.host,
                1,
                version,
                &update(version, SEATS),
                Timestamp(1),
            )
            .unwrap();
        let worker = |at: u32| {
            let mut vm = VmState::new(first.host.clone());
            vm.configure(1, Rc::clone(&first.config));
            let host = first.host.clone();
            let config = Rc::clone(&first.config);
            HttpWorld {
                host,
                vm: Rc::new(RefCell::new(vm)),
                config,
                streams: std::cell::Cell::new(1_000 * (at + 1)),
            }
        };
        let workers = Self((0..count).map(worker).collect());
        workers
            .0
            .iter()
            .for_each(|worker| worker.vm.borrow_mut().mark_serving());
        (0..2).for_each(|_| workers.tick());
        workers
    }

    fn host(&self) -> &FakeHost {
        &self.0[0].host
    }

    fn tick(&self) {
        self.host().pass_ms(100);
        for worker in &self.0 {
            let due = worker.vm.borrow_mut().tick(1);
            due.iter().for_each(|request| request.retry());
            release_queued(&worker.vm);
        }
        self.wake();
    }

    /// Delivers wake-ups, until there are none. Workers have registered their queues in order.
    fn wake(&self) {
        for _ in 0..100 {
            let woken = self
                .host()
                .queues
                .borrow()
                .iter()
                .position(|(_, items)| !items.is_empty());
            let Some(at) = woken else { return };
            let due = self.0[at]
                .vm
                .borrow_mut()
                .on_wake(u32::try_from(at).unwrap() + 1);
            due.iter().for_each(|request| request.retry());
            release_queued(&self.0[at].vm);
        }
        panic!("the workers wake each other for ever");
    }

    /// Sends a request. Returns its stream, and whether it went on at once.
    fn send(&self, worker: usize) -> (HttpStreamContext<FakeHost>, bool) {
        self.send_as(worker, "")
    }

    fn send_as(&self, worker: usize, objective: &str) -> (HttpStreamContext<FakeHost>, bool) {
        let head = [
            (":method", "POST"),
            (":path", "/v1/chat/completions"),
            ("content-type", "application/json"),
        ];
        let objective = ("x-llm-d-inference-objective", objective);
        let head: Vec<_> = head
            .into_iter()
            .chain((!objective.1.is_empty()).then_some(objective))
            .collect();
        let (mut stream, _) = self.0[worker].headers(&head, false);
        let went = self.0[worker].body(&mut stream, CHAT) == Action::Continue;
        (stream, went)
    }

    fn held(&self) -> usize {
        let held = |worker: &HttpWorld| {
            worker
                .vm
                .borrow()
                .replica("default")
                .unwrap()
                .borrow()
                .pool
                .queues()
                .queued()
        };
        self.0.iter().map(held).sum()
    }

    fn running(&self) -> u32 {
        self.0.iter().map(HttpWorld::in_flight).sum()
    }

    /// Counts the requests that were given up.
    fn given_up(&self) -> u64 {
        let given_up = |worker: &HttpWorld| -> u64 {
            let replica = worker.vm.borrow().replica("default").unwrap();
            let replica = replica.borrow();
            replica
                .pool
                .queues()
                .counters()
                .map(|band| band.given_up)
                .sum()
        };
        self.0.iter().map(given_up).sum()
    }
}

#[test]
fn while_nothing_is_held_no_worker_reads_the_order() {
    let workers = Workers::new(3);
    workers.host().record_calls();
    for worker in [0, 1, 2, 0] {
        let (mut stream, went) = workers.send(worker);
        assert!(went);
        workers.host().pass_ms(3);
        workers.0[worker].respond(&mut stream, "via_upstream", LOADED, &[(":status", "200")]);
        assert!(stream.on_done());
        workers.host().pass_ms(3);
    }
    let calls = workers.host().take_calls();
    assert!(
        calls
            .iter()
            .all(|call| !call.name.contains("/held") && call.call != FakeCall::QueuePush),
        "{calls:?}"
    );
}

#[test]
fn a_worker_that_sees_room_wakes_the_one_whose_request_came_first() {
    let workers = Workers::new(3);
    let mut running: Vec<_> = (0..2).map(|_| workers.send(0)).collect();
    assert!(running.iter().all(|(_, went)| *went));
    workers.host().pass_ms(3);
    let mut waiting = Vec::new();
    for worker in [1, 2, 0, 1] {
        let (stream, went) = workers.send(worker);
        assert!(!went);
        workers.wake();
        workers.host().pass_ms(3);
        waiting.push(stream);
    }
    assert_eq!((workers.held(), workers.running()), (4, 2));
    workers.host().take_log();
    let mut order = Vec::new();
    for _ in 0..2 {
        workers.host().record_calls();
        running.remove(0).0.on_done();
        workers.wake();
        let calls = workers.host().take_calls();
        let shared = calls
            .iter()
            .filter(|call| matches!(call.call, FakeCall::Shared | FakeCall::Share))
            .count();
        // Each of the other three workers tries its request too, in case there is more room.
        assert!(
            calls.len() <= 120 && shared <= 64,
            "{} calls, {shared} of shared data",
            calls.len()
        );
        let log = workers.host().take_log();
        assert_eq!(
            log.iter().filter(|line| *line == "resume").count(),
            1,
            "{log:?}"
        );
        order.extend(
            log.into_iter()
                .take_while(|line| *line != "resume")
                .filter(|line| line.starts_with("focus"))
                .last(),
        );
        assert_eq!(workers.running(), 2, "no room is given twice");
        workers.host().pass_ms(3);
    }
    assert_eq!(order, ["focus 2001", "focus 3001"]);
    // A wake-up that is lost costs a tick.
    waiting.remove(0).on_done();
    workers
        .host()
        .queues
        .borrow_mut()
        .iter_mut()
        .for_each(|(_, items)| items.clear());
    workers.tick();
    assert_eq!((workers.held(), workers.running()), (1, 2));
    assert!(waiting.iter_mut().all(|stream| stream.on_done()));
    workers.tick();
    assert_eq!((workers.held(), workers.running()), (0, 0));
}

/// Each case has the worker of each batch request, the worker of the waiting request, and the VM
/// that gives up a request.
#[test]
fn a_batch_request_is_given_up_by_the_worker_that_has_it() {
    let cases = [
        ([0, 0], 0, 0),
        ([0, 0], 2, 0),
        ([2, 2], 1, 2),
        ([1, 2], 0, 1),
        ([1, 0], 2, 0),
    ];
    // A worker that has just picked has just read the reports of the others.
    for ((batch, waits, gives), ms) in cases.into_iter().flat_map(|case| [(case, 0), (case, 3)]) {
        let workers = Workers::new(3);
        let running = batch.map(|worker| {
            let sent = workers.send_as(worker, "batch");
            workers.host().pass_ms(3);
            sent.0
        });
        assert_eq!((workers.running(), workers.held()), (2, 0));
        for worker in &workers.0 {
            workers.host().pass_ms(ms);
            let replica = worker.vm.borrow().replica("default").unwrap();
            worker.vm.borrow().receive_loads(
                &mut replica.borrow_mut(),
                workers.host().now(),
                SharingOccasion::Claim,
            );
        }
        workers.host().take_log();
        let (mut chat, went) = workers.send(waits);
        assert!(!went);
        workers.wake();
        let log = workers.host().take_log();
        let answers: Vec<&String> = log
            .iter()
            .filter(|line| line.starts_with("reply") || *line == "resume")
            .collect();
        assert!(
            answers[0].starts_with("reply 429")
                && answers[0].contains("evicted")
                && answers[1] == "resume",
            "{log:?}"
        );
        assert_eq!(
            (
                answers.len(),
                workers.held(),
                workers.running(),
                workers.given_up()
            ),
            (2, 0, 2, 1),
            "{log:?}"
        );
        assert!(
            log.iter()
                .any(|line| line.starts_with(&format!("focus {}", gives + 1))),
            "{gives} of {batch:?}: {log:?}"
        );
        assert!(chat.on_done() && running.into_iter().all(|mut stream| stream.on_done()));
        assert_eq!(workers.running(), 0, "what was given up is released once");
    }
}

#[test]
fn a_request_that_has_begun_to_answer_is_not_given_up_and_the_workers_stop_asking() {
    let workers = Workers::new(3);
    let mut running: Vec<_> = [0, 1]
        .map(|worker| (worker, workers.send_as(worker, "batch").0))
        .into();
    workers.host().pass_ms(3);
    for (worker, stream) in &mut running {
        workers.0[*worker].respond(stream, "via_upstream", LOADED, &[(":status", "200")]);
    }
    let (chat, went) = workers.send(2);
    assert!(!went);
    workers.wake();
    (0..20).for_each(|_| workers.tick());
    assert_eq!(
        (workers.held(), workers.running(), workers.given_up()),
        (1, 2, 0)
    );
    running.remove(0).1.on_done();
    workers.wake();
    assert_eq!(
        (workers.held(), workers.running()),
        (0, 2),
        "it waits as without eviction"
    );
    drop(chat);
}

/// Envoy runs the wake-ups of a thread before anything else, so a worker that wakes itself for ever
/// stops its thread.
#[test]
fn a_worker_that_learns_first_that_flow_control_has_ended_rests() {
    let workers = Workers::new(2);
    let running: Vec<_> = (0..2).map(|_| workers.send(0)).collect();
    workers.host().pass_ms(3);
    let waiting = workers.send(0);
    workers.host().pass_ms(100);
    let version = Version {
        term: 1,
        sequence: 2,
    };
    let store = crate::shared_data::snapshot_store::SharedSnapshotStore::new("default");
    let update = pool_update_message("default", version, &[LOADED, "10.0.0.2:8000"]);
    store
        .publish_pool_update(workers.host(), 1, version, &update, Timestamp(1))
        .unwrap();
    let first = &workers.0[1].vm;
    let due = first.borrow_mut().tick(1);
    assert!(due.is_empty() && workers.held() == 1);
    release_queued(first);
    workers.wake();
    workers.tick();
    assert_eq!((workers.held(), workers.running()), (0, 2), "it is refused");
    drop((running, waiting));
}

#[test]
fn a_worker_that_finds_nothing_to_resume_waits_for_the_next_tick_at_last() {
    let workers = Workers::new(2);
    let running: Vec<_> = (0..2).map(|_| workers.send(0)).collect();
    workers.host().pass_ms(3);
    let waiting = workers.send(0);
    workers.wake();
    let mut vm = workers.0[0].vm.borrow_mut();
    let mut wakes_itself = |other_replies: usize| {
        let replica = vm.replica("default").unwrap();
        replica.borrow_mut().pool.queues_mut().room_changed();
        vm.watched().begin_callback();
        (0..other_replies).for_each(|_| vm.watched().count_local_reply());
        assert!(vm.begin_release());
        vm.end_release(false);
        let mut queues = workers.host().queues.borrow_mut();
        let woken: usize = queues
            .iter_mut()
            .map(|(_, items)| items.drain(..).count())
            .sum();
        woken > 0
    };
    let times = (0..1_000).take_while(|_| wakes_itself(1_000)).count();
    assert_eq!(times, 1_000, "other requests took the replies");
    let times = (0..1_000).take_while(|_| wakes_itself(0)).count();
    assert!((8..256).contains(&times), "{times} times");
    workers.host().pass_ms(100);
    drop(vm.tick(1));
    let replica = vm.replica("default").unwrap();
    replica.borrow_mut().pool.queues_mut().room_changed();
    assert!(vm.begin_release());
    vm.end_release(false);
    drop(vm);
    workers.wake();
    drop((running, waiting));
}

/// Envoy runs the wake-ups of a thread before its sockets and timers.
#[test]
fn after_a_pool_update_a_worker_looks_at_some_held_requests_and_at_the_others_in_the_next_ticks() {
    const HELD: usize = 600;
    let workers = Workers::new(1);
    let running: Vec<_> = (0..2).map(|_| workers.send(0)).collect();
    workers.host().pass_ms(3);
    let waiting: Vec<_> = (0..HELD).map(|_| workers.send(0)).collect();
    workers.wake();
    let store = crate::shared_data::snapshot_store::SharedSnapshotStore::new("default");
    let publish = |sequence, seats| {
        let version = Version { term: 1, sequence };
        let update = update(version, seats);
        store
            .publish_pool_update(workers.host(), 1, version, &update, Timestamp(1))
            .unwrap();
    };
    publish(2, SEATS);
    workers.host().take_log();
    let tried = || {
        let log = workers.host().take_log();
        let is_stream = |line: &&String| line.starts_with("focus ") && *line != "focus 1";
        log.iter().filter(is_stream).count()
    };
    let times = [(); 4].map(|()| {
        workers.tick();
        tried()
    });
    // Each tick also tries a few requests in case there is room.
    assert!(
        times[..2].iter().all(|times| (256..320).contains(times)),
        "{times:?}"
    );
    assert!((88..150).contains(&times[2]) && times[3] < 64, "{times:?}");
    assert_eq!((workers.held(), workers.running()), (HELD, 2));
    // Requests that were not looked at do not delay those that have room.
    publish(3, 400.0);
    workers.tick();
    assert_eq!((workers.held(), workers.running()), (0, 602));
    drop((running, waiting));
}

/// These calls are made each time that another worker releases a request.
#[test]
fn a_release_by_another_worker_makes_few_calls() {
    let workers = Workers::new(2);
    let mut running: Vec<_> = (0..2).map(|_| workers.send(0)).collect();
    workers.host().pass_ms(3);
    let waiting = workers.send(1);
    workers.wake();
    workers.host().pass_ms(3);
    workers.host().record_calls();
    running.remove(0).0.on_done();
    let at_end = workers.host().take_calls();
    workers.host().record_calls();
    workers.wake();
    let at_release = workers.host().take_calls();
    assert_eq!((workers.held(), workers.running()), (0, 2));
    assert!(at_end.len() <= 10, "{at_end:?}");
    let of_plain = |call: &&crate::fake::RecordedCall| {
        matches!(call.call, FakeCall::HeaderSet | FakeCall::MetricRecord)
    };
    let beside = at_release.len() - at_release.iter().filter(of_plain).count();
    assert!(beside <= 18, "{at_release:?}");
    assert!(
        at_release.iter().all(|call| !call.name.ends_with("/head")),
        "the snapshot store has not changed: {at_release:?}"
    );
    drop((waiting, running));
}
