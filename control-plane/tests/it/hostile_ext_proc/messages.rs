//! Well-formed messages without sense: extreme values, wrong order. One test sends all these
//! messages to one daemon.

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue, Metadata};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Part;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpBody, HttpHeaders, HttpTrailers, ProcessingRequest, ProtocolConfiguration,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{ListValue, Struct, Value};
use tonic::Code;
use tonic::codegen::Bytes;

use super::kit::{
    DaemonProgram, RSS_BYTES_MAX, RawStream, SteadyClient, body, chat, framed, framed_bytes,
    headers, prompt, said,
};

fn value(kind: Kind) -> Value {
    Value { kind: Some(kind) }
}

fn metadata(fields: Struct) -> Option<Metadata> {
    Some(Metadata {
        filter_metadata: [("envoy.lb.subset_hint".to_owned(), fields)].into(),
        ..Metadata::default()
    })
}

fn with_headers(pairs: Vec<(Vec<u8>, Vec<u8>)>) -> ProcessingRequest {
    let header = |(name, value)| HeaderValue {
        key: String::from_utf8(name).unwrap(),
        raw_value: value,
        ..HeaderValue::default()
    };
    let headers = Some(HeaderMap {
        headers: pairs.into_iter().map(header).collect(),
    });
    said(Part::RequestHeaders(HttpHeaders {
        headers,
        end_of_stream: true,
        ..HttpHeaders::default()
    }))
}

/// Returns a protobuf field with its length.
fn field(tag: u8, bytes: &[u8]) -> Vec<u8> {
    let mut field = Vec::new();
    prost::encoding::encode_varint(u64::from(tag) << 3 | 2, &mut field);
    prost::encoding::encode_varint(bytes.len() as u64, &mut field);
    field.extend_from_slice(bytes);
    field
}

/// Returns a value within lists that are nested this deep.
fn nested(levels: usize) -> Vec<u8> {
    (0..levels).fold(Vec::new(), |inner, _| field(6, &field(1, &inner)))
}

/// A description, the messages of a stream, and the status that it must end with, if one is
/// certain.
type StreamCase = (&'static str, Vec<Bytes>, Option<Code>);

fn begin() -> Bytes {
    framed(&chat(BodySendMode::FullDuplexStreamed))
}

fn get() -> Bytes {
    framed(&said(Part::RequestHeaders(headers(
        &[(":method", "GET"), (":path", "/v1/models")],
        true,
    ))))
}

fn ask() -> Bytes {
    framed(&prompt())
}

fn reply() -> Bytes {
    framed(&said(Part::ResponseHeaders(headers(
        &[(":status", "200")],
        false,
    ))))
}

fn out_of_order() -> Vec<StreamCase> {
    let reply_body = |end| {
        framed(&said(Part::ResponseBody(HttpBody {
            body: b"x".to_vec(),
            end_of_stream: end,
            ..HttpBody::default()
        })))
    };
    let trailers = || framed(&said(Part::RequestTrailers(HttpTrailers::default())));
    let reply_trailers = || framed(&said(Part::ResponseTrailers(HttpTrailers::default())));
    let after_the_end = vec![
        get(),
        reply(),
        reply_body(true),
        reply_trailers(),
        reply_body(true),
        trailers(),
        ask(),
        get(),
    ];
    vec![
        (
            "a response before a request",
            vec![reply(), reply_body(true), get()],
            None,
        ),
        (
            "a response body first",
            vec![reply_body(false), reply_body(true)],
            None,
        ),
        (
            "trailers first",
            vec![trailers(), reply_trailers(), begin(), ask()],
            None,
        ),
        (
            "headers twice",
            vec![begin(), begin(), ask(), begin(), ask()],
            None,
        ),
        ("two requests on a stream", vec![get(), get(), get()], None),
        (
            "a body after its end",
            vec![begin(), ask(), ask(), trailers(), ask()],
            None,
        ),
        (
            "a request in the middle of its response",
            vec![
                get(),
                reply(),
                reply_body(false),
                begin(),
                ask(),
                reply_body(true),
            ],
            None,
        ),
        ("messages after the end", after_the_end, None),
        (
            "messages after a refusal",
            vec![begin(), framed(&body("{", true)), ask(), get(), reply()],
            None,
        ),
        (
            "empty messages",
            vec![framed(&ProcessingRequest::default()); 1_000],
            None,
        ),
        (
            "an observer",
            vec![
                framed(&ProcessingRequest {
                    observability_mode: true,
                    ..chat(BodySendMode::Buffered)
                }),
                ask(),
            ],
            None,
        ),
    ]
}

fn extreme_values() -> Vec<StreamCase> {
    let modes = |mode| ProtocolConfiguration {
        request_body_mode: mode,
        response_body_mode: mode,
        ..ProtocolConfiguration::default()
    };
    let mode = |mode: i32| {
        framed(&ProcessingRequest {
            protocol_config: Some(modes(mode)),
            ..chat(BodySendMode::None)
        })
    };
    let attempts = |number| {
        let fields = [(
            "upstream.request_attempt_count".to_owned(),
            value(Kind::NumberValue(number)),
        )]
        .into();
        let attributes = [("envoy.filters.http.ext_proc".to_owned(), Struct { fields })].into();
        framed(&ProcessingRequest {
            attributes,
            ..said(Part::ResponseHeaders(headers(&[(":status", "200")], true)))
        })
    };
    let length = |text: &str| {
        let pairs = [
            (":method", "POST"),
            (":path", "/v1/completions"),
            ("content-length", text),
        ];
        framed(&said(Part::RequestHeaders(headers(&pairs, false))))
    };
    let status = |text: &str| {
        framed(&said(Part::ResponseHeaders(headers(
            &[(":status", text)],
            true,
        ))))
    };
    vec![
        ("a mode there is not", vec![mode(i32::MAX), ask()], None),
        ("a negative mode", vec![mode(i32::MIN), ask()], None),
        (
            "another mode in the middle",
            vec![mode(2), mode(4), ask()],
            None,
        ),
        (
            "no headers at all",
            vec![
                framed(&said(Part::RequestHeaders(HttpHeaders::default()))),
                ask(),
            ],
            None,
        ),
        (
            "a content-length beyond any number",
            vec![length("99999999999999999999999999")],
            None,
        ),
        (
            "a content-length of the last number",
            vec![length(&u64::MAX.to_string())],
            None,
        ),
        ("a negative content-length", vec![length("-1")], None),
        ("a status of no number", vec![get(), status("NaN")], None),
        (
            "a status beyond any",
            vec![get(), status("4294967296")],
            None,
        ),
        (
            "infinitely many attempts",
            vec![get(), attempts(f64::INFINITY)],
            None,
        ),
        (
            "attempts that are no number",
            vec![get(), attempts(f64::NAN)],
            None,
        ),
        ("negative attempts", vec![get(), attempts(-1e308)], None),
    ]
}

fn extreme_headers() -> Vec<StreamCase> {
    let pair = |name: &[u8], value: &[u8]| (name.to_vec(), value.to_vec());
    let one = |name: &[u8], value: &[u8]| vec![framed(&with_headers(vec![pair(name, value)]))];
    let every: Vec<u8> = (0..=255).collect();
    let control = (0..5_000)
        .map(|i| pair(format!("x-switchpoint-{i}").as_bytes(), b"1"))
        .collect();
    let million = Struct {
        fields: (0..1_000_000)
            .map(|i| (i.to_string(), Value::default()))
            .collect(),
    };
    let hint = ListValue {
        values: vec![value(Kind::StringValue("10.0.0.1:1".into())); 10_000],
    };
    let hint = Struct {
        fields: [(
            "x-gateway-destination-endpoint-subset".to_owned(),
            value(Kind::ListValue(hint)),
        )]
        .into(),
    };
    let with = |fields| {
        vec![framed(&ProcessingRequest {
            metadata_context: metadata(fields),
            ..said(Part::RequestHeaders(headers(&[], true)))
        })]
    };
    let deep = field(
        8,
        &field(1, &field(2, &field(1, &field(2, &nested(1_000))))),
    );
    vec![
        ("a header without a name", one(b"", b"x"), None),
        ("a header of every byte", one(b"x", &every), None),
        ("a path of no text", one(b":path", &[0xff; 100]), None),
        (
            "a header of 200 KiB",
            one(b"x-gateway-model-name", &vec![b'm'; 200 << 10]),
            None,
        ),
        (
            "control headers without end",
            vec![framed(&with_headers(control))],
            None,
        ),
        (
            "a header larger than allowed",
            one(b"x", &vec![b'm'; 300 << 10]),
            Some(Code::ResourceExhausted),
        ),
        (
            "a million entries of metadata",
            with(million),
            Some(Code::ResourceExhausted),
        ),
        ("ten thousand endpoints in a hint", with(hint), None),
        (
            "metadata a thousand levels deep",
            vec![framed_bytes(&deep)],
            Some(Code::InvalidArgument),
        ),
    ]
}

fn broken_encodings() -> Vec<StreamCase> {
    let twice = [field(4, &field(1, b"{")), field(4, &field(1, b"}"))].concat();
    vec![
        (
            "a body in two fields",
            vec![begin(), framed_bytes(&twice)],
            None,
        ),
        (
            "a body field of the wrong kind",
            vec![begin(), framed_bytes(&[0x20, 1])],
            Some(Code::InvalidArgument),
        ),
        (
            "a field longer than its message",
            vec![framed_bytes(&[0x22, 0xff, 0xff, 0xff, 0xff, 0x0f])],
            Some(Code::InvalidArgument),
        ),
        (
            "groups",
            vec![framed_bytes(&[0x0b; 1_000])],
            Some(Code::InvalidArgument),
        ),
        (
            "a compressed message",
            vec![Bytes::from_static(&[1, 0, 0, 0, 1, 0])],
            Some(Code::Unimplemented),
        ),
        (
            "a flag there is not",
            vec![Bytes::from_static(&[0xff, 0, 0, 0, 1, 0])],
            Some(Code::Unimplemented),
        ),
        (
            "half a message",
            vec![Bytes::from_static(&[0, 0, 0, 1, 0, 0x12, 0x80])],
            None,
        ),
        ("half a prefix", vec![Bytes::from_static(&[0, 0])], None),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_message_harms_the_daemon_or_its_other_clients() {
    let program = DaemonProgram::start().await;
    let neighbour = SteadyClient::for_program(&program).await;
    let channel = program.channel().await;
    for (what, messages, expected) in [
        out_of_order(),
        extreme_values(),
        extreme_headers(),
        broken_encodings(),
    ]
    .concat()
    {
        let peer = RawStream::open(&channel);
        for message in messages {
            peer.send(message).await;
        }
        let (_, status) = peer.end().await;
        if let Some(expected) = expected {
            assert_eq!(
                status.as_ref().map(tonic::Status::code),
                Some(expected),
                "{what}: {status:?}"
            );
        }
    }
    let peak = program.peak_rss();
    let slowest = neighbour.was_served().await;
    eprintln!(
        "peak {} MiB, slowest pick of the neighbour {slowest:?}",
        peak >> 20
    );
    assert!(peak < RSS_BYTES_MAX, "{} MiB", peak >> 20);
    program.settled().await;
}

/// Sends a message just below the limit of its length that would take a gigabyte when decoded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_million_empty_headers_are_not_decoded() {
    let program = DaemonProgram::start().await;
    let neighbour = SteadyClient::for_program(&program).await;
    let peer = RawStream::open(&program.channel().await);
    peer.send(framed_bytes(&field(
        2,
        &field(1, &[0x0a, 0].repeat(16 << 20)),
    )))
    .await;
    let (_, status) = peer.end().await;
    let peak = program.peak_rss();
    let slowest = neighbour.was_served().await;
    eprintln!(
        "peak {} MiB, slowest pick of the neighbour {slowest:?}",
        peak >> 20
    );
    assert!(peak < RSS_BYTES_MAX, "{} MiB", peak >> 20);
    assert_eq!(status.unwrap().code(), Code::ResourceExhausted);
    program.settled().await;
}

#[tokio::test]
async fn no_grpc_metadata_harms_it_either() {
    let program = DaemonProgram::start().await;
    let channel = program.channel().await;
    let long = "p".repeat(12 << 10);
    let extremes: [&[(&str, &str)]; 4] = [
        &[("x-switchpoint-pool", &long)],
        &[("x-switchpoint-pool", "")],
        &[("x-switchpoint-destination-format", &long)],
        &[
            ("grpc-timeout", "99999999H"),
            ("grpc-encoding", "gzip"),
            ("grpc-accept-encoding", "nonsense"),
        ],
    ];
    for metadata in extremes {
        let peer = RawStream::with_metadata(&channel, metadata);
        peer.say(&chat(BodySendMode::FullDuplexStreamed)).await;
        peer.say(&prompt()).await;
        peer.end().await;
    }
    program.settled().await;
}
