//! The link to the daemon. The leader opens the link and applies the daemon's messages. The two
//! kinds of connection are in [`connection`].
//!
//! ```text
//! Closed ── its time has come ──► Open ── silence, a changed configuration, the end of the lease ──► Closed
//!    ▲                             │
//!    └── the daemon or the network closed it: wait, longer each time, at different times than other proxies
//! ```
//! The leader first decodes each message with [`CrashGuard::decode_guarded`]. Then it publishes the
//! message in the snapshot store, from which all other VMs read the message, and applies the
//! message. A message that breaks a rule is refused as a whole, counted and logged. The leader
//! answers a refused pool update with the reason.

mod connection;
mod leader_context;
pub mod peer_publisher;

use exchange::Timestamp;
use front::daemon_rules;
use pool_state::DaemonUpdate;
use prost::Message as _;
use proto::frames;
use proto::state::{self, proxy_message};

use crate::host::{Host, WriteCondition};
use crate::metrics::Stat;
use crate::shared_data::counters;
use crate::shared_data::crash_guard::CrashGuard;
use crate::shared_data::snapshot_store::PublishError;
use crate::vm::replica::{PoolReplica, decode};
use connection::{ConnectionFailure, StateConnection};
use front::config::StateConfig;

pub use connection::CallResponse;
pub use leader_context::LeaderContext;
use peer_publisher::PeerPublisher;

/// The key of the random identity of the process, which all its VMs share. The node id does not
/// identify a process, because a hot restart runs two processes with one node id.
const PROCESS_KEY: &str = "switchpoint/1/process";

/// The connection to the daemon, or the wait for a connection.
#[derive(Debug)]
pub struct StateLink {
    phase: LinkPhase,
    failures: u32,
    crash_guard: CrashGuard,
    reported: Timestamp,
}

#[derive(Debug)]
enum LinkPhase {
    Closed { retry_at: Timestamp },
    Open(OpenLink),
}

#[derive(Debug)]
struct OpenLink {
    wire: StateConnection,
    /// The root context that the connection belongs to.
    root: u32,
    received_at: Timestamp,
    /// The configuration with which the connection was opened.
    state: StateConfig,
    pools: Vec<String>,
}

// === impl StateLink ===

impl Default for StateLink {
    fn default() -> Self {
        Self {
            phase: LinkPhase::Closed {
                retry_at: Timestamp(0),
            },
            failures: 0,
            crash_guard: CrashGuard::default(),
            reported: Timestamp(0),
        }
    }
}

impl StateLink {
    pub fn begin<H: Host>(&mut self, leader: &mut LeaderContext<'_, H>) {
        let (crash_guard, lost) = CrashGuard::load(leader.host, leader.vm, leader.now);
        if lost {
            log::error!(
                "a VM was lost while it decoded a message from the daemon; that message is refused from now on"
            );
            leader.metrics.count(Stat::CrashGuarded);
        }
        let phase = LinkPhase::Closed {
            retry_at: crash_guard.pause_ends(),
        };
        *self = Self {
            phase,
            crash_guard,
            ..Self::default()
        };
    }

    /// Does the due work of a tick: opens the link, reports, or closes the link to a silent daemon.
    pub fn drive<H: Host>(&mut self, leader: &mut LeaderContext<'_, H>) {
        match &self.phase {
            LinkPhase::Closed { retry_at } if *retry_at <= leader.now => self.open(leader),
            LinkPhase::Closed { .. } => {}
            LinkPhase::Open(open)
                if open.root != leader.root
                    || open.state != leader.config.state
                    || open.pools != names(&leader.replicas) =>
            {
                self.close(leader.host, leader.root);
                self.open(leader);
            }
            LinkPhase::Open(open)
                if leader.now.ms_since(open.received_at) > leader.config.state.silence_max_ms =>
            {
                self.close(leader.host, leader.root);
                self.schedule_retry(leader, "it is silent");
            }
            LinkPhase::Open(_) => {
                self.report(leader);
                self.forward_observations(leader);
                self.renew_calls(leader);
            }
        }
        leader.metrics.record(
            Stat::WithoutVmSlot,
            leader.vm_table.without_vm_slot(leader.now) as u64,
        );
        let newest = leader
            .replicas
            .iter()
            .filter_map(|replica| replica.metrics_at())
            .max();
        if let Some(at) = newest {
            leader.metrics.record(Stat::AgeMs, leader.now.ms_since(at));
        }
    }

    /// Publishes changes of load to the other proxies.
    pub fn publish_load<H: Host>(&mut self, leader: &mut LeaderContext<'_, H>) {
        let (LinkPhase::Open(_), Some(_)) = (&self.phase, leader.me) else {
            return;
        };
        let mut shares = Vec::new();
        for replica in &mut leader.replicas {
            let PoolReplica {
                peer_publisher,
                sharing,
                pool,
                name,
                flow_order,
                ..
            } = &mut **replica;
            let held = if peer_publisher.has_peers() {
                flow_order.backlog(leader.host, pool, leader.vm, leader.now)
            } else {
                Vec::new()
            };
            let (share, lost) =
                peer_publisher.next_report(leader.host, (name, pool, held), sharing, leader.now);
            leader.metrics.add(Stat::PlacementsLost, lost);
            shares.extend(share.map(proxy_message::Message::LoadReport));
        }
        self.send_all(leader, shares);
    }

    /// Whether `stream` is the open stream.
    #[must_use]
    pub fn is(&self, stream: u32) -> bool {
        matches!(&self.phase, LinkPhase::Open(open) if open.wire.is_stream(stream))
    }

    /// Ends the connection, if one is open. `root` is the root context of the current callback;
    /// only a stream's own root context can end the stream.
    pub fn close<H: Host>(&mut self, host: &H, root: u32) {
        if let LinkPhase::Open(open) = std::mem::replace(
            &mut self.phase,
            LinkPhase::Closed {
                retry_at: Timestamp(0),
            },
        ) {
            let elsewhere = open.root != root;
            if elsewhere {
                let _ = host.focus(open.root);
            }
            open.wire.close(host);
            if elsewhere {
                let _ = host.focus(root);
            }
        }
    }

    /// Ends the connection if it belongs to the removed root context.
    pub fn remove_root<H: Host>(&mut self, host: &H, root: u32) {
        if matches!(&self.phase, LinkPhase::Open(open) if open.root == root) {
            self.close(host, root);
        }
    }

    /// Handles a connection that the daemon or the network ended. A stream's handle must be
    /// released here, because the host may later give the same handle to another stream.
    pub fn on_closed<H: Host>(&mut self, leader: &mut LeaderContext<'_, H>, why: &str) {
        self.close(leader.host, leader.root);
        self.schedule_retry(leader, why);
    }

    /// Handles the response to a call, if the call belongs to this connection. Fails if a later
    /// leader has written.
    pub fn on_response<H: Host>(
        &mut self,
        leader: &mut LeaderContext<'_, H>,
        call: u32,
        answer: CallResponse,
    ) -> Result<(), PublishError> {
        let LinkPhase::Open(open) = &mut self.phase else {
            return Ok(());
        };
        let Some(calls) = open.wire.calls_with(call) else {
            return Ok(());
        };
        let (messages, continues) = match calls.take_response(call, answer) {
            Ok(answered) => answered,
            Err(why) => {
                self.on_closed(leader, &why);
                return Ok(());
            }
        };
        let mut rest = messages.as_slice();
        while !rest.is_empty() && matches!(self.phase, LinkPhase::Open(_)) {
            let Some((message, after)) = frames::take(rest) else {
                self.on_closed(leader, "its answer is cut short");
                return Ok(());
            };
            self.on_message(leader, message)?;
            rest = after;
        }
        if continues {
            self.renew_calls(leader);
        }
        Ok(())
    }

    /// Handles a message from the daemon. Fails if a later leader has written.
    pub fn on_message<H: Host>(
        &mut self,
        leader: &mut LeaderContext<'_, H>,
        bytes: &[u8],
    ) -> Result<(), PublishError> {
        let LinkPhase::Open(open) = &mut self.phase else {
            return Ok(());
        };
        open.received_at = leader.now;
        open.wire.record_received();
        #[cfg(feature = "drill")]
        crate::drill::stall(leader.host, bytes);
        let Some(decoded) = self
            .crash_guard
            .decode_guarded(leader.host, leader.vm, bytes, || {
                decode(bytes, |pool| leader.replica(pool))
            })
        else {
            leader.metrics.count(Stat::Refused);
            log::warn!(
                "a message from the daemon is refused: a VM was lost while it decoded the message"
            );
            return Ok(());
        };
        let checked = decoded.and_then(|update| update.check_term(leader.host.unix_ms()));
        let answer = match checked {
            Ok(DaemonUpdate::Welcome(welcome)) => {
                self.welcome(leader, &welcome);
                None
            }
            Ok(DaemonUpdate::Peers(peers)) => {
                leader.apply_peers(peers);
                None
            }
            Ok(DaemonUpdate::Outweighed(pool)) => leader
                .replica(&pool)
                .and_then(|kept| kept.stored_models(leader.host))
                .map(proxy_message::Message::LearnedModels),
            Ok(update) => {
                if matches!(
                    update,
                    DaemonUpdate::PoolUpdate(_) | DaemonUpdate::Metrics { .. }
                ) {
                    self.record_received();
                }
                leader
                    .apply(update, bytes)?
                    .map(proxy_message::Message::Ack)
            }
            Err(refused) => leader.nack(refused).map(proxy_message::Message::Ack),
        };
        if let Some(answer) = answer {
            self.send(leader, answer);
        }
        Ok(())
    }

    fn open<H: Host>(&mut self, leader: &mut LeaderContext<'_, H>) {
        let pools = names(&leader.replicas);
        match StateConnection::open(leader.host, &leader.config.state) {
            Err(error) => self.schedule_retry(leader, &ConnectionFailure::from(error).to_string()),
            Ok(wire) => {
                leader.metrics.count(Stat::StreamsOpened);
                // This daemon may be a new process, which lacks the messages that were sent to the
                // previous process.
                leader
                    .replicas
                    .iter_mut()
                    .for_each(|replica| replica.peer_publisher = PeerPublisher::default());
                let root = leader.root;
                let state = leader.config.state.clone();
                self.phase = LinkPhase::Open(OpenLink {
                    wire,
                    root,
                    received_at: leader.now,
                    state,
                    pools: pools.clone(),
                });
                self.reported = leader.now;
                let hello =
                    daemon_rules::hello(node_id(leader.host), process_id(leader.host), pools);
                self.send(leader, proxy_message::Message::Hello(hello));
            }
        }
    }

    fn send<H: Host>(
        &mut self,
        leader: &mut LeaderContext<'_, H>,
        message: proxy_message::Message,
    ) {
        let bytes = state::ProxyMessage {
            message: Some(message),
        }
        .encode_to_vec();
        self.act(leader, |host, wire, state| wire.send(host, state, &bytes));
    }

    /// Sends messages until the connection ends.
    fn send_all<H: Host>(
        &mut self,
        leader: &mut LeaderContext<'_, H>,
        messages: Vec<proxy_message::Message>,
    ) {
        messages
            .into_iter()
            .for_each(|message| self.send(leader, message));
    }

    /// Makes the next HTTP call after the response to a call.
    fn renew_calls<H: Host>(&mut self, leader: &mut LeaderContext<'_, H>) {
        self.act(leader, |host, wire, state| wire.drive(host, state));
    }

    fn act<H: Host>(
        &mut self,
        leader: &mut LeaderContext<'_, H>,
        act: impl FnOnce(&H, &mut StateConnection, &StateConfig) -> Result<(), ConnectionFailure>,
    ) {
        let LinkPhase::Open(open) = &mut self.phase else {
            return;
        };
        if let Err(broken) = act(leader.host, &mut open.wire, &open.state) {
            self.on_closed(leader, &broken.to_string());
        }
    }

    fn welcome<H: Host>(&mut self, leader: &mut LeaderContext<'_, H>, welcome: &state::Welcome) {
        if let Some(why) = daemon_rules::schema_mismatch(welcome) {
            self.on_closed(leader, &why);
            return;
        }
        leader.metrics.record(Stat::Connected, 1);
        daemon_rules::unserved_pools(welcome).for_each(|line| log::warn!("{line}"));
    }

    /// Records that state arrived, so the daemon works. A Welcome message alone does not show this,
    /// because a daemon without room for this proxy sends it too.
    fn record_received(&mut self) {
        if std::mem::take(&mut self.failures) > 0 {
            log::info!("the daemon is back");
        }
    }

    /// Waits before the next attempt.
    fn schedule_retry<H: Host>(&mut self, leader: &mut LeaderContext<'_, H>, why: &str) {
        leader.metrics.record(Stat::Connected, 0);
        self.failures = self.failures.saturating_add(1);
        // Only failures 1, 2, 4 and so on are logged: about twenty lines in an outage of a day.
        if self.failures.is_power_of_two() {
            log::warn!(
                "no daemon (attempt {}): {why}; picks continue with the last state",
                self.failures
            );
        }
        let is_cold = leader.replicas.iter().any(|replica| !replica.has_state());
        let pause = daemon_rules::retry_pause_ms(
            self.failures,
            is_cold,
            leader.config.state.backoff_max_ms,
            leader.host.entropy(),
        );
        self.phase = LinkPhase::Closed {
            retry_at: leader.now.plus_ms(pause),
        };
    }

    fn report<H: Host>(&mut self, leader: &mut LeaderContext<'_, H>) {
        if leader.now.ms_since(self.reported) < daemon_rules::REPORT_MS {
            return;
        }
        self.reported = leader.now;
        let gather = |replica: &&mut PoolReplica| {
            counters::gather(leader.host, &replica.name, leader.vm_table, leader.now)
        };
        let reports = leader
            .replicas
            .iter()
            .flat_map(gather)
            .map(proxy_message::Message::Report)
            .collect();
        self.send_all(leader, reports);
    }

    /// Sends the observations of all VMs since the last tick.
    fn forward_observations<H: Host>(&mut self, leader: &mut LeaderContext<'_, H>) {
        let read = |replica: &mut &mut PoolReplica| {
            replica.read_observations(leader.host, leader.vm_table, leader.now)
        };
        let observed = leader
            .replicas
            .iter_mut()
            .flat_map(read)
            .map(proxy_message::Message::Observations)
            .collect();
        self.send_all(leader, observed);
    }
}

fn names(replicas: &[&mut PoolReplica]) -> Vec<String> {
    replicas.iter().map(|r| r.name.to_string()).collect()
}

fn node_id<H: Host>(host: &H) -> String {
    let id = host
        .property(&["xds", "node", "id"])
        .ok()
        .flatten()
        .unwrap_or_default();
    String::from_utf8_lossy(&id).into_owned()
}

fn process_id<H: Host>(host: &H) -> u64 {
    let fresh = host.entropy();
    // This write fails if another VM has written a value, so all VMs use the first value.
    let _ = host.share(PROCESS_KEY, &fresh.to_le_bytes(), WriteCondition::Absent);
    let shared = host.shared(PROCESS_KEY).ok().flatten();
    shared
        .and_then(|s| <[u8; 8]>::try_from(s.bytes).ok())
        .map_or(fresh, u64::from_le_bytes)
}
