//! Tests a proxy that may refuse any call at any time. Two VMs, their requests and their daemon act
//! in any order. Nothing panics, and once the proxy accepts calls again, everything works again.

use proptest::prelude::*;
use proto::state::{self, daemon_message};

use super::*;
use crate::fake::{FakeCall, encode, metrics_message};
use crate::shared_data::crash_guard::CrashGuard;
use crate::state_link::CallResponse;

const CALLS: [FakeCall; 23] = [
    FakeCall::Shared,
    FakeCall::Share,
    FakeCall::QueueRegister,
    FakeCall::QueuePush,
    FakeCall::QueuePop,
    FakeCall::StreamOpen,
    FakeCall::StreamSend,
    FakeCall::StreamCancel,
    FakeCall::Call,
    FakeCall::Property,
    FakeCall::PropertySet,
    FakeCall::Headers,
    FakeCall::HeaderSet,
    FakeCall::HeaderRemove,
    FakeCall::Buffer,
    FakeCall::BufferReplace,
    FakeCall::Reply,
    FakeCall::ResumeRequest,
    FakeCall::Focus,
    FakeCall::TickPeriod,
    FakeCall::Metric,
    FakeCall::MetricAdd,
    FakeCall::MetricRecord,
];
const STREAMED_CHAT: &str =
    r#"{"model":"alias","messages":[{"role":"user","content":"hello"}],"stream":true}"#;
const PATHS: [&str; 4] = [
    "/v1/chat/completions",
    "/v1/models",
    "/some.Service/Talk",
    "/switchpoint/ready",
];

#[derive(Clone, Debug)]
enum RefusalStep {
    /// Makes every call of these kinds fail until the next such step.
    Fail(Vec<usize>),
    FailAfter(u32),
    Tick(usize),
    Pass(u64),
    Wake(usize),
    Says(RefusalResult),
    Closed,
    NotAnswered,
    Configure(usize),
    Headers {
        vm: usize,
        path: usize,
        end: bool,
    },
    Body {
        stream: usize,
        end: bool,
    },
    Trailers {
        stream: usize,
    },
    Response {
        stream: usize,
        details: usize,
    },
    Chunk {
        stream: usize,
        end: bool,
    },
    Done {
        stream: usize,
    },
}

#[derive(Clone, Copy, Debug)]
enum RefusalResult {
    PoolUpdate,
    Metrics,
    Peers,
    Nonsense,
}

fn step() -> impl Strategy<Value = RefusalStep> {
    let said = prop_oneof![
        Just(RefusalResult::PoolUpdate),
        Just(RefusalResult::Metrics),
        Just(RefusalResult::Peers),
        Just(RefusalResult::Nonsense)
    ];
    prop_oneof![
        2 => prop::collection::vec(0..CALLS.len(), 0..4).prop_map(RefusalStep::Fail),
        2 => (0..40_u32).prop_map(RefusalStep::FailAfter),
        6 => (0..2_usize).prop_map(RefusalStep::Tick),
        3 => (1..1_500_u64).prop_map(RefusalStep::Pass),
        1 => (0..2_usize).prop_map(RefusalStep::Wake),
        6 => said.prop_map(RefusalStep::Says),
        1 => Just(RefusalStep::Closed),
        1 => Just(RefusalStep::NotAnswered),
        1 => (0..2_usize).prop_map(RefusalStep::Configure),
        4 => (0..2_usize, 0..PATHS.len(), any::<bool>()).prop_map(|(vm, path, end)| RefusalStep::Headers { vm, path, end }),
        4 => (0..8_usize, any::<bool>()).prop_map(|(stream, end)| RefusalStep::Body { stream, end }),
        1 => (0..8_usize).prop_map(|stream| RefusalStep::Trailers { stream }),
        2 => (0..8_usize, 0..3_usize).prop_map(|(stream, details)| RefusalStep::Response { stream, details }),
        2 => (0..8_usize, any::<bool>()).prop_map(|(stream, end)| RefusalStep::Chunk { stream, end }),
        1 => (0..8_usize).prop_map(|stream| RefusalStep::Done { stream }),
    ]
}

struct RefusalProcess {
    host: FakeHost,
    vms: Vec<(Rc<RefCell<VmState<FakeHost>>>, u32)>,
    config: Rc<FilterConfig>,
    streams: Vec<HttpStreamContext<FakeHost>>,
    contexts: u32,
    sequence: u64,
}

impl RefusalProcess {
    fn new(transport: &str) -> Self {
        let config = format!(
            r#"{{"pools": [{{"name": "default"}}], "explain": true, "decision_log_one_in": 1, "prefix_entries": 64, "state": {{"transport": "{transport}"}}}}"#
        );
        let host = FakeHost::new();
        let config = Rc::new(FilterConfig::parse(config.as_bytes()).unwrap());
        let vm = |_| {
            let mut vm = VmState::new(host.clone());
            vm.configure(1, Rc::clone(&config));
            (Rc::new(RefCell::new(vm)), 1)
        };
        Self {
            vms: (0..2).map(vm).collect(),
            host,
            config,
            streams: Vec::new(),
            contexts: 100,
            sequence: 1,
        }
    }

    fn tick(&self, vm: usize) {
        let (vm, root) = &self.vms[vm];
        let due = vm.borrow_mut().tick(*root);
        due.iter().for_each(|request| request.retry());
    }

    fn call(&self, kind: &str) -> u32 {
        let calls = self.host.grpc.calls.borrow();
        u32::try_from(
            calls
                .iter()
                .rposition(|(path, _, _)| path.ends_with(kind))
                .map_or(0, |at| at + 1),
        )
        .unwrap()
    }

    /// Delivers the response to a call. A response to an unknown call has no effect.
    fn answer(&self, call: u32, answer: &CallResponse) {
        for (vm, root) in &self.vms {
            let answer = CallResponse {
                status: answer.status.clone(),
                body: answer.body.clone(),
            };
            let due = vm.borrow_mut().on_call_response(*root, call, answer);
            due.iter().for_each(|request| request.retry());
        }
    }

    /// Delivers a message from the daemon on the current stream or call.
    fn says(&self, message: Vec<u8>) {
        let stream = u32::try_from(self.host.grpc.streams.borrow().len()).unwrap();
        let size = message.len();
        let mut body = Vec::new();
        proto::frames::push(&mut body, &message);
        self.host
            .http
            .buffers
            .borrow_mut()
            .insert(BodyBuffer::StreamMessage as u32, message);
        for (vm, root) in self.vms.iter().filter(|_| stream > 0) {
            let due = vm.borrow_mut().on_stream_message(*root, stream, size);
            due.iter().for_each(|request| request.retry());
        }
        let status = Some(b"200".to_vec());
        self.answer(
            self.call("tell"),
            &CallResponse {
                status: status.clone(),
                body: Vec::new(),
            },
        );
        self.answer(self.call("hear"), &CallResponse { status, body });
    }

    fn pool_update(&mut self) {
        self.sequence += 1;
        let other = format!("10.0.1.{}:1", self.sequence % 200);
        let version = Version {
            term: 1,
            sequence: self.sequence,
        };
        self.says(pool_update_message(
            "default",
            version,
            &["10.0.0.1:1", "10.0.0.2:1", &other],
        ));
    }

    fn headers(&mut self, vm: usize, path: &str, end: bool) -> Action {
        let headers = [
            (":method", "POST"),
            (":path", path),
            ("x-gateway-destination-endpoint", "6.6.6.6:1"),
        ];
        *self.host.http.request.borrow_mut() = headers
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .to_vec();
        self.contexts += 1;
        let mut stream = HttpStreamContext::new(
            self.contexts,
            self.host.clone(),
            Rc::clone(&self.vms[vm].0),
            Rc::clone(&self.config),
        );
        let action = stream.on_http_request_headers(3, end);
        self.streams.push(stream);
        action
    }

    fn body(&mut self, stream: usize, end: bool) -> Option<Action> {
        self.host
            .http
            .buffers
            .borrow_mut()
            .insert(BodyBuffer::RequestBody as u32, STREAMED_CHAT.into());
        Some(
            self.streams
                .get_mut(stream)?
                .on_http_request_body(STREAMED_CHAT.len(), end),
        )
    }

    fn act(&mut self, step: RefusalStep) {
        match step {
            RefusalStep::Fail(kinds) => self.host.fail(
                &kinds
                    .into_iter()
                    .map(|kind| CALLS[kind])
                    .collect::<Vec<_>>(),
            ),
            RefusalStep::FailAfter(count) => self.host.fail_after(count),
            RefusalStep::Tick(vm) => self.tick(vm),
            RefusalStep::Pass(ms) => self.host.pass_ms(ms),
            RefusalStep::Wake(vm) => {
                (1..3).for_each(|queue| drop(self.vms[vm].0.borrow_mut().on_wake(queue)));
            }
            RefusalStep::Says(RefusalResult::PoolUpdate) => self.pool_update(),
            RefusalStep::Says(RefusalResult::Metrics) => {
                let version = Version {
                    term: 1,
                    sequence: self.sequence,
                };
                self.says(metrics_message(
                    "default",
                    version,
                    self.host.now_ms.get(),
                    &[1.0, 2.0, 3.0],
                ));
            }
            RefusalStep::Says(RefusalResult::Peers) => {
                let peers = state::PeerLoad {
                    pool: "default".into(),
                    proxies: 2,
                    active: 1,
                    ..state::PeerLoad::default()
                };
                self.says(encode(daemon_message::Message::PeerLoad(peers)));
            }
            RefusalStep::Says(RefusalResult::Nonsense) => self.says(b"\xff\xff".to_vec()),
            RefusalStep::Closed => {
                let stream = u32::try_from(self.host.grpc.streams.borrow().len()).unwrap();
                self.vms
                    .iter()
                    .filter(|_| stream > 0)
                    .for_each(|(vm, root)| vm.borrow_mut().on_stream_closed(*root, stream, "gone"));
            }
            RefusalStep::NotAnswered => self.answer(self.call("hear"), &CallResponse::default()),
            RefusalStep::Configure(vm) => {
                let (vm, root) = &mut self.vms[vm];
                vm.borrow_mut()
                    .configure(*root + 1, Rc::clone(&self.config));
                vm.borrow_mut().remove_root(*root);
                *root += 1;
            }
            RefusalStep::Headers { vm, path, end } if self.streams.len() < 8 => {
                _ = self.headers(vm, PATHS[path], end);
            }
            RefusalStep::Headers { .. } => {}
            RefusalStep::Body { stream, end } => _ = self.body(stream, end),
            RefusalStep::Trailers { stream } => {
                _ = self
                    .streams
                    .get_mut(stream)
                    .map(|stream| stream.on_http_request_trailers(0));
            }
            RefusalStep::Response { stream, details } => {
                let details = ["via_upstream", "", "response_timeout"][details];
                self.host
                    .properties
                    .borrow_mut()
                    .insert("response.code_details".into(), details.into());
                self.host
                    .properties
                    .borrow_mut()
                    .insert("upstream.address".into(), b"10.0.0.1:1".to_vec());
                *self.host.http.response.borrow_mut() = vec![
                    (":status".into(), "200".into()),
                    ("content-type".into(), "text/event-stream".into()),
                ];
                let _ = self
                    .streams
                    .get_mut(stream)
                    .map(|stream| stream.on_http_response_headers(2, false));
            }
            RefusalStep::Chunk { stream, end } => {
                let chunk = b"data: {\"model\":\"served\",\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
                self.host
                    .http
                    .buffers
                    .borrow_mut()
                    .insert(BodyBuffer::ResponseBody as u32, chunk.to_vec());
                let _ = self
                    .streams
                    .get_mut(stream)
                    .map(|stream| stream.on_http_response_body(chunk.len(), end));
            }
            RefusalStep::Done { stream } if stream < self.streams.len() => {
                _ = self.streams.remove(stream).on_done();
            }
            RefusalStep::Done { .. } => {}
        }
    }

    /// Runs this many ticks in which the proxy accepts every call, and in which the daemon answers.
    fn heals(&mut self, ticks: usize) {
        self.host.fail(&[]);
        self.host.fail_after(u32::MAX);
        for _ in 0..ticks {
            self.host.pass_ms(100);
            (0..2).for_each(|vm| self.tick(vm));
            self.says(encode(daemon_message::Message::Welcome(state::Welcome {
                schema: proto::SCHEMA,
                ..state::Welcome::default()
            })));
            self.pool_update();
        }
    }

    /// How long the leaders stay away from the daemon, in ms. A proxy that refuses to remove the
    /// mark of a message looks like a VM that was lost while it decoded the message.
    fn crash_pause_ms(&self) -> u64 {
        CrashGuard::load(&self.host, 0, self.host.now())
            .0
            .pause_ends()
            .ms_since(self.host.now())
    }

    fn in_flight(&self, vm: usize) -> u32 {
        let replica = self.vms[vm].0.borrow().replica("default").unwrap();
        let replica = replica.borrow();
        replica
            .pool
            .in_flight()
            .rows()
            .map(|(_, load)| load.requests)
            .sum()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn a_proxy_that_refuses_anything_at_any_time_stops_nothing_for_good(http: bool, steps in prop::collection::vec(step(), 0..80)) {
        let mut world = RefusalProcess::new(if http { "http" } else { "grpc" });
        steps.into_iter().for_each(|step| world.act(step));
        // Within six seconds a lease expires, the VM notices a silence, and the longest pause
        // between attempts ends.
        world.heals(60);
        for (vm, _) in &world.vms {
            prop_assert_eq!(vm.borrow().parked_count(), 0, "no request waits, because state has come");
        }
        world.host.pass_ms(world.crash_pause_ms());
        world.heals(60);
        world.streams.drain(..).for_each(|mut stream| _ = stream.on_done());
        world.heals(1);
        prop_assert_eq!(world.host.metric_value("switchpoint_state_connected"), 1);
        for vm in 0..2 {
            let replica = world.vms[vm].0.borrow().replica("default").unwrap();
            let version = replica.borrow().version();
            let newest = world.sequence;
            prop_assert!(version.sequence + 1 >= newest, "{:?} of {}", version, newest);
            prop_assert_eq!(world.in_flight(vm), 0);
            prop_assert_eq!(world.headers(vm, PATHS[0], false), Action::Pause);
            prop_assert_eq!(world.body(vm, true), Some(Action::Continue));
            let request = world.host.http.request.borrow();
            prop_assert!(request.iter().any(|(name, value)| name == DESTINATION && value.contains("10.0.")), "{:?}", request);
            drop(request);
            prop_assert_eq!(world.in_flight(vm), 1);
        }
    }
}
