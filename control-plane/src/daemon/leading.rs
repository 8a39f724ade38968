//! The tasks that only the leader runs. The leader sends state and EDS to proxies, answers KEDA
//! (because proxies report only to the leader), and writes the files that the next leader reads.

use std::net::SocketAddr;
use std::sync::Arc;

use proto::state::state_service_server::StateServiceServer;
use proto::{MESSAGE_BYTES_MAX, PROXY_MESSAGE_BYTES_MAX};
use tokio::task::AbortHandle;
use tonic::service::Routes;

use super::StandbyDaemon;
use super::certificates::CertificateRenewal;
use super::tasks::TaskGroup;
use crate::error::FatalError;
use crate::serve::eds::EdsServer;
use crate::serve::health::HealthChecks;
use crate::serve::listen::{IncomingConnections, ListenerName, identify};
use crate::serve::monitoring::{ended, open, server};
use crate::serve::scaler::ScalerListener;
use crate::serve::state_stream::{self, StateServer};
use crate::shutdown::Shutdown;
use crate::state::life::unix_ms;
use crate::state::shared::DaemonState;
use crate::state::snapshot_file::SavedState;

/// The maximum number of bytes that the daemon reads ahead on one stream of the state listener. A
/// message may be larger, because the daemon makes room while it reads. Messages beyond the rate of
/// an origin stay unread for seconds.
const STREAM_WINDOW_BYTES: u32 = 64 << 10;

/// The maximum number of bytes that the daemon reads ahead on one connection of the state listener,
/// which has a state stream and an EDS stream. An origin may have hundreds of connections, so each
/// connection must take little memory.
const CONNECTION_WINDOW_BYTES: u32 = 2 * STREAM_WINDOW_BYTES;

/// The tasks of a leading daemon, in addition to those of its [`StandbyDaemon`].
#[derive(Debug)]
pub struct LeadingDaemon {
    /// The address of the state listener (state and EDS).
    pub state_address: SocketAddr,
    /// The address of the scaler, if there is one.
    pub scaler_address: Option<SocketAddr>,
    shared: Arc<DaemonState>,
    health: HealthChecks,
    snapshot: Option<AbortHandle>,
    group: TaskGroup,
}

// === impl LeadingDaemon ===

impl LeadingDaemon {
    /// Begins to lead, and serves before it returns. The files are read now, because another daemon
    /// may have written them since this daemon started.
    pub(super) async fn begin(standby: &StandbyDaemon) -> Result<Self, FatalError> {
        let found = begin_term(standby).await;
        let shared = Arc::clone(&standby.shared);
        let health = standby.monitoring.health.clone();
        let mut group = TaskGroup::new();
        let state = open(
            ListenerName::State,
            standby.listen_state.0,
            standby.listen_state.1.clone(),
            &group.shutdown,
        )
        .await?;
        let scaler = ScalerListener::open(standby.scaler.0, &group.shutdown).await?;
        let state_address = state.address();
        let scaler_address = scaler.as_ref().map(ScalerListener::address);
        let mut snapshot = None;
        if let Some(file) = &standby.snapshot {
            let first = SavedState::capture(
                &shared,
                &shared.pools.views.borrow(),
                &found.map(|found| found.pools).unwrap_or_default(),
            );
            file.store(&first).map_err(FatalError::Snapshot)?;
            let keep = Arc::clone(file).keep(Arc::clone(&shared), first, group.shutdown.clone());
            snapshot = Some(group.spawn("snapshot file", keep));
        }
        let served = serve_state(state, Arc::clone(&shared), group.shutdown.clone());
        group.tasks.spawn(served);
        if let Some(scaler) = scaler {
            scaler.spawn(
                &mut group.tasks,
                Arc::clone(&shared.pools),
                Arc::clone(&standby.scaler.1),
                &group.shutdown,
            );
        }
        shared.life.set_leads(true);
        health.leads(true).await;
        tracing::info!(state = %state_address, admin = %standby.admin_address, ext_proc = standby.ext_proc_address.map(tracing::field::display), term = shared.life.term(), pools = ?shared.pools.names, "serving");
        Ok(Self {
            state_address,
            scaler_address,
            shared,
            health,
            snapshot,
            group,
        })
    }

    /// Renews certificates when they are due, until the term ends.
    pub(super) fn renew_certificates(&mut self, renewal: CertificateRenewal) {
        let stop = self.group.shutdown.clone();
        self.group.spawn("certificates", renewal.run(stop));
    }

    /// Waits until a task ends and returns its name. No task should end before [`Self::end`].
    pub async fn task_ended(&mut self) -> &'static str {
        self.group.task_ended().await
    }

    /// Stops leading in order: ends the streams of proxies, and writes the files a last time.
    pub async fn end(self) {
        self.shared.life.set_leads(false);
        self.health.leads(false).await;
        self.group.stop().await;
    }

    /// Stops leading without writing the snapshot file again. If this process was paused for long,
    /// the next leader has already written the file.
    pub async fn lose(self) {
        if let Some(snapshot) = &self.snapshot {
            snapshot.abort();
        }
        self.end().await;
    }
}

/// Begins a term with the files of the previous leader. Returns the snapshot of that leader.
async fn begin_term(standby: &StandbyDaemon) -> Option<SavedState> {
    let life = &standby.shared.life;
    let found = standby.snapshot.as_ref().and_then(|file| file.load());
    let term = next_term(
        life.term(),
        found.as_ref().map(|found| found.term),
        unix_ms(),
    );
    life.begin_term(
        term,
        found
            .as_ref()
            .map_or(life.hash_secret(), |found| found.hash_secret),
    );
    let other = |saved: &&SavedState| {
        standby
            .snapshot
            .as_ref()
            .is_some_and(|file| !file.knows(saved))
    };
    if let Some(saved) = found.as_ref().filter(other) {
        standby.adopt(saved).await;
    }
    if let Some(models) = &standby.models {
        models.read_again();
    }
    found
}

/// Returns the term after `known`, the last term that this daemon knows, and after `saved`, the
/// term in the snapshot file. The term is also at least the clock's time, because the file may be
/// lost or old, or not shared by the daemons that lead one after another.
fn next_term(known: u64, saved: Option<u64>, unix_ms: u64) -> u64 {
    known.max(saved.unwrap_or(0)).saturating_add(1).max(unix_ms)
}

/// Serves state and EDS until `shutdown`.
pub async fn serve_state(
    incoming: IncomingConnections,
    shared: Arc<DaemonState>,
    mut shutdown: Shutdown,
) -> &'static str {
    let state = StateServer::new(Arc::clone(&shared), shutdown.clone());
    let calls = state_stream::calls::router(state.clone());
    let state = StateServiceServer::new(state)
        .max_decoding_message_size(PROXY_MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let eds = EdsServer::new(shared, shutdown.clone());
    let served = server()
        .accept_http1(true) // calls may use HTTP/1.1 or HTTP/2
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .layer(identify())
        .add_routes(Routes::from(calls))
        .add_service(state)
        .add_service(eds)
        .serve_with_incoming_shutdown(incoming, async move { shutdown.begun().await })
        .await;
    ended(served, "state listener")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn each_term_is_larger_than_all_before_it(takeovers in prop::collection::vec((0_usize..3, any::<u32>()), 1..40), shared_file: bool) {
            // `known` has the newest term that each daemon knows, and `file` the term in the file
            // that daemons may share. With a shared file the clocks may be wrong. Without a shared
            // file the clocks must agree.
            let mut known = [0_u64; 3];
            let mut file = None;
            let mut newest = 0_u64;
            let mut clock = 0_u64;
            for (daemon, time) in takeovers {
                clock = if shared_file { u64::from(time) } else { clock + 1 + u64::from(time) };
                let term = next_term(known[daemon], file, clock);
                prop_assert!(term > newest, "{term} after {newest}");
                (newest, known[daemon], file) = (term, term, shared_file.then_some(term));
            }
        }
    }
}
