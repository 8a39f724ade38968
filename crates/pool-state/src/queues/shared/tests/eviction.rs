//! Running requests are given up over several VMs, in any order of events and callbacks.

use std::collections::BTreeSet;

use scheduler::{EndpointMetrics, PipelineSpec, PluginSpec, SEQUENCES_MAX_ATTRIBUTE};

use super::*;
use crate::queues::revocation::{ASK_AGAIN_MS, REVOKED_PER_S_MAX};
use crate::queues::{BandCounters, FlowOutcome};

/// Endpoints with [`SEATS`] sequences each, and eviction. A request waits at its own endpoint.
fn evicting(endpoints: u16, seats: f32, minimum_share: f64) -> Snapshot {
    let eviction = ("eviction".to_owned(), ParameterValue::Flag(true));
    let section = vec![
        eviction,
        number("ttlMs", 0.0),
        number("minimumShare", minimum_share),
    ];
    let control = PluginSpec {
        parameters: section,
        ..PluginSpec::of_type(scheduler::flow::FLOW_CONTROL)
    };
    let detector = PluginSpec {
        parameters: vec![number("reserve", 0.0), number("sequenceReserve", 0.0)],
        ..PluginSpec::of_type("backlog-detector")
    };
    let mut spec = PipelineSpec {
        saturation_detector: detector.name().to_owned(),
        ..PipelineSpec::default()
    };
    spec.plugins.extend([detector, control]);
    let sequences = EndpointMetrics {
        attributes: Box::new([(SEQUENCES_MAX_ATTRIBUTE.into(), seats)]),
        ..EndpointMetrics::default()
    };
    let plain = snapshot(endpoints, &spec);
    plain
        .with_metrics(plain.version(), vec![sequences; usize::from(endpoints)])
        .unwrap()
}

/// An event of the drill. `Job` numbers count from the first request, and begin again after the
/// last one.
#[derive(Clone, Copy, Debug)]
enum VmEvent {
    Arrives {
        vm: usize,
        priority: i32,
        slot: u16,
    },
    FirstByte {
        job: usize,
    },
    /// The reply ends, or the client leaves.
    Ends {
        job: usize,
    },
    /// A callback of the VM, if one is due.
    Steps {
        vm: usize,
    },
    Ticks {
        ms: u64,
    },
}

fn event() -> impl Strategy<Value = VmEvent> {
    let priority = prop_oneof![3 => -3..0_i32, 1 => Just(0), 2 => 1..4_i32];
    prop_oneof![
        6 => (0..4_usize, priority, 0..2_u16).prop_map(|(vm, priority, slot)| VmEvent::Arrives { vm, priority, slot }),
        2 => (0..80_usize).prop_map(|job| VmEvent::FirstByte { job }),
        3 => (0..80_usize).prop_map(|job| VmEvent::Ends { job }),
        6 => (0..4_usize).prop_map(|vm| VmEvent::Steps { vm }),
        1 => (0..900_u64).prop_map(|ms| VmEvent::Ticks { ms }),
    ]
}

impl Process {
    fn handle(&mut self, event: VmEvent) {
        let vms = self.vms.len();
        let jobs = self.jobs.len().max(1);
        match event {
            VmEvent::Arrives { vm, priority, slot } => self.comes(
                vm % vms,
                Job {
                    priority,
                    slot,
                    tokens: 10,
                    ..Job::default()
                },
            ),
            VmEvent::FirstByte { job } => self.has_first_byte(job % jobs),
            VmEvent::Ends { job } => self.end_job(job % jobs),
            VmEvent::Steps { vm } if self.is_due(vm % vms) => self.steps(vm % vms),
            VmEvent::Steps { .. } => {}
            VmEvent::Ticks { ms } => self.ticks(ms),
        }
        self.now = self.now.plus_ms(1);
    }

    fn has_first_byte(&mut self, job: usize) {
        let Some(job) = self.jobs.get_mut(job) else {
            return;
        };
        if let Some((at, hold)) = &mut job.running {
            self.vms[*at].pool.record_first_byte(hold);
            job.begun = true;
        }
    }

    /// The client leaves, or its reply ends.
    fn end_job(&mut self, job: usize) {
        let place = |vm: &Vm| vm.queued.iter().position(|(_, queued)| *queued == job);
        let Some((at, place)) = self
            .vms
            .iter()
            .enumerate()
            .find_map(|(at, vm)| Some((at, place(vm)?)))
        else {
            return if job < self.jobs.len() {
                self.release(&[job]);
            };
        };
        let (ticket, _) = self.vms[at].queued.swap_remove(place);
        self.vms[at].pool.drop_queued(ticket, self.now);
        (self.jobs[job].left, self.jobs[job].queued_until) = (true, Some(self.now));
        self.publish(at);
        self.looks_at_freed(at);
    }

    /// The tick of each VM.
    fn ticks(&mut self, ms: u64) {
        self.now = self.now.plus_ms(ms);
        for at in 0..self.vms.len() {
            self.vms[at].pool.tick(self.now);
            self.publish(at);
            self.read(at);
            self.vms[at].pool.queues_mut().look_at_order();
        }
    }

    /// No request arrives or ends for some seconds, so that each request can ask again.
    fn rests(&mut self) {
        self.run();
        for _ in 0..12 {
            self.ticks(ASK_AGAIN_MS + 100);
            self.run();
        }
    }

    fn counted(&self, of: impl Fn(&BandCounters) -> u64) -> usize {
        let all = self.vms.iter().flat_map(|vm| vm.pool.queues().counters());
        usize::try_from(all.map(of).sum::<u64>()).unwrap()
    }

    fn outcome(&self, outcome: FlowOutcome) -> usize {
        self.counted(|band| band.outcomes[outcome as usize])
    }

    fn running_at(&self, slot: u16) -> usize {
        self.jobs
            .iter()
            .filter(|job| job.slot == slot && job.running.is_some())
            .count()
    }

    /// Only work of negative priority without a first byte is given up, once, for a request of
    /// higher priority that is queued at the same endpoint.
    fn only_lower_work_is_given_up(&self) -> Result<(), TestCaseError> {
        for mark in &self.marks {
            let job = &self.jobs[mark.job];
            let waits = &self.jobs[mark.waits];
            prop_assert!(
                job.priority < 0 && job.priority < waits.priority && job.slot == waits.slot,
                "{:?}",
                mark
            );
            prop_assert!(mark.any_queued, "given up though none waits: {:?}", mark);
        }
        for job in &self.given_up {
            prop_assert!(!self.jobs[*job].begun, "job {} has its first byte", job);
            prop_assert!(
                self.marks.iter().any(|mark| mark.job == *job),
                "job {} was given up for nobody",
                job
            );
        }
        prop_assert_eq!(
            self.given_up.iter().collect::<BTreeSet<_>>().len(),
            self.given_up.len(),
            "one was given up twice"
        );
        Ok(())
    }

    /// Each waiting request has at most one other given up in a second, and each VM gives up at
    /// most a fixed number.
    fn few_are_given_up(&self) -> Result<(), TestCaseError> {
        for mark in &self.marks {
            let kind = |job: usize| (self.jobs[job].priority, self.jobs[job].slot);
            let given_up = self
                .marks
                .iter()
                .filter(|other| kind(other.waits) == kind(mark.waits))
                .count() as u64;
            let asks: u64 = (0..self.jobs.len())
                .filter(|job| kind(*job) == kind(mark.waits))
                .map(|job| self.asks_most(job))
                .sum();
            prop_assert!(
                given_up <= asks,
                "{} for requests that had {} asks",
                given_up,
                asks
            );
            let second = |of: &RoomMark| (of.vm, of.at.ms_since(Timestamp(0)) / 1_000);
            let of_vm = self
                .marks
                .iter()
                .filter(|other| second(other) == second(mark))
                .count();
            prop_assert!(
                of_vm <= REVOKED_PER_S_MAX as usize,
                "{} in one VM and second",
                of_vm
            );
        }
        Ok(())
    }

    /// How often the request may have asked: at its arrival, and once a second while it waited.
    fn asks_most(&self, job: usize) -> u64 {
        let job = &self.jobs[job];
        1 + job.queued_until.unwrap_or(self.now).ms_since(job.arrived) / ASK_AGAIN_MS
    }

    /// Each request is in one place, and each is counted once.
    fn none_is_lost(&self) -> Result<(), TestCaseError> {
        let of = |is: fn(&Job) -> bool| self.jobs.iter().filter(|job| is(job)).count();
        let refused = of(|job| job.refused);
        let left = of(|job| job.left);
        prop_assert_eq!(
            self.sent.len() + self.queued() + refused + left,
            self.jobs.len()
        );
        prop_assert_eq!(self.outcome(FlowOutcome::Dispatched), self.sent.len());
        prop_assert_eq!(self.outcome(FlowOutcome::EvictedContextCancelled), left);
        prop_assert_eq!(self.counted(|band| band.queued), self.queued());
        prop_assert_eq!(
            (
                self.counted(|band| band.given_up),
                self.counted(|band| band.given_up_for)
            ),
            (self.given_up.len(), self.given_up.len())
        );
        Ok(())
    }

    /// No request waits where lower work runs that may be given up.
    fn none_waits_behind_lower_work(&self) -> Result<(), TestCaseError> {
        for (_, queued) in self.vms.iter().flat_map(|vm| &vm.queued) {
            let waits = &self.jobs[*queued];
            let may_go = |job: &&Job| {
                job.running
                    .as_ref()
                    .is_some_and(|(_, hold)| hold.revocable().is_some())
            };
            let lower = self
                .jobs
                .iter()
                .filter(may_go)
                .find(|job| job.slot == waits.slot && job.priority < waits.priority);
            prop_assert!(
                lower.is_none(),
                "priority {} waits behind {:?}",
                waits.priority,
                lower.map(|job| job.priority)
            );
        }
        Ok(())
    }

    /// Ends all requests, and checks that nothing is left in any VM.
    fn all_end(&mut self) -> Result<(), TestCaseError> {
        while self.running() > 0 {
            self.end_oldest();
        }
        prop_assert_eq!(self.queued(), 0);
        for vm in &self.vms {
            prop_assert!(
                vm.pool.queues().is_empty()
                    && vm.pool.queues().bytes() == 0
                    && vm.pool.in_flight().rows().next().is_none()
            );
            prop_assert!(
                vm.pool
                    .queues()
                    .counters()
                    .all(|band| (band.queued, band.bytes) == (0, 0))
            );
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn lower_work_makes_room_over_all_vms(
        vms in 2..5_usize,
        share in prop_oneof![Just(0.0), Just(0.05)],
        conflict_each in prop_oneof![Just(0_u64), 2..9_u64],
        events in prop::collection::vec(event(), 1..100),
    ) {
        let mut process = Process::with_snapshot(vms, || evicting(2, SEATS as f32, share), conflict_each);
        for event in &events {
            process.handle(*event);
            prop_assert!((0..2).all(|slot| process.running_at(slot) <= SEATS as usize), "room was given twice");
            process.only_lower_work_is_given_up()?;
            process.few_are_given_up()?;
            process.none_is_lost()?;
        }
        process.rests();
        process.only_lower_work_is_given_up()?;
        process.few_are_given_up()?;
        process.none_waits_behind_lower_work()?;
        process.all_end()?;
        process.none_is_lost()?;
    }
}

/// All running work is in one VM, and all requests that wait are in the others. The requests that
/// got no room because of the limit ask again together, though only the first of them is tried.
#[test]
fn a_vm_gives_up_so_many_in_a_second_for_others() {
    let mut process = Process::with_snapshot(3, || evicting(1, 120.0, 0.0), 0);
    (0..120).for_each(|_| {
        process.comes(
            0,
            Job {
                priority: -1,
                tokens: 1,
                ..Job::default()
            },
        );
    });
    for at in 0..120 {
        process.comes(
            1 + at % 2,
            Job {
                priority: 5,
                tokens: 1,
                ..Job::default()
            },
        );
        process.run();
    }
    let mut given_up = vec![process.given_up.len()];
    for _ in 0..4 {
        process.ticks(1_000);
        process.run();
        given_up.push(process.given_up.len());
    }
    assert_eq!(given_up[0], REVOKED_PER_S_MAX as usize);
    assert!(
        given_up
            .windows(2)
            .all(|two| two[1] - two[0] <= REVOKED_PER_S_MAX as usize),
        "{given_up:?}"
    );
    assert_eq!(given_up[3], 120, "{given_up:?}");
}
