//! The state of one VM, shared by all its root contexts: after a configuration update the old root context lives beside the new one until its
//! last stream has ended, and both are one VM with one set of pools, one seat among the VMs and at most one lead.
//!
//! What the VM does by itself it does in the ticks of its newest root context, beginning with the first: a configuration is also read by a
//! throw-away VM that never ticks, and whatever that one did would be done for nobody.

pub mod board;
pub mod lease;
pub mod poison;
pub mod replica;
pub mod report;
pub mod roll;
mod words;

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use exchange::Time;

use crate::config::FilterConfig;
use crate::host::{Buffer, Host};
use crate::metrics::{Metrics, Stat};
use crate::stream::{Lead, Link};
use board::NotPosted;
use lease::Lease;
use replica::Replica;
use roll::{HEARTBEAT_MS, Roll, Row};

/// Tick period. It bounds how late a lost wake-up is noticed, a parked request answered, a free lease taken. A tick costs a few µs.
pub const TICK_MS: u32 = 100;
/// The most requests parked in one VM; beyond it they are answered at once. A worker that got more in two seconds without state is not
/// helped by holding them.
const PARKED_MAX: usize = 1_024;
/// Wake-ups taken off the queue at once: what is left is taken at the next.
const WAKES_MAX: usize = 1_024;

/// One VM.
#[derive(Debug)]
pub struct Vm<H: Host> {
    host: H,
    id: u64,
    roots: Vec<Root>,
    replicas: Vec<Rc<RefCell<Replica>>>,
    metrics: Rc<Metrics<H>>,
    seat: Seat,
    lease: Lease,
    epoch: Option<u64>,
    link: Link,
    parked: Vec<Parked>,
    serves: bool,
}

#[derive(Debug)]
struct Root {
    id: u32,
    config: Rc<FilterConfig>,
}

/// The VM's place among the VMs of the process.
#[derive(Debug, Default)]
struct Seat {
    slot: Option<u16>,
    queue: u32,
    /// The root context that the queue wakes.
    root: u32,
    beat: Option<Time>,
    roll: Roll,
}

/// A request that waits for the first state of its pool.
pub trait Waiting {
    /// There is state, or there will be none in time: decide again.
    fn retry(&self);
}

struct Parked {
    deadline: Time,
    replica: Rc<RefCell<Replica>>,
    request: Weak<dyn Waiting>,
}

// === impl Vm ===

impl<H: Host> Vm<H> {
    /// A VM without any configuration.
    pub fn new(host: H) -> Self {
        // 0 is nobody in the table of VMs.
        let id = host.entropy().max(1);
        let metrics = Rc::new(Metrics::new(host.clone()));
        Self {
            host,
            id,
            roots: Vec::new(),
            replicas: Vec::new(),
            metrics,
            seat: Seat::default(),
            lease: Lease::new(id),
            epoch: None,
            link: Link::default(),
            parked: Vec::new(),
            serves: false,
        }
    }

    /// What is counted.
    pub fn metrics(&self) -> Rc<Metrics<H>> {
        Rc::clone(&self.metrics)
    }

    /// A root context took a configuration. Touches nothing outside the VM.
    pub fn configure(&mut self, root: u32, config: Rc<FilterConfig>) {
        self.roots.retain(|r| r.id != root);
        self.roots.push(Root { id: root, config });
        self.match_pools();
    }

    /// A root context goes, and with the last one this VM's lead.
    pub fn remove_root(&mut self, root: u32) {
        self.link.root_goes(&self.host, root);
        self.roots.retain(|r| r.id != root);
        if self.roots.is_empty() {
            self.lease.resign(&self.host);
            self.epoch = None;
            self.write_counters();
        }
        self.match_pools();
    }

    /// The replica of a pool of a configuration in force.
    pub fn replica(&self, pool: &str) -> Option<Rc<RefCell<Replica>>> {
        self.replicas.iter().find(|r| *r.borrow().name == *pool).cloned()
    }

    /// Is anything known of every pool of `config`?
    pub fn is_ready(&self, config: &FilterConfig) -> bool {
        config.pools.iter().all(|pool| self.replica(&pool.name).is_some_and(|r| r.borrow().has_state()))
    }

    /// This VM gets requests: it is not the main thread's.
    pub fn serves(&mut self) {
        self.serves = true;
    }

    /// Holds a request; false when too many are held already.
    pub fn park(&mut self, deadline: Time, replica: Rc<RefCell<Replica>>, request: Weak<dyn Waiting>) -> bool {
        if self.parked.len() >= PARKED_MAX {
            return false;
        }
        self.metrics.count(Stat::Parked);
        self.parked.push(Parked { deadline, replica, request });
        true
    }

    /// What is due; the requests returned are to be decided again.
    pub fn tick(&mut self, root: u32) -> Vec<Rc<dyn Waiting>> {
        let now = self.host.now();
        let Some(newest) = self.roots.last().filter(|r| r.id == root) else { return Vec::new() };
        let config = Rc::clone(&newest.config);
        self.keep_seat(root, now);
        self.contend(root, &config, now);
        self.refresh();
        for replica in &self.replicas {
            replica.borrow_mut().pool.tick();
        }
        self.due(now)
    }

    /// Somebody put something on the board.
    pub fn woken(&mut self, queue: u32) -> Vec<Rc<dyn Waiting>> {
        for _ in 0..WAKES_MAX {
            match self.host.queue_pop(queue) {
                Ok(Some(_)) => {}
                _ => break,
            }
        }
        self.refresh();
        self.due(self.host.now())
    }

    /// A message came on a stream.
    pub fn stream_message(&mut self, root: u32, stream: u32, size: usize) -> Vec<Rc<dyn Waiting>> {
        let now = self.host.now();
        if !self.link.is(stream) {
            return Vec::new();
        }
        let bytes = match self.host.buffer(Buffer::StreamMessage, size) {
            Ok(bytes) => bytes,
            Err(error) => {
                self.host_error("a message of the daemon", error);
                return Vec::new();
            }
        };
        let outcome = self.with_lead(root, now, |link, lead| link.message(lead, &bytes));
        if matches!(outcome, None | Some(Err(NotPosted::Superseded))) {
            self.step_down(root);
        }
        self.due(now)
    }

    /// The other side closed a stream.
    pub fn stream_closed(&mut self, root: u32, stream: u32, why: &str) {
        let now = self.host.now();
        if !self.link.is(stream) {
            let _ = self.host.stream_cancel(stream);
        } else if self.with_lead(root, now, |link, lead| link.ended(lead, stream, why)).is_none() {
            self.step_down(root);
        }
    }

    /// One replica for each pool of any configuration in force.
    fn match_pools(&mut self) {
        let named = |name: &str| self.roots.iter().any(|root| root.config.pools.iter().any(|p| p.name == *name));
        self.replicas.retain(|r| named(&r.borrow().name));
        for pool in self.roots.iter().flat_map(|root| &root.config.pools) {
            if !self.replicas.iter().any(|r| *r.borrow().name == *pool.name) {
                self.replicas.push(Rc::new(RefCell::new(Replica::new(&pool.name, self.host.entropy()))));
            }
        }
    }

    /// Shows that this VM is alive, and has the root context of this tick woken from now on.
    fn keep_seat(&mut self, root: u32, now: Time) {
        let due = self.seat.beat.is_none_or(|beat| now.ms_since(beat) >= HEARTBEAT_MS);
        if due {
            self.host.follow_log_level();
            self.beat(now);
            self.write_counters();
        }
        if let (Some(slot), true) = (self.seat.slot, self.seat.root != root) {
            match self.host.queue_register(&format!("switchpoint/1/wake/{slot}")) {
                Ok(queue) => {
                    self.seat.root = root;
                    if std::mem::replace(&mut self.seat.queue, queue) != queue {
                        self.beat(now);
                    }
                }
                Err(error) => self.host_error("a queue", error),
            }
        }
    }

    fn beat(&mut self, now: Time) {
        let row = Row { vm: self.id, beat: now, queue: self.seat.queue, serves: self.serves };
        let (slot, roll) = Roll::beat(&self.host, row);
        if slot != self.seat.slot {
            // Another slot has another queue.
            (self.seat.queue, self.seat.root) = (0, 0);
        }
        (self.seat.slot, self.seat.roll, self.seat.beat) = (slot, roll, Some(now));
    }

    fn write_counters(&self) {
        if let Some(slot) = self.seat.slot {
            for replica in &self.replicas {
                report::write(&self.host, self.id, slot, &replica.borrow());
            }
        }
    }

    /// Takes, keeps or loses the lead, and leads.
    fn contend(&mut self, root: u32, config: &FilterConfig, now: Time) {
        let before = self.epoch;
        self.epoch = self.lease.poll(&self.host, self.serves, config.lease_ms, now);
        if self.epoch.is_none() && before.is_some() {
            self.step_down(root);
        } else if self.epoch != before {
            self.metrics.count(Stat::LeadersElected);
            log::debug!("VM {:016x} leads", self.id);
            self.with_lead(root, now, |link, lead| link.begin(lead));
        }
        let successor = self.successor(now);
        if let (Some(successor), true) = (successor, self.epoch.is_some()) {
            self.lease.hand_over(&self.host, successor.vm, config.lease_ms, now);
            self.step_down(root);
            let _ = self.host.queue_push(successor.queue, b"lead");
        }
        self.with_lead(root, now, |link, lead| link.drive(lead));
    }

    /// Whom a leader that serves requests hands over to: a VM that does not.
    fn successor(&self, now: Time) -> Option<Row> {
        if !self.serves || !self.lease.may_hand_over(now) {
            return None;
        }
        self.seat.roll.alive(now).map(|(_, row)| row).find(|row| row.vm != self.id && !row.serves && row.queue != 0)
    }

    fn step_down(&mut self, root: u32) {
        self.epoch = None;
        self.link.close(&self.host, root);
    }

    /// Does something as the leader; `None` when this VM is not.
    fn with_lead<R>(&mut self, root: u32, now: Time, act: impl FnOnce(&mut Link, &Lead<'_, H>) -> R) -> Option<R> {
        let (Some(epoch), Some(newest)) = (self.epoch.filter(|_| self.lease.holds(now)), self.roots.last()) else { return None };
        let lead = Lead {
            host: &self.host,
            vm: self.id,
            root,
            epoch,
            now,
            config: &newest.config,
            replicas: &self.replicas,
            roll: &self.seat.roll,
            metrics: &self.metrics,
        };
        Some(act(&mut self.link, &lead))
    }

    fn refresh(&self) {
        for replica in &self.replicas {
            let mut replica = replica.borrow_mut();
            match replica.refresh(&self.host) {
                Err(error) => self.host_error("the notice board", error),
                Ok(refreshed) if refreshed.refused => {
                    self.metrics.count(Stat::Refused);
                    log::error!("pool {}: what is on the notice board cannot be read here", replica.name);
                }
                Ok(_) => {}
            }
        }
    }

    fn due(&mut self, now: Time) -> Vec<Rc<dyn Waiting>> {
        if self.parked.is_empty() {
            return Vec::new();
        }
        let is_due = |p: &Parked| p.deadline <= now || p.replica.borrow().has_state() || p.request.strong_count() == 0;
        let (due, waiting) = std::mem::take(&mut self.parked).into_iter().partition(is_due);
        self.parked = waiting;
        due.into_iter().filter_map(|p: Parked| p.request.upgrade()).collect()
    }

    fn host_error(&self, what: &str, error: crate::host::HostError) {
        self.metrics.count(Stat::HostErrors);
        log::debug!("the proxy refused {what}: {error}");
    }
}

// === impl Parked ===

impl std::fmt::Debug for Parked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parked").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}
