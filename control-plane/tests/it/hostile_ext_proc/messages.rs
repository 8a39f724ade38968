//! Messages that are well-formed and make no sense: extreme values, wrong order. One test tries them all against one daemon.

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue, Metadata};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Part;
use envoy_types::pb::envoy::service::ext_proc::v3::{HttpBody, HttpHeaders, HttpTrailers, ProcessingRequest, ProtocolConfiguration};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{ListValue, Struct, Value};
use tonic::Code;
use tonic::codegen::Bytes;

use super::kit::{Neighbour, Peer, Program, RSS_BYTES_MAX, body, chat, framed, framed_bytes, headers, prompt, said};

fn value(kind: Kind) -> Value {
    Value { kind: Some(kind) }
}

fn metadata(fields: Struct) -> Option<Metadata> {
    Some(Metadata { filter_metadata: [("envoy.lb.subset_hint".to_owned(), fields)].into(), ..Metadata::default() })
}

fn with_headers(pairs: Vec<(Vec<u8>, Vec<u8>)>) -> ProcessingRequest {
    let header = |(name, value)| HeaderValue { key: String::from_utf8(name).unwrap(), raw_value: value, ..HeaderValue::default() };
    let headers = Some(HeaderMap { headers: pairs.into_iter().map(header).collect() });
    said(Part::RequestHeaders(HttpHeaders { headers, end_of_stream: true, ..HttpHeaders::default() }))
}

/// A protobuf field that says its length.
fn field(tag: u8, bytes: &[u8]) -> Vec<u8> {
    let mut field = Vec::new();
    prost::encoding::encode_varint(u64::from(tag) << 3 | 2, &mut field);
    prost::encoding::encode_varint(bytes.len() as u64, &mut field);
    field.extend_from_slice(bytes);
    field
}

/// A value within lists, so many levels deep.
fn nested(levels: usize) -> Vec<u8> {
    (0..levels).fold(Vec::new(), |inner, _| field(6, &field(1, &inner)))
}

/// Streams of messages that mean nothing good, each with the status it must end with, if one is certain.
fn conversations() -> Vec<(&'static str, Vec<Bytes>, Option<Code>)> {
    let begin = || framed(&chat(BodySendMode::FullDuplexStreamed));
    let reply = || framed(&said(Part::ResponseHeaders(headers(&[(":status", "200")], false))));
    let reply_body = |end| framed(&said(Part::ResponseBody(HttpBody { body: b"x".to_vec(), end_of_stream: end, ..HttpBody::default() })));
    let trailers = || framed(&said(Part::RequestTrailers(HttpTrailers::default())));
    let reply_trailers = || framed(&said(Part::ResponseTrailers(HttpTrailers::default())));
    let get = || framed(&said(Part::RequestHeaders(headers(&[(":method", "GET"), (":path", "/v1/models")], true))));
    let prompt = || framed(&prompt());
    let million = Struct { fields: (0..1_000_000).map(|i| (i.to_string(), Value::default())).collect() };
    let million = ProcessingRequest { metadata_context: metadata(million), ..said(Part::RequestHeaders(headers(&[], true))) };
    let long_hint = ListValue { values: vec![value(Kind::StringValue("10.0.0.1:1".into())); 10_000] };
    let long_hint = Struct { fields: [("x-gateway-destination-endpoint-subset".to_owned(), value(Kind::ListValue(long_hint)))].into() };
    let long_hint = ProcessingRequest { metadata_context: metadata(long_hint), ..said(Part::RequestHeaders(headers(&[], true))) };
    let modes = |mode| ProtocolConfiguration { request_body_mode: mode, response_body_mode: mode, ..ProtocolConfiguration::default() };
    let mode = |mode: i32| framed(&ProcessingRequest { protocol_config: Some(modes(mode)), ..chat(BodySendMode::None) });
    let number = |number| {
        let fields = [("upstream.request_attempt_count".to_owned(), value(Kind::NumberValue(number)))].into();
        let attributes = [("envoy.filters.http.ext_proc".to_owned(), Struct { fields })].into();
        framed(&ProcessingRequest { attributes, ..said(Part::ResponseHeaders(headers(&[(":status", "200")], true))) })
    };
    let pair = |name: &[u8], value: &[u8]| (name.to_vec(), value.to_vec());
    let length = |text: &str| {
        framed(&with_headers(vec![pair(b":method", b"POST"), pair(b":path", b"/v1/completions"), pair(b"content-length", text.as_bytes())]))
    };
    let status = |text: &str| framed(&said(Part::ResponseHeaders(headers(&[(":status", text)], true))));
    vec![
        ("a response before a request", vec![reply(), reply_body(true), get()], None),
        ("a response body first", vec![reply_body(false), reply_body(true)], None),
        ("trailers first", vec![trailers(), reply_trailers(), begin(), prompt()], None),
        ("headers twice", vec![begin(), begin(), prompt(), begin(), prompt()], None),
        ("two requests on a stream", vec![get(), get(), get()], None),
        ("a body after its end", vec![begin(), prompt(), prompt(), trailers(), prompt()], None),
        ("a request in the middle of its response", vec![get(), reply(), reply_body(false), begin(), prompt(), reply_body(true)], None),
        (
            "messages after the end",
            vec![get(), reply(), reply_body(true), reply_trailers(), reply_body(true), trailers(), prompt(), get()],
            None,
        ),
        ("messages after a refusal", vec![begin(), framed(&body("{", true)), prompt(), get(), reply()], None),
        ("messages that say nothing", vec![framed(&ProcessingRequest::default()); 1_000], None),
        ("a mode there is not", vec![mode(i32::MAX), prompt()], None),
        ("a negative mode", vec![mode(i32::MIN), prompt()], None),
        ("another mode in the middle", vec![mode(2), mode(4), prompt()], None),
        ("no headers at all", vec![framed(&said(Part::RequestHeaders(HttpHeaders::default()))), prompt()], None),
        ("a content-length beyond any number", vec![length("99999999999999999999999999")], None),
        ("a content-length of the last number", vec![length(&u64::MAX.to_string())], None),
        ("a negative content-length", vec![length("-1")], None),
        ("a status of no number", vec![get(), status("NaN")], None),
        ("a status beyond any", vec![get(), status("4294967296")], None),
        ("infinitely many attempts", vec![get(), number(f64::INFINITY)], None),
        ("attempts that are no number", vec![get(), number(f64::NAN)], None),
        ("negative attempts", vec![get(), number(-1e308)], None),
        ("a header without a name", vec![framed(&with_headers(vec![pair(b"", b"x"), pair(b":method", b"GET")]))], None),
        (
            "a header of every byte",
            vec![framed(&with_headers(vec![pair(b"x", &(0..=255).collect::<Vec<u8>>()), pair(b":path", &[0xff; 100])]))],
            None,
        ),
        ("a header of 200 KiB", vec![framed(&with_headers(vec![pair(b"x-gateway-model-name", &vec![b'm'; 200 << 10])]))], None),
        (
            "control headers without end",
            vec![framed(&with_headers((0..5_000).map(|i| pair(format!("x-switchpoint-{i}").as_bytes(), b"1")).collect()))],
            None,
        ),
        (
            "a header beyond what is taken",
            vec![framed(&with_headers(vec![pair(b"x", &vec![b'm'; 300 << 10])]))],
            Some(Code::ResourceExhausted),
        ),
        ("16 million empty headers", vec![framed_bytes(&field(2, &field(1, &[0x0a, 0].repeat(16 << 20))))], Some(Code::ResourceExhausted)),
        ("a million entries of metadata", vec![framed(&million)], Some(Code::ResourceExhausted)),
        ("ten thousand endpoints in a hint", vec![framed(&long_hint)], None),
        (
            "metadata a thousand levels deep",
            vec![framed_bytes(&field(8, &field(1, &field(2, &field(1, &field(2, &nested(1_000)))))))],
            Some(Code::InvalidArgument),
        ),
        ("a body in two fields", vec![begin(), framed_bytes(&[field(4, &field(1, b"{")), field(4, &field(1, b"}"))].concat())], None),
        ("a body field of the wrong kind", vec![begin(), framed_bytes(&[0x20, 1])], Some(Code::InvalidArgument)),
        ("a field longer than its message", vec![framed_bytes(&[0x22, 0xff, 0xff, 0xff, 0xff, 0x0f])], Some(Code::InvalidArgument)),
        ("groups", vec![framed_bytes(&[0x0b; 1_000])], Some(Code::InvalidArgument)),
        ("a compressed message", vec![Bytes::from_static(&[1, 0, 0, 0, 1, 0])], Some(Code::Unimplemented)),
        ("a flag there is not", vec![Bytes::from_static(&[0xff, 0, 0, 0, 1, 0])], Some(Code::Unimplemented)),
        ("half a message", vec![Bytes::from_static(&[0, 0, 0, 1, 0, 0x12, 0x80])], None),
        ("half a prefix", vec![Bytes::from_static(&[0, 0])], None),
        (
            "an answer for one that looks on",
            vec![framed(&ProcessingRequest { observability_mode: true, ..chat(BodySendMode::Buffered) }), prompt()],
            None,
        ),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_message_harms_the_daemon_or_its_other_clients() {
    let program = Program::start().await;
    let neighbour = Neighbour::of(&program).await;
    let channel = program.channel().await;
    for (what, messages, expected) in conversations() {
        let peer = Peer::open(&channel);
        for message in messages {
            peer.send(message).await;
        }
        let (_, status) = peer.end().await;
        if let Some(expected) = expected {
            assert_eq!(status.as_ref().map(tonic::Status::code), Some(expected), "{what}: {status:?}");
        }
    }
    let peak = program.peak_rss();
    let slowest = neighbour.was_served().await;
    eprintln!("peak {} MiB, slowest pick of the neighbour {slowest:?}", peak >> 20);
    assert!(peak < RSS_BYTES_MAX, "{} MiB", peak >> 20);
    program.settled().await;
}

#[tokio::test]
async fn no_grpc_metadata_harms_it_either() {
    let program = Program::start().await;
    let channel = program.channel().await;
    let long = "p".repeat(12 << 10);
    let extremes: [&[(&str, &str)]; 5] = [
        &[("x-switchpoint-pool", &long)],
        &[("x-switchpoint-pool", "")],
        &[("x-switchpoint-destination-format", &long)],
        &[("grpc-timeout", "99999999H"), ("grpc-encoding", "gzip"), ("grpc-accept-encoding", "nonsense")],
        &[("x-switchpoint-pool", "\u{7f}")],
    ];
    for metadata in extremes {
        if metadata[0].1 == "\u{7f}" {
            continue; // no client library sends it
        }
        let peer = Peer::with_metadata(&channel, metadata);
        peer.say(&chat(BodySendMode::FullDuplexStreamed)).await;
        peer.say(&prompt()).await;
        peer.end().await;
    }
    program.settled().await;
}
