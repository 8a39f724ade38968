//! For any order of host calls, the resources of a pick are released exactly once, and nothing
//! panics.

use exchange::{
    Exchange, ExchangeSettings, ExchangeStep, HeadersStep, ManagedPool, ResponseHead,
    ResponseOrigin, Timestamp,
};
use proptest::prelude::*;
use scheduler::plugin::ParameterValue;
use scheduler::{
    Endpoint, EndpointMetrics, EndpointRef, Generation, Pipeline, PipelineSpec, PluginSpec,
    ProfilePlugin, ProfileSpec, ROLE_LABEL, Readiness, Slot, Snapshot, Version,
};

#[derive(Clone, Debug)]
enum ReleaseEvent {
    Headers {
        end: bool,
        path: usize,
    },
    Grow(usize),
    Decide(usize),
    Response {
        origin: usize,
        address: usize,
        attempts: u32,
        stream: bool,
    },
    Chunk(usize),
    NewPoolUpdate(u8),
    End,
}

const PATHS: [&[u8]; 4] = [b"/v1/chat/completions", b"/v1/messages", b"/v1/models", b""];
const BODIES: [&[u8]; 4] = [
    br#"{"model":"m","messages":[{"role":"user","content":"hello"}],"stream":true}"#,
    b"{",
    b"",
    br#"{"model":"m","prompt":"x"}"#,
];
const CHUNKS: [&[u8]; 5] = [
    b"data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}\n\n",
    b"data: {\"choices\":[{\"delta\":{\"cont",
    b"ent\":\"hi\"}}]}\n\ndata: {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}\n\n",
    b"data: [DONE]\n\n",
    b"\xff\xfe",
];

fn event() -> impl Strategy<Value = ReleaseEvent> {
    prop_oneof![
        (any::<bool>(), 0..4usize).prop_map(|(end, path)| ReleaseEvent::Headers { end, path }),
        (0..30_000_000usize).prop_map(ReleaseEvent::Grow),
        (0..4usize).prop_map(ReleaseEvent::Decide),
        (0..3usize, 0..5usize, 0..5u32, any::<bool>()).prop_map(
            |(origin, address, attempts, stream)| ReleaseEvent::Response {
                origin,
                address,
                attempts,
                stream
            }
        ),
        (0..5usize).prop_map(ReleaseEvent::Chunk),
        (0..7u8).prop_map(ReleaseEvent::NewPoolUpdate),
        Just(ReleaseEvent::End),
    ]
}

fn address(i: usize) -> String {
    format!("10.0.0.{i}:8000")
}

pub(crate) fn pool_update(n: u8, generation: u32) -> Snapshot {
    pool_update_of(n, generation, &PipelineSpec::default(), |_| "")
}

/// Returns a pool update in which two of three endpoints serve the stages before decode, and every
/// request needs these stages.
pub(crate) fn split_pool_update(n: u8, generation: u32) -> Snapshot {
    pool_update_of_stages(n, generation, &["prefill", "encode"])
}

/// Returns the same pool update, but of the stages before decode, requests need only `earlier`.
pub(crate) fn pool_update_of_stages(n: u8, generation: u32, earlier: &[&str]) -> Snapshot {
    let decider = "always-disagg-pd-decider";
    let deciders = earlier.iter().map(|stage| {
        (
            (*stage).to_owned(),
            ParameterValue::Text(decider.to_owned()),
        )
    });
    let deciders = ParameterValue::Map(deciders.collect());
    let handler = PluginSpec {
        parameters: vec![("deciders".to_owned(), deciders)],
        ..PluginSpec::of_type("disagg-profile-handler")
    };
    let profile = |stage: &str| ProfileSpec {
        name: stage.to_owned(),
        plugins: vec![ProfilePlugin {
            name: format!("{stage}-filter"),
            weight: 1.0,
        }],
    };
    let stages = ["decode", "prefill", "encode"];
    let filters = stages.map(|stage| PluginSpec::of_type(&format!("{stage}-filter")));
    let pipeline = PipelineSpec {
        plugins: filters
            .into_iter()
            .chain([handler, PluginSpec::of_type(decider)])
            .collect(),
        profiles: stages.map(profile).into(),
        profile_handler: "disagg-profile-handler".to_owned(),
        ..PipelineSpec::default()
    };
    pool_update_of(n, generation, &pipeline, |i| stages[usize::from(i) % 3])
}

pub(crate) fn pool_update_of(
    n: u8,
    generation: u32,
    pipeline: &PipelineSpec,
    role: impl Fn(u16) -> &'static str,
) -> Snapshot {
    let endpoints: Vec<Endpoint> = (0..u16::from(n))
        .map(|i| Endpoint {
            id: EndpointRef {
                slot: Slot(i),
                generation: Generation(generation),
            },
            name: format!("pod-{i}").into(),
            address: address(usize::from(i)).into(),
            readiness: Readiness::Ready,
            labels: Box::new([(ROLE_LABEL.into(), role(i).into())]),
            models: std::sync::Arc::default(),
            age_ms: 60_000,
        })
        .collect();
    let metrics = vec![EndpointMetrics::default(); endpoints.len()];
    let version = Version {
        term: 1,
        sequence: u64::from(generation),
    };
    Snapshot::try_new(
        version,
        endpoints,
        metrics,
        Pipeline::build(pipeline).unwrap(),
    )
    .unwrap()
}

struct ReleaseHost {
    settings: ExchangeSettings,
    pool: ManagedPool,
    exchange: Exchange,
    now: Timestamp,
    generation: u32,
    forwarded: u32,
    ended: u32,
}

impl ReleaseHost {
    fn decide(&mut self, body: &[u8]) {
        if let ExchangeStep::Forward(_) =
            self.exchange
                .decide(&self.settings, &mut self.pool, None, body, self.now)
        {
            self.forwarded += 1;
        }
    }

    fn apply(&mut self, event: &ReleaseEvent) {
        self.now = self.now.plus_ms(7);
        match *event {
            ReleaseEvent::Headers { end, path } => {
                self.ended += u32::from(self.exchange.end(&mut self.pool, self.now).is_some());
                self.exchange = Exchange::new(self.now);
                let pairs: [(&[u8], &[u8]); 2] = [(b":method", b"POST"), (b":path", PATHS[path])];
                if self.exchange.request_headers(&self.settings, pairs, end) == HeadersStep::Decide
                {
                    self.decide(b"");
                }
            }
            ReleaseEvent::Grow(bytes) => drop(self.exchange.check_body_size(&self.settings, bytes)),
            ReleaseEvent::Decide(body) => {
                self.ended += u32::from(self.exchange.end(&mut self.pool, self.now).is_some());
                self.decide(BODIES[body]);
            }
            ReleaseEvent::Response {
                origin,
                address: at,
                attempts,
                stream,
            } => {
                let address = address(at);
                let head = ResponseHead {
                    origin: [
                        ResponseOrigin::Upstream,
                        ResponseOrigin::Proxy,
                        ResponseOrigin::Ours,
                    ][origin],
                    status: 200,
                    upstream_address: Some(address.as_bytes()),
                    attempts,
                    content_type: stream.then_some(b"text/event-stream"),
                    encoded: false,
                    ..ResponseHead::default()
                };
                self.exchange
                    .response_headers(&mut self.pool, &head, self.now);
            }
            ReleaseEvent::Chunk(i) => {
                let _ = self
                    .exchange
                    .response_chunk(&mut self.pool, CHUNKS[i], false, self.now);
            }
            ReleaseEvent::NewPoolUpdate(n) => {
                self.generation += 1;
                let pool_update = if self.generation.is_multiple_of(2) {
                    split_pool_update(n, self.generation)
                } else {
                    pool_update(n, self.generation)
                };
                self.pool.install(pool_update, 7, 1000);
            }
            ReleaseEvent::End => {
                self.ended += u32::from(self.exchange.end(&mut self.pool, self.now).is_some());
            }
        }
    }
}

proptest! {
    #[test]
    fn the_ledger_is_empty_when_all_is_over(events in prop::collection::vec(event(), 0..60)) {
        let mut host = ReleaseHost {
            settings: ExchangeSettings::default(),
            pool: ManagedPool::new(1, 1024),
            exchange: Exchange::new(Timestamp(0)),
            now: Timestamp(0),
            generation: 0,
            forwarded: 0,
            ended: 0,
        };
        host.apply(&ReleaseEvent::NewPoolUpdate(3));
        for event in events {
            host.apply(&event);
            let held: u32 = host.pool.in_flight().rows().map(|(_, load)| load.requests).sum();
            prop_assert!(held <= 3, "one exchange holds one request at most, at one endpoint a stage");
        }
        host.apply(&ReleaseEvent::End);
        prop_assert_eq!(host.pool.in_flight().rows().count(), 0);
        prop_assert_eq!(host.forwarded, host.ended, "each request sent on ended once");
        prop_assert_eq!(host.pool.counters().models().iter().map(|m| m.running).sum::<u64>(), 0);
    }
}
