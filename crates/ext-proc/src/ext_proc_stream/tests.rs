//! Streams as transcripts (`transcripts.txt`): the messages from the proxy, and the answers.

mod traced;

use std::collections::HashMap;
use std::fmt::Write;

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue, Metadata};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    CommonResponse, HeaderMutation, HttpTrailers, ProtocolConfiguration,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{ListValue, Struct, Value};
use exchange::{DestinationFormat, HeaderTrust};
use proto::state;
use proto::state::daemon_message::Message as DaemonContent;
use scheduler::Version;

use super::host::PIECE_BYTES_MAX;
use super::*;

fn with_format(format: DestinationFormat) -> ExchangeSettings {
    let mut settings = ExchangeSettings::default();
    settings.destination.format = format;
    settings
}

const POOL: &str = "default";
pub(crate) const SERVER: &str = "10.0.0.1:8000";
const OTHER: &str = "10.0.0.2:8000";

/// A server with these endpoints, which serves the model `alias` as `served`.
pub(crate) fn server(addresses: &[&str]) -> Arc<ExtProcServer> {
    let server = ExtProcServer::new(&[POOL.into()]);
    apply_state(&server, 1, addresses);
    server
}

/// A server whose endpoints take one request each. Further requests are held for `ttl_ms` at most.
pub(crate) fn holding(addresses: &[&str], ttl_ms: f64) -> Arc<ExtProcServer> {
    let number = |name: &str, number: f64| state::Parameter {
        name: name.into(),
        value: Some(state::parameter::Value::Number(number)),
    };
    let plugin = |kind: &str, parameter| state::Plugin {
        r#type: kind.into(),
        name: kind.into(),
        parameters: vec![parameter],
    };
    let mut pipeline = pipeline();
    pipeline.plugins.extend([
        plugin("concurrency-detector", number("maxConcurrency", 1.0)),
        plugin("flow-control", number("ttlMs", ttl_ms)),
    ]);
    pipeline.saturation_detector = "concurrency-detector".into();
    let server = ExtProcServer::new(&[POOL.into()]);
    apply_pipeline(&server, 1, addresses, pipeline);
    server
}

fn pipeline() -> state::Pipeline {
    let plugin = |kind: &str| state::Plugin {
        r#type: kind.into(),
        name: kind.into(),
        parameters: vec![],
    };
    let part = |name: &str| state::ProfilePlugin {
        name: name.into(),
        weight: 1.0,
    };
    state::Pipeline {
        plugins: vec![plugin("queue-scorer"), plugin("max-score-picker")],
        profiles: vec![state::Profile {
            name: "p".into(),
            plugins: vec![part("queue-scorer"), part("max-score-picker")],
        }],
        ranked_max: 3,
        ..state::Pipeline::default()
    }
}

fn apply_state(server: &ExtProcServer, sequence: u64, addresses: &[&str]) {
    apply_pipeline(server, sequence, addresses, pipeline());
}

fn apply_pipeline(
    server: &ExtProcServer,
    sequence: u64,
    addresses: &[&str],
    pipeline: state::Pipeline,
) {
    let endpoint = |(slot, address): (u32, &&str)| state::Endpoint {
        slot,
        generation: 1,
        name: (*address).into(),
        address: (*address).into(),
        ready: true,
        age_ms: 60_000,
        ..state::Endpoint::default()
    };
    let pool_update = state::PoolUpdate {
        pool: POOL.into(),
        version: Some(state::Version { term: 1, sequence }),
        endpoints: (0..).zip(addresses).map(endpoint).collect(),
        pipeline: Some(pipeline),
        objects: Some(state::Objects {
            rewrites: vec![state::Rewrite {
                models: vec!["alias".into()],
                targets: vec![state::Target {
                    model: "served".into(),
                    weight: None,
                }],
            }],
            ..state::Objects::default()
        }),
        hash_secret: 1,
        staleness_max_ms: 2_000,
        ..state::PoolUpdate::default()
    };
    let ack = server
        .apply(state::DaemonMessage {
            message: Some(DaemonContent::PoolUpdate(pool_update)),
        })
        .unwrap();
    assert_eq!(ack.refused, "");
    // The first endpoint has the shorter queue.
    let metrics: Vec<_> = (0..)
        .zip(addresses)
        .map(|(i, _): (u16, _)| queue(f32::from(i) * 9.0))
        .collect();
    let metrics = proto::encode_metrics(POOL, Version { term: 1, sequence }, sequence, &metrics);
    assert!(
        server
            .apply(state::DaemonMessage {
                message: Some(DaemonContent::Metrics(metrics))
            })
            .is_none()
    );
}

fn queue(depth: f32) -> scheduler::EndpointMetrics {
    scheduler::EndpointMetrics {
        queue_depth: Some(depth),
        ..scheduler::EndpointMetrics::default()
    }
}

fn stream(server: &Arc<ExtProcServer>, settings: ExchangeSettings) -> ExtProcStream {
    ExtProcStream::new(
        Arc::clone(server),
        Arc::clone(server.pool(None).unwrap()),
        Arc::new(settings),
    )
}

/// Requests in flight at the first endpoint, by the ledger.
pub(crate) fn under_way(server: &ExtProcServer) -> u32 {
    let inner = server.pool(None).unwrap().lock();
    inner
        .pool
        .in_flight()
        .rows()
        .map(|(_, load)| load.requests)
        .sum()
}

// === the language of transcripts ===

#[derive(Default)]
struct StreamScript {
    mode: Option<ProtocolConfiguration>,
    list: bool,
    message: ProcessingRequest,
}

fn value(kind: Kind) -> Value {
    Value { kind: Some(kind) }
}

fn text_value(text: &str) -> Value {
    value(Kind::StringValue(text.to_owned()))
}

fn header_map<'t>(pairs: impl Iterator<Item = (&'t str, &'t str)>) -> Option<HeaderMap> {
    let header = |(name, value): (&str, &str)| HeaderValue {
        key: name.into(),
        raw_value: value.into(),
        ..HeaderValue::default()
    };
    Some(HeaderMap {
        headers: pairs.map(header).collect(),
    })
}

impl StreamScript {
    fn modes(&mut self, words: &str) {
        let mode = |word: &str| match word {
            "none" => BodySendMode::None,
            "streamed" => BodySendMode::Streamed,
            "buffered" => BodySendMode::Buffered,
            "partial" => BodySendMode::BufferedPartial,
            "duplex" => BodySendMode::FullDuplexStreamed,
            other => panic!("no mode {other}"),
        };
        let mut config = ProtocolConfiguration::default();
        for word in words.split(' ') {
            match word.split_once('=') {
                Some(("request", word)) => config.request_body_mode = mode(word).into(),
                Some(("response", word)) => config.response_body_mode = mode(word).into(),
                _ if word == "early" => config.send_body_without_waiting_for_header_response = true,
                _ if word == "list" => self.list = true,
                _ => panic!("{word}?"),
            }
        }
        self.mode = Some(config);
    }

    /// Parses a line of the proxy. Metadata and attributes stand on lines before their message.
    fn says(&mut self, line: &str) -> Option<ProcessingRequest> {
        let (what, rest) = line.split_once(' ').unwrap_or((line, ""));
        match what {
            "metadata" => {
                let (namespace, rest) = rest.split_once(' ').unwrap();
                let (key, said) = rest.split_once('=').unwrap();
                let said = match said
                    .strip_prefix('[')
                    .and_then(|said| said.strip_suffix(']'))
                {
                    Some(items) => {
                        let values = items
                            .split(' ')
                            .filter(|item| !item.is_empty())
                            .map(text_value)
                            .collect();
                        value(Kind::ListValue(ListValue { values }))
                    }
                    None if said == "7" => value(Kind::NumberValue(7.0)),
                    None => text_value(said),
                };
                let context = self
                    .message
                    .metadata_context
                    .get_or_insert_with(Metadata::default);
                context.filter_metadata.insert(
                    namespace.into(),
                    Struct {
                        fields: HashMap::from([(key.into(), said)]),
                    },
                );
                return None;
            }
            "attribute" => {
                let (key, said) = rest.split_once('=').unwrap();
                let said = said.parse().map_or_else(
                    |_| text_value(said),
                    |number| value(Kind::NumberValue(number)),
                );
                let attributes = self
                    .message
                    .attributes
                    .entry("envoy.filters.http.ext_proc".into())
                    .or_default();
                attributes.fields.insert(key.into(), said);
                return None;
            }
            _ => {}
        }
        let body = |end_of_stream| HttpBody {
            body: rest.into(),
            end_of_stream,
            ..HttpBody::default()
        };
        let pairs = || rest.split(' ').filter_map(|word| word.split_once('='));
        let mut request = std::mem::take(&mut self.message);
        request.protocol_config = self.mode.take();
        request.request = Some(match what {
            "GET" | "POST" => {
                let path = rest.split(' ').next().unwrap();
                let headers = header_map(
                    [(":method", what), (":path", path)]
                        .into_iter()
                        .chain(pairs()),
                );
                Part::RequestHeaders(HttpHeaders {
                    headers,
                    end_of_stream: what == "GET",
                    ..HttpHeaders::default()
                })
            }
            "body" => Part::RequestBody(body(false)),
            "last" => Part::RequestBody(body(true)),
            "trailers" => Part::RequestTrailers(HttpTrailers::default()),
            "reply" => {
                let status = rest.split(' ').next().unwrap();
                let headers = header_map([(":status", status)].into_iter().chain(pairs()));
                Part::ResponseHeaders(HttpHeaders {
                    headers,
                    ..HttpHeaders::default()
                })
            }
            "reply-body" => Part::ResponseBody(body(false)),
            "reply-last" => Part::ResponseBody(body(true)),
            "reply-trailers" => Part::ResponseTrailers(HttpTrailers::default()),
            other => panic!("{other}?"),
        });
        Some(request)
    }
}

fn shown(answer: &ProcessingResponse) -> String {
    let mut line = match answer.response.as_ref().unwrap() {
        Response::RequestHeaders(answer) => {
            format!("headers{}", common(answer.response.as_ref().unwrap()))
        }
        Response::ResponseHeaders(answer) => {
            format!("reply headers{}", common(answer.response.as_ref().unwrap()))
        }
        Response::RequestBody(answer) => {
            format!("body{}", common(answer.response.as_ref().unwrap()))
        }
        Response::ResponseBody(answer) => {
            format!("reply body{}", common(answer.response.as_ref().unwrap()))
        }
        Response::RequestTrailers(_) => "trailers".to_owned(),
        Response::ResponseTrailers(_) => "reply trailers".to_owned(),
        Response::ImmediateResponse(reply) => {
            let status = reply.status.as_ref().unwrap().code;
            let body: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
            format!(
                "answer {status} {}{}",
                body["error"]["code"].as_str().unwrap_or("-"),
                mutation(reply.headers.as_ref().unwrap())
            )
        }
        Response::StreamedImmediateResponse(_) => unreachable!("never sent"),
    };
    if let Some(mode) = &answer.mode_override {
        assert_eq!(mode.request_body_mode, i32::from(BodySendMode::None));
        line.push_str(" (without the body)");
    }
    for (namespace, value) in answer
        .dynamic_metadata
        .iter()
        .flat_map(|metadata| &metadata.fields)
    {
        let Some(Kind::StructValue(entries)) = &value.kind else {
            panic!("not a namespace")
        };
        let mut entries: Vec<_> = entries
            .fields
            .iter()
            .map(|(key, value)| format!("{key}={}", wire::text(value).unwrap()))
            .collect();
        entries.sort();
        let _ = write!(line, " | {namespace} {}", entries.join(" "));
    }
    line
}

fn common(response: &CommonResponse) -> String {
    let body = match response
        .body_mutation
        .as_ref()
        .and_then(|body| body.mutation.as_ref())
    {
        None => String::new(),
        Some(Mutation::Body(body)) => format!(" := {}", String::from_utf8_lossy(body)),
        Some(Mutation::StreamedResponse(piece)) => {
            let last = if piece.end_of_stream { " last" } else { "" };
            format!("{last} = {}", String::from_utf8_lossy(&piece.body))
        }
        Some(Mutation::ClearBody(_)) => unreachable!("never sent"),
    };
    response
        .header_mutation
        .as_ref()
        .map_or_else(String::new, mutation)
        + &body
}

/// Writes removed names and set headers, except those of every routed request.
fn mutation(changes: &HeaderMutation) -> String {
    const USUAL: [&str; 5] = [
        "endpoint-load-metrics-format",
        "x-envoy-max-retries",
        "x-envoy-retry-on",
        "x-envoy-retriable-status-codes",
        "content-type",
    ];
    let removed = changes
        .remove_headers
        .iter()
        .map(|name| format!(" -{name}"));
    let set = changes
        .set_headers
        .iter()
        .map(|option| option.header.as_ref().unwrap());
    let set = set.filter(|header| !USUAL.contains(&header.key.as_str()));
    removed
        .chain(set.map(|header| {
            format!(
                " +{}={}",
                header.key,
                String::from_utf8_lossy(&header.raw_value)
            )
        }))
        .collect()
}

/// Plays the proxy's lines and writes the answers behind each.
fn play(transcript: &str) -> String {
    let mut script = StreamScript::default();
    let mut played = String::new();
    let server = server(&[SERVER, OTHER]);
    let mut stream = None;
    for line in transcript.lines() {
        if line.starts_with("< ") {
            continue;
        }
        played.push_str(line);
        played.push('\n');
        if let Some(words) = line.strip_prefix("modes ") {
            script.modes(words);
        }
        let Some(message) = line.strip_prefix("> ").and_then(|line| script.says(line)) else {
            continue;
        };
        let format = if script.list {
            DestinationFormat::List
        } else {
            DestinationFormat::Single
        };
        let settings = || ExchangeSettings {
            body_limit_bytes: 200,
            ..with_format(format)
        };
        let stream = stream.get_or_insert_with(|| self::stream(&server, settings()));
        assert!(
            matches!(stream.receive(message), StreamAction::Listen),
            "there is state"
        );
        for answer in stream.answers() {
            let _ = writeln!(played, "< {}", shown(&answer));
        }
    }
    drop(stream);
    assert_eq!(
        under_way(&server),
        0,
        "what was picked is released:\n{played}"
    );
    played
}

#[test]
fn transcripts_play_as_written() {
    let file = include_str!("transcripts.txt");
    let (comment, transcripts) = file.split_once("\n\n").unwrap();
    let played = transcripts
        .split("\n\n")
        .map(|transcript| play(transcript.trim_end()))
        .collect::<Vec<_>>()
        .join("\n");
    let played = format!("{comment}\n\n{played}");
    if std::env::var_os("UPDATE_GOLDENS").is_some() {
        std::fs::write(
            concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/src/ext_proc_stream/transcripts.txt"
            ),
            &played,
        )
        .unwrap();
    }
    assert_eq!(played, file);
}

// === what no transcript can show ===

fn say(stream: &mut ExtProcStream, lines: &[&str]) -> Vec<String> {
    let mut script = StreamScript::default();
    let mut answers = Vec::new();
    for line in lines {
        if let Some(message) = script.says(line) {
            let _ = stream.receive(message);
            answers.extend(stream.answers().map(|answer| shown(&answer)));
        }
    }
    answers
}

const CHAT: &str = r#"last {"model":"m","messages":[]}"#;

#[test]
fn whenever_a_client_leaves_its_pick_is_released_once() {
    let phases = [
        "POST /v1/chat/completions",
        CHAT,
        "reply 200 content-type=text/event-stream",
        "reply-body data: {}",
        "reply-last ",
    ];
    for phase in 0..=phases.len() {
        let server = server(&[SERVER]);
        let mut left = stream(&server, ExchangeSettings::default());
        let mut stays = stream(&server, ExchangeSettings::default());
        say(&mut stays, &phases[..2]);
        say(&mut left, &phases[..phase]);
        assert_eq!(
            under_way(&server),
            if (2..5).contains(&phase) { 2 } else { 1 },
            "phase {phase}: from the pick to the end of the reply"
        );
        drop(left);
        assert_eq!(under_way(&server), 1, "phase {phase}: only its own");
        assert_eq!((server.streams().begun(), server.streams().open()), (2, 1));
    }
}

#[test]
fn headers_twice_release_the_first_pick() {
    let server = server(&[SERVER]);
    let mut stream = stream(&server, ExchangeSettings::default());
    say(&mut stream, &["GET /v1/models", "GET /v1/models"]);
    assert_eq!(under_way(&server), 1);
}

/// The requests, and the tokens of their prompts, that endpoints count.
fn load(server: &ExtProcServer) -> Vec<(u32, u64)> {
    let inner = server.pool(None).unwrap().lock();
    let rows = inner.pool.in_flight().rows();
    rows.map(|(_, load)| (load.requests, load.prefill_tokens))
        .collect()
}

/// 25 MB for an API whose bodies are not read.
const UNREAD: &str = "POST /v2/models/m/infer content-length=25000000";

#[test]
fn a_body_that_is_not_read_counts_when_it_has_arrived() {
    for last in ["last x", "trailers"] {
        let server = server(&[SERVER]);
        let mut stream = stream(&server, ExchangeSettings::default());
        say(&mut stream, &[UNREAD, "body x"]);
        stream.check_reply(server.now());
        assert_eq!(load(&server), [(1, 0)]);
        stream.check_reply(server.now().plus_ms(5_000));
        assert!(load(&server).is_empty(), "no endpoint works on it");
        say(&mut stream, &["body x"]);
        assert!(load(&server).is_empty());
        say(&mut stream, &[last]);
        assert_eq!(load(&server), [(1, 6_250_000)], "{last}");
    }
}

#[test]
fn a_body_whose_end_the_proxy_does_not_show_counts_when_the_endpoint_answers() {
    for modes in [
        "request=buffered response=streamed",
        "request=streamed response=streamed",
        "request=none response=none",
    ] {
        let server = server(&[SERVER]);
        let mut stream = stream(&server, ExchangeSettings::default());
        let mut script = StreamScript::default();
        script.modes(modes);
        let _ = stream.receive(script.says(UNREAD).unwrap());
        assert_eq!(load(&server), [(1, 0)], "{modes}");
        stream.check_reply(server.now());
        stream.check_reply(server.now().plus_ms(60_000));
        assert_eq!(load(&server), [(1, 0)], "{modes}: the engine may work");
        let reply = "reply 200 content-type=text/event-stream";
        let _ = stream.receive(script.says(reply).unwrap());
        assert_eq!(load(&server), [(1, 6_250_000)], "{modes}");
    }
}

#[test]
fn a_body_whose_trailers_the_proxy_does_not_show_counts_when_the_endpoint_answers() {
    let server = server(&[SERVER]);
    let mut stream = stream(&server, ExchangeSettings::default());
    say(&mut stream, &[UNREAD, "body x"]);
    assert_eq!(load(&server), [(1, 0)]);
    say(&mut stream, &["reply 200 content-type=text/event-stream"]);
    assert_eq!(load(&server), [(1, 6_250_000)]);
}

/// In all modes Envoy buffers the same part of a reply for its client.
#[test]
fn only_a_computed_reply_longer_than_envoys_buffer_gives_its_place_back_at_its_headers() {
    for mode in ["streamed", "partial", "duplex", "buffered"] {
        for (bytes, counted) in [(1_000, 1), (65_536, 1), (65_537, 0)] {
            let server = server(&[SERVER]);
            let mut stream = stream(&server, ExchangeSettings::default());
            let mut script = StreamScript::default();
            script.modes(&format!("request=duplex response={mode}"));
            let reply = format!("reply 200 content-type=application/json content-length={bytes}");
            for line in ["POST /v1/chat/completions", CHAT, reply.as_str()] {
                let _ = stream.receive(script.says(line).unwrap());
            }
            assert_eq!(under_way(&server), counted, "{mode}, {bytes} bytes");
            let _ = stream.receive(script.says("reply-last {}").unwrap());
            assert_eq!(under_way(&server), 0, "{mode}, {bytes} bytes");
        }
    }
}

/// Whether the proxy may retry the request.
fn may_retry(answer: &ProcessingResponse) -> bool {
    let Some(Response::RequestHeaders(headers)) = &answer.response else {
        panic!("{answer:?}")
    };
    let changes = headers.response.as_ref().unwrap().header_mutation.as_ref();
    let mut set = changes.unwrap().set_headers.iter();
    set.any(|option| option.header.as_ref().unwrap().key == "x-envoy-retry-on")
}

#[test]
fn a_long_request_may_be_retried_while_its_client_has_room_and_a_short_one_always() {
    const LONG: &str = "POST /upload content-length=20000000";
    let server = server(&[SERVER, OTHER]);
    let send = |line: &str| {
        let mut stream = stream(&server, with_format(DestinationFormat::List));
        let message = StreamScript::default().says(line).unwrap();
        let _ = stream.receive(message);
        let may_retry = may_retry(&stream.next_answer().unwrap());
        (stream, may_retry)
    };
    let mut sent: Vec<_> = (0..4).map(|_| send(LONG)).collect();
    let retried = sent.iter().filter(|(_, may_retry)| *may_retry).count();
    assert_eq!(retried, 2, "7/8 of 64 MiB");
    assert!(send("POST /upload content-length=1000").1);
    assert!(send("POST /upload content-length=13000000 x-forwarded-for=10.2.2.2").1);
    assert!(!send(LONG).1);
    sent.truncate(1);
    assert!(send(LONG).1, "a stream has ended");
}

#[test]
fn without_state_a_request_waits_whole_and_then_goes() {
    let server = ExtProcServer::new(&[POOL.into()]);
    let mut stream = stream(&server, ExchangeSettings::default());
    assert!(
        say(
            &mut stream,
            &["POST /v1/chat/completions", r#"body {"model":"m","#]
        )
        .is_empty()
    );
    let mut script = StreamScript::default();
    let StreamAction::Wait(deadline) =
        stream.receive(script.says(r#"last "messages":[]}"#).unwrap())
    else {
        panic!("not parked")
    };
    assert!(deadline > server.now());
    apply_state(&server, 1, &[SERVER]);
    assert!(matches!(stream.retry(server.now()), StreamAction::Listen));
    let answers: Vec<_> = stream.answers().map(|answer| shown(&answer)).collect();
    assert_eq!(answers.len(), 3, "{answers:?}");
    assert!(answers[0].contains(SERVER), "{answers:?}");
    assert_eq!(answers[2], r#"body last = "messages":[]}"#);
}

#[test]
fn without_state_in_time_it_is_refused() {
    let server = ExtProcServer::new(&[POOL.into()]);
    let mut stream = stream(&server, ExchangeSettings::default());
    let mut script = StreamScript::default();
    let StreamAction::Wait(deadline) = stream.receive(script.says("GET /v1/models").unwrap())
    else {
        panic!("not parked")
    };
    assert!(matches!(stream.retry(deadline), StreamAction::Listen));
    assert!(
        stream
            .answers()
            .map(|answer| shown(&answer))
            .next()
            .unwrap()
            .starts_with("answer 503 ")
    );
}

#[test]
fn in_observability_mode_nothing_is_answered_or_picked() {
    let server = server(&[SERVER]);
    let mut stream = stream(&server, ExchangeSettings::default());
    let mut script = StreamScript::default();
    for line in [
        "POST /v1/chat/completions",
        CHAT,
        "reply 200",
        "reply-last x",
    ] {
        let message = ProcessingRequest {
            observability_mode: true,
            ..script.says(line).unwrap()
        };
        assert!(matches!(stream.receive(message), StreamAction::Listen));
    }
    assert_eq!((stream.answers().count(), under_way(&server)), (0, 0));
}

#[test]
fn a_large_piece_goes_back_in_pieces_that_envoy_takes() {
    let server = server(&[SERVER]);
    let mut stream = stream(&server, ExchangeSettings::default());
    let body = format!(
        r#"{{"model":"m","messages":[],"x":"{}"}}"#,
        "y".repeat(200_000)
    );
    say(&mut stream, &["POST /v1/chat/completions"]);
    let mut script = StreamScript::default();
    let _ = stream.receive(script.says(&format!("last {body}")).unwrap());
    let mut whole = Vec::new();
    let mut ends = 0;
    for answer in stream.answers().skip(1) {
        let Some(Response::RequestBody(answer)) = answer.response else {
            panic!("not a body")
        };
        let Some(Mutation::StreamedResponse(piece)) =
            answer.response.unwrap().body_mutation.unwrap().mutation
        else {
            panic!("no piece")
        };
        assert!(piece.body.len() <= PIECE_BYTES_MAX);
        whole.extend(piece.body);
        ends += usize::from(piece.end_of_stream);
    }
    assert_eq!((whole, ends), (body.into_bytes(), 1));
}

#[test]
fn a_stop_may_cut_off_only_what_the_proxy_finishes_alone() {
    let streamed = "modes request=duplex response=streamed";
    for (modes, lines, dispensable) in [
        (streamed, &["POST /v1/chat/completions"][..], false),
        (streamed, &["POST /v1/chat/completions", CHAT], true),
        (
            streamed,
            &["POST /v1/chat/completions", CHAT, "reply 200"],
            true,
        ),
        (
            streamed,
            &[
                "POST /v1/chat/completions",
                r#"last {"model":"alias","messages":[]}"#,
                "reply 200",
            ],
            false,
        ),
        (
            "modes request=duplex response=duplex",
            &["POST /v1/chat/completions", CHAT, "reply 200"],
            false,
        ),
    ] {
        let server = server(&[SERVER]);
        let mut stream = stream(&server, ExchangeSettings::default());
        let mut script = StreamScript::default();
        script.modes(modes.strip_prefix("modes ").unwrap());
        for line in lines {
            let _ = stream.receive(script.says(line).unwrap());
        }
        assert_eq!(stream.is_dispensable(), dispensable, "{modes} {lines:?}");
    }
}

#[test]
fn the_served_endpoint_is_read_from_the_protocols_metadata_alone() {
    let server = server(&[SERVER, OTHER]);
    let settings = ExchangeSettings {
        objective_header: HeaderTrust::Trust,
        ..with_format(DestinationFormat::List)
    };
    let mut stream = stream(&server, settings);
    let served = format!("metadata envoy.lb x-gateway-destination-endpoint-served={OTHER}");
    say(&mut stream, &["GET /v1/models", &served, "reply 200"]);
    let loads = || -> Vec<u32> {
        let inner = server.pool(None).unwrap().lock();
        let snapshot = inner.pool.snapshot().unwrap();
        snapshot
            .endpoints()
            .iter()
            .map(|e| inner.pool.in_flight().own(e.id).requests)
            .collect()
    };
    assert_eq!(loads(), [0, 1], "accounting moved to who served");
    // An endpoint of another pool served, so no endpoint of this pool counts the request.
    let mut elsewhere = self::stream(&server, ExchangeSettings::default());
    say(
        &mut elsewhere,
        &[
            "GET /v1/models",
            "metadata envoy.lb x-gateway-destination-endpoint-served=10.9.9.9:1",
            "reply 200",
        ],
    );
    let served: Vec<u64> = server
        .pool(None)
        .unwrap()
        .lock()
        .pool
        .counters()
        .endpoints()
        .iter()
        .map(|e| e.served)
        .collect();
    assert_eq!(served, [0, 1]);
}

#[test]
fn the_destination_and_the_served_endpoint_are_in_the_namespace_that_the_operator_names() {
    let server = ExtProcServer::with_namespace(&[POOL.into()], Some("gateway.lb".to_owned()));
    apply_state(&server, 1, &[SERVER, OTHER]);
    let settings = with_format(DestinationFormat::List);
    let mut stream = stream(&server, settings);
    let sent = say(&mut stream, &["GET /v1/models"]);
    assert!(
        sent.iter().any(|answer| answer.contains("gateway.lb"))
            && !sent.iter().any(|answer| answer.contains("envoy.lb")),
        "{sent:?}"
    );
    let elsewhere = format!("metadata envoy.lb x-gateway-destination-endpoint-served={SERVER}");
    let served = format!("metadata gateway.lb x-gateway-destination-endpoint-served={OTHER}");
    say(&mut stream, &[&elsewhere, &served, "reply 200"]);
    let served: Vec<u64> = server
        .pool(None)
        .unwrap()
        .lock()
        .pool
        .counters()
        .endpoints()
        .iter()
        .map(|e| e.served)
        .collect();
    assert_eq!(served, [0, 1]);
}

/// One gateway has the pickers of two pools. After a failover it opens a new stream to the second
/// picker. That picker names its own endpoints and receives the served endpoint.
#[test]
fn after_a_failover_the_pool_that_answered_counts_the_served_endpoint() {
    let first = server(&[SERVER]);
    let second = server(&[OTHER]);
    let settings = || with_format(DestinationFormat::List);
    let mut given_up = stream(&first, settings());
    let mut next_turn = stream(&second, settings());
    let to_first = say(&mut given_up, &["POST /v1/chat/completions", CHAT]);
    assert!(
        to_first.iter().any(|answer| answer.contains(SERVER)),
        "{to_first:?}"
    );
    let before = format!("metadata envoy.lb x-gateway-destination-endpoint-served={SERVER}");
    let to_second = say(
        &mut next_turn,
        &["POST /v1/chat/completions", &before, CHAT],
    );
    assert!(
        to_second.iter().any(|answer| answer.contains(OTHER))
            && !to_second.iter().any(|answer| answer.contains(SERVER)),
        "{to_second:?}"
    );
    drop(given_up); // its stream ends without a response
    let served = format!("metadata envoy.lb x-gateway-destination-endpoint-served={OTHER}");
    say(&mut next_turn, &[&served, "reply 200", "reply-last {}"]);
    drop(next_turn);
    let counted = |server: &ExtProcServer| -> Vec<(u64, u64)> {
        server
            .pool(None)
            .unwrap()
            .lock()
            .pool
            .counters()
            .endpoints()
            .iter()
            .map(|e| (e.picked, e.served))
            .collect()
    };
    assert_eq!(
        (counted(&first), counted(&second)),
        (vec![(1, 0)], vec![(1, 1)])
    );
    assert_eq!((under_way(&first), under_way(&second)), (0, 0));
}

proptest::proptest! {
    /// Any messages in any order cause no panic and leave no ledger entry.
    #[test]
    fn any_order_of_messages_is_survived(script in proptest::collection::vec(0_usize..12, 0..24), modes in 0_usize..5) {
        const LINES: [&str; 12] = [
            "POST /v1/chat/completions", "POST /v1/chat/completions content-length=3", "GET /v1/models", "body {\"model\":\"alias\",", CHAT,
            "last \"messages\":[]}", "trailers", "reply 200 content-length=30", "reply 503",
            "reply-body {\"model\":\"served\"}", "reply-last {\"model\":\"served\"}", "reply-trailers",
        ];
        const MODES: [&str; 5] = [
            "request=duplex response=duplex", "request=streamed response=streamed", "request=streamed response=streamed early",
            "request=buffered response=buffered", "request=partial response=none",
        ];
        let server = server(&[SERVER, OTHER]);
        let mut stream = stream(&server, ExchangeSettings::default());
        let mut said = StreamScript::default();
        said.modes(MODES[modes]);
        for line in script {
            if let Some(message) = said.says(LINES[line]) {
                let _ = stream.receive(message);
                let _ = stream.answers().count();
            }
        }
        drop(stream);
        proptest::prop_assert_eq!(under_way(&server), 0);
    }
}
