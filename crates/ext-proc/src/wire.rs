//! Reads and writes Envoy's messages: header maps, attributes and metadata values, and the answers
//! to each part of an exchange.

use std::collections::HashMap;

use envoy_types::pb::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use envoy_types::pb::envoy::config::core::v3::{
    HeaderMap, HeaderValue, HeaderValueOption, Metadata,
};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::ProcessingMode;
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyMutation, BodyResponse, CommonResponse, HeaderMutation, HeadersResponse, ImmediateResponse,
    ProcessingRequest, ProcessingResponse, ProtocolConfiguration, StreamedBodyResponse,
    TrailersResponse,
};
use envoy_types::pb::envoy::r#type::v3::HttpStatus;
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Duration, Struct, Value};
use exchange::LocalReply;
use exchange::api::{ApiFamily, RequestApi};

/// The metadata namespace of the destination and of the served endpoint, unless the operator
/// configures another.
pub const DESTINATION_NAMESPACE: &str = "envoy.lb";

/// How the proxy sends the bodies of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyMode {
    /// The proxy does not send the body.
    None,
    /// The proxy sends pieces, and the server answers each; the next piece may come before the
    /// answer. The headers were forwarded before the first piece, unless `early`: then the pieces
    /// come before the answer to the headers, which is sent after the last piece.
    Streamed {
        /// `send_body_without_waiting_for_header_response`.
        early: bool,
    },
    /// The proxy sends one piece, and the headers wait for its answer.
    Buffered,
    /// Like `Buffered`, but cut off at the proxy's limit; the rest passes unread.
    BufferedPartial,
    /// The proxy sends pieces and forwards only the pieces that this server sends back.
    FullDuplex,
}

/// How the proxy sends both bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BodyModes {
    pub request: BodyMode,
    pub response: BodyMode,
}

#[derive(Debug, Default)]
pub struct HeaderChanges {
    /// Names of headers to remove, with all their values.
    pub remove: Vec<String>,
    /// Headers to set; each replaces all values of its name.
    pub set: Vec<(String, String)>,
}

/// The direction of the message that is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyDirection {
    /// Towards the model server.
    Request,
    /// Towards the client.
    Response,
}

// === impl BodyModes ===

impl BodyModes {
    /// Reads the modes from the stream's first message. Without them the mode is full duplex, which
    /// the protocol requires of gateways; every Envoy that has other modes sends them.
    #[must_use]
    pub fn from_config(config: Option<&ProtocolConfiguration>) -> Self {
        let Some(config) = config else {
            return Self {
                request: BodyMode::FullDuplex,
                response: BodyMode::FullDuplex,
            };
        };
        let early = config.send_body_without_waiting_for_header_response;
        let mode = |mode: i32| match BodySendMode::try_from(mode) {
            Ok(BodySendMode::None) => BodyMode::None,
            Ok(BodySendMode::Streamed) => BodyMode::Streamed { early },
            Ok(BodySendMode::Buffered) => BodyMode::Buffered,
            Ok(BodySendMode::BufferedPartial) => BodyMode::BufferedPartial,
            Ok(BodySendMode::FullDuplexStreamed | BodySendMode::Grpc) | Err(_) => {
                BodyMode::FullDuplex
            }
        };
        Self {
            request: mode(config.request_body_mode),
            response: mode(config.response_body_mode),
        }
    }
}

// === reading ===

/// Names and values, as bytes, in order.
pub fn pairs(map: Option<&HeaderMap>) -> impl Iterator<Item = (&[u8], &[u8])> + Clone {
    let headers = map.map_or(&[][..], |map| &map.headers);
    headers.iter().map(
        |HeaderValue {
             key,
             value,
             raw_value,
             ..
         }| {
            (
                key.as_bytes(),
                if raw_value.is_empty() {
                    value.as_bytes()
                } else {
                    raw_value
                },
            )
        },
    )
}

/// The API family whose error shape a request with these headers gets.
pub fn family<'m>(pairs: impl Iterator<Item = (&'m [u8], &'m [u8])>) -> ApiFamily {
    let mut method = &b""[..];
    let mut path = &b""[..];
    for (name, value) in pairs {
        match name {
            b":method" => method = value,
            b":path" => path = value,
            _ => {}
        }
    }
    RequestApi::for_request(method, path).error_family()
}

/// The value at `key` of a namespace of the metadata that came with a message.
pub fn metadata<'m>(
    context: Option<&'m Metadata>,
    namespace: &str,
    key: &str,
) -> Option<&'m Value> {
    context?.filter_metadata.get(namespace)?.fields.get(key)
}

/// Like [`metadata`], for a value within nested structures.
pub fn metadata_at<'m, 'k>(
    context: Option<&'m Metadata>,
    namespace: &str,
    mut keys: impl Iterator<Item = &'k str>,
) -> Option<&'m Value> {
    let first = metadata(context, namespace, keys.next()?)?;
    keys.try_fold(first, |value, key| match &value.kind {
        Some(Kind::StructValue(fields)) => fields.fields.get(key),
        _ => None,
    })
}

pub fn text(value: &Value) -> Option<&str> {
    match &value.kind {
        Some(Kind::StringValue(text)) => Some(text),
        _ => None,
    }
}

/// Converts a subset hint to the form that the exchange reads: the items of a list, or a string.
/// Any other value allows no endpoint, so that a wrong hint never allows too much.
pub fn subset_hint(value: &Value) -> Vec<u8> {
    match &value.kind {
        Some(Kind::ListValue(list)) => list
            .values
            .iter()
            .filter_map(text)
            .collect::<Vec<_>>()
            .join(",")
            .into_bytes(),
        Some(Kind::StringValue(text)) => text.clone().into_bytes(),
        _ => Vec::new(),
    }
}

/// An attribute that the proxy sends, from any of its filters.
pub fn attribute<'m>(attributes: &'m HashMap<String, Struct>, name: &str) -> Option<&'m Value> {
    attributes
        .values()
        .find_map(|attributes| attributes.fields.get(name))
}

/// Like [`attribute`], if the value is text.
pub fn text_attribute<'m>(message: &'m ProcessingRequest, name: &str) -> Option<&'m str> {
    attribute(&message.attributes, name).and_then(text)
}

/// Like [`attribute`], if the value is a count.
pub fn count_attribute(message: &ProcessingRequest, name: &str) -> Option<u32> {
    match attribute(&message.attributes, name)?.kind {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "in range; a fraction of a count is none"
        )]
        Some(Kind::NumberValue(number)) if (0.0..=f64::from(u32::MAX)).contains(&number) => {
            Some(number as u32)
        }
        _ => None,
    }
}

// === writing ===

impl From<HeaderChanges> for HeaderMutation {
    fn from(HeaderChanges { remove, set }: HeaderChanges) -> Self {
        Self {
            set_headers: set
                .into_iter()
                .map(|(name, value)| header(name, value))
                .collect(),
            remove_headers: remove,
        }
    }
}

fn header(name: String, value: String) -> HeaderValueOption {
    let header = HeaderValue {
        key: name,
        raw_value: value.into_bytes(),
        ..HeaderValue::default()
    };
    let append_action = HeaderAppendAction::OverwriteIfExistsOrAdd.into();
    HeaderValueOption {
        header: Some(header),
        append_action,
        ..HeaderValueOption::default()
    }
}

pub fn headers_answer(direction: BodyDirection, changes: HeaderChanges) -> ProcessingResponse {
    let response = CommonResponse {
        header_mutation: Some(changes.into()),
        ..CommonResponse::default()
    };
    let answer = HeadersResponse {
        response: Some(response),
    };
    respond(match direction {
        BodyDirection::Request => Response::RequestHeaders(answer),
        BodyDirection::Response => Response::ResponseHeaders(answer),
    })
}

/// A mode override with which the proxy does not send the request's body. A proxy that does not
/// allow overrides sends the pieces, and they are still answered. `None` if the body mode cannot be
/// changed. (Response bodies are never declined, because the end of the body is the end of the
/// exchange.)
pub fn decline_request_body(modes: BodyModes) -> Option<ProcessingMode> {
    let response = match modes.response {
        BodyMode::None => BodySendMode::None,
        BodyMode::Streamed { .. } => BodySendMode::Streamed,
        BodyMode::Buffered => BodySendMode::Buffered,
        BodyMode::BufferedPartial => BodySendMode::BufferedPartial,
        BodyMode::FullDuplex => return None,
    };
    let mode = ProcessingMode {
        request_body_mode: BodySendMode::None.into(),
        response_body_mode: response.into(),
        ..ProcessingMode::default() // headers and trailers stay as they are
    };
    let declinable = matches!(
        modes.request,
        BodyMode::Streamed { early: false } | BodyMode::Buffered | BodyMode::BufferedPartial
    );
    declinable.then_some(mode)
}

/// Answers a piece of a body. `replacement` replaces the piece, and `changes` apply to the headers
/// that waited for it.
pub fn body_answer(
    direction: BodyDirection,
    replacement: Option<Vec<u8>>,
    changes: HeaderChanges,
) -> ProcessingResponse {
    let body_mutation = replacement.map(|body| BodyMutation {
        mutation: Some(Mutation::Body(body)),
    });
    body_response(
        direction,
        CommonResponse {
            header_mutation: Some(changes.into()),
            body_mutation,
            ..CommonResponse::default()
        },
    )
}

/// A piece of a body to forward, in full duplex.
pub fn streamed_body(
    direction: BodyDirection,
    body: Vec<u8>,
    end_of_stream: bool,
) -> ProcessingResponse {
    let streamed = StreamedBodyResponse {
        body,
        end_of_stream,
        ..StreamedBodyResponse::default()
    };
    let body_mutation = Some(BodyMutation {
        mutation: Some(Mutation::StreamedResponse(streamed)),
    });
    body_response(
        direction,
        CommonResponse {
            body_mutation,
            ..CommonResponse::default()
        },
    )
}

fn body_response(direction: BodyDirection, response: CommonResponse) -> ProcessingResponse {
    let answer = BodyResponse {
        response: Some(response),
    };
    respond(match direction {
        BodyDirection::Request => Response::RequestBody(answer),
        BodyDirection::Response => Response::ResponseBody(answer),
    })
}

/// Lets trailers pass.
pub fn trailers_answer(direction: BodyDirection) -> ProcessingResponse {
    let answer = TrailersResponse {
        header_mutation: None,
    };
    respond(match direction {
        BodyDirection::Request => Response::RequestTrailers(answer),
        BodyDirection::Response => Response::ResponseTrailers(answer),
    })
}

/// Answers the client in place of a model server. The reply has no `details`, so that the shipped
/// Envoy files can distinguish the picker's replies from Envoy's own.
pub fn immediate(reply: LocalReply) -> ProcessingResponse {
    let set = reply
        .headers
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    respond(Response::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus {
            code: reply.status.into(),
        }),
        headers: Some(
            HeaderChanges {
                set,
                ..HeaderChanges::default()
            }
            .into(),
        ),
        body: reply.body,
        ..ImmediateResponse::default()
    }))
}

/// Lets the proxy wait this much longer for the answer to its message. Envoy accepts this once for
/// each message, and ignores a time above `max_message_timeout`.
pub fn wait_longer(ms: u64) -> ProcessingResponse {
    let wait = Duration {
        seconds: i64::try_from(ms.div_ceil(1_000)).unwrap_or(i64::MAX),
        nanos: 0,
    };
    ProcessingResponse {
        override_message_timeout: Some(wait),
        ..ProcessingResponse::default()
    }
}

/// Dynamic metadata with these values in this namespace.
pub fn destination_metadata(
    namespace: &str,
    values: impl IntoIterator<Item = (String, String)>,
) -> Option<Struct> {
    let value = |kind| Value { kind: Some(kind) };
    let fields: HashMap<_, _> = values
        .into_iter()
        .map(|(key, text)| (key, value(Kind::StringValue(text))))
        .collect();
    let values = value(Kind::StructValue(Struct { fields }));
    Some(Struct {
        fields: HashMap::from([(namespace.to_owned(), values)]),
    })
}

fn respond(response: Response) -> ProcessingResponse {
    ProcessingResponse {
        response: Some(response),
        ..ProcessingResponse::default()
    }
}
