//! Connects the ext_proc server to the daemon's state, as if the server were a proxy. The server
//! gets its messages from a [`StateSession`], as other proxies do, and reports the same counters.
//! The daemon does not know the EDS streams of its gateways. So the server receives a new endpoint
//! after the delay that replaces an acknowledgement.

use std::sync::Arc;
use std::time::Duration;

use ext_proc::ExtProcServer;
use tokio::time::{Instant, MissedTickBehavior};

use crate::serve::health::HealthChecks;
use crate::serve::state_stream::StateSession;
use crate::shutdown::Shutdown;
use crate::state::counters::CounterTotals;
use crate::state::peer::{Origin, ProxyProcess};
use crate::state::peer_relay::SHARE_INTERVAL;
use crate::state::proxies::PoolMembership;
use crate::state::shared::DaemonState;

/// The interval at which the server maintains a pool's prefix index (a part each time) and its
/// ejections.
const TICK: Duration = Duration::from_millis(100);

/// The interval at which counters are reported, which is the same as for filters.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// The node id of the ext_proc server; no Envoy has it.
const NODE: &str = "switchpointd/ext_proc";

/// Connects the server to the daemon's tables.
#[derive(Debug)]
pub struct DaemonLink {
    server: Arc<ExtProcServer>,
    shared: Arc<DaemonState>,
    process_id: u64,
}

// === impl DaemonLink ===

impl DaemonLink {
    #[must_use]
    pub fn new(server: Arc<ExtProcServer>, shared: Arc<DaemonState>) -> Self {
        // The process id 0 means no process.
        let process_id = rand::random::<u64>().max(1);
        Self {
            server,
            shared,
            process_id,
        }
    }

    /// Follows the daemon's state until `shutdown`, and reports to `health` whether every pool has
    /// state.
    pub async fn follow_state(self, mut shutdown: Shutdown, health: HealthChecks) {
        let Self { server, shared, .. } = &self;
        let mut session = StateSession::new(
            ProxyProcess::ext_proc_server(NODE, self.process_id),
            server.pools().map(|(name, _)| name.to_string()),
            Instant::now(),
        );
        let mut pools = shared.pools.views.subscribe();
        let mut relayed = shared.proxies.relayed.subscribe();
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut reported = Instant::now();
        let mut ready = false;
        let mut memberships = Vec::new();
        loop {
            let views = pools.borrow_and_update().clone();
            // A change is marked as seen only when it may be forwarded. If there was an earlier
            // change, it wakes this task later.
            if session.relay_at(Instant::now()) <= Instant::now() {
                relayed.borrow_and_update();
            }
            while let Some(message) = session.next(shared, Instant::now()) {
                if let Some(ack) = server.apply(message) {
                    session.ack(ack, Instant::now());
                }
                shared.proxies.set_own(session.status());
            }
            if server.is_ready() != ready {
                ready = !ready;
                health.ready(ready).await;
            }
            let relay_at = session.relay_at(Instant::now());
            let has_peers = self.share();
            tokio::select! {
                changed = pools.changed() => if changed.is_err() { return },
                // Other proxies report hundreds of times a second, so this task does not wake
                // before a report may be forwarded.
                changed = async { tokio::time::sleep_until(relay_at).await; relayed.changed().await } => if changed.is_err() { return },
                () = tokio::time::sleep(SHARE_INTERVAL), if has_peers => {}
                () = tokio::time::sleep_until(session.wake_at(&views, Instant::now())) => {}
                _ = tick.tick() => {
                    self.tick(&mut memberships);
                    if reported.elapsed() >= REPORT_INTERVAL {
                        reported = Instant::now();
                        self.report();
                        server.expire();
                    }
                }
                () = shutdown.begun() => return,
            }
        }
    }

    /// Adds the pools that begin to serve requests to `memberships`.
    fn tick(&self, memberships: &mut Vec<PoolMembership>) {
        let own = ProxyProcess::ext_proc_server(NODE, self.process_id);
        for (name, pool) in self.server.pools() {
            let mut pool = pool.lock();
            let joins = pool.tick(self.server.now());
            if let Some(observations) = pool.take_observations(name) {
                self.shared
                    .learned
                    .observed(self.process_id, &Origin::default(), observations);
            }
            if joins {
                let proxies = &self.shared.proxies;
                memberships.push(proxies.join(name, &own, 0, Instant::now()));
            }
        }
    }

    /// Reports the changes of each pool to the other proxies. Returns whether there are other
    /// proxies.
    fn share(&self) -> bool {
        let mut has_peers = false;
        for (name, pool) in self.server.pools() {
            let report = {
                let mut pool = pool.lock();
                has_peers |= pool.has_peers();
                pool.next_report(name, self.server.now())
            };
            if let Some(report) = report {
                let views = self.shared.pools.views.borrow();
                let view = views.get(&report.pool);
                self.shared
                    .proxies
                    .share(self.process_id, report, view, Instant::now());
            }
        }
        has_peers
    }

    fn report(&self) {
        for (name, pool) in self.server.pools() {
            let (totals, decision) = {
                let mut state = pool.lock();
                let Some(pick_us) = state.pick_times() else {
                    continue;
                };
                let totals = CounterTotals::from_pool(&state.pool, pick_us);
                (totals, state.pool.take_sample())
            };
            let now = Instant::now();
            self.shared.reports.record_own(name, totals, now);
            let own = Origin::default();
            let reports = &self.shared.reports;
            reports.keep_decision(name, "ext_proc", &own, &decision, now);
        }
    }
}
