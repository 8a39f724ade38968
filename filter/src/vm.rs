//! The state of one VM, shared by all its root contexts. After a configuration update, the old root
//! context exists beside the new one until its last stream has ended. Both root contexts belong to
//! one VM, which has one set of pools, one VM slot and at most one lease. Listeners with the same
//! `vm_id` also share one VM, which has the pools of all these listeners, and the daemon of the
//! newest configuration.
//!
//! Background work happens only in the ticks of the newest root context. The proxy also tries each
//! configuration in a temporary VM, which never ticks and whose work would be lost when the proxy
//! ends that VM.

mod leading;
pub mod parked_request;
mod queue_release;
pub mod replica;
mod vm_slot;
mod watched;

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use exchange::Timestamp;
use pool_state::Applied;
use proto::shared_data::room_ask;

use crate::host::Host;
use crate::metrics::{FilterMetrics, Stat};
use crate::shared_data::lease::LeaderElection;
use crate::shared_data::load_sharing::{SharingOccasion, VmContext};
use crate::state_link::StateLink;
use front::config::FilterConfig;
use parked_request::{ParkedRequest, ParkingEntry};
use queue_release::{QUEUED_WAKE, WAKES_MAX};
use replica::{PoolReplica, SharedReplica};
use vm_slot::VmSlot;
use watched::WatchedStreams;

/// The tick period, in ms. This is the longest delay after a lost wake-up, for a parked request,
/// and for a lease that became free. A tick takes a few µs.
pub const TICK_MS: u32 = 100;
/// The maximum number of requests parked in one VM. Further requests are refused immediately. If a
/// worker without state gets more requests than this in two seconds, parking more does not help.
const PARKED_MAX: usize = 2_048;
/// The tick period while flow control holds requests, in ms. After a lost wake-up, or after another
/// worker made room, a held request waits at most this long.
const HOLDING_TICK_MS: u32 = 10;

/// One VM. The fields of this struct are parts of the VM that change independently of each other.
#[derive(Debug)]
pub struct VmState<H: Host> {
    host: H,
    id: u64,
    roots: Vec<RootConfig>,
    replicas: Vec<SharedReplica>,
    metrics: Rc<FilterMetrics<H>>,
    vm_slot: VmSlot,
    lease: LeaderElection,
    epoch: Option<u64>,
    link: StateLink,
    parked: Vec<ParkingEntry>,
    watched: WatchedStreams,
    releasing: QueueRelease,
    serves: bool,
    ticks: TickTimer,
}

/// The state of resuming held requests. Only a root context may resume these requests: in a
/// callback of one stream, a proxy call about another stream would change that callback's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueRelease {
    /// No held request may be resumed now.
    Idle,
    /// The VM has woken itself to resume requests.
    Woken,
    /// A root context is resuming requests.
    Running,
}

#[derive(Debug, Default)]
struct TickTimer {
    /// The time of the last tick that did all due work.
    complete: Option<Timestamp>,
    /// The root context whose tick period is shortened, and that period.
    short: Option<(u32, u32)>,
    /// How often the VM has found no request to resume since its last complete tick, although a
    /// request was due.
    idle_releases: u8,
}

#[derive(Debug)]
struct RootConfig {
    id: u32,
    config: Rc<FilterConfig>,
}

// === impl VmState ===

impl<H: Host> VmState<H> {
    pub fn new(host: H) -> Self {
        // The id is at least 1, because 0 in the VM table means no VM.
        let id = host.entropy().max(1);
        let metrics = Rc::new(FilterMetrics::new(host.clone()));
        Self {
            host,
            id,
            roots: Vec::new(),
            replicas: Vec::new(),
            metrics,
            vm_slot: VmSlot::default(),
            lease: LeaderElection::new(id),
            epoch: None,
            link: StateLink::default(),
            parked: Vec::new(),
            watched: WatchedStreams::default(),
            releasing: QueueRelease::Idle,
            serves: false,
            ticks: TickTimer::default(),
        }
    }

    pub fn metrics(&self) -> Rc<FilterMetrics<H>> {
        Rc::clone(&self.metrics)
    }

    /// Records the configuration of a root context. This has no effect outside the VM.
    pub fn configure(&mut self, root: u32, config: Rc<FilterConfig>) {
        self.roots.retain(|r| r.id != root);
        self.roots.push(RootConfig { id: root, config });
        self.match_pools();
    }

    /// Removes a root context. After the last root context is removed, this VM releases its lease.
    pub fn remove_root(&mut self, root: u32) {
        self.metrics.flush();
        self.link.remove_root(&self.host, root);
        self.roots.retain(|r| r.id != root);
        if self.roots.is_empty() {
            self.lease.resign(&self.host);
            self.epoch = None;
            self.write_counters();
        }
        self.match_pools();
    }

    /// Returns the replica of a pool, if a current configuration names it.
    pub fn replica(&self, pool: &str) -> Option<SharedReplica> {
        self.replicas
            .iter()
            .find(|r| *r.borrow().name == *pool)
            .cloned()
    }

    /// Whether every pool of `config` has state.
    pub fn is_ready(&self, config: &FilterConfig) -> bool {
        config.pools.iter().all(|pool| {
            self.replica(&pool.name)
                .is_some_and(|r| r.borrow().has_state())
        })
    }

    /// Records that this VM serves requests, so this is not the VM of the main thread. A VM that
    /// replaced a lost VM gets requests before its first tick, and reads the state from the
    /// snapshot store.
    pub fn mark_serving(&mut self) {
        if !std::mem::replace(&mut self.serves, true) {
            // After the first heartbeat, the other VMs read this VM's load report at each pick.
            self.write_heartbeat(self.host.now());
            self.refresh();
        }
    }

    /// Publishes this VM's changes of the load of a pool to the other VMs.
    pub fn publish_load(&self, replica: &mut PoolReplica, now: Timestamp, moment: SharingOccasion) {
        if let Some(me) = self.vm_context() {
            replica
                .sharing
                .publish(&self.host, me, &mut replica.pool, now, moment);
        }
    }

    /// Reads the other VMs' changes of the load of a pool.
    pub fn receive_loads(
        &self,
        replica: &mut PoolReplica,
        now: Timestamp,
        moment: SharingOccasion,
    ) {
        if let Some(me) = self.vm_context() {
            let lost = replica
                .sharing
                .receive(&self.host, me, &mut replica.pool, now, moment);
            let proxies = replica.sharing.alone_of(replica.metrics_at(), now);
            replica.pool.queues_mut().set_alone(proxies);
            if moment == SharingOccasion::Tick && replica.sharing.knows_peers(now) {
                replica.pool.record_part();
            }
            replica.pool.set_peers_unreachable(
                replica
                    .sharing
                    .are_peers_unreachable(replica.metrics_at(), now),
            );
            self.metrics.add(Stat::PlacementsLost, lost);
        } else {
            replica.sharing.forget_peers(&mut replica.pool);
        }
    }

    /// Writes the observations of finished requests for the leader.
    pub fn publish_observations(&self, replica: &mut PoolReplica) {
        if let Some(vm_slot) = self.vm_slot.slot {
            replica.publish_observations(&self.host, vm_slot, self.id);
        }
    }

    /// Returns the identity and the slot of this VM, and the VM table; `None` if the VM has no
    /// slot, or if sharing is off.
    fn vm_context(&self) -> Option<VmContext<'_>> {
        let shares = self.roots.last().is_some_and(|root| root.config.sharing);
        let vm_slot = self.vm_slot.slot.filter(|_| shares)?;
        Some(VmContext {
            vm: self.id,
            vm_slot,
            vm_table: &self.vm_slot.vm_table,
        })
    }

    /// Parks a request of this client. Returns false if too many requests are parked in total, or
    /// if the client already has half of the parking places that other clients leave free.
    pub fn park(
        &mut self,
        deadline: Timestamp,
        client: u64,
        replica: SharedReplica,
        request: Weak<dyn ParkedRequest>,
    ) -> bool {
        let parked = self.parked.iter();
        let own = parked.filter(|parked| parked.client == client).count();
        if self.parked.len().saturating_add(own) >= PARKED_MAX {
            return false;
        }
        self.metrics.count(Stat::Parked);
        self.parked.push(ParkingEntry {
            deadline,
            client,
            replica,
            request,
        });
        true
    }

    /// Retries a request that was parked before, at the first tick after `at`. The requests that
    /// wait for a retry are bounded too, because each was parked before.
    pub fn retry_after(
        &mut self,
        at: Timestamp,
        replica: SharedReplica,
        request: Weak<dyn ParkedRequest>,
    ) {
        self.parked.push(ParkingEntry {
            deadline: at,
            client: 0,
            replica,
            request,
        });
    }

    /// Whether a held request may be resumed.
    fn is_release_due(&self) -> bool {
        self.replicas
            .iter()
            .any(|replica| replica.borrow().pool.has_due())
    }

    /// Returns the next held request to resume.
    pub fn next_queued(&mut self) -> Option<Rc<dyn ParkedRequest>> {
        let now = self.host.now();
        self.replicas
            .iter()
            .find_map(|replica| self.next_queued_of(&mut replica.borrow_mut(), now))
    }

    /// Returns the streams on which this VM acts in callbacks of a root context.
    pub fn watched(&mut self) -> &mut WatchedStreams {
        &mut self.watched
    }

    /// Does the due work of a tick, and returns the parked requests to decide again.
    pub fn tick(&mut self, root: u32) -> Vec<Rc<dyn ParkedRequest>> {
        self.metrics.flush();
        self.watched.begin_callback();
        let now = self.host.now();
        let Some(newest) = self.roots.last().filter(|r| r.id == root) else {
            return Vec::new();
        };
        let config = Rc::clone(&newest.config);
        let between = self.ticks.short.is_some_and(|(short, _)| short == root)
            && self
                .ticks
                .complete
                .is_some_and(|whole| now.ms_since(whole) < u64::from(TICK_MS));
        if between {
            self.share_with_peers(root, now);
            return Vec::new();
        }
        self.ticks.complete = Some(now);
        self.ticks.idle_releases = 0;
        self.keep_vm_slot(root, now);
        self.contend_for_leader(root, &config, now);
        self.refresh();
        self.prepare(&config, now);
        self.share_with_peers(root, now);
        self.take_due(now)
    }

    /// Publishes changes to other proxies if this VM leads, and sets the tick period that this work
    /// needs.
    fn share_with_peers(&mut self, root: u32, now: Timestamp) {
        if self.epoch.is_some() {
            for replica in &self.replicas {
                self.receive_loads(&mut replica.borrow_mut(), now, SharingOccasion::Pick);
            }
            self.with_leader(root, now, |link, leader| link.publish_load(leader));
        }
        let period = |replica: &SharedReplica| replica.borrow().peer_publisher.tick_ms(now);
        let publishing = self
            .epoch
            .and_then(|_| self.replicas.iter().filter_map(period).min());
        let holding: Vec<_> = self
            .replicas
            .iter()
            .filter(|replica| replica.borrow().pool.queues().queued() > 0)
            .collect();
        for replica in holding.iter().filter(|_| self.epoch.is_none()) {
            self.receive_loads(&mut replica.borrow_mut(), now, SharingOccasion::Pick);
        }
        let holding = (!holding.is_empty()).then_some(HOLDING_TICK_MS);
        self.replicas
            .iter()
            .for_each(|replica| replica.borrow_mut().pool.queues_mut().retry_left_room());
        self.look_at_orders();
        let short = publishing
            .into_iter()
            .chain(holding)
            .min()
            .map(|ms| (root, ms));
        if short != self.ticks.short
            && self
                .host
                .tick_period(short.map_or(TICK_MS, |(_, ms)| ms))
                .is_ok()
        {
            self.ticks.short = short;
        }
    }

    /// Handles a wake-up: reads the changes of the snapshot store or of the order of held requests.
    pub fn on_wake(&mut self, queue: u32) -> Vec<Rc<dyn ParkedRequest>> {
        self.watched.begin_callback();
        let now = self.host.now();
        for _ in 0..WAKES_MAX {
            let Ok(Some(message)) = self.host.queue_pop(queue) else {
                break;
            };
            // Each message may mean that another VM has held a request since the last message.
            self.look_at_orders();
            let ask = room_ask::read(&message)
                .and_then(|(pool, ask, left)| Some((self.replica(pool)?, (ask, left))));
            match ask {
                Some((replica, (ask, left))) => {
                    self.on_ask(&mut replica.borrow_mut(), ask, left, now);
                }
                None if message == QUEUED_WAKE => {}
                None => self.refresh(),
            }
        }
        self.take_due(now)
    }

    /// Makes this VM read the orders of held requests of all pools when it next looks for a request
    /// to resume.
    fn look_at_orders(&self) {
        self.replicas
            .iter()
            .for_each(|replica| replica.borrow_mut().pool.queues_mut().look_at_order());
    }

    /// Creates a replica for each pool that a current configuration names, and drops the other
    /// replicas.
    fn match_pools(&mut self) {
        let named = |name: &str| {
            self.roots
                .iter()
                .any(|root| root.config.pools.iter().any(|p| p.name == *name))
        };
        // A pool that still holds requests stays until these requests are answered.
        self.replicas
            .retain(|r| named(&r.borrow().name) || r.borrow().pool.queues().queued() > 0);
        for pool in self.roots.iter().flat_map(|root| &root.config.pools) {
            if !self.replicas.iter().any(|r| *r.borrow().name == *pool.name) {
                self.replicas.push(Rc::new(RefCell::new(PoolReplica::new(
                    &pool.name,
                    self.host.entropy(),
                ))));
            }
        }
    }

    /// Prepares the pools at a tick, so that no request waits for this work. Creating a prefix
    /// index takes milliseconds, and only a VM that serves requests (not the leader) needs the
    /// index. If the configuration has several pools, the VM may never serve one of them, so the
    /// first request for a pool creates the pool's index.
    fn prepare(&self, config: &FilterConfig, now: Timestamp) {
        for replica in &self.replicas {
            let replica = &mut *replica.borrow_mut();
            let pool = &mut replica.pool;
            pool.tick(now);
            if self.epoch.is_none() && self.replicas.len() == 1 {
                pool.reserve_prefixes(config.prefix_entries);
            }
            pool.set_placement_publishing(config.sharing);
            self.receive_loads(replica, now, SharingOccasion::Tick);
            self.publish_load(replica, now, SharingOccasion::Tick);
        }
    }

    fn refresh(&self) {
        for replica in &self.replicas {
            let mut replica = replica.borrow_mut();
            match replica.refresh(&self.host) {
                Err(error) => self.host_error("the snapshot store", error),
                Ok(applied) if applied.contains(&Applied::Nothing) => {
                    self.metrics.count(Stat::Refused);
                    log::error!(
                        "pool {}: this VM cannot decode a message that another VM stored",
                        replica.name
                    );
                }
                Ok(_) => {}
            }
        }
    }

    /// Returns the parked requests to decide now. These requests stay parked until they are
    /// decided, because the proxy may refuse a call that a decision needs.
    fn take_due(&mut self, now: Timestamp) -> Vec<Rc<dyn ParkedRequest>> {
        self.parked.retain(|parked| {
            parked
                .request
                .upgrade()
                .is_some_and(|request| request.waits())
        });
        let is_due = |p: &&ParkingEntry| p.deadline <= now || p.replica.borrow().has_state();
        self.parked
            .iter()
            .filter(is_due)
            .filter_map(|parked| parked.request.upgrade())
            .collect()
    }

    fn host_error(&self, what: &str, error: crate::host::HostError) {
        self.metrics.count(Stat::HostErrors);
        log::debug!("the proxy refused {what}: {error}");
    }
}

// === impl ParkingEntry ===

impl std::fmt::Debug for ParkingEntry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parked")
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{FakeHost, encode, metrics_message, pool_update_message};
    use crate::host::BodyBuffer;
    use crate::host::WriteCondition;
    use crate::shared_data::vm_table::VmTable;
    use crate::shared_data::{crash_guard, observation_ring, snapshot_store};
    use crate::state_link::CallResponse;
    use prost::Message;
    use proto::shared_data::LeaseValue;
    use proto::shared_data::VmEntry;
    use proto::state::{self, proxy_message};
    use scheduler::Version;
    use scheduler::latency::step::StepModel;

    const TERM: u64 = 40;

    impl<H: Host> VmState<H> {
        pub fn parked_count(&self) -> usize {
            self.parked.len()
        }
    }

    fn config(json: &str) -> Rc<FilterConfig> {
        Rc::new(FilterConfig::parse(json.as_bytes()).unwrap())
    }

    fn vm(host: &FakeHost, root: u32) -> VmState<FakeHost> {
        let mut vm = VmState::new(host.clone());
        vm.configure(root, config(r#"{"pools": [{"name": "default"}]}"#));
        vm
    }

    fn version(sequence: u64) -> Version {
        Version {
            term: TERM,
            sequence,
        }
    }

    /// Sends `bytes` from the daemon on the newest stream.
    fn send(host: &FakeHost, vm: &mut VmState<FakeHost>, bytes: Vec<u8>) -> usize {
        let size = bytes.len();
        let stream = u32::try_from(host.grpc.streams.borrow().len()).unwrap();
        host.http
            .buffers
            .borrow_mut()
            .insert(BodyBuffer::StreamMessage as u32, bytes);
        let root = vm.roots.last().unwrap().id;
        vm.on_stream_message(root, stream, size).len()
    }

    /// Returns the messages that the VM has sent to the daemon since the last call, as text.
    fn said(host: &FakeHost) -> Vec<String> {
        let sent = std::mem::take(&mut *host.grpc.sent.borrow_mut());
        let text =
            |(stream, bytes): (u32, Vec<u8>)| match state::ProxyMessage::decode(bytes.as_slice())
                .unwrap()
                .message
                .unwrap()
            {
                proxy_message::Message::Hello(h) => {
                    format!("{stream}: hello {} {:?}", h.node_id, h.pools)
                }
                proxy_message::Message::Ack(a) => {
                    let held = a.held.map_or(String::new(), |held| {
                        format!("; holds {}.{}", held.term, held.sequence)
                    });
                    format!(
                        "{stream}: ack {} {}{held}",
                        a.version.unwrap().sequence,
                        a.refused
                    )
                }
                proxy_message::Message::Report(r) => {
                    format!("{stream}: report of {}", r.counters.len())
                }
                proxy_message::Message::Observations(o) => {
                    format!("{stream}: {} bytes of observations", o.encoded_len())
                }
                proxy_message::Message::LearnedModels(m) => {
                    format!(
                        "{stream}: models of {} words, {} of latency",
                        m.step.len(),
                        m.latency.len()
                    )
                }
                proxy_message::Message::LoadReport(s) => format!(
                    "{stream}: share of {} bytes, {} placements",
                    s.row.len(),
                    s.placements.len()
                ),
            };
        sent.into_iter().map(text).collect()
    }

    fn in_force(vm: &VmState<FakeHost>) -> u64 {
        vm.replica("default").unwrap().borrow().version().sequence
    }

    /// Returns a process and its VM 1, which leads and has received a pool update with sequence 1.
    fn led() -> (FakeHost, VmState<FakeHost>) {
        let host = FakeHost::new();
        host.properties
            .borrow_mut()
            .insert("xds.node.id".into(), b"proxy-1".to_vec());
        let mut leader = vm(&host, 1);
        leader.tick(1);
        send(
            &host,
            &mut leader,
            pool_update_message("default", version(1), &["10.0.0.1:1"]),
        );
        (host, leader)
    }

    #[test]
    fn the_last_configuration_of_a_vm_leaves_no_count_behind() {
        let (host, mut leader) = led();
        leader.metrics().collect(Stat::Picked, 3);
        leader.remove_root(1);
        assert_eq!(host.metric_value("switchpoint_picked_total"), 3);
    }

    #[test]
    fn a_configuration_alone_touches_nothing_outside_the_vm() {
        let host = FakeHost::new();
        let mut canary = vm(&host, 1);
        canary.remove_root(1);
        assert_eq!(
            (
                host.writes.get(),
                host.queues.borrow().len(),
                host.grpc.streams.borrow().len()
            ),
            (0, 0, 0)
        );
    }

    #[test]
    fn the_leader_hears_the_daemon_and_wakes_the_others() {
        let (host, mut leader) = led();
        assert_eq!(said(&host), ["1: hello proxy-1 [\"default\"]", "1: ack 1 "]);
        let mut other = vm(&host, 1);
        other.tick(1);
        assert_eq!(
            in_force(&other),
            1,
            "a later VM reads the current snapshot store"
        );
        assert_eq!(
            host.grpc.streams.borrow().len(),
            1,
            "one stream for each process"
        );

        host.pass_ms(1_000);
        leader.tick(1);
        said(&host);
        send(
            &host,
            &mut leader,
            pool_update_message("default", version(2), &["10.0.0.1:1", "10.0.0.2:1"]),
        );
        let queue = other.vm_slot.queue;
        assert_eq!(host.queues.borrow()[queue as usize - 1].1.len(), 1);
        other.on_wake(queue);
        assert_eq!((in_force(&leader), in_force(&other)), (2, 2));
        assert!(
            host.queues.borrow()[queue as usize - 1].1.is_empty(),
            "wake-ups do not pile up"
        );
    }

    #[test]
    fn a_wake_up_that_is_lost_costs_a_tick() {
        let (host, mut leader) = led();
        let mut other = vm(&host, 1);
        other.tick(1);
        send(
            &host,
            &mut leader,
            pool_update_message("default", version(2), &["10.0.0.1:1"]),
        );
        host.pass_ms(100);
        other.tick(1);
        assert_eq!(in_force(&other), 2);
    }

    #[test]
    fn a_leader_that_dies_is_followed_and_what_was_known_stays() {
        let (host, leader) = led();
        let mut other = vm(&host, 1);
        other.tick(1);
        drop(leader);
        for _ in 0..30 {
            host.pass_ms(100);
            other.tick(1);
        }
        assert_eq!(host.grpc.streams.borrow().len(), 2, "within the lease");
        said(&host);
        // The daemon sends its state again. The VM does not refuse a pool update that is already in
        // force.
        send(
            &host,
            &mut other,
            pool_update_message("default", version(1), &["10.0.0.1:1"]),
        );
        assert_eq!(said(&host), ["2: ack 1 "]);
        assert_eq!(host.metric_value("switchpoint_state_refused_total"), 0);
    }

    #[test]
    fn a_stalled_leader_steps_down_at_its_next_message() {
        let (host, mut stalled) = led();
        let mut other = vm(&host, 1);
        host.pass_ms(3_000);
        other.tick(1);
        assert_eq!(host.grpc.streams.borrow().len(), 2);
        send(
            &host,
            &mut other,
            pool_update_message("default", version(5), &["10.0.0.5:1"]),
        );
        said(&host);
        // The stalled leader now receives a message that was sent to it before the stall.
        let late = pool_update_message("default", version(9), &["10.0.0.9:1"]);
        host.http
            .buffers
            .borrow_mut()
            .insert(BodyBuffer::StreamMessage as u32, late.clone());
        stalled.on_stream_message(1, 1, late.len());
        assert_eq!(said(&host), [""; 0]);
        assert!(
            !host.grpc.streams.borrow()[0],
            "the stalled leader closed its stream"
        );
        stalled.tick(1);
        assert_eq!(in_force(&stalled), 5);
    }

    /// Returns a message with latency models in which a decode step takes `decode_ms`. With `None`,
    /// the models are provisional and have only the prior.
    fn models_message(version: Version, decode_ms: Option<f32>) -> Vec<u8> {
        let step =
            decode_ms.map(|ms| StepModel::from_parts([9.0, 0.1, 0.0], [ms, 0.1, 0.0], 100.0));
        let provisional = decode_ms.is_none();
        let learned = proto::LearnedModels {
            pool: "default".into(),
            version,
            step: step.unwrap_or_default(),
            latency: None,
            provisional,
        };
        encode(state::daemon_message::Message::LearnedModels(
            proto::encode_learned(&learned).unwrap(),
        ))
    }

    fn decode_ms(vm: &VmState<FakeHost>) -> f32 {
        vm.replica("default")
            .unwrap()
            .borrow()
            .pool
            .snapshot()
            .unwrap()
            .table()
            .step()
            .decode()[0]
    }

    #[test]
    fn a_daemon_that_knows_less_is_sent_the_models_that_all_vms_keep() {
        let (host, mut leader) = led();
        let mut other = vm(&host, 1);
        send(&host, &mut leader, models_message(version(2), None));
        send(&host, &mut leader, models_message(version(3), Some(20.0)));
        other.tick(1);
        assert_eq!(
            (decode_ms(&leader), decode_ms(&other)),
            (20.0, 20.0),
            "provisional models give way"
        );
        said(&host);
        let restarted = Version {
            term: TERM + 1,
            sequence: 1,
        };
        send(&host, &mut leader, models_message(restarted, None));
        assert_eq!(
            said(&host),
            [format!(
                "1: models of {} words, 0 of latency",
                StepModel::default().words().len()
            )]
        );
        let mut fresh = vm(&host, 1);
        [&mut other, &mut fresh]
            .into_iter()
            .for_each(|vm| drop(vm.tick(1)));
        assert_eq!([&leader, &other, &fresh].map(decode_ms), [20.0; 3]);
        // The daemon continues with the VM's models, and learns.
        send(
            &host,
            &mut leader,
            models_message(
                Version {
                    sequence: 2,
                    ..restarted
                },
                Some(21.0),
            ),
        );
        [&mut other, &mut fresh]
            .into_iter()
            .for_each(|vm| drop(vm.tick(1)));
        assert_eq!([&leader, &other, &fresh].map(decode_ms), [21.0; 3]);
        assert_eq!(said(&host), [""; 0]);
        assert_eq!(host.metric_value("switchpoint_state_refused_total"), 0);
    }

    #[test]
    fn a_daemon_of_the_far_future_does_not_shut_out_all_later_ones() {
        let (host, mut leader) = led();
        said(&host);
        let far = Version {
            term: u64::MAX,
            sequence: 1,
        };
        let update = pool_update_message("default", far, &["10.0.0.7:1"]);
        send(&host, &mut leader, update);
        assert_eq!(
            said(&host),
            [format!(
                "1: ack 1 term {} is more than a day ahead of this proxy's clock",
                u64::MAX
            )]
        );
        let next = Version {
            term: TERM + 1,
            sequence: 1,
        };
        let update = pool_update_message("default", next, &["10.0.0.7:1"]);
        send(&host, &mut leader, update);
        assert_eq!(
            leader.replica("default").unwrap().borrow().version().term,
            TERM + 1
        );
    }

    #[test]
    fn bad_and_old_pool_updates_are_refused_with_the_reason_and_change_nothing() {
        let (host, mut leader) = led();
        said(&host);
        send(
            &host,
            &mut leader,
            pool_update_message("default", version(2), &["10.0.0.1:1", "10.0.0.1:1"]),
        );
        send(&host, &mut leader, b"\xff\xff\xff".to_vec());
        send(
            &host,
            &mut leader,
            pool_update_message(
                "default",
                Version {
                    term: TERM - 1,
                    sequence: 99,
                },
                &["10.0.0.7:1"],
            ),
        );
        send(
            &host,
            &mut leader,
            metrics_message("default", version(1), 3, &[1.0, 2.0]),
        );
        let said = said(&host);
        assert!(
            said[0].starts_with("1: ack 2 ") && said[0].contains("claimed by two endpoints"),
            "{said:?}"
        );
        assert_eq!(
            said[1..],
            ["1: ack 99 older than 40.1, which is in force; holds 40.1"]
        );
        assert_eq!(
            (
                in_force(&leader),
                host.metric_value("switchpoint_state_refused_total")
            ),
            (1, 4)
        );
        // The new leader continues to publish.
        send(
            &host,
            &mut leader,
            pool_update_message(
                "default",
                Version {
                    term: TERM + 1,
                    sequence: 1,
                },
                &["10.0.0.7:1"],
            ),
        );
        assert_eq!(
            leader.replica("default").unwrap().borrow().version().term,
            TERM + 1
        );
    }

    #[test]
    fn a_pool_update_of_two_million_empty_endpoints_is_refused_and_the_pool_stays() {
        let (host, mut leader) = led();
        let mut other = vm(&host, 1);
        other.tick(1);
        said(&host);
        let mut update = state::PoolUpdate {
            pool: "default".into(),
            version: Some(state::Version {
                term: TERM,
                sequence: 2,
            }),
            ..state::PoolUpdate::default()
        }
        .encode_to_vec();
        // Each of these is an empty message in field 3, `endpoints`.
        update.extend([0x1a, 0].repeat(2_000_000));
        // The update is the content of field 2 of the message.
        let mut message = vec![0x12];
        prost::encoding::encode_varint(update.len() as u64, &mut message);
        message.extend(update);
        let decoded = proto::daemon_message(&message).unwrap_err();
        assert!(decoded.to_string().contains("Endpoint"), "{decoded}");
        send(&host, &mut leader, message);
        assert_eq!(host.metric_value("switchpoint_state_refused_total"), 1);
        assert!(said(&host).is_empty(), "no version was read to refuse");
        other.tick(1);
        for vm in [&leader, &other] {
            assert_eq!(in_force(vm), 1);
            assert!(vm.replica("default").unwrap().borrow().has_state());
        }
        let next = pool_update_message("default", version(2), &["10.0.0.1:1"]);
        send(&host, &mut leader, next);
        assert_eq!(in_force(&leader), 2, "later updates are applied");
    }

    /// The clock of the previous daemon was ahead of the clock of the new daemon, so the new daemon
    /// begins with a term that is too low. The new daemon raises its term after a refusal.
    #[test]
    fn a_daemon_whose_term_is_behind_is_told_what_is_held_and_heard_once_it_is_ahead() {
        const AHEAD: u64 = TERM + 1_000_000;
        for transport in ["grpc", "http"] {
            let host = FakeHost::new();
            let ahead = Version {
                term: AHEAD,
                sequence: 77,
            };
            snapshot_store::SharedSnapshotStore::new("default")
                .publish_pool_update(
                    &host,
                    1,
                    ahead,
                    &pool_update_message("default", ahead, &["10.0.0.1:1"]),
                    host.now(),
                )
                .unwrap();
            snapshot_store::SharedSnapshotStore::for_models("default")
                .publish_pool_update(&host, 1, ahead, b"\xff", host.now())
                .unwrap();
            let mut leader = VmState::new(host.clone());
            leader.configure(1, config(&format!(r#"{{"pools": [{{"name": "default"}}], "state": {{"transport": "{transport}"}}}}"#)));
            leader.tick(1);
            let hear = |leader: &mut VmState<FakeHost>, message: Vec<u8>| match transport {
                "grpc" => drop(send(&host, leader, message)),
                _ => {
                    let last = |kind: &str| {
                        host.grpc
                            .calls
                            .borrow()
                            .iter()
                            .rposition(|(path, _, _)| path.ends_with(kind))
                            .unwrap()
                            + 1
                    };
                    answer(leader, last("tell"), b"200", &[]);
                    answer(leader, last("hear"), b"200", &[message]);
                }
            };
            let acks = || -> Vec<state::Ack> {
                let mut bytes: Vec<Vec<u8>> = host
                    .grpc
                    .sent
                    .borrow()
                    .iter()
                    .map(|(_, bytes)| bytes.clone())
                    .collect();
                for (_, _, body) in &*host.grpc.calls.borrow() {
                    let mut rest = body.as_slice();
                    while let Some((message, after)) = proto::frames::take(rest) {
                        rest = after;
                        bytes.push(message.to_vec());
                    }
                }
                let ack = |bytes: &Vec<u8>| match state::ProxyMessage::decode(bytes.as_slice())
                    .unwrap()
                    .message
                {
                    Some(proxy_message::Message::Ack(ack)) => Some(ack),
                    _ => None,
                };
                bytes.iter().filter_map(ack).collect()
            };
            for sequence in 1..4 {
                hear(
                    &mut leader,
                    pool_update_message("default", version(sequence), &["10.0.0.2:1"]),
                );
            }
            let refusals = acks();
            assert!(!refusals.is_empty(), "{transport}");
            for ack in refusals {
                let held = ack.held.map(|held| (held.term, held.sequence));
                assert_eq!(
                    (held, ack.refused.is_empty()),
                    (Some((AHEAD, 77)), false),
                    "{transport}"
                );
            }
            let raised = Version {
                term: AHEAD + 1,
                sequence: 1,
            };
            hear(
                &mut leader,
                pool_update_message("default", raised, &["10.0.0.2:1"]),
            );
            hear(&mut leader, metrics_message("default", raised, 2, &[4.0]));
            let replica = leader.replica("default").unwrap();
            assert_eq!(
                (
                    replica.borrow().version(),
                    replica.borrow().applied().metrics_sequence()
                ),
                (raised, 2),
                "{transport}"
            );
            host.pass_ms(100);
            leader.tick(1);
            assert!(
                acks()
                    .last()
                    .is_some_and(|ack| ack.refused.is_empty() && ack.held.is_none()),
                "{transport}"
            );
        }
    }

    #[test]
    fn a_store_that_cannot_be_read_here_still_says_what_is_held() {
        let (host, mut leader) = led();
        said(&host);
        let ahead = Version {
            term: TERM + 5,
            sequence: 2,
        };
        snapshot_store::SharedSnapshotStore::new("default")
            .publish_pool_update(&host, 9, ahead, b"\xff\xff", host.now())
            .unwrap();
        // A later leader has written the state. This leader still has the lease, and notices the
        // later leader when this leader publishes.
        host.share(
            "switchpoint/1/leader",
            &LeaseValue {
                epoch: 9,
                holder: leader.id,
                until: host.now().plus_ms(3_000),
            }
            .to_bytes(),
            WriteCondition::Any,
        )
        .unwrap();
        leader.lease = LeaderElection::new(leader.id);
        leader.tick(1);
        let stream = u32::try_from(host.grpc.streams.borrow().len()).unwrap();
        assert_eq!(leader.epoch, Some(9));
        send(
            &host,
            &mut leader,
            pool_update_message("default", version(3), &["10.0.0.2:1"]),
        );
        assert_eq!(
            said(&host).last().unwrap(),
            &format!("{stream}: ack 3 older than 45.2, which is in force; holds 45.2")
        );
    }

    #[test]
    fn a_pool_update_that_killed_its_leader_is_not_decoded_again() {
        let (host, leader) = led();
        let deadly = |sequence| pool_update_message("default", version(sequence), &["10.0.0.2:1"]);
        // The leader is lost while it decodes a message, so its mark stays in shared data.
        let mut mark = None;
        let (other, _) = crash_guard::CrashGuard::load(&host, leader.id, host.now());
        other.decode_guarded(&host, leader.id, &deadly(2), || {
            mark = host.shared("switchpoint/1/decoding").unwrap();
        });
        host.share(
            "switchpoint/1/decoding",
            &mark.unwrap().bytes,
            WriteCondition::Any,
        )
        .unwrap();
        drop(leader);
        let mut next = vm(&host, 1);
        let ticks = |next: &mut VmState<FakeHost>, count| {
            for _ in 0..count {
                host.pass_ms(100);
                next.tick(1);
            }
        };
        ticks(&mut next, 31);
        assert_eq!(
            (next.epoch, host.grpc.streams.borrow().len()),
            (Some(2), 1),
            "it leads, and does not contact the daemon for a while"
        );
        ticks(&mut next, 100);
        assert_eq!(host.grpc.streams.borrow().len(), 2);
        said(&host);
        send(&host, &mut next, deadly(3));
        assert_eq!((in_force(&next), said(&host).len()), (1, 0));
        assert_eq!(
            host.metric_value("switchpoint_state_crash_guarded_total"),
            1
        );
        send(
            &host,
            &mut next,
            pool_update_message("default", version(4), &["10.0.0.3:1"]),
        );
        assert_eq!(in_force(&next), 4);
    }

    #[test]
    fn a_stream_that_ends_is_released_at_once_and_opened_again_after_a_pause() {
        let (host, mut leader) = led();
        leader.on_stream_closed(1, 1, "gone");
        assert!(!host.grpc.streams.borrow()[0]);
        leader.tick(1);
        assert_eq!(host.grpc.streams.borrow().len(), 1, "not at once");
        host.pass_ms(100);
        leader.tick(1);
        assert_eq!(host.grpc.streams.borrow().len(), 2);
        // The pauses between two attempts grow up to a limit.
        let mut waits = Vec::new();
        for _ in 0..12 {
            let open = u32::try_from(host.grpc.streams.borrow().len()).unwrap();
            leader.on_stream_closed(1, open, "gone");
            let mut ticks = 0;
            while host.grpc.streams.borrow().len() == open as usize {
                host.pass_ms(100);
                leader.tick(1);
                ticks += 1;
            }
            waits.push(ticks * 100);
        }
        assert!(
            waits.iter().all(|&ms| (100..=2_100).contains(&ms)) && waits[11] >= 1_000,
            "{waits:?}"
        );
    }

    #[test]
    fn a_silent_daemon_is_given_up() {
        let (host, mut leader) = led();
        for _ in 0..49 {
            host.pass_ms(100);
            leader.tick(1);
        }
        assert_eq!(*host.grpc.streams.borrow(), [true]);
        for _ in 0..4 {
            host.pass_ms(100);
            leader.tick(1);
        }
        assert_eq!(*host.grpc.streams.borrow(), [false, true]);
        assert_eq!(host.metric_value("switchpoint_state_connected"), 0);
    }

    #[test]
    fn a_new_root_context_takes_over_stream_and_wake_ups() {
        let (host, mut leader) = led();
        leader.configure(
            2,
            config(r#"{"pools": [{"name": "default"}, {"name": "more"}]}"#),
        );
        host.take_log();
        leader.tick(1);
        assert_eq!(
            host.take_log(),
            [""; 0],
            "ticks of the old root context have no effect"
        );
        leader.tick(2);
        // Only the root context that opened a stream can end the stream.
        assert_eq!(host.take_log(), ["focus 1", "focus 2"]);
        assert_eq!(*host.grpc.streams.borrow(), [false, true]);
        assert_eq!(
            said(&host).last().unwrap(),
            "2: hello proxy-1 [\"default\", \"more\"]"
        );
        assert_eq!(leader.vm_slot.root, 2);
        leader.remove_root(1);
        assert_eq!(*host.grpc.streams.borrow(), [false, true]);
        // A pool that no configuration names is dropped. A pool that stays keeps its state.
        leader.configure(3, config(r#"{"pools": [{"name": "default"}]}"#));
        leader.remove_root(2);
        assert_eq!(*host.grpc.streams.borrow(), [false, false]);
        assert!(leader.replica("more").is_none());
        assert_eq!(in_force(&leader), 1);
        leader.tick(3);
        assert_eq!(*host.grpc.streams.borrow(), [false, false, true]);
    }

    #[test]
    fn the_last_root_context_frees_the_leader() {
        let (host, mut leader) = led();
        let mut other = vm(&host, 1);
        other.tick(1);
        leader.remove_root(1);
        other.tick(1);
        assert_eq!(*host.grpc.streams.borrow(), [false, true]);
    }

    #[test]
    fn a_leader_that_serves_hands_over_to_a_vm_that_does_not() {
        let (host, mut worker) = led();
        let mut main = vm(&host, 1);
        worker.mark_serving();
        for _ in 0..101 {
            host.pass_ms(100);
            main.tick(1);
            worker.tick(1);
            send(
                &host,
                &mut worker,
                metrics_message("default", version(1), host.now_ms.get(), &[1.0]),
            );
        }
        main.tick(1);
        assert_eq!(*host.grpc.streams.borrow(), [false, true]);
        assert!(worker.epoch.is_none() && main.epoch.is_some());
    }

    #[test]
    fn counters_of_all_vms_are_reported_by_the_leader() {
        let (host, mut leader) = led();
        let mut other = vm(&host, 1);
        said(&host);
        for _ in 0..22 {
            host.pass_ms(100);
            other.tick(1);
            leader.tick(1);
        }
        assert_eq!(said(&host), ["1: report of 2", "1: report of 2"]);
    }

    #[test]
    fn a_worker_has_its_prefix_index_before_its_first_request_and_the_leader_none() {
        let (host, leader) = led();
        let mut worker = vm(&host, 1);
        worker.tick(1);
        let entries = |vm: &VmState<FakeHost>| {
            vm.replica("default")
                .unwrap()
                .borrow()
                .pool
                .prefixes()
                .stats()
                .entries_max
        };
        assert_eq!(entries(&leader), 0);
        assert!(entries(&worker) >= FilterConfig::default().prefix_entries);
    }

    // === HTTP calls ===

    /// Answers a call of the VM with this status and these messages.
    fn answer(vm: &mut VmState<FakeHost>, call: usize, status: &[u8], messages: &[Vec<u8>]) {
        let mut body = Vec::new();
        messages
            .iter()
            .for_each(|message| proto::frames::push(&mut body, message));
        let answer = CallResponse {
            status: Some(status.to_vec()),
            body,
        };
        vm.on_call_response(1, u32::try_from(call).unwrap(), answer);
    }

    /// Returns the calls that the VM has made since the last check, as numbered text.
    fn called(host: &FakeHost, seen: &mut usize) -> Vec<String> {
        let calls = host.grpc.calls.borrow();
        let text = |(path, session, body): &(String, String, Vec<u8>)| {
            let mut kinds = Vec::new();
            let mut rest = body.as_slice();
            while let Some((message, after)) = proto::frames::take(rest) {
                rest = after;
                kinds.push(
                    match state::ProxyMessage::decode(message)
                        .unwrap()
                        .message
                        .unwrap()
                    {
                        proxy_message::Message::Hello(_) => "hello".to_owned(),
                        proxy_message::Message::Ack(ack) => {
                            format!("ack {}", ack.version.unwrap().sequence)
                        }
                        proxy_message::Message::Report(_) => "report".to_owned(),
                        _ => "other".to_owned(),
                    },
                );
            }
            format!(
                "{} {} {kinds:?}",
                path.strip_prefix("/switchpoint/state/").unwrap(),
                u64::from_str_radix(session, 16).unwrap()
            )
        };
        calls
            .iter()
            .skip(std::mem::replace(seen, calls.len()))
            .map(text)
            .collect()
    }

    /// Returns a process and its VM 1, which leads over HTTP calls. The VM has sent its hello in
    /// call 1.
    fn calling() -> (FakeHost, VmState<FakeHost>, usize) {
        let host = FakeHost::new();
        let mut leader = VmState::new(host.clone());
        leader.configure(
            1,
            config(r#"{"pools": [{"name": "default"}], "state": {"transport": "http"}}"#),
        );
        leader.tick(1);
        let mut seen = 0;
        let first = called(&host, &mut seen);
        assert!(
            first.len() == 1 && first[0].starts_with("tell ") && first[0].ends_with("[\"hello\"]"),
            "{first:?}"
        );
        (host, leader, seen)
    }

    fn session(host: &FakeHost) -> u64 {
        u64::from_str_radix(&host.grpc.calls.borrow().last().unwrap().1, 16).unwrap()
    }

    #[test]
    fn calls_do_what_the_stream_does() {
        let (host, mut leader, mut seen) = calling();
        let s = session(&host);
        answer(&mut leader, 1, b"200", &[]);
        assert_eq!(called(&host, &mut seen), [format!("hear {s} []")]);
        let both = [
            pool_update_message("default", version(1), &["10.0.0.1:1"]),
            metrics_message("default", version(1), 7, &[3.0]),
        ];
        answer(&mut leader, 2, b"200", &both);
        assert_eq!(in_force(&leader), 1);
        assert_eq!(
            host.metric_value("switchpoint_state_metrics_total"),
            1,
            "both were taken, in order"
        );
        assert_eq!(
            called(&host, &mut seen),
            [format!("tell {s} [\"ack 1\"]"), format!("hear {s} []")]
        );
        // While a call is open, messages collect for the next call.
        for sequence in 2..4 {
            let hear = host.grpc.calls.borrow().len();
            answer(
                &mut leader,
                hear,
                b"200",
                &[pool_update_message(
                    "default",
                    version(sequence),
                    &["10.0.0.1:1"],
                )],
            );
            assert_eq!(called(&host, &mut seen), [format!("hear {s} []")]);
        }
        answer(&mut leader, 3, b"200", &[]);
        assert_eq!(
            called(&host, &mut seen),
            [format!("tell {s} [\"ack 2\", \"ack 3\"]")]
        );
        assert_eq!(host.grpc.streams.borrow().len(), 0);
    }

    #[test]
    fn a_daemon_that_does_not_wait_is_asked_once_a_tick() {
        let (host, mut leader, mut seen) = calling();
        answer(&mut leader, 1, b"200", &[]);
        called(&host, &mut seen);
        answer(&mut leader, 2, b"200", &[]);
        assert_eq!(called(&host, &mut seen).len(), 0);
        host.pass_ms(100);
        leader.tick(1);
        assert_eq!(called(&host, &mut seen).len(), 1);
    }

    #[test]
    fn a_call_that_fails_is_the_end_of_the_connection() {
        let frames = |body: &[u8]| CallResponse {
            status: Some(b"200".to_vec()),
            body: body.to_vec(),
        };
        let ends = [
            CallResponse::default(),
            CallResponse {
                status: Some(b"503".to_vec()),
                body: b"shutting down\n".to_vec(),
            },
            frames(b"\x09\0\0\0cut"),
        ];
        for end in ends {
            let (host, mut leader, mut seen) = calling();
            let s = session(&host);
            answer(&mut leader, 1, b"200", &[]);
            called(&host, &mut seen);
            leader.on_call_response(1, 2, end);
            assert_eq!(called(&host, &mut seen).len(), 0, "not at once");
            host.pass_ms(100);
            leader.tick(1);
            let again = called(&host, &mut seen);
            assert!(
                again.len() == 1 && again[0].ends_with("[\"hello\"]") && session(&host) != s,
                "{again:?}"
            );
            // The response to a call of the previous connection is ignored.
            answer(
                &mut leader,
                2,
                b"200",
                &[pool_update_message("default", version(1), &["10.0.0.1:1"])],
            );
            assert_eq!((in_force(&leader), called(&host, &mut seen).len()), (0, 0));
        }
    }

    #[test]
    fn calls_to_a_silent_daemon_are_given_up_and_so_is_a_superseded_leader() {
        let (host, mut leader, mut seen) = calling();
        answer(&mut leader, 1, b"200", &[]);
        called(&host, &mut seen);
        for _ in 0..54 {
            host.pass_ms(100);
            leader.tick(1);
        }
        assert!(
            called(&host, &mut seen)
                .iter()
                .any(|call| call.ends_with("[\"hello\"]")),
            "silence is noticed as on a stream"
        );
        let mut other = vm(&host, 1);
        host.pass_ms(3_000);
        other.tick(1);
        let hear = host.grpc.calls.borrow().len();
        answer(
            &mut leader,
            hear,
            b"200",
            &[pool_update_message("default", version(9), &["10.0.0.9:1"])],
        );
        assert_eq!(
            (
                in_force(&leader),
                called(&host, &mut seen).len(),
                leader.epoch
            ),
            (0, 0, None)
        );
    }

    // === a proxy that refuses calls ===

    /// Ends 512 requests in the VM of each writer. This is the maximum number of observations in a
    /// message.
    fn requests_end(host: &FakeHost, writers: &mut [observation_ring::ObservationRingWriter]) {
        for (vm_slot, writer) in (10_u16..).zip(writers) {
            let vm = 1_000 + u64::from(vm_slot);
            VmTable::vm_slot(
                host,
                vm_slot,
                VmEntry {
                    vm,
                    heartbeat: host.now(),
                    queue: 0,
                    serves: true,
                },
            );
            writer.append(
                host,
                crate::shared_data::RingOwner {
                    pool: "default",
                    vm_slot,
                    vm,
                },
                (0..512).map(|_| [7; proto::observation::OBSERVATION_BYTES]),
            );
        }
    }

    #[test]
    fn a_call_that_fails_at_once_ends_the_connection_and_harms_no_vm() {
        let (host, mut leader, mut seen) = calling();
        let mut writers = [observation_ring::ObservationRingWriter::default()];
        for round in 0..3 {
            requests_end(&host, &mut writers);
            host.fail(&[crate::fake::FakeCall::Call]);
            for _ in 0..30 {
                host.pass_ms(100);
                leader.tick(1);
            }
            assert_eq!(host.metric_value("switchpoint_state_connected"), 0);
            host.fail(&[]);
            for _ in 0..30 {
                host.pass_ms(100);
                leader.tick(1);
            }
            let said = called(&host, &mut seen);
            assert!(
                said.last().is_some_and(|call| call.starts_with("tell")),
                "round {round}: {said:?}"
            );
            let hello = host.grpc.calls.borrow().len();
            answer(&mut leader, hello, b"200", &[]);
        }
    }

    #[test]
    fn more_than_the_daemon_takes_in_time_ends_the_connection_whatever_carries_it() {
        for transport in ["http", "grpc"] {
            let host = FakeHost::new();
            let mut leader = VmState::new(host.clone());
            leader.configure(1, config(&format!(r#"{{"pools": [{{"name": "default"}}], "state": {{"transport": "{transport}"}}}}"#)));
            leader.tick(1);
            if transport == "http" {
                answer(&mut leader, 1, b"200", &[]);
            }
            let connections = |host: &FakeHost| {
                let sessions: std::collections::BTreeSet<String> = host
                    .grpc
                    .calls
                    .borrow()
                    .iter()
                    .map(|(_, session, _)| session.clone())
                    .collect();
                sessions.len() + host.grpc.streams.borrow().len()
            };
            let mut writers: Vec<_> = (0..8)
                .map(|_| observation_ring::ObservationRingWriter::default())
                .collect();
            // The daemon accepts no messages for a time that is too short to count as silence.
            for _ in 0..48 {
                requests_end(&host, &mut writers);
                host.pass_ms(100);
                leader.tick(1);
            }
            assert!(
                connections(&host) >= 2,
                "{transport}: given up, and tried again"
            );
        }
    }

    #[derive(Default)]
    struct FakeParkedRequest(std::cell::Cell<u32>);

    impl ParkedRequest for FakeParkedRequest {
        fn check_reply(&self, _: Timestamp) {}
        fn refuse_body(&self) {}
        fn waits(&self) -> bool {
            self.0.get() == 0
        }

        fn retry(&self) {
            self.0.set(self.0.get() + 1);
        }
    }

    #[test]
    fn parked_requests_come_back_with_state_or_at_their_deadline_and_are_bounded() {
        let host = FakeHost::new();
        let mut leader = vm(&host, 1);
        leader.tick(1);
        let replica = leader.replica("default").unwrap();
        let waiters: [Rc<dyn ParkedRequest>; 2] = [
            Rc::new(FakeParkedRequest(std::cell::Cell::new(0))),
            Rc::new(FakeParkedRequest(std::cell::Cell::new(0))),
        ];
        let dropped: Weak<dyn ParkedRequest> = Weak::<FakeParkedRequest>::new();
        let park = |vm: &mut VmState<FakeHost>, ms, waiter| {
            vm.park(
                host.now().plus_ms(ms),
                1,
                Rc::clone(&replica),
                Rc::downgrade(waiter),
            )
        };
        assert!(park(&mut leader, 500, &waiters[0]) && park(&mut leader, 2_000, &waiters[1]));
        assert!(leader.park(host.now().plus_ms(2_000), 1, Rc::clone(&replica), dropped));
        host.pass_ms(100);
        assert_eq!(
            leader.tick(1).len(),
            0,
            "a request whose client left is dropped"
        );
        assert_eq!(leader.parked.len(), 2);
        host.pass_ms(400);
        let due = leader.tick(1);
        assert_eq!(due.len(), 1, "the first is due");
        assert_eq!(leader.tick(1).len(), 1, "it stays due until it is decided");
        due[0].retry();
        assert_eq!(leader.tick(1).len(), 0);
        assert_eq!(
            send(
                &host,
                &mut leader,
                pool_update_message("default", version(1), &["10.0.0.1:1"])
            ),
            1,
            "there is state"
        );
        waiters[1].retry();
        assert_eq!(leader.tick(1).len(), 0);
        let park = |vm: &mut VmState<FakeHost>, client| {
            vm.park(
                host.now().plus_ms(1),
                client,
                Rc::clone(&replica),
                Rc::<FakeParkedRequest>::downgrade(&Rc::default()),
            )
        };
        let parked = |vm: &mut VmState<FakeHost>, client| {
            (0..PARKED_MAX).take_while(|_| park(vm, client)).count()
        };
        assert_eq!(parked(&mut leader, 1), PARKED_MAX / 2, "one is alone");
        assert_eq!(parked(&mut leader, 2), PARKED_MAX / 4, "half of the rest");
        assert_eq!(parked(&mut leader, 3), PARKED_MAX / 8);
        assert_eq!(parked(&mut leader, 1), 0);
    }
}
