//! Several VMs of one process, with real queues and load reports.

mod eviction;
mod shares;

use std::collections::VecDeque;

use proptest::prelude::*;
use scheduler::flow::RoomAsk;
use scheduler::objects::{ObjectiveSpec, Objects, ObjectsSpec};
use scheduler::plugin::ParameterValue;

use scheduler::{PipelineSpec, Request, Snapshot, SubsetHint, Timestamp};

use super::super::tests::{Admitted, admit, number, pipeline, snapshot};
use super::*;
use crate::LoadReportHead;
use crate::peers::PeerReport;
use crate::pool::{FlowAdmission, LedgerHold, ManagedPool, OwnLoadReport};
use crate::queues::FlowArrival;

const SEATS: u32 = 2;

/// One VM, and the streams that it holds.
struct Vm {
    id: u64,
    pool: ManagedPool,
    own: OwnLoadReport,
    published: Vec<u8>,
    peers: Vec<PeerReport>,
    queued: Vec<(QueuedTicket, usize)>,
    woken: bool,
    /// Each [`RoomAsk`] from other VMs, how many VMs may still be asked, and the job that waits.
    asks: VecDeque<(RoomAsk, usize, usize)>,
}

/// A request: its priority, flow, prompt tokens and the slot of the endpoint that it needs; the VM
/// and the ledger entry while it runs.
#[derive(Default)]
struct Job {
    priority: i32,
    flow: &'static str,
    tokens: u32,
    slot: u16,
    arrived: Timestamp,
    /// The time when it was no longer queued.
    queued_until: Option<Timestamp>,
    running: Option<(usize, LedgerHold)>,
    refused: bool,
    /// Whether its first byte has come.
    begun: bool,
    /// Whether its client left while it was queued.
    left: bool,
}

/// The decision of a VM to give up the job for another job.
#[derive(Clone, Copy, Debug)]
struct RoomMark {
    vm: usize,
    job: usize,
    waits: usize,
    /// Whether any request was queued at that moment.
    any_queued: bool,
    at: Timestamp,
}

struct Process {
    vms: Vec<Vm>,
    order: SharedOrder,
    jobs: Vec<Job>,
    now: Timestamp,
    /// The jobs in the order in which they were sent.
    sent: Vec<usize>,
    /// In one of this many writes, another VM seems to have written first; 0 means never.
    conflict_each: u64,
    writes: u64,
    /// How often a queued request was tried, and a VM woken.
    tries: usize,
    wakes: usize,
    given_up: Vec<usize>,
    marks: Vec<RoomMark>,
}

impl Job {
    fn subset(&self) -> SubsetHint {
        SubsetHint::parse([format!("10.0.0.{}:8000", self.slot + 1).as_str()])
    }

    fn request<'a>(&self, subset: &'a SubsetHint) -> Request<'a> {
        Request {
            priority: self.priority,
            prompt_tokens: self.tokens,
            subset: Some(subset),
            ..Request::default()
        }
    }
}

impl Process {
    /// VMs in front of one endpoint.
    fn new(vms: usize, section: &[(String, ParameterValue)], conflict_each: u64) -> Self {
        Self::with_snapshot(
            vms,
            || snapshot(1, &pipeline(f64::from(SEATS), section.to_vec())),
            conflict_each,
        )
    }

    fn with_snapshot(vms: usize, snapshot: impl Fn() -> Snapshot, conflict_each: u64) -> Self {
        let vm = |id: usize| {
            let mut pool = ManagedPool::new(id as u64, 0);
            pool.install(snapshot(), 0, u32::MAX);
            pool.recount_load_reports([]);
            let peers = (0..vms).map(|_| PeerReport::of_vm(1_000_000)).collect();
            Vm {
                id: id as u64 + 1,
                pool,
                own: OwnLoadReport::default(),
                published: Vec::new(),
                peers,
                queued: Vec::new(),
                woken: false,
                asks: VecDeque::new(),
            }
        };
        let now = Timestamp(0).plus_ms(1_000);
        let mut process = Self {
            vms: (0..vms).map(vm).collect(),
            order: SharedOrder::default(),
            jobs: Vec::new(),
            now,
            sent: Vec::new(),
            conflict_each,
            writes: 0,
            tries: 0,
            wakes: 0,
            given_up: Vec::new(),
            marks: Vec::new(),
        };
        (0..vms).for_each(|at| process.publish(at));
        process
    }

    fn publish(&mut self, at: usize) {
        let vm = &mut self.vms[at];
        let head = LoadReportHead {
            vm: vm.id,
            written: self.now,
            ring: 0,
        };
        vm.published = vm.pool.write_load_report(&mut vm.own, head).to_vec();
    }

    /// Reads the loads of the others, and whether they hold any.
    fn read(&mut self, at: usize) {
        let others: Vec<_> = self
            .vms
            .iter()
            .map(|vm| (vm.id, vm.published.clone(), vm.pool.queues().queued() > 0))
            .collect();
        let vm = &mut self.vms[at];
        let mut holds = false;
        for (peer, (id, bytes, other_holds)) in vm
            .peers
            .iter_mut()
            .zip(others)
            .filter(|(_, (id, ..))| *id != vm.id)
        {
            peer.set_writer(id);
            peer.read(&mut vm.pool, bytes, self.now);
            peer.count(&mut vm.pool, self.now);
            holds |= other_holds;
        }
        vm.pool.queues_mut().set_peers(true, holds);
    }

    /// Writes the order, unless another VM wrote first. Then wakes the VM `wake`.
    fn write(&mut self, at: usize, order: SharedOrder, wake: Option<u64>) -> bool {
        self.writes += 1;
        // The choice is random. If it were every n-th write, the decisive write of a claim with n
        // writes might never be chosen.
        let dice = self.writes.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
        let is_written = self.conflict_each == 0 || !dice.is_multiple_of(self.conflict_each);
        if is_written {
            self.order = order;
            self.wakes += usize::from(wake.is_some());
            self.vms
                .iter_mut()
                .filter(|vm| Some(vm.id) == wake)
                .for_each(|vm| vm.woken = true);
        }
        self.vms[at].pool.queues_mut().order_written(is_written);
        is_written
    }

    fn arrives(&mut self, at: usize, priority: i32, flow: &'static str, tokens: u32) {
        self.comes(
            at,
            Job {
                priority,
                flow,
                tokens,
                ..Job::default()
            },
        );
        self.run();
        self.now = self.now.plus_ms(1);
    }

    /// Runs the steps of an arriving request's stream.
    fn comes(&mut self, at: usize, mut job: Job) {
        self.read(at);
        let now = self.now;
        let number = self.jobs.len();
        let mut order = self.order.clone();
        let vm = &mut self.vms[at];
        if vm.pool.queues().is_shared() {
            vm.pool.read_order(&order, vm.id, now);
        }
        let arrival = FlowArrival {
            flow: job.flow,
            client: 0,
            request_id: "",
            bytes: 1,
            arrived: now,
            ttl_ms: None,
        };
        let mut is_queued = false;
        match admit(&mut vm.pool, &job.request(&job.subset()), &arrival, now) {
            Ok(Admitted::Sent(picked)) => {
                self.sent.push(number);
                job.running = Some((at, picked.hold));
                job.queued_until = Some(now);
            }
            Ok(Admitted::Queued(ticket)) => {
                vm.queued.push((ticket, number));
                is_queued = true;
            }
            Err(_) => job.refused = true,
        }
        self.jobs.push(Job {
            arrived: now,
            ..job
        });
        self.publish(at);
        let vm = &mut self.vms[at];
        if is_queued && vm.pool.queues().is_shared() {
            let wake = vm.pool.write_order(&mut order, vm.id, now);
            self.write(at, order, wake);
        }
        self.sends_asks(at, number);
        if is_queued && self.vms[at].pool.queues().is_shared() {
            self.looks_at_freed(at);
        }
    }

    fn ends(&mut self, job: usize) {
        self.end_together(&[job]);
    }

    /// Ends the requests at the same moment, and runs what that makes due.
    fn end_together(&mut self, jobs: &[usize]) {
        self.release(jobs);
        self.run();
        self.now = self.now.plus_ms(1);
    }

    /// Ends the requests at the same moment: each VM publishes before any reads.
    fn release(&mut self, jobs: &[usize]) {
        let running: Vec<_> = jobs
            .iter()
            .filter_map(|job| self.jobs[*job].running.take())
            .collect();
        let vms: Vec<usize> = running.iter().map(|(at, _)| *at).collect();
        for (at, hold) in running {
            self.vms[at].pool.release(hold, self.now);
        }
        vms.iter().for_each(|at| self.publish(*at));
        vms.iter().for_each(|at| self.looks_at_freed(*at));
    }

    fn has_first_token(&mut self, job: usize) {
        let Some((at, mut hold)) = self.jobs[job].running.take() else {
            return;
        };
        self.vms[at]
            .pool
            .record_first_token(&mut hold, self.jobs[job].tokens, self.now);
        self.jobs[job].running = Some((at, hold));
        self.publish(at);
        self.looks_at_freed(at);
        self.run();
    }

    /// The steps of a stream's callback, which may not resume another stream.
    fn looks_at_freed(&mut self, at: usize) {
        self.read(at);
        self.vms[at].pool.look_at_freed(self.now);
        while self.vms[at].pool.queues().is_shared() && self.vms[at].pool.has_due() {
            let mut order = self.order.clone();
            let id = self.vms[at].id;
            let now = self.now;
            match self.vms[at].pool.flow_turn(&mut order, id, false, now) {
                FlowTurn::Write(wake) if !self.write(at, order, wake) => {}
                _ => return,
            }
        }
    }

    fn passes(&mut self, ms: u64) {
        self.now = self.now.plus_ms(ms);
        for at in 0..self.vms.len() {
            self.publish(at);
            self.read(at);

            self.vms[at].pool.queues_mut().look_at_order();
        }
        self.run();
    }

    /// Runs the callbacks that are due, until none is.
    fn run(&mut self) {
        for _ in 0..1_000 {
            let Some(at) = (0..self.vms.len()).find(|at| self.is_due(*at)) else {
                return;
            };
            self.steps(at);
        }
        panic!("the VMs do not come to rest");
    }

    fn is_due(&self, at: usize) -> bool {
        let vm = &self.vms[at];
        vm.woken || !vm.asks.is_empty() || vm.pool.has_due()
    }

    /// Runs a callback of the VM, which first receives each [`RoomAsk`] from other VMs.
    fn steps(&mut self, at: usize) {
        while let Some((ask, left, waits)) = self.vms[at].asks.pop_front() {
            self.hears(at, ask, left, waits);
        }
        if std::mem::take(&mut self.vms[at].woken) {
            self.read(at);
            self.vms[at].pool.queues_mut().look_at_order();
        }
        self.callback(at);
    }

    /// The VM receives a [`RoomAsk`]. It gives up a request, or asks the next VM.
    fn hears(&mut self, at: usize, ask: RoomAsk, left: usize, waits: usize) {
        self.read(at);
        match self.vms[at].pool.queues_mut().give_room(ask, self.now) {
            true => self.records_marks(at, waits),
            false => self.passes_ask(at, ask, left, waits),
        }
        self.vms[at].woken = true;
    }

    fn passes_ask(&mut self, at: usize, ask: RoomAsk, left: usize, waits: usize) {
        let next = (at + 1) % self.vms.len();
        left.checked_sub(1)
            .into_iter()
            .for_each(|left| self.vms[next].asks.push_back((ask, left, waits)));
    }

    /// After a try of the job, the VM asks other VMs for room for it, or gives up requests itself.
    fn sends_asks(&mut self, at: usize, job: usize) {
        let others = self.vms.len() - 1;
        self.vms[at]
            .pool
            .queues_mut()
            .take_asks()
            .into_iter()
            .for_each(|ask| self.passes_ask(at, ask, others, job));
        self.records_marks(at, job);
    }

    fn records_marks(&mut self, at: usize, waits: usize) {
        let any_queued = self.queued() > 0;
        let now = self.now;
        for number in self.vms[at].pool.queues().revocations.numbers() {
            let Some(job) = self.running_as(at, number) else {
                panic!("nobody's number")
            };
            if !self.marks.iter().any(|mark| mark.job == job) {
                self.marks.push(RoomMark {
                    vm: at,
                    job,
                    waits,
                    any_queued,
                    at: now,
                });
            }
        }
    }

    /// The job that runs through the VM and may be given up by this number.
    fn running_as(&self, at: usize, number: u64) -> Option<usize> {
        let is = |job: &Job| {
            job.running
                .as_ref()
                .is_some_and(|(vm, hold)| *vm == at && hold.revocable() == Some(number))
        };
        self.jobs.iter().position(is)
    }

    /// The stream of a running request is resumed, to be given up.
    fn gives_up(&mut self, at: usize, number: u64) {
        let Some(job) = self.running_as(at, number) else {
            panic!("nobody's number")
        };
        let Some((_, hold)) = self.jobs[job].running.take() else {
            unreachable!()
        };
        assert!(
            self.vms[at].pool.take_revoked(&hold).is_some(),
            "the pool named it"
        );
        self.vms[at].pool.release(hold, self.now);
        self.given_up.push(job);
        self.publish(at);
        self.looks_at_freed(at);
    }

    fn callback(&mut self, at: usize) {
        self.vms[at].pool.look_at_freed(self.now);
        while self.vms[at].pool.queues().is_shared() {
            let mut order = self.order.clone();
            let id = self.vms[at].id;
            let now = self.now;
            match self.vms[at].pool.flow_turn(&mut order, id, true, now) {
                FlowTurn::Rest | FlowTurn::WakeSelf => return,
                FlowTurn::Write(wake) => {
                    if self.write(at, order, wake) {
                        return;
                    }
                }
                FlowTurn::Resume(number) | FlowTurn::Try(number) => self.resume(at, number, order),
            }
        }
        while let Some(number) = self.vms[at].pool.next_due(self.now) {
            self.resume(at, number, SharedOrder::default());
        }
    }

    fn resume(&mut self, at: usize, number: u64, mut order: SharedOrder) {
        self.read(at);
        self.tries += 1;
        let id = self.vms[at].id;
        let now = self.now;
        let Some(place) = self.vms[at]
            .queued
            .iter()
            .position(|(ticket, _)| ticket.number == number)
        else {
            return self.gives_up(at, number);
        };
        let (ticket, job) = self.vms[at].queued.swap_remove(place);
        let subset = self.jobs[job].subset();
        let request = self.jobs[job].request(&subset);
        let pool = &mut self.vms[at].pool;
        let planned = pool.plan(&request, now, &mut ());
        let claim = match pool.admit_queued(ticket, planned, &request, now) {
            Err(_) => {
                self.jobs[job].refused = true;
                return;
            }
            Ok(FlowAdmission::Wait(ticket)) => {
                self.vms[at].queued.push((ticket, job));
                self.sends_asks(at, job);
                return;
            }
            Ok(FlowAdmission::Go(_)) => unreachable!("it is queued"),
            Ok(FlowAdmission::Claim(claim)) => claim,
        };
        self.publish(at);
        let wake = self.vms[at].pool.write_order(&mut order, id, now);
        if self.write(at, order, wake) {
            let subset = self.jobs[job].subset();
            let request = self.jobs[job].request(&subset);
            let picked = self.vms[at].pool.redeem(claim, &request, now);
            self.sent.push(job);
            self.jobs[job].running = Some((at, picked.hold));
            self.jobs[job].queued_until = Some(now);
        } else {
            let ticket = self.vms[at].pool.give_back(claim);
            self.vms[at].queued.push((ticket, job));
        }
        self.publish(at);
    }

    fn queued(&self) -> usize {
        self.vms.iter().map(|vm| vm.queued.len()).sum()
    }

    fn running(&self) -> usize {
        self.jobs.iter().filter(|job| job.running.is_some()).count()
    }

    /// Among the running requests, ends the one that was sent first.
    fn end_oldest(&mut self) {
        let oldest = self
            .sent
            .iter()
            .copied()
            .find(|job| self.jobs[*job].running.is_some());
        oldest.into_iter().for_each(|job| self.ends(job));
    }
}

#[test]
fn the_higher_band_of_all_vms_goes_first_and_within_a_band_the_first_come() {
    let mut process = Process::new(3, &[], 0);
    for (vm, priority) in [
        (0, 0),
        (1, 0),
        (0, -1),
        (1, 0),
        (2, 5),
        (2, 0),
        (0, 0),
        (1, 5),
    ] {
        process.arrives(vm, priority, "", 10);
    }
    assert_eq!(
        (process.sent.as_slice(), process.queued()),
        (&[0, 1][..], 6)
    );
    for _ in 0..6 {
        process.end_oldest();
    }
    assert_eq!(process.sent, [0, 1, 4, 7, 3, 5, 6, 2]);
    assert!(
        process.order.rows.is_empty(),
        "nobody holds anything: {:?}",
        process.order
    );
}

/// One flow sends its requests through one VM, the other through another: both get as many tokens.
#[test]
fn flows_of_different_vms_get_equal_tokens() {
    let mut process = Process::new(3, &[], 0);
    for _ in 0..40 {
        process.arrives(0, 0, "long", 4_000);
        process.arrives(1, 0, "short", 200);
        process.arrives(2, 0, "short", 200);
    }
    for _ in 0..60 {
        process.end_oldest();
    }
    let tokens = |flow: &str| -> u32 {
        let sent = process.sent.iter().skip(2).map(|job| &process.jobs[*job]);
        sent.filter(|job| job.flow == flow)
            .map(|job| job.tokens + 256)
            .sum()
    };
    let share = f64::from(tokens("short")) / f64::from(tokens("short") + tokens("long"));
    assert!((0.4..0.6).contains(&share), "{share}");
}

/// A claim that fails because another VM was first charges nothing, so each flow still gets its
/// turn.
#[test]
fn flows_get_equal_turns_though_claims_fail() {
    for conflict_each in 2..9 {
        let mut process = Process::new(4, &[], conflict_each);
        for at in 0..120 {
            process.arrives(at % 4, 0, "large", 10);
        }
        for at in 0..40 {
            process.arrives(at % 4, 0, "small", 10);
        }
        while process.running() > 0 {
            process.end_oldest();
        }
        let flows: Vec<&str> = process
            .sent
            .iter()
            .map(|job| process.jobs[*job].flow)
            .collect();
        let last = flows.iter().rposition(|flow| *flow == "small").unwrap();
        assert!(
            (70..=99).contains(&last),
            "a write in {conflict_each} fails: {flows:?}"
        );
    }
}

/// A band leaves room to a higher one of another proxy for a while. A claim that fails because
/// another VM was first does not start that wait again, and the VMs do not wake each other
/// meanwhile.
#[test]
fn a_claim_that_fails_costs_no_further_patience() {
    for conflict_each in 3..9 {
        let with_chat = || {
            let chat = ObjectiveSpec {
                name: "chat".to_owned(),
                priority: 1,
            };
            let objects = Objects::build(&ObjectsSpec {
                objectives: vec![chat],
                ..ObjectsSpec::default()
            });
            snapshot(1, &pipeline(f64::from(SEATS), Vec::new())).with_objects(objects.unwrap())
        };
        let mut process = Process::with_snapshot(4, with_chat, conflict_each);
        (0..10).for_each(|at| process.arrives(at % 4, 0, "", 10));
        let higher = QueuedInBand {
            priority: 1,
            requests: 1,
            bytes: 0,
        };
        process
            .vms
            .iter_mut()
            .for_each(|vm| vm.pool.queues_mut().set_outside(&[higher], 0, 0));
        for sent in 3..=10 {
            process.end_oldest();
            assert!(
                sent > 3 || process.sent.len() < sent,
                "room is left at first"
            );
            (0..2).for_each(|_| process.passes(10));
            assert_eq!(process.sent.len(), sent, "a write in {conflict_each} fails");
        }
    }
}

/// An event wakes at most the VM whose request goes, and no VM if there is no room.
#[test]
fn a_release_costs_one_try_and_an_event_without_room_none() {
    let mut process = Process::new(4, &[], 0);
    process.passes(1);
    // The last VM has the latest requests, and its row is not written when the others' are sent.
    (0..20).for_each(|at| process.arrives(if at < 15 { at % 3 } else { 3 }, 0, "", 400));
    assert_eq!(
        (process.tries, process.wakes),
        (0, 0),
        "each found at its arrival that it does not fit"
    );
    for sent in 3..=20 {
        let oldest = process.sent[sent - 3];
        process.tries = 0;
        process.wakes = 0;
        process.has_first_token(oldest);
        assert_eq!((process.tries, process.wakes), (0, 0), "no request fits");
        process.end_oldest();
        assert_eq!((process.sent.len(), process.tries), (sent, 1));
        assert!(process.wakes <= 1, "woken: {}", process.wakes);
    }
}

/// While another VM holds requests, a VM without state, or whose pool has no flow control any more,
/// has nothing to do. If something stayed due there, its thread would do nothing else.
#[test]
fn a_vm_without_flow_control_rests_while_another_holds_requests() {
    let without_state = || ManagedPool::new(9, 0);
    let without_flow_control = || {
        let mut pool = without_state();
        pool.install(snapshot(1, &PipelineSpec::default()), 0, u32::MAX);
        pool
    };
    for pool in [without_state(), without_flow_control()] {
        let mut process = Process::new(2, &[], 0);
        process.passes(1);
        (0..4).for_each(|_| process.arrives(0, 0, "", 400));
        assert_eq!(process.queued(), 2);
        process.vms[1].pool = pool;
        process.passes(1);
        process.vms[1].pool.queues_mut().room_changed();
        process.run();
        process.end_oldest();
        assert_eq!(process.queued(), 1);
    }
}

#[test]
fn the_limits_hold_for_all_vms_and_the_lowest_band_of_any_is_left_out() {
    let mut process = Process::new(3, &[number("maxRequests", 3.0)], 0);
    for _ in 0..2 {
        process.arrives(0, 0, "", 1);
    }
    for vm in 0..3 {
        process.arrives(vm, -1, "", 1);
    }
    process.arrives(1, -1, "", 1);
    assert_eq!((process.queued(), process.jobs[5].refused), (3, true));
    // VM 1 holds no request of a lower band, so another VM refuses one of its requests.
    process.arrives(1, 3, "", 1);
    process.passes(10);
    assert_eq!(process.queued(), 3);
    assert_eq!(process.jobs.iter().filter(|job| job.refused).count(), 2);
    assert!(
        process
            .jobs
            .iter()
            .all(|job| !job.refused || job.priority == -1)
    );
}

proptest! {
    /// For any events in any VM, even if writes fail: the engine never has more requests than it
    /// may, none waits while there is room, and each request ends once.
    #[test]
    fn no_room_is_given_twice_and_none_is_left(
        events in prop::collection::vec((0..4_usize, 0..7_u8, 0..3_i32, 1..400_u32), 1..60),
        conflict_each in prop_oneof![Just(0_u64), 2..9_u64],
    ) {
        let mut process = Process::new(4, &[], conflict_each);
        for (vm, kind, priority, tokens) in events {
            match kind {
                0..=3 => process.arrives(vm, priority, if tokens % 2 == 0 { "even" } else { "odd" }, tokens),
                4 => process.end_oldest(),
                5 => process.end_together(&(0..process.jobs.len()).collect::<Vec<_>>()),
                _ => process.passes(u64::from(tokens)),
            }
            prop_assert!(process.running() <= SEATS as usize, "a room was given twice");
            prop_assert!(process.queued() == 0 || process.running() == SEATS as usize, "free room, and {} wait", process.queued());
        }
        while process.running() > 0 {
            process.end_oldest();
        }
        prop_assert_eq!((process.queued(), process.sent.len()), (0, process.jobs.len()));
        prop_assert!(process.vms.iter().all(|vm| vm.pool.queues().is_empty() && vm.pool.in_flight().rows().next().is_none()));
    }
}
