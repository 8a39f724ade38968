//! The life of the daemon. The daemon stands by, leads while it holds the lease, and stops on a
//! signal.
//!
//! ```text
//!  StandbyDaemon::start ──▶ stands by ── lease won ──▶ StandbyDaemon::lead ──▶ leads
//!                              ▲                                                │
//!                              └──────── lease lost: LeadingDaemon::end ────────┘
//! ```
//! A standby does everything that needs no single writer: it follows and scrapes endpoints, learns
//! from its own requests, and answers ext_proc. Only the leader sends state to proxies, because
//! proxies of one pool must agree on slots, generations and hash secret. A daemon without a
//! configured lease leads from its start.

use crate::cli::args::ServeArgs;
use crate::cli::build::VERSION;
use crate::error::FatalError;
use crate::serve::listen::raise_descriptors;

pub mod certificates;
mod leading;
pub mod lease;
pub mod signals;
mod standby;
pub mod tasks;

pub use leading::{LeadingDaemon, serve_state};
pub use standby::StandbyDaemon;

use certificates::CertificateRenewal;
use lease::LeaderLease;
use signals::SignalWatch;

/// Runs the daemon until a signal stops it.
///
/// # Errors
/// Returns [`FatalError`] if the daemon could not start or had to stop.
pub async fn serve(args: ServeArgs) -> Result<(), FatalError> {
    let mut signals = SignalWatch::listen().map_err(FatalError::Signals)?;
    tracing::info!(version = VERSION, "starting");
    raise_descriptors();
    let wanted = args.lease.clone();
    let renewal = args.renewal.clone().connect().await?;
    let drain = (
        args.ext_proc.ext_proc_drain,
        args.ext_proc.ext_proc_reply_wait,
    );
    let mut standby = StandbyDaemon::start(args).await?;
    let mut lease = wanted.want(standby.life()).await?;
    let ended = campaign(&mut standby, &mut lease, renewal.as_ref(), &mut signals).await;
    if let Some(lease) = lease {
        lease.give_back().await;
    }
    // Only an orderly end of the process leaves time for gateways that still call this daemon.
    if let (Ok("SIGTERM"), (Some(drain), replies), Some(_)) =
        (&ended, drain, standby.ext_proc_address)
    {
        standby
            .drain(drain, replies.unwrap_or_default(), &mut signals)
            .await;
    }
    standby.stop().await;
    ended.map(drop)
}

/// Leads whenever the daemon holds the lease. Ends with a signal, and returns its name.
async fn campaign(
    standby: &mut StandbyDaemon,
    lease: &mut Option<LeaderLease>,
    renewal: Option<&CertificateRenewal>,
    signals: &mut SignalWatch,
) -> Result<&'static str, FatalError> {
    loop {
        tokio::select! {
            won = lease::won(lease) => won?,
            signal = signals.received() => return Ok(stopping(standby, signal).await),
            task = standby.task_ended() => return Err(FatalError::TaskEnded(task)),
        }
        let mut leading = standby.lead().await?;
        if let Some(renewal) = renewal {
            leading.renew_certificates(renewal.clone());
        }
        let ended = tokio::select! {
            signal = signals.received() => Some(Ok(stopping(standby, signal).await)),
            task = standby.task_ended() => Some(Err(FatalError::TaskEnded(task))),
            task = leading.task_ended() => Some(Err(FatalError::TaskEnded(task))),
            () = lease::lost(lease) => None,
        };
        if let Some(ended) = ended {
            leading.end().await;
            return ended;
        }
        tracing::warn!("the lease is lost; standing by until this daemon gets it again");
        leading.lose().await;
    }
}

/// Reports immediately that gateways must call another daemon. Returns the name of the signal.
async fn stopping(standby: &StandbyDaemon, signal: &'static str) -> &'static str {
    tracing::info!(signal, "stopping");
    standby.stop_ready().await;
    signal
}
