//! The link to the daemon: one gRPC stream through an Envoy cluster, on Envoy's main thread.
//!
//! ```text
//! Closed ── its time has come ──► Open ── silence, a newer configuration ──► Closed
//!    ▲                             │
//!    └── the daemon or the network closed it: wait, longer each time, at different times than other proxies
//! ```
//! A message that breaks a rule, or at which the module panics, is refused as a whole, counted and
//! logged. The link stays open.

use std::time::{SystemTime, UNIX_EPOCH};

use exchange::Timestamp;
use front::config::StateConfig;
use front::daemon_rules::{self, percent_decoded};
use front::metrics::Stat;
use pool_state::{Applied, DaemonUpdate, RejectedMessage, wire_version};
use prost::Message as _;
use proto::MESSAGE_BYTES_MAX;
use proto::state::{self, proxy_message};

use crate::abi::HeaderList;
use crate::grpc_frames::{FrameReader, framed};
use crate::module_config::ModuleConfig;
use crate::node_id;
use crate::panics::caught;
use crate::pool::{Applying, NativePool};
use crate::process::{NativeProcess, entropy};

/// The path of the daemon's stream.
const PATH: &str = "/switchpoint.state.v1.StateService/Stream";

/// The number by which the daemon knows the counters and observations of this process. A process
/// with one pool counts as one VM.
const VM: u64 = 1;

/// The maximum number of bytes sent since the daemon's last message. A daemon sends a message every
/// second. If it is further behind, the link is closed, because waiting bytes use Envoy's memory.
const WAITING_BYTES_MAX: usize = 4 * MESSAGE_BYTES_MAX;

/// An event of a stream to the daemon.
#[derive(Debug)]
pub(crate) struct LinkEvent {
    /// The number of the configuration that opened the stream.
    pub(crate) config: u64,
    pub(crate) stream: u64,
    pub(crate) event: StreamEvent,
}

#[derive(Debug)]
pub(crate) enum StreamEvent {
    Headers(HeaderList),
    Data(Vec<u8>),
    Trailers(HeaderList),
    Ended,
}

#[derive(Debug)]
pub(crate) struct NativeLink {
    phase: LinkState,
    failures: u32,
    reported: Timestamp,
    node_id: Option<String>,
}

#[derive(Debug)]
enum LinkState {
    Closed { retry_at: Timestamp },
    Open(DaemonStream),
}

#[derive(Debug)]
struct DaemonStream {
    config: u64,
    stream: u64,
    frames: FrameReader,
    received_at: Timestamp,
    /// The configuration with which the stream was opened.
    state: StateConfig,
    pools: Vec<String>,
    /// The number of bytes sent since the daemon's last message.
    waiting_bytes: usize,
}

// === impl NativeLink ===

impl Default for NativeLink {
    fn default() -> Self {
        Self {
            phase: LinkState::Closed {
                retry_at: Timestamp(0),
            },
            failures: 0,
            reported: Timestamp(0),
            node_id: None,
        }
    }
}

impl NativeLink {
    /// Does the due work of a tick: opens the link, reports, or closes the link to a silent daemon.
    pub(crate) fn drive(&mut self, process: &NativeProcess, is_complete: bool, now: Timestamp) {
        let Some(newest) = process.newest() else {
            return self.close(process);
        };
        match &self.phase {
            LinkState::Closed { retry_at } if *retry_at <= now => self.open(process, &newest, now),
            LinkState::Closed { .. } => {}
            LinkState::Open(open)
                if open.config != newest.number
                    && (open.state != newest.config.state || open.pools != newest.names())
                    || process.with_config(open.config, |_, _| ()).is_none() =>
            {
                self.close(process);
                self.open(process, &newest, now);
            }
            LinkState::Open(open)
                if now.ms_since(open.received_at) > newest.config.state.silence_max_ms =>
            {
                self.close(process);
                self.schedule_retry(process, "it is silent", now);
            }
            LinkState::Open(_) => self.tell(process, now),
        }
        if is_complete {
            let pools = process.pools();
            let newest_at = pools.iter().filter_map(|pool| pool.summary().2).max();
            if let Some(at) = newest_at {
                process.metrics.set(Stat::AgeMs, now.ms_since(at));
            }
        }
    }

    /// Ends the stream, if one is open. The next tick opens another one.
    pub(crate) fn close(&mut self, process: &NativeProcess) {
        let closed = LinkState::Closed {
            retry_at: Timestamp(0),
        };
        if let LinkState::Open(open) = std::mem::replace(&mut self.phase, closed) {
            process.with_config(open.config, |handle, _| handle.reset(open.stream));
        }
    }

    /// Handles an event, unless it is of a stream that was closed before.
    pub(crate) fn on_event(&mut self, process: &NativeProcess, event: LinkEvent, now: Timestamp) {
        let LinkState::Open(open) = &mut self.phase else {
            return;
        };
        if (open.config, open.stream) != (event.config, event.stream) {
            return;
        }
        match event.event {
            StreamEvent::Headers(headers) => {
                if let Some(why) = failure_in_headers(&headers) {
                    self.on_closed(process, &why, now);
                }
            }
            StreamEvent::Data(bytes) => {
                open.frames.push(&bytes);
                self.read_messages(process, now);
            }
            StreamEvent::Trailers(trailers) => {
                let why = grpc_status(&trailers).unwrap_or_else(|| "the stream ended".to_owned());
                self.on_closed(process, &why, now);
            }
            StreamEvent::Ended => self.on_closed(process, "the stream ended", now),
        }
    }

    fn read_messages(&mut self, process: &NativeProcess, now: Timestamp) {
        // A message may end the link.
        while let LinkState::Open(open) = &mut self.phase {
            match open.frames.next() {
                Ok(Some(message)) => {
                    open.received_at = now;
                    open.waiting_bytes = 0;
                    self.on_message(process, &message, now);
                }
                Ok(None) => return,
                Err(why) => self.on_closed(process, why, now),
            }
        }
    }

    /// Handles a stream that the daemon or the network ended.
    fn on_closed(&mut self, process: &NativeProcess, why: &str, now: Timestamp) {
        self.close(process);
        self.schedule_retry(process, why, now);
    }

    fn open(&mut self, process: &NativeProcess, newest: &ModuleConfig, now: Timestamp) {
        let state = &newest.config.state;
        let authority = if state.authority.is_empty() {
            &state.cluster
        } else {
            &state.authority
        };
        let headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", PATH),
            (":authority", authority.as_str()),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ];
        let started = process.with_config(newest.number, |handle, _| {
            handle.start_stream(&state.cluster, &headers)
        });
        match started {
            None => {}
            Some(Err(why)) => self.schedule_retry(process, why, now),
            Some(Ok(stream)) => {
                process.metrics.count(Stat::StreamsOpened);
                let pools = newest.names();
                self.phase = LinkState::Open(DaemonStream {
                    config: newest.number,
                    stream,
                    frames: FrameReader::default(),
                    received_at: now,
                    state: state.clone(),
                    pools: pools.clone(),
                    waiting_bytes: 0,
                });
                self.reported = now;
                let node_id = self.node_id.get_or_insert_with(node_id::read).clone();
                let hello = daemon_rules::hello(node_id, process.id, pools);
                self.send(process, proxy_message::Message::Hello(hello), now);
            }
        }
    }

    /// Tells the daemon what it must hear now.
    fn tell(&mut self, process: &NativeProcess, now: Timestamp) {
        use proxy_message::Message;
        let pools = process.pools();
        for pool in &pools {
            let (observations, report) = pool.news(VM, now);
            let observed = observations.map(Message::Observations);
            for message in observed.into_iter().chain(report.map(Message::LoadReport)) {
                self.send(process, message, now);
            }
        }
        if now.ms_since(self.reported) >= daemon_rules::REPORT_MS {
            self.reported = now;
            for pool in &pools {
                let counters = vec![pool.counters(VM)];
                let report = Message::Report(state::Report { counters });
                self.send(process, report, now);
            }
        }
    }

    fn send(&mut self, process: &NativeProcess, message: proxy_message::Message, now: Timestamp) {
        let LinkState::Open(open) = &mut self.phase else {
            return;
        };
        let message = Some(message);
        let frame = framed(&state::ProxyMessage { message }.encode_to_vec());
        open.waiting_bytes = open.waiting_bytes.saturating_add(frame.len());
        if open.waiting_bytes > WAITING_BYTES_MAX {
            let why = format!("it does not read: more than {WAITING_BYTES_MAX} bytes wait");
            return self.on_closed(process, &why, now);
        }
        // If the stream has ended, Envoy says so by an event.
        process.with_config(open.config, |handle, _| handle.send(open.stream, &frame));
    }

    fn on_message(&mut self, process: &NativeProcess, bytes: &[u8], now: Timestamp) {
        use proxy_message::Message;
        let pools = process.pools();
        let find = |name: &str| pools.iter().find(|pool| *pool.name == *name);
        let decoded = caught(|| {
            let locked = |name: &str| find(name).map(|pool| pool.lock());
            DaemonUpdate::decode_bytes(bytes, locked)?.check_term(unix_ms())
        });
        let Some(decoded) = decoded else {
            process.metrics.count(Stat::Refused);
            log::error!("a message of the daemon is refused, because the module panicked at it");
            return;
        };
        let answer = match decoded {
            Ok(DaemonUpdate::Welcome(welcome)) => {
                self.welcome(process, &welcome, now);
                None
            }
            Ok(DaemonUpdate::Peers(peers)) => {
                if let Some(delay_us) =
                    find(&peers.pool).and_then(|pool| pool.receive_peers(peers, now))
                {
                    record(process, Stat::ShareDelayUs, u64::from(delay_us));
                }
                None
            }
            Ok(DaemonUpdate::Outweighed(pool)) => find(&pool)
                .and_then(|pool| pool.models())
                .map(Message::LearnedModels),
            Ok(update) => {
                let proves_state = matches!(
                    update,
                    DaemonUpdate::PoolUpdate(_) | DaemonUpdate::Metrics { .. }
                );
                if proves_state && std::mem::take(&mut self.failures) > 0 {
                    log::info!("the daemon is back");
                }
                let pool = update.pool().and_then(find);
                pool.and_then(|pool| apply(process, pool, update, bytes, now))
                    .map(Message::Ack)
            }
            Err(rejected) => nack(process, rejected).map(Message::Ack),
        };
        if let Some(answer) = answer {
            self.send(process, answer, now);
        }
        process.wake_parked(now);
    }

    fn welcome(&mut self, process: &NativeProcess, welcome: &state::Welcome, now: Timestamp) {
        if let Some(why) = daemon_rules::schema_mismatch(welcome) {
            return self.on_closed(process, &why, now);
        }
        process.metrics.set(Stat::Connected, 1);
        daemon_rules::unserved_pools(welcome).for_each(|line| log::warn!("{line}"));
    }

    /// Waits before the next attempt.
    fn schedule_retry(&mut self, process: &NativeProcess, why: &str, now: Timestamp) {
        process.metrics.set(Stat::Connected, 0);
        self.failures = self.failures.saturating_add(1);
        // Only failures 1, 2, 4 and so on are logged: about twenty lines in an outage of a day.
        if self.failures.is_power_of_two() {
            log::warn!(
                "no daemon (attempt {}): {why}; picks continue with the last state",
                self.failures
            );
        }
        let is_cold = process.pools().iter().any(|pool| !pool.has_state());
        let longest = process
            .newest()
            .map_or(0, |module| module.config.state.backoff_max_ms);
        let pause = daemon_rules::retry_pause_ms(self.failures, is_cold, longest, entropy());
        self.phase = LinkState::Closed {
            retry_at: now.plus_ms(pause),
        };
    }
}

/// Applies an update to its pool. Returns the acknowledgement, or the refusal of a pool update.
fn apply(
    process: &NativeProcess,
    pool: &NativePool,
    update: DaemonUpdate,
    bytes: &[u8],
    now: Timestamp,
) -> Option<state::Ack> {
    let ack = update.ack();
    let refusal = update.refuse("");
    match pool.apply(update, bytes, now) {
        Applying::InForce | Applying::Done(Applied::Nothing) => {}
        Applying::Done(Applied::PoolUpdate) => {
            process.metrics.count(Stat::PoolUpdatesApplied);
            let (endpoints, version, _) = pool.summary();
            log::info!(
                "pool {}: {endpoints} endpoints, version {}.{}",
                pool.name,
                version.term,
                version.sequence
            );
            let pools = process.pools();
            let total = pools.iter().map(|pool| pool.summary().0 as u64).sum();
            process.metrics.set(Stat::Endpoints, total);
        }
        Applying::Done(Applied::Metrics) => process.metrics.count(Stat::MetricsApplied),
        Applying::Done(Applied::Models) => process.metrics.count(Stat::LearnedApplied),
        Applying::Older(held) => {
            let why = format!(
                "older than {}.{}, which is in force",
                held.term, held.sequence
            );
            let ack = nack(process, RejectedMessage { why, ..refusal? })?;
            let held = Some(wire_version(held));
            return Some(state::Ack { held, ..ack });
        }
    }
    ack
}

/// Counts and logs a refusal. Returns it for the daemon.
fn nack(process: &NativeProcess, rejected: RejectedMessage) -> Option<state::Ack> {
    process.metrics.count(Stat::Refused);
    let level = if rejected.needs_operator() {
        log::Level::Error
    } else {
        log::Level::Debug
    };
    let RejectedMessage { pool, why, .. } = &rejected;
    log::log!(
        level,
        "pool {pool}: the daemon's message is refused as a whole, the current state stays in force: {why}"
    );
    rejected.ack()
}

/// Records a value in a histogram of the newest configuration.
fn record(process: &NativeProcess, histogram: Stat, value: u64) {
    let Some(newest) = process.newest() else {
        return;
    };
    process.with_config(newest.number, |handle, module| {
        if let Some(id) = module.metrics.of(histogram) {
            handle.record(id, value);
        }
    });
}

/// Returns the reason if the headers of the daemon's answer end the stream.
fn failure_in_headers(headers: &HeaderList) -> Option<String> {
    let status = headers.iter().find(|(name, _)| *name == b":status");
    let status = status.map_or("no status".into(), |(_, value)| {
        String::from_utf8_lossy(value)
    });
    if status != "200" {
        return Some(format!("it answers {status}"));
    }
    grpc_status(headers)
}

/// Returns a text for the log with the gRPC status of headers or trailers; `None` without one.
fn grpc_status(headers: &HeaderList) -> Option<String> {
    let value = |wanted: &[u8]| {
        let mut pairs = headers.iter();
        pairs.find_map(|(name, value)| (name == wanted).then_some(value))
    };
    let code = std::str::from_utf8(value(b"grpc-status")?).ok()?;
    let message = percent_decoded(value(b"grpc-message").unwrap_or_default());
    Some(format!("the stream ended: {message} (gRPC status {code})"))
}

/// The wall-clock time in ms since 1970.
fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |time| {
        u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(pairs: &[(&str, &str)]) -> HeaderList {
        let mut list = HeaderList::default();
        for (name, value) in pairs {
            list.push(name.as_bytes(), value.as_bytes());
        }
        list
    }

    #[test]
    fn what_ends_the_stream_is_named() {
        assert_eq!(failure_in_headers(&list(&[(":status", "200")])), None);
        assert_eq!(
            failure_in_headers(&list(&[(":status", "503")])).as_deref(),
            Some("it answers 503")
        );
        let refused = [
            (":status", "200"),
            ("grpc-status", "7"),
            ("grpc-message", "no%20room"),
        ];
        assert_eq!(
            failure_in_headers(&list(&refused)).as_deref(),
            Some("the stream ended: no room (gRPC status 7)")
        );
    }
}
