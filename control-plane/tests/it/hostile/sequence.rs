//! Any sequence of messages of several peers, beside a peer that behaves well. Input bytes choose
//! the messages, so that a fuzzer and a property test can both drive it.
//! `fuzz/fuzz_targets/peers.rs` includes this file.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use control_plane::config::{CompiledConfig, LatencyOptions};
use control_plane::pool::writer::{Pool, PoolSettings, WallAndMonotonic};
use control_plane::scrape::{ScrapeConfig, Scraper};
use control_plane::serve::state_stream::{FIRST_POOL_UPDATE_WAIT, StateStream};
use control_plane::state::client_names::ClientNames;
use control_plane::state::eds_streams::{EdsAck, EdsStream};
use control_plane::state::peer::{Origin, RemoteAddress};
use control_plane::state::peer_relay::ACTIVE_PER_ORIGIN_MAX;
use control_plane::state::reports::ScraperHandle;
use control_plane::state::shared::DaemonState;
use discovery::Instance;
use pool_state::{LoadReportSum, PeerLoadReport};
use prost::Message as _;
use proto::load_report::PEER_EJECTION_MS_MAX;
use proto::state::{self, daemon_message, proxy_message};
use tokio::time::Instant;

/// The number of hostile peers, without the good peer.
const PEERS: u8 = 5;
/// The number of hosts of the hostile peers.
const HOSTS: u8 = 2;

/// The daemon's state, and its streams to the good and the bad peers.
struct SequenceDaemon {
    shared: Arc<DaemonState>,
    pool: Pool,
    now: Instant,
    endpoints: u16,
    good: StateStream,
    good_has: ReceivedState,
    bad: Vec<Option<(StateStream, ReceivedState)>>,
}

/// The messages that a peer has received.
#[derive(Default)]
struct ReceivedState {
    version: Option<(u64, u64)>,
    endpoints: usize,
}

/// The bytes that choose the next messages.
struct SequenceBytes<'b>(&'b [u8]);

/// Plays the messages that `bytes` choose. Panics if the daemon breaks a promise.
pub fn play(bytes: &[u8]) {
    let mut world = SequenceDaemon::new();
    let mut bytes = SequenceBytes(bytes);
    while !bytes.0.is_empty() {
        world.step(&mut bytes);
        world.listen();
    }
    world.end();
}

impl SequenceDaemon {
    fn new() -> Self {
        let (_scraper, busy, stats) = Scraper::try_new(&ScrapeConfig::default()).unwrap();
        let shared = DaemonState::new(
            7,
            99,
            [(
                Arc::from("p"),
                ScraperHandle {
                    busy,
                    stats,
                    kv_events: Arc::default(),
                },
            )]
            .into(),
            ClientNames::Any,
        );
        let CompiledConfig { pipeline, .. } =
            CompiledConfig::default_config(&LatencyOptions::default()).unwrap();
        let staleness_max = Duration::from_secs(5);
        let pool = Pool::new(PoolSettings {
            name: "p".into(),
            pipeline,
            staleness_max,
            generation_first: 1,
            ..PoolSettings::default()
        });
        let now = Instant::now();
        let good = begin(&shared, 0, 0, now);
        let mut world = Self {
            shared,
            pool,
            now,
            endpoints: 0,
            good,
            good_has: ReceivedState::default(),
            bad: (0..PEERS).map(|_| None).collect(),
        };
        world.discover(3);
        world
    }

    fn discover(&mut self, endpoints: u16) {
        self.endpoints = endpoints;
        let all = (1..=endpoints)
            .map(|port| Instance::new(format!("e{port}"), ([127, 0, 0, 1], port).into()))
            .collect();
        self.pool.replace_instances(
            all,
            WallAndMonotonic {
                instant: self.now,
                wall: SystemTime::UNIX_EPOCH,
            },
        );
        self.publish();
    }

    fn publish(&mut self) {
        if let Some(view) = self.pool.take_view() {
            self.shared.pools.publish(view);
        }
    }

    fn step(&mut self, bytes: &mut SequenceBytes<'_>) {
        let who = usize::from(bytes.byte() % PEERS);
        match bytes.byte() % 8 {
            0 => {
                let host = 1 + bytes.byte() % HOSTS;
                let process_id = u64::from(bytes.byte() % 4);
                self.bad[who] = Some((
                    begin(&self.shared, host, process_id, self.now),
                    ReceivedState::default(),
                ));
            }
            1 => self.bad[who] = None,
            2 => self.now += Duration::from_millis(u64::from(bytes.byte()) * 20),
            3 => self.discover(u16::from(bytes.byte() % 6)),
            4 => {
                let host = 1 + bytes.byte() % HOSTS;
                let stream = u64::from(bytes.byte());
                let acked = bytes.number();
                let late = bytes.byte().is_multiple_of(2);
                let pools = BTreeMap::from([(
                    "p".to_owned(),
                    EdsAck {
                        acked,
                        late,
                        refused: None,
                    },
                )]);
                let eds = EdsStream {
                    node_id: "n".to_owned(),
                    remote: remote(host),
                    since: SystemTime::UNIX_EPOCH,
                    pools,
                };
                self.shared.proxies.eds.send_modify(|all| {
                    if acked.is_multiple_of(7) {
                        all.close(stream, self.now);
                    } else {
                        all.open(stream, eds);
                    }
                });
            }
            _ => {
                let message =
                    bytes.message(self.bad[who].as_ref().and_then(|(_, heard)| heard.version));
                if let Some((conversation, _)) = &mut self.bad[who]
                    && conversation.receive(message, self.now).is_err()
                {
                    self.bad[who] = None;
                }
            }
        }
        let shared = Arc::clone(&self.shared);
        self.pool.settle(
            |revision| shared.proxies.acknowledged("p", revision),
            WallAndMonotonic {
                instant: self.now,
                wall: SystemTime::UNIX_EPOCH,
            },
        );
        self.publish();
    }

    /// Lets each peer read its messages. Only the good peer acknowledges its messages.
    fn listen(&mut self) {
        for (conversation, heard) in self.bad.iter_mut().flatten() {
            while let Some(message) = conversation.next(self.now) {
                heard.take(message);
            }
        }
        while let Some(message) = self.good.next(self.now) {
            if let Some(ack) = self.good_has.take(message) {
                self.good
                    .receive(
                        state::ProxyMessage {
                            message: Some(proxy_message::Message::Ack(ack)),
                        },
                        self.now,
                    )
                    .unwrap();
            }
        }
        let open = self.bad.iter().flatten().count() + 1;
        assert!(
            self.shared.proxies.streams.borrow().len() <= open,
            "rows of ended streams are left"
        );
        assert!(
            self.shared
                .proxies
                .streams
                .borrow()
                .contains_key(&self.good.stream_id()),
            "the good one was replaced"
        );
        let counters = self.shared.reports.counters();
        assert_eq!(
            counters.totals("q", self.now).vms,
            0,
            "a pool that is not served is counted"
        );
    }

    fn end(&mut self) {
        self.now += FIRST_POOL_UPDATE_WAIT;
        self.listen();
        assert_eq!(
            self.good_has.endpoints,
            usize::from(self.endpoints),
            "the good one does not have the newest pool update"
        );
    }
}

impl ReceivedState {
    /// Checks a message against what any proxy may rely on. Returns the acknowledgement, if the
    /// message needs one.
    fn take(&mut self, message: state::DaemonMessage) -> Option<state::Ack> {
        match message.message? {
            daemon_message::Message::PoolUpdate(pool_update) => {
                let version = pool_update.version.map(|v| (v.term, v.sequence));
                assert!(
                    version > self.version,
                    "{version:?} after {:?}",
                    self.version
                );
                self.version = version;
                self.endpoints = pool_update.endpoints.len();
                Some(state::Ack {
                    pool: pool_update.pool,
                    version: pool_update.version,
                    ..state::Ack::default()
                })
            }
            daemon_message::Message::PeerLoad(peers) => {
                assert!(
                    peers.active <= u32::from(1 + HOSTS) * ACTIVE_PER_ORIGIN_MAX
                        && peers.placements.len() <= proto::PLACEMENTS_BYTES_MAX
                );
                let mut row = PeerLoadReport::default();
                LoadReportSum::default().read(&mut row, peers.row);
                let written = row.head().written;
                for ejection in row.ejections() {
                    assert!(
                        ejection.at <= written
                            && ejection.until.ms_since(written) <= PEER_EJECTION_MS_MAX,
                        "{ejection:?} at {written:?}"
                    );
                }
                None
            }
            _ => None,
        }
    }
}

impl SequenceBytes<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    /// Returns a number: small, large, or the largest.
    fn number(&mut self) -> u64 {
        match self.byte() {
            255 => u64::MAX,
            254 => u64::MAX - 1,
            253 => u64::from(u32::MAX),
            252 => 1 << 63,
            small => u64::from(small),
        }
    }

    fn some(&mut self) -> Vec<u8> {
        let length = usize::from(self.byte()).min(self.0.len());
        let (some, rest) = self.0.split_at(length);
        self.0 = rest;
        some.to_vec()
    }

    fn row(&mut self) -> Vec<u8> {
        if self.byte().is_multiple_of(4) {
            return self.some();
        }
        let count = u64::from(self.byte() % 6);
        let mut words = vec![
            self.number(),
            self.number(),
            self.number(),
            count | count << 32,
        ];
        for slot in 0..count {
            words.extend([
                slot | self.number() << 16,
                self.number(),
                self.number(),
                self.number(),
            ]);
        }
        for slot in 0..count {
            words.extend([slot | 1 << 32, self.number(), self.number(), self.number()]);
        }
        words.into_iter().flat_map(u64::to_le_bytes).collect()
    }

    fn message(&mut self, newest: Option<(u64, u64)>) -> state::ProxyMessage {
        let pool = if self.byte().is_multiple_of(8) {
            "q"
        } else {
            "p"
        }
        .to_owned();
        let version = |(term, sequence)| state::Version { term, sequence };
        let message = match self.byte() % 6 {
            0 => {
                let sent = newest
                    .filter(|_| !self.byte().is_multiple_of(4))
                    .unwrap_or((self.number(), self.number()));
                let held = (self.byte().is_multiple_of(2))
                    .then(|| version((self.number(), self.number())));
                let refused = "r".repeat(usize::from(self.byte() % 2) * 2_000);
                proxy_message::Message::Ack(state::Ack {
                    pool,
                    version: Some(version(sent)),
                    refused,
                    held,
                })
            }
            1 | 2 => proxy_message::Message::LoadReport(state::LoadReport {
                pool,
                row: self.row(),
                placements: self.some(),
                claims: self.some(),
                backlog: self.some(),
                stamp: self.number(),
            }),
            3 => {
                let endpoint = state::EndpointCounters {
                    slot: u32::from(self.byte()),
                    picked: self.number(),
                    requests: self.number(),
                    ..Default::default()
                };
                let model = state::ModelCounters {
                    model: self.byte().to_string(),
                    requests: self.number(),
                    ..Default::default()
                };
                let vm = state::VmCounters {
                    pool,
                    vm_id: self.number(),
                    endpoints: vec![endpoint],
                    models: vec![model],
                    ..Default::default()
                };
                proxy_message::Message::Report(state::Report {
                    counters: vec![vm.encode_to_vec(), self.some()],
                })
            }
            4 => proxy_message::Message::Observations(state::Observations {
                pool,
                vm_id: self.number(),
                first: self.number(),
                rows: self.some(),
            }),
            _ => return state::ProxyMessage::decode(self.some().as_slice()).unwrap_or_default(),
        };
        state::ProxyMessage {
            message: Some(message),
        }
    }
}

fn remote(host: u8) -> RemoteAddress {
    RemoteAddress {
        origin: Origin {
            certificate: None,
            address: Some([10, 0, 0, host].into()),
        },
        socket: None,
    }
}

fn begin(shared: &Arc<DaemonState>, host: u8, process_id: u64, now: Instant) -> StateStream {
    let pools = vec!["p".to_owned(), "q".to_owned()];
    let hello = state::Hello {
        schema: proto::SCHEMA,
        node_id: "n".to_owned(),
        process_id,
        pools,
        ..state::Hello::default()
    };
    let (conversation, _) = StateStream::begin(shared, hello, remote(host), now).unwrap();
    conversation
}
