//! Arbitrary messages on several ext_proc streams at once: in any order, with any bytes, cut
//! anywhere, while time passes and memory runs short. There is no panic, the account of held bytes
//! is right after every step, and every pick and held byte is released at the end. In full duplex
//! the server passes on exactly the bytes that it received, in their order.

#![no_main]

use std::sync::Arc;

use arbitrary::Arbitrary;
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpBody, HttpHeaders, HttpTrailers, ProcessingRequest, ProcessingResponse,
    ProtocolConfiguration,
};
use exchange::{DestinationFormat, ExchangeSettings};
use ext_proc::{ExpiringStream as _, ExtProcServer, HELD_BYTES_MAX, SessionAction, StreamSession};
use libfuzzer_sys::fuzz_target;
use prost::Message;
use proto::state::{self, daemon_message};

const DUPLEX: i32 = 4;

#[derive(Arbitrary, Debug)]
enum Said {
    /// A message as bytes.
    Raw(Vec<u8>),
    Begins {
        inference: bool,
        length: Option<u16>,
        end: bool,
    },
    Body {
        bytes: Vec<u8>,
        end: bool,
    },
    Prompt {
        end: bool,
    },
    Trailers,
    Answers {
        status: u8,
        length: Option<u16>,
        streamed: bool,
    },
    Reply {
        bytes: Vec<u8>,
        end: bool,
    },
    ReplyTrailers,
}

/// An event on a stream.
#[derive(Arbitrary, Debug)]
enum Event {
    Says(Said),
    /// The same messages, in frames of this many bytes.
    SaysInFrames(Said, u8),
    /// Bytes that need not be a message.
    Bytes(Vec<u8>),
    /// Takes pending output, at most this many times.
    Takes(u8),
    /// The clock of the stream advances by this many seconds.
    Waits(u8),
    /// All other streams of the daemon hold all memory but this many bytes.
    Short(u32),
    Leaves,
}

#[derive(Arbitrary, Debug)]
struct Gateway {
    modes: [Option<(u8, u8, bool)>; STREAMS],
    list: bool,
    events: Vec<(u8, Event)>,
}

/// Number of streams at once.
const STREAMS: usize = 3;

/// One stream, and the bytes of its request bodies in and out.
struct FuzzedStream {
    talk: Arc<StreamSession>,
    config: Option<ProtocolConfiguration>,
    came: Vec<u8>,
    went: Vec<u8>,
    begun: u32,
    /// Whether bytes in and out must match. Arbitrary bytes may begin a second request or change
    /// the configuration; then they need not.
    balances: bool,
}

fn server() -> Arc<ExtProcServer> {
    let server = ExtProcServer::new(&["p".into()]);
    let endpoint = |slot: u32| state::Endpoint {
        slot,
        name: format!("e{slot}"),
        address: format!("10.0.0.{slot}:80"),
        ready: true,
        ..state::Endpoint::default()
    };
    let plugin = |kind: &str| state::Plugin {
        r#type: kind.into(),
        name: kind.into(),
        ..state::Plugin::default()
    };
    let part = |name: &str| state::ProfilePlugin {
        name: name.into(),
        weight: 1.0,
    };
    let pool_update = state::PoolUpdate {
        pool: "p".into(),
        version: Some(state::Version {
            term: 1,
            sequence: 1,
        }),
        endpoints: (1..4).map(endpoint).collect(),
        pipeline: Some(state::Pipeline {
            plugins: vec![plugin("prefix-cache-scorer"), plugin("max-score-picker")],
            profiles: vec![state::Profile {
                name: "p".into(),
                plugins: vec![part("prefix-cache-scorer"), part("max-score-picker")],
                ..state::Profile::default()
            }],
            ranked_max: 3,
            ..state::Pipeline::default()
        }),
        ..state::PoolUpdate::default()
    };
    let ack = server
        .apply(state::DaemonMessage {
            message: Some(daemon_message::Message::PoolUpdate(pool_update)),
        })
        .expect("an answer");
    assert_eq!(ack.refused, "");
    server
}

fn headers(pairs: &[(&str, String)], end_of_stream: bool) -> HttpHeaders {
    let header = |(name, value): &(&str, String)| HeaderValue {
        key: (*name).into(),
        raw_value: value.clone().into(),
        ..HeaderValue::default()
    };
    HttpHeaders {
        headers: Some(HeaderMap {
            headers: pairs.iter().map(header).collect(),
        }),
        end_of_stream,
        ..HttpHeaders::default()
    }
}

fn request(said: Said) -> Option<ProcessingRequest> {
    let length = |length: Option<u16>| length.map(|length| ("content-length", length.to_string()));
    let body = |body: Vec<u8>, end_of_stream| HttpBody {
        body,
        end_of_stream,
        ..HttpBody::default()
    };
    let request = match said {
        Said::Raw(bytes) => return ProcessingRequest::decode(bytes.as_slice()).ok(),
        Said::Begins {
            inference,
            length: bytes,
            end,
        } => {
            let path = if inference {
                "/v1/chat/completions"
            } else {
                "/x"
            };
            let mut pairs = vec![(":method", "POST".to_owned()), (":path", path.to_owned())];
            pairs.extend(length(bytes));
            Request::RequestHeaders(headers(&pairs, end))
        }
        Said::Body { bytes, end } => Request::RequestBody(body(bytes, end)),
        Said::Prompt { end } => {
            Request::RequestBody(body(br#"{"model":"m","messages":[]}"#.to_vec(), end))
        }
        Said::Trailers => Request::RequestTrailers(HttpTrailers::default()),
        Said::Answers {
            status,
            length: bytes,
            streamed,
        } => {
            let kind = if streamed {
                "text/event-stream"
            } else {
                "application/json"
            };
            let mut pairs = vec![
                (":status", (200 + u16::from(status)).to_string()),
                ("content-type", kind.to_owned()),
            ];
            pairs.extend(length(bytes));
            Request::ResponseHeaders(headers(&pairs, false))
        }
        Said::Reply { bytes, end } => Request::ResponseBody(body(bytes, end)),
        Said::ReplyTrailers => Request::ResponseTrailers(HttpTrailers::default()),
    };
    Some(ProcessingRequest {
        request: Some(request),
        ..ProcessingRequest::default()
    })
}

impl FuzzedStream {
    fn new(
        server: &Arc<ExtProcServer>,
        settings: &Arc<ExchangeSettings>,
        modes: Option<(u8, u8, bool)>,
    ) -> Self {
        let config = modes.map(|(request, response, early)| ProtocolConfiguration {
            request_body_mode: i32::from(request % 6),
            response_body_mode: i32::from(response % 6),
            send_body_without_waiting_for_header_response: early,
            ..ProtocolConfiguration::default()
        });
        let balances = config
            .as_ref()
            .is_none_or(|config| config.request_body_mode == DUPLEX);
        let talk = StreamSession::new(server, server.pool(None).expect("the pool"), settings);
        Self {
            talk,
            config,
            came: Vec::new(),
            went: Vec::new(),
            begun: 0,
            balances,
        }
    }

    fn framed(&mut self, said: Said) -> Option<Vec<u8>> {
        self.balances &= !matches!(said, Said::Raw(_));
        self.begun += u32::from(matches!(said, Said::Begins { .. }));
        let mut message = request(said)?;
        message.protocol_config = self.config.take();
        if let Some(Request::RequestBody(body)) = &message.request {
            self.came.extend_from_slice(&body.body);
        }
        let message = message.encode_to_vec();
        let length = u32::try_from(message.len()).expect("a short message");
        Some([&[0], &length.to_be_bytes()[..], &message].concat())
    }

    /// Takes pending output. Returns whether there may be more.
    fn take(&mut self) -> bool {
        let bytes = match self.talk.next() {
            SessionAction::Send(bytes) => bytes,
            SessionAction::Wait(_) | SessionAction::Hold(_) => panic!("there is state and room"),
            SessionAction::Listen | SessionAction::End(_) => return false,
        };
        let mut rest = &bytes[..];
        while let [0, a, b, c, d, more @ ..] = rest {
            let (message, after) = more.split_at(u32::from_be_bytes([*a, *b, *c, *d]) as usize);
            let answer = ProcessingResponse::decode(message).expect("an answer");
            if let Some(Response::RequestBody(answer)) = answer.response
                && let Some(Mutation::StreamedResponse(piece)) = answer
                    .response
                    .and_then(|r| r.body_mutation)
                    .and_then(|b| b.mutation)
            {
                self.went.extend(piece.body);
            }
            rest = after;
        }
        assert!(!self.balances || self.begun > 1 || self.came.starts_with(&self.went));
        true
    }
}

fuzz_target!(|gateway: Gateway| {
    let server = server();
    let memory = Arc::clone(server.streams().memory());
    let mut settings = ExchangeSettings {
        body_limit_bytes: 4096,
        ..ExchangeSettings::default()
    };
    settings.destination.format = if gateway.list {
        DestinationFormat::List
    } else {
        DestinationFormat::Single
    };
    let settings = Arc::new(settings);
    let mut others = memory.account();
    let mut short = 0;
    let mut ahead_ms = 0;
    let mut streams: [Option<FuzzedStream>; STREAMS] = std::array::from_fn(|_| None);
    for (index, event) in gateway.events {
        let index = usize::from(index) % STREAMS;
        let stream = streams[index]
            .get_or_insert_with(|| FuzzedStream::new(&server, &settings, gateway.modes[index]));
        match event {
            Event::Says(said) => {
                let bytes = stream.framed(said).unwrap_or_default();
                stream.talk.receive(&bytes);
                while stream.take() {}
            }
            Event::SaysInFrames(said, frame) => {
                let bytes = stream.framed(said).unwrap_or_default();
                for frame in bytes.chunks(usize::from(frame).max(1)) {
                    stream.talk.receive(frame);
                    stream.take();
                }
            }
            Event::Bytes(bytes) => {
                stream.balances = false;
                stream.talk.receive(&bytes);
            }
            Event::Takes(times) => {
                let _ = (0..times).all(|_| stream.take());
            }
            Event::Waits(seconds) => {
                ahead_ms += u64::from(seconds) * 1000;
                stream.talk.expire(server.now().plus_ms(ahead_ms));
            }
            Event::Short(left) => {
                let ours = memory.used() - short;
                short = HELD_BYTES_MAX.saturating_sub(ours + left as usize);
                others.record(short);
            }
            Event::Leaves => streams[index] = None,
        }
        let held: usize = streams
            .iter()
            .flatten()
            .map(|stream| stream.talk.memory())
            .sum();
        assert_eq!(memory.used(), held + short);
    }
    drop((streams, others));
    let pool = server.pool(None).expect("the pool");
    let left: u32 = pool
        .lock()
        .pool
        .in_flight()
        .rows()
        .map(|(_, load)| load.requests)
        .sum();
    assert_eq!((left, memory.used(), server.streams().open()), (0, 0, 0));
});
