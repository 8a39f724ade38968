//! A proxy that the test simulates at the real daemon, beside a real proxy: each receives the load
//! and the placements of the other.

use std::time::{Duration, Instant};

use e2e::explain::ExplainedDecision;
use exchange::Timestamp;
use pool_state::{Ejection, LoadReportHead, LoadReportSum, PeerLoadReport};
use prost::Message;
use proto::state::state_service_client::StateServiceClient;
use proto::state::{self, daemon_message, proxy_message};
use scheduler::flow::QueuedInBand;
use scheduler::in_flight::EndpointLoad;
use scheduler::{EndpointRef, Generation, Slot};
use testbed::stack::Stack;
use testbed::{Error, Result, wait_for};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

/// The maximum time from a message to its effect. It is far above the promised time.
pub(super) const LIMIT: Duration = Duration::from_secs(20);

/// The simulated proxy.
pub(super) struct SimulatedPeer {
    out: mpsc::Sender<proxy_message::Message>,
    stream: tonic::Streaming<state::DaemonMessage>,
    pool_update: state::PoolUpdate,
    others: (LoadReportSum, PeerLoadReport),
    /// All messages from the daemon, as bytes.
    pub(super) received: Vec<Vec<u8>>,
}

impl SimulatedPeer {
    /// Joins the pool of a stack.
    pub(super) async fn join(stack: &mut Stack) -> Result<Self> {
        let daemon = stack.daemon()?.settings().state.address();
        let (out, messages) = mpsc::channel(16);
        let mut client = StateServiceClient::connect(format!("http://{daemon}")).await?;
        let hello = state::Hello {
            schema: proto::SCHEMA,
            node_id: "outsider".into(),
            process_id: 77,
            pools: vec!["default".into()],
            ..state::Hello::default()
        };
        out.send(proxy_message::Message::Hello(hello)).await?;
        let wrapped = ReceiverStream::new(messages).map(|message| state::ProxyMessage {
            message: Some(message),
        });
        let stream = client.stream(wrapped).await?.into_inner();
        let mut outsider = Self {
            out,
            stream,
            pool_update: state::PoolUpdate::default(),
            others: (LoadReportSum::default(), PeerLoadReport::default()),
            received: Vec::new(),
        };
        while outsider.pool_update.endpoints.len() < stack.servers.len() {
            if let daemon_message::Message::PoolUpdate(pool_update) = outsider.next().await? {
                let ack = state::Ack {
                    pool: pool_update.pool.clone(),
                    version: pool_update.version,
                    ..state::Ack::default()
                };
                outsider.out.send(proxy_message::Message::Ack(ack)).await?;
                outsider.pool_update = pool_update;
            }
        }
        let present = (0..stack.servers.len())
            .map(|server| outsider.endpoint(server))
            .collect::<Result<Vec<_>>>()?;
        outsider.others.0.reset(present, []);
        Ok(outsider)
    }

    async fn next(&mut self) -> Result<daemon_message::Message> {
        let next = tokio::time::timeout(LIMIT, self.stream.message())
            .await??
            .ok_or("the daemon closed the stream")?;
        self.received.push(next.encode_to_vec());
        next.message.ok_or_else(|| Error::from("an empty message"))
    }

    fn endpoint(&self, server: usize) -> Result<EndpointRef> {
        let name = format!("server-{server}");
        let endpoint = self
            .pool_update
            .endpoints
            .iter()
            .find(|endpoint| endpoint.name == name)
            .ok_or("no such server")?;
        Ok(EndpointRef {
            slot: Slot(u16::try_from(endpoint.slot)?),
            generation: Generation(endpoint.generation),
        })
    }

    /// Sends a load report with this many requests at a server.
    pub(super) async fn tell(&self, server: usize, requests: u32) -> Result<()> {
        let mut sum = LoadReportSum::default();
        let endpoint = self.endpoint(server)?;
        sum.reset(vec![endpoint], []);
        sum.add(
            endpoint,
            EndpointLoad {
                requests,
                prefill_tokens: u64::from(requests) * 100,
                ..EndpointLoad::default()
            },
        );
        let row = sum.row(
            LoadReportHead {
                written: Timestamp(1),
                ..LoadReportHead::default()
            },
            [],
            &[],
        );
        let share = state::LoadReport {
            pool: "default".into(),
            row,
            ..state::LoadReport::default()
        };
        Ok(self
            .out
            .send(proxy_message::Message::LoadReport(share))
            .await?)
    }

    /// Reports the largest load at these servers, a failure of the first two just now, and a
    /// million held requests in the highest band.
    pub(super) async fn lie(&self, servers: std::ops::Range<usize>) -> Result<()> {
        let mut sum = LoadReportSum::default();
        let busy = servers
            .map(|server| self.endpoint(server))
            .collect::<Result<Vec<_>>>()?;
        sum.reset(busy.clone(), []);
        for endpoint in &busy {
            let most = u64::from(u32::MAX);
            let load = EndpointLoad {
                requests: 0xffff,
                prefill_tokens: most,
                decode_tokens: most,
                ..EndpointLoad::default()
            };
            sum.add(*endpoint, load);
        }
        let written = Timestamp(1_000_000_000);
        let failures: Vec<Ejection> = busy
            .into_iter()
            .take(2)
            .map(|endpoint| Ejection {
                at: written,
                failures: 9,
                until: written.plus_ms(30_000),
                endpoint,
                outside: false,
                by_answers: true,
                is_own: false,
            })
            .collect();
        let head = LoadReportHead {
            written,
            ..LoadReportHead::default()
        };
        let band = QueuedInBand {
            priority: i32::MAX,
            requests: 1_000_000,
            bytes: 0,
        };
        let share = state::LoadReport {
            pool: "default".into(),
            row: sum.row(head, [], &failures),
            backlog: proto::backlog::write(&[band]),
            ..state::LoadReport::default()
        };
        let message = proxy_message::Message::LoadReport(share);
        Ok(self.out.send(message).await?)
    }

    /// Places 25,000 blocks that no prompt has at each of these servers, within about a second.
    pub(super) async fn place_invented(&self, servers: std::ops::Range<usize>) -> Result<()> {
        let endpoints = servers
            .map(|server| self.endpoint(server))
            .collect::<Result<Vec<_>>>()?;
        // The hashes are even, like the hash of a single block.
        let mut hashes = (1_u64..).map(|number| number.wrapping_mul(0x9e37_79b9_7f4a_7c15) & !1);
        for _ in 0..50 {
            let mut placements = Vec::new();
            for endpoint in &endpoints {
                let blocks: Vec<u64> = hashes.by_ref().take(500).collect();
                proto::placements::push(&mut placements, *endpoint, &blocks);
            }
            let share = state::LoadReport {
                pool: "default".into(),
                placements,
                ..state::LoadReport::default()
            };
            self.out
                .send(proxy_message::Message::LoadReport(share))
                .await?;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Returns the block hashes of each prompt in the received placements.
    pub(super) fn placed(&self) -> Vec<Vec<u64>> {
        let message =
            |bytes: &Vec<u8>| state::DaemonMessage::decode(bytes.as_slice()).ok()?.message;
        let placements = |message| {
            if let daemon_message::Message::PeerLoad(peers) = message {
                peers.placements
            } else {
                Vec::new()
            }
        };
        let placements = self.received.iter().filter_map(message).map(placements);
        placements
            .flat_map(|placed| {
                proto::placements::each(&placed)
                    .map(|(_, blocks)| blocks)
                    .collect::<Vec<_>>()
            })
            .collect()
    }

    /// Waits until the other proxies have this many requests, over all servers. Returns the length
    /// of the wait, and how many placements arrived meanwhile.
    pub(super) async fn hear_until(&mut self, requests: u32) -> Result<(Duration, usize)> {
        let began = Instant::now();
        let mut placed = 0;
        loop {
            if let daemon_message::Message::PeerLoad(peers) = self.next().await? {
                placed += proto::placements::each(&peers.placements).count();
                let (sum, row) = &mut self.others;
                sum.read(row, peers.row);
                let slots = self
                    .pool_update
                    .endpoints
                    .iter()
                    .map(|e| (e.slot, e.generation));
                let load = |(slot, generation): (u32, u32)| {
                    sum.load(EndpointRef {
                        slot: Slot(slot as u16),
                        generation: Generation(generation),
                    })
                    .requests
                };
                if slots.map(load).sum::<u32>() == requests {
                    return Ok((began.elapsed(), placed));
                }
            }
            if began.elapsed() > LIMIT {
                return Err(format!("the others never had {requests} requests").into());
            }
        }
    }
}

/// Reports 50 requests of the simulated proxy at a server until the stack's scorer sees a
/// difference. A report expires after two seconds, and a busy machine may take longer to decide.
/// Returns the decision, and a time before the last report was sent.
pub(super) async fn report_until_seen(
    stack: &Stack,
    outsider: &SimulatedPeer,
    server: usize,
    scorer: &str,
) -> Result<(ExplainedDecision, Instant)> {
    let look = || async {
        let before = Instant::now();
        outsider.tell(server, 50).await.ok()?;
        tokio::time::sleep(Duration::from_millis(50)).await;
        let decision = ExplainedDecision::ask(stack.address(), "a question of its own")
            .await
            .ok()?;
        decision.distinguishes(scorer).then_some((decision, before))
    };
    wait_for(LIMIT, &format!("{scorer} to distinguish endpoints"), look).await
}

/// Waits until a scorer gives the servers of a stack different scores, or equal scores if
/// `expected` is false.
pub(super) async fn tells_apart(stack: &Stack, scorer: &str, expected: bool) -> Result<Duration> {
    let began = Instant::now();
    let look = || async {
        let decision = ExplainedDecision::ask(stack.address(), "a question of its own")
            .await
            .ok()?;
        (decision.distinguishes(scorer) == expected).then(|| began.elapsed())
    };
    wait_for(
        LIMIT,
        &format!("{scorer} to distinguish endpoints: {expected}"),
        look,
    )
    .await
}
