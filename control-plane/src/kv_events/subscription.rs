//! The subscription to one engine's publisher: connects, receives, requests replays, and reports
//! when the engine's cache is empty.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use scheduler::EndpointRef;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, timeout};

use super::batch::BatchSummary;
use super::follower::{EventFollower, SequencePlace};
use super::stats::{KvEventRow, KvEventStats, PublisherLink};
use super::target::KvEventTarget;
use super::zmtp::{ByteBudget, ZmtpConnection, ZmtpError, ZmtpRole};
use crate::scrape::ScrapeEvent;

/// The maximum time of a connection's start, from the first packet to the end of the handshake.
const OPEN_WAIT: Duration = Duration::from_secs(5);

/// The first pause after a connection ended. Each further pause is twice as long.
const RECONNECT_PAUSE_MIN: Duration = Duration::from_millis(100);

/// The longest pause. An engine takes longer to start, so its first events are not missed.
const RECONNECT_PAUSE_MAX: Duration = Duration::from_secs(1);

/// The minimum time between two log lines about a connection that ended.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The silence after which the system checks whether the engine's machine still answers. An engine
/// without requests sends nothing.
const KEEPALIVE_TIME: Duration = Duration::from_secs(15);

/// The maximum time of a replay. Meanwhile new messages wait in the system and at the engine.
const REPLAY_WAIT: Duration = Duration::from_secs(10);

/// The maximum silence within a replay. A router drops what its queue has no room for (1,000
/// messages by default), and so perhaps the end of the replay.
const REPLAY_SILENCE_MAX: Duration = Duration::from_secs(3);

/// The minimum time between two replays, because vLLM sends no events while it replays.
const REPLAY_INTERVAL_MIN: Duration = Duration::from_secs(1);

/// The maximum number of messages of a replay: as many as vLLM and SGLang keep by default.
const REPLAY_MESSAGES_MAX: usize = 10_000;

/// One subscription. It runs until its task is aborted.
#[derive(Debug)]
pub(super) struct PublisherSubscription {
    target: KvEventTarget,
    stats: Arc<KvEventStats>,
    /// Reports restarts and cleared caches.
    emptied: mpsc::Sender<ScrapeEvent>,
    /// The endpoint's present generation.
    current: watch::Receiver<EndpointRef>,
    /// The generation at the last message. If a scrape has noticed a restart since, the pool
    /// ignores a report for this generation.
    last: EndpointRef,
    follower: EventFollower,
    budget: ByteBudget,
    replay_after: Instant,
}

/// The parts of a message that matter.
struct EventMessage {
    sequence: u64,
    payload: Vec<u8>,
}

// === impl PublisherSubscription ===

impl PublisherSubscription {
    pub(super) fn new(
        target: KvEventTarget,
        stats: Arc<KvEventStats>,
        emptied: mpsc::Sender<ScrapeEvent>,
        current: watch::Receiver<EndpointRef>,
    ) -> Self {
        let last = *current.borrow();
        Self {
            target,
            stats,
            emptied,
            current,
            last,
            follower: EventFollower::default(),
            budget: ByteBudget::full(),
            replay_after: Instant::now(),
        }
    }

    pub(super) async fn run(mut self) {
        let mut pause = RECONNECT_PAUSE_MIN;
        let mut log_after = Instant::now();
        loop {
            let messages = self.row(|row| row.counts.messages);
            let Err(why) = self.follow().await;
            let endpoint = &*self.target.name;
            if self.row(|row| row.counts.messages) > messages {
                pause = RECONNECT_PAUSE_MIN;
            }
            if Instant::now() >= log_after {
                tracing::warn!(endpoint, %why, "KV events are not received; trying again");
                log_after = Instant::now() + LOG_INTERVAL;
            }
            self.row(|row| row.link = PublisherLink::Lost(why.to_string()));
            sleep(pause.mul_f32(1.0 + 0.2 * rand::random::<f32>())).await;
            pause = RECONNECT_PAUSE_MAX.min(pause * 2);
        }
    }

    /// Connects, and receives until the connection ends.
    async fn follow(&mut self) -> Result<Infallible, ZmtpError> {
        let mut connection = open(self.target.events, ZmtpRole::Subscriber).await?;
        self.row(|row| row.link = PublisherLink::Connected);
        tracing::debug!(endpoint = &*self.target.name, "subscribed to KV events");
        loop {
            let frames = connection.receive(&mut self.budget).await?;
            let message = match <[Vec<u8>; 3]>::try_from(frames) {
                Ok([_topic, sequence, payload]) => EventMessage::from_frames(&sequence, payload),
                Err(_) => None,
            };
            match message {
                Some(message) => self.receive(&message).await,
                None => self.row(|row| row.counts.invalid += 1),
            }
        }
    }

    /// Handles a message of the live stream. A message that cannot be read is ignored, so the next
    /// one shows a gap.
    async fn receive(&mut self, message: &EventMessage) {
        let bytes = message.payload.len() as u64;
        let batch = match BatchSummary::decode(&message.payload) {
            Ok(batch) => batch,
            Err(why) => {
                if self.row(|row| row.add_invalid(bytes)) == 1 {
                    let endpoint = &*self.target.name;
                    tracing::warn!(endpoint, %why, "a message of KV events cannot be read");
                }
                return;
            }
        };
        let arrived = self.follower.arrive(message.sequence);
        if arrived.is_restart {
            tracing::debug!(endpoint = &*self.target.name, "KV events start again");
            self.row(|row| row.counts.restarts += 1);
            self.report(ScrapeEvent::Restarted(self.last)).await;
        }
        if let SequencePlace::Gap { from } = arrived.place {
            self.row(|row| row.counts.gaps += 1);
            self.fill_gap(from, message.sequence).await;
        }
        let is_new = self.count(message, &batch);
        self.row(|row| {
            row.counts.messages += u64::from(is_new);
            row.lag_seconds = Some(unix_seconds() - batch.time).filter(|lag| lag.is_finite());
        });
        let current = *self.current.borrow_and_update();
        // The first message of a process may begin with a clear, as SGLang's does. That is no news.
        let is_first = arrived.is_restart || message.sequence == 0;
        if is_new && batch.is_cleared && !is_first {
            self.report(ScrapeEvent::Cleared(current)).await;
        }
        self.last = current;
    }

    /// Counts a message of the live stream or of a replay. Returns false if it was counted before.
    fn count(&mut self, message: &EventMessage, batch: &BatchSummary) -> bool {
        let bytes = message.payload.len() as u64;
        let counted = self.follower.count(message.sequence, batch);
        let blocks = self.follower.blocks();
        let knowledge = self.follower.knowledge();
        self.row(|row| {
            row.counts.bytes += bytes;
            let Some(counted) = counted else {
                return;
            };
            row.blocks = blocks;
            row.knowledge = knowledge;
            row.rank = batch.rank;
            row.block_tokens = batch.block_tokens.or(row.block_tokens);
            row.counts.lost = row.counts.lost.saturating_add(counted.lost);
            row.counts.clears += u64::from(batch.is_cleared);
            row.counts.unmatched_blocks += counted.unmatched;
            row.counts.unknown_events += batch.unknown_events;
        });
        counted.is_some()
    }

    /// Requests the messages from `from` on, if the engine replays. Without them, the counts are
    /// partial from now on.
    async fn fill_gap(&mut self, from: u64, until: u64) {
        let now = Instant::now();
        let Some(address) = self.target.replay.filter(|_| now >= self.replay_after) else {
            return;
        };
        self.replay_after = now + REPLAY_INTERVAL_MIN;
        let replayed = timeout(REPLAY_WAIT, self.replay(address, from, until)).await;
        let endpoint = &*self.target.name;
        match replayed {
            Ok(Ok(())) => {}
            Ok(Err(why)) => tracing::debug!(endpoint, from, until, %why, "no replay of KV events"),
            Err(_) => tracing::debug!(
                endpoint,
                from,
                until,
                "the replay of KV events takes too long"
            ),
        }
    }

    /// Counts the replayed messages before `until`.
    async fn replay(
        &mut self,
        address: SocketAddr,
        from: u64,
        until: u64,
    ) -> Result<(), ZmtpError> {
        let mut connection = open(address, ZmtpRole::Dealer).await?;
        connection.send(&[&[], &from.to_be_bytes()]).await?;
        for _ in 0..REPLAY_MESSAGES_MAX {
            let received = connection.receive(&mut self.budget);
            let Ok(frames) = timeout(REPLAY_SILENCE_MAX, received).await else {
                return Ok(());
            };
            let mut frames = frames?;
            // An empty frame comes first, and perhaps the topic.
            let payload = frames.pop().unwrap_or_default();
            let sequence = frames.pop().unwrap_or_default();
            let Some(message) = EventMessage::from_frames(&sequence, payload) else {
                self.row(|row| row.counts.invalid += 1);
                continue;
            };
            // An empty payload ends a replay.
            if message.payload.is_empty() || message.sequence >= until {
                return Ok(());
            }
            let Ok(batch) = BatchSummary::decode(&message.payload) else {
                self.row(|row| row.add_invalid(message.payload.len() as u64));
                continue;
            };
            if self.count(&message, &batch) {
                self.row(|row| row.counts.replayed += 1);
                if batch.is_cleared && message.sequence > 0 {
                    let current = *self.current.borrow_and_update();
                    self.report(ScrapeEvent::Cleared(current)).await;
                }
            }
        }
        Ok(())
    }

    /// Reports that the cache of a generation is empty now.
    async fn report(&self, event: ScrapeEvent) {
        let _ = self.emptied.send(event).await; // without receiver the pool has ended
    }

    /// Changes or reads the engine's row of the statistics.
    fn row<T: Default>(&self, change: impl FnOnce(&mut KvEventRow) -> T) -> T {
        let mut result = T::default();
        self.stats
            .update(self.target.endpoint, |row| result = change(row));
        result
    }
}

// === impl EventMessage ===

impl EventMessage {
    /// Returns `None` if the sequence number has not 8 bytes.
    fn from_frames(sequence: &[u8], payload: Vec<u8>) -> Option<Self> {
        Some(Self {
            sequence: u64::from_be_bytes(sequence.try_into().ok()?),
            payload,
        })
    }
}

async fn open(address: SocketAddr, role: ZmtpRole) -> Result<ZmtpConnection<TcpStream>, ZmtpError> {
    let opened = async {
        let stream = TcpStream::connect(address).await?;
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_TIME)
            .with_interval(KEEPALIVE_TIME);
        SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
        ZmtpConnection::open(stream, role).await
    };
    timeout(OPEN_WAIT, opened)
        .await
        .unwrap_or(Err(ZmtpError::NotReady))
}

fn unix_seconds() -> f64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64()
}

#[cfg(test)]
mod tests {
    use scheduler::{Generation, Slot};

    use super::*;

    fn endpoint(generation: u32) -> EndpointRef {
        EndpointRef {
            slot: Slot(0),
            generation: Generation(generation),
        }
    }

    /// A message without events, or with a clear.
    fn message(sequence: u64, is_clear: bool) -> EventMessage {
        let payload = match is_clear {
            true => b"\x92\x07\x91\x91\xb0AllBlocksCleared".to_vec(),
            false => b"\x92\x07\x90".to_vec(),
        };
        EventMessage { sequence, payload }
    }

    #[tokio::test]
    async fn a_restart_is_reported_for_the_generation_before_it() {
        let address = SocketAddr::from(([127, 0, 0, 1], 1));
        let target = KvEventTarget {
            endpoint: address,
            name: "e".into(),
            events: address,
            replay: None,
        };
        let (current, seen) = watch::channel(endpoint(1));
        let (emptied, mut reports) = mpsc::channel(8);
        let mut engine = PublisherSubscription::new(target, Arc::default(), emptied, seen);
        engine.receive(&message(0, true)).await;
        engine.receive(&message(1, false)).await;
        assert!(reports.try_recv().is_err(), "nothing to report");

        // A scrape has noticed the restart already. The pool ignores reports for generation 1.
        current.send_replace(endpoint(2));
        engine.receive(&message(0, true)).await;
        let restarted = |generation| Ok(ScrapeEvent::Restarted(endpoint(generation)));
        assert_eq!(reports.try_recv(), restarted(1));
        assert!(reports.try_recv().is_err(), "one report for both");

        engine.receive(&message(0, false)).await;
        assert_eq!(reports.try_recv(), restarted(2), "no scrape has noticed");
        engine.receive(&message(1, true)).await;
        let cleared = Ok(ScrapeEvent::Cleared(endpoint(2)));
        assert_eq!(reports.try_recv(), cleared);
    }
}
