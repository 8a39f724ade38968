//! A model of a process whose VMs read and write the common order, and read each other's load, in
//! single steps. One test lets two VMs take their steps in every possible sequence, and another
//! test lets four VMs take their steps in a random sequence with faults.

use std::collections::BTreeSet;

use super::*;
use crate::rng::Rng;

const MS: u64 = 1_000_000;

/// The position of a VM in its callback.
#[derive(Clone, Debug, PartialEq)]
enum Place {
    /// The VM is outside of its callback.
    Idle,
    /// The VM has read the order, after it was written this many times.
    Read(SharedOrder, u64),
    /// The VM has picked an endpoint for its next request, and has published its load. The number
    /// is that of the writes before the VM read the order.
    Picked(SharedOrder, u64),
    /// The VM is about to wake another VM.
    Wakes(u64),
}

#[derive(Clone, Debug)]
struct ModelVm {
    id: u64,
    /// The keys of the queued requests.
    queued: Vec<u64>,
    tried: Vec<u64>,
    round: u64,
    event: bool,
    /// Whether the callback of the VM is due.
    due: bool,
    place: Place,
    running: u64,
    published: u64,
    dead: bool,
}

#[derive(Clone, Debug)]
struct Model {
    seats: u64,
    now: u64,
    order: SharedOrder,
    writes: u64,
    vms: Vec<ModelVm>,
    sent: Vec<u64>,
}

fn tag(key: u64) -> QueuedTag {
    QueuedTag {
        owed: false,
        priority: 0,
        flow: 0,
        rank: 0.0,
        key,
    }
}

impl ModelVm {
    fn new(id: u64, queued: &[u64]) -> Self {
        let queued = queued.to_vec();
        let tried = Vec::new();
        Self {
            id,
            queued,
            tried,
            round: 0,
            event: true,
            due: true,
            place: Place::Idle,
            running: 0,
            published: 0,
            dead: false,
        }
    }

    fn row(&self, order: &SharedOrder, now: u64) -> OrderRow {
        let first = self.queued.iter().min().map(|key| tag(*key));
        let next = self
            .queued
            .iter()
            .filter(|key| !self.tried.contains(key))
            .min()
            .map(|key| tag(*key));
        let bands: Vec<_> = self
            .queued
            .iter()
            .map(|_| RowBand::default())
            .take(1)
            .collect();
        OrderRow {
            vm: self.id,
            written: Timestamp(now),
            round: order.round,
            first,
            next,
            bands,
            ..OrderRow::default()
        }
    }
}

impl Model {
    fn new(seats: u64, queued: &[&[u64]]) -> Self {
        let vms = (1..)
            .zip(queued)
            .map(|(id, queued)| ModelVm::new(id, queued))
            .collect();
        Self {
            seats,
            now: 1_000 * MS,
            order: SharedOrder::default(),
            writes: 0,
            vms,
            sent: Vec::new(),
        }
    }

    /// Makes the VM at index `at` end a request.
    fn end(&mut self, at: usize) {
        let vm = &mut self.vms[at];
        vm.running -= 1;
        vm.published = vm.running;
        vm.event = true;
        vm.due = true;
    }

    fn write(&mut self, order: SharedOrder, seen: u64) -> bool {
        if self.writes != seen {
            return false;
        }
        self.order = order;
        self.writes = seen + 1;
        true
    }

    /// Does the next step of the VM at index `at`. Returns false if the VM has no step to do.
    fn step(&mut self, at: usize, lose_wakes: bool) -> bool {
        let now = self.now;
        let mut vm = self.vms[at].clone();
        match std::mem::replace(&mut vm.place, Place::Idle) {
            Place::Idle if !vm.due || vm.dead => return false,
            Place::Idle => {
                vm.due = false;
                vm.place = Place::Read(self.order.clone(), self.writes);
            }
            Place::Read(mut order, seen) => {
                if vm.event {
                    order.begin_round(Timestamp(now));
                }
                if vm.round != order.round {
                    vm.round = order.round;
                    vm.tried = Vec::new();
                }
                match order.step(vm.row(&order, now), vm.event) {
                    OrderStep::Try => {
                        let next = *vm
                            .queued
                            .iter()
                            .filter(|key| !vm.tried.contains(key))
                            .min()
                            .unwrap();
                        vm.tried.push(next);
                        let others: u64 = self
                            .vms
                            .iter()
                            .filter(|other| other.id != vm.id)
                            .map(|other| other.published)
                            .sum();
                        vm.due = true;
                        if vm.running + others < self.seats {
                            vm.running += 1;
                            vm.published = vm.running;
                            vm.place = Place::Picked(order, seen);
                        }
                    }
                    OrderStep::Write(wake) => {
                        if self.write(order, seen) {
                            vm.event = false;
                            vm.place = wake.map_or(Place::Idle, Place::Wakes);
                        } else {
                            vm.due = true;
                        }
                    }
                    OrderStep::Rest => {}
                }
            }
            Place::Picked(mut order, seen) => {
                let key = vm.tried.pop().unwrap();
                vm.queued.retain(|queued| *queued != key);
                let smaller = order
                    .rows
                    .iter()
                    .filter(|row| row.is_rival(vm.id, Timestamp(now)));
                let smaller = smaller
                    .filter_map(|row| row.untried(order.round))
                    .any(|other| other.compare(&tag(key)).is_lt());
                order.set_row(vm.row(&order, now));
                if self.write(order, seen) {
                    assert!(
                        !smaller,
                        "a smaller request waits in another VM and was not tried"
                    );
                    vm.event = false;
                    self.sent.push(key);
                } else {
                    vm.queued.push(key);
                    vm.running -= 1;
                    vm.published = vm.running;
                    vm.event = true;
                }
                vm.due = true;
            }
            Place::Wakes(other) => {
                let other = self.vms.iter_mut().find(|vm| vm.id == other).unwrap();
                other.due |= !lose_wakes;
                // If the VM has begun no round for its event yet, its callback is due again.
                vm.due = vm.due || vm.event;
            }
        }
        self.vms[at] = vm;
        let running: u64 = self
            .vms
            .iter()
            .filter(|vm| !matches!(vm.place, Place::Picked(..)))
            .map(|vm| vm.running)
            .sum();
        let claimed = running
            + self
                .vms
                .iter()
                .filter(|vm| matches!(vm.place, Place::Picked(..)))
                .map(|vm| vm.running - 1)
                .sum::<u64>();
        assert!(claimed <= self.seats, "a room was given twice");
        true
    }

    /// Checks, when no step is left, that no request waits while a seat is free.
    fn assert_quiet(&self) {
        let running: u64 = self.vms.iter().map(|vm| vm.running).sum();
        let queued = self.vms.iter().any(|vm| !vm.queued.is_empty());
        assert!(
            !queued || running == self.seats,
            "a wake-up was lost: {self:#?}"
        );
    }

    /// Does the steps in every possible order, and ends a request at every possible point.
    fn explore(&self, seen: &mut BTreeSet<String>, ends: u64) {
        let shape = |vm: &ModelVm| {
            let tags = |order: &SharedOrder| {
                let rows = order.rows.iter().map(|row| {
                    (
                        row.vm,
                        order.round - row.round,
                        row.next.map(|tag| tag.key),
                        row.woken.0 > 0,
                    )
                });
                rows.collect::<Vec<_>>()
            };
            let place = match &vm.place {
                Place::Read(order, at) => (1, self.writes - at, tags(order)),
                Place::Picked(order, at) => (2, self.writes - at, tags(order)),
                Place::Wakes(other) => (3, *other, Vec::new()),
                Place::Idle => (0, 0, Vec::new()),
            };
            let lag = self.order.round.wrapping_sub(vm.round);
            format!(
                "{:?}",
                (
                    &vm.queued,
                    &vm.tried,
                    lag,
                    vm.event,
                    vm.due,
                    place,
                    vm.running,
                    vm.published
                )
            )
        };
        let rows = self.order.rows.iter().map(|row| {
            (
                row.vm,
                self.order.round - row.round,
                row.next.map(|tag| tag.key),
                row.woken.0 > 0,
            )
        });
        let key = format!(
            "{ends} {:?} {:?}",
            self.vms.iter().map(shape).collect::<Vec<_>>(),
            rows.collect::<Vec<_>>()
        );
        if !seen.insert(key) {
            return;
        }
        let mut quiet = true;
        for at in 0..self.vms.len() {
            let mut next = self.clone();
            if next.step(at, false) {
                quiet = false;
                next.explore(seen, ends);
            }
            if ends > 0
                && self.vms[at].running > 0
                && !matches!(self.vms[at].place, Place::Picked(..))
            {
                let mut next = self.clone();
                next.end(at);
                next.explore(seen, ends - 1);
            }
        }
        if quiet {
            self.assert_quiet();
        }
    }
}

/// Plays every interleaving of two VMs: once with two requests in each VM, one seat and two
/// requests that end, and once with three requests, two seats and one request that ends.
#[test]
fn no_interleaving_of_two_vms_gives_a_room_twice_or_loses_a_wake_up() {
    let run = || {
        let mut seen = BTreeSet::new();
        Model::new(1, &[&[1, 4], &[2, 3]]).explore(&mut seen, 2);
        Model::new(2, &[&[1, 2], &[3]]).explore(&mut seen, 1);
        assert!(seen.len() > 1_000, "{} states", seen.len());
    };
    // The thread needs a large stack, because each step is a recursive call.
    std::thread::Builder::new()
        .stack_size(256 << 20)
        .spawn(run)
        .unwrap()
        .join()
        .unwrap();
}

/// Lets four VMs take steps in random order, while wake-ups get lost and one VM dies. Checks that
/// all requests of the living VMs are sent. All are sent because each VM also ticks every 10 ms,
/// and begins a round if the last round is older.
#[test]
fn requests_are_sent_in_spite_of_lost_wake_ups_and_dead_vms() {
    for seed in 0..300 {
        let mut rng = Rng::seeded(seed);
        let queued: Vec<Vec<u64>> = (0..4)
            .map(|vm| (0..5).map(|n| n * 4 + vm).collect())
            .collect();
        let queued: Vec<&[u64]> = queued.iter().map(Vec::as_slice).collect();
        let mut model = Model::new(2, &queued);
        let dies = seed % 2 == 0;
        for turn in 0..20_000_u64 {
            let at = usize::try_from(rng.next_u64() % 4).unwrap();
            model.now += MS / 20;
            let lost = rng.next_u64().is_multiple_of(4);
            model.step(at, lost);
            if turn % 200 == at as u64 {
                let vm = &mut model.vms[at];
                vm.event |= model.now - model.order.began.0 >= 10 * MS;
                vm.due = true;
            }
            if dies && turn == 500 {
                model.vms[0].dead = true;
                model.vms[0].place = Place::Idle;
                (model.vms[0].running, model.vms[0].published) = (0, 0);
            }
            let runs =
                model.vms[at].running > 0 && !matches!(model.vms[at].place, Place::Picked(..));
            if runs && !model.vms[at].dead && rng.next_u64().is_multiple_of(20) {
                model.end(at);
            }
        }
        let left = model
            .vms
            .iter()
            .filter(|vm| !vm.dead)
            .map(|vm| vm.queued.len())
            .sum::<usize>();
        assert_eq!(left, 0, "seed {seed}: {model:#?}");
    }
}

/// Checks that requests are sent in the order of their tags while no request ends.
#[test]
fn the_smallest_of_all_vms_goes_first() {
    for seed in 0..200 {
        let mut rng = Rng::seeded(seed);
        let mut model = Model::new(9, &[&[1, 6, 7], &[2, 5, 9], &[3, 4, 8]]);
        // At first there is no seat, so that all VMs write their rows before the first request is
        // sent.
        model.seats = 0;
        for _ in 0..300 {
            model.step(usize::try_from(rng.next_u64() % 3).unwrap(), false);
        }
        model.seats = 9;
        let first = usize::try_from(rng.next_u64() % 3).unwrap();
        (model.vms[first].event, model.vms[first].due) = (true, true);
        for _ in 0..2_000 {
            model.step(usize::try_from(rng.next_u64() % 3).unwrap(), false);
        }
        assert_eq!(model.sent, (1..=9).collect::<Vec<_>>(), "seed {seed}");
    }
}

#[test]
fn flows_that_saved_nothing_are_left_out() {
    let flow = |start: f64| FlowAccount {
        start,
        ..FlowAccount::default()
    };
    let mut band = BandService {
        account: BandAccount {
            virtual_time: 5.0,
            turn: 0,
        },
        ..BandService::default()
    };
    band.flows = (0..400_u32)
        .map(|at| (u64::from(at), flow(f64::from(at))))
        .collect();
    band.trim();
    assert_eq!(
        (band.flows.len(), band.flows.iter().map(|(id, _)| *id).min()),
        (SHARED_FLOWS_MAX, Some(144))
    );
}
