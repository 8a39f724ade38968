//! Any messages on an ext_proc stream, in any order and of any bytes: no panic, nothing picked is left behind, and in full duplex what goes on
//! is what came, in its order.

#![no_main]

use std::sync::Arc;

use arbitrary::Arbitrary;
use control_plane::ext_proc::{Conversation, Front, Next};
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{HttpBody, HttpHeaders, HttpTrailers, ProcessingRequest, ProtocolConfiguration};
use exchange::{DestinationFormat, Settings};
use libfuzzer_sys::fuzz_target;
use prost::Message;
use proto::state::{self, daemon_message};

const DUPLEX: i32 = 4;

#[derive(Arbitrary, Debug)]
enum Said {
    /// A message as bytes.
    Raw(Vec<u8>),
    Begins { inference: bool, length: Option<u16>, end: bool },
    Body { bytes: Vec<u8>, end: bool },
    Prompt { end: bool },
    Trailers,
    Answers { status: u8, length: Option<u16>, streamed: bool },
    Reply { bytes: Vec<u8>, end: bool },
    ReplyTrailers,
}

#[derive(Arbitrary, Debug)]
struct Talk {
    modes: Option<(u8, u8, bool)>,
    list: bool,
    said: Vec<Said>,
}

fn front() -> Arc<Front> {
    let front = Front::new(&["p".into()]);
    let endpoint = |slot: u32| state::Endpoint {
        slot,
        name: format!("e{slot}"),
        address: format!("10.0.0.{slot}:80"),
        ready: true,
        ..state::Endpoint::default()
    };
    let plugin = |kind: &str| state::Plugin { r#type: kind.into(), name: kind.into(), ..state::Plugin::default() };
    let part = |name: &str| state::ProfilePlugin { name: name.into(), weight: 1.0 };
    let roster = state::Roster {
        pool: "p".into(),
        version: Some(state::Version { term: 1, sequence: 1 }),
        endpoints: (1..4).map(endpoint).collect(),
        pipeline: Some(state::Pipeline {
            plugins: vec![plugin("prefix-cache-scorer"), plugin("max-score-picker")],
            profiles: vec![state::Profile { name: "p".into(), plugins: vec![part("prefix-cache-scorer"), part("max-score-picker")], ..state::Profile::default() }],
            ranked_max: 3,
            ..state::Pipeline::default()
        }),
        ..state::Roster::default()
    };
    let ack = front.told(state::DaemonMessage { message: Some(daemon_message::Message::Roster(roster)) }).expect("an answer");
    assert_eq!(ack.refused, "");
    front
}

fn headers(pairs: &[(&str, String)], end_of_stream: bool) -> HttpHeaders {
    let header = |(name, value): &(&str, String)| HeaderValue { key: (*name).into(), raw_value: value.clone().into(), ..HeaderValue::default() };
    HttpHeaders { headers: Some(HeaderMap { headers: pairs.iter().map(header).collect() }), end_of_stream, ..HttpHeaders::default() }
}

fn request(said: Said) -> Option<ProcessingRequest> {
    let length = |length: Option<u16>| length.map(|length| ("content-length", length.to_string()));
    let body = |body: Vec<u8>, end_of_stream| HttpBody { body, end_of_stream, ..HttpBody::default() };
    let request = match said {
        Said::Raw(bytes) => return ProcessingRequest::decode(bytes.as_slice()).ok(),
        Said::Begins { inference, length: bytes, end } => {
            let path = if inference { "/v1/chat/completions" } else { "/x" };
            let mut pairs = vec![(":method", "POST".to_owned()), (":path", path.to_owned())];
            pairs.extend(length(bytes));
            Request::RequestHeaders(headers(&pairs, end))
        }
        Said::Body { bytes, end } => Request::RequestBody(body(bytes, end)),
        Said::Prompt { end } => Request::RequestBody(body(br#"{"model":"m","messages":[]}"#.to_vec(), end)),
        Said::Trailers => Request::RequestTrailers(HttpTrailers::default()),
        Said::Answers { status, length: bytes, streamed } => {
            let kind = if streamed { "text/event-stream" } else { "application/json" };
            let mut pairs = vec![(":status", (200 + u16::from(status)).to_string()), ("content-type", kind.to_owned())];
            pairs.extend(length(bytes));
            Request::ResponseHeaders(headers(&pairs, false))
        }
        Said::Reply { bytes, end } => Request::ResponseBody(body(bytes, end)),
        Said::ReplyTrailers => Request::ResponseTrailers(HttpTrailers::default()),
    };
    Some(ProcessingRequest { request: Some(request), ..ProcessingRequest::default() })
}

fuzz_target!(|talk: Talk| {
    let front = front();
    let pool = Arc::clone(front.pool(None).expect("the pool"));
    let destination_format = if talk.list { DestinationFormat::List } else { DestinationFormat::Single };
    let settings = Settings { destination_format, body_limit_bytes: 4096, ..Settings::default() };
    let mut conversation = Conversation::new(Arc::clone(&front), Arc::clone(&pool), Arc::new(settings));
    let config = talk.modes.map(|(request, response, early)| ProtocolConfiguration {
        request_body_mode: i32::from(request % 6),
        response_body_mode: i32::from(response % 6),
        send_body_without_waiting_for_header_response: early,
    });
    let duplex = config.is_none_or(|config| config.request_body_mode == DUPLEX);
    let (mut came, mut went, mut begun) = (Vec::new(), Vec::new(), 0);
    // Raw messages may begin anew, or bring another configuration: then the books do not balance.
    let mut balances = duplex;
    for (index, said) in talk.said.into_iter().enumerate() {
        balances &= !matches!(said, Said::Raw(_));
        begun += usize::from(matches!(said, Said::Begins { .. }));
        let Some(mut message) = request(said) else { continue };
        if index == 0 {
            message.protocol_config = config;
        }
        if let Some(Request::RequestBody(body)) = &message.request {
            came.extend_from_slice(&body.body);
        }
        assert!(matches!(conversation.receive(message), Next::Listen), "there is state");
        for answer in conversation.answers() {
            if let Some(Response::RequestBody(answer)) = answer.response
                && let Some(Mutation::StreamedResponse(piece)) = answer.response.and_then(|r| r.body_mutation).and_then(|b| b.mutation)
            {
                went.extend(piece.body);
            }
        }
    }
    if balances && begun <= 1 {
        assert!(came.starts_with(&went));
    }
    drop(conversation);
    let left: u32 = pool.lock().pool.in_flight().rows().map(|(_, load)| load.requests).sum();
    assert_eq!(left, 0);
});
