//! Reads the messages of one gRPC stream from its bytes.
//!
//! This reader replaces tonic's reader, whose memory is not bounded. The buffer of tonic keeps the
//! size of the largest message as long as the stream lasts. A message of a few MiB of empty headers
//! decodes to a hundred times its size.

use std::ops::Range;

use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Part;
use envoy_types::pb::envoy::service::ext_proc::v3::{HttpBody, ProcessingRequest};
use prost::Message;
use prost::bytes::Buf;
use tonic::Status;

/// The longest message accepted, in bytes: a body of Envoy's limit in the shipped files (32 MiB)
/// with its headers. So a body between that and the daemon's limit (24 MiB) is refused with an
/// error of its API.
pub const MESSAGE_BYTES_MAX: usize = 33 << 20;

/// The maximum number of bytes of a message besides those of a body: headers, trailers, metadata
/// and attributes. Envoy accepts 60 KiB of headers by default.
pub const ENVELOPE_BYTES_MAX: usize = 256 << 10;

/// A decoded message without its body takes at most this many times its bytes. An empty header is
/// two bytes, and 72 when decoded, in a list that is copied as it grows.
pub const EXPANSION_MAX: usize = 80;

/// An empty buffer keeps at most this many bytes for the next message: messages of a streamed reply
/// are shorter.
const IDLE_BYTES_MAX: usize = 4 << 10;

/// A body of at least this many bytes is moved out of the buffer, not copied.
const MOVED_BYTES_MIN: usize = 64 << 10;

/// Bytes before each message: a flag and the length.
const PREFIX_BYTES: usize = 5;

/// The bytes of a stream that were received but not read yet.
#[derive(Debug, Default)]
pub struct MessageReader {
    buffer: Vec<u8>,
    /// Where the next message begins.
    start: usize,
}

/// The positions of a complete message's parts in the buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageLayout {
    message: Range<usize>,
    body: Option<BodyField>,
}

/// A request's or a response's body among the fields of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
struct BodyField {
    of_request: bool,
    /// Tag, length and value.
    field: Range<usize>,
    /// The value, a message.
    value: Range<usize>,
    /// The field of `value` that has the body's bytes.
    content_field: Range<usize>,
    /// The bytes of the body.
    content: Range<usize>,
}

/// A field of a protobuf message.
struct ProtoField {
    tag: u64,
    bytes: Range<usize>,
    /// The value, if the field is length-delimited.
    value: Option<Range<usize>>,
}

/// The fields of a protobuf message, one after another.
struct ProtoFields<'m> {
    bytes: &'m [u8],
    at: usize,
    end: usize,
}

// === impl MessageReader ===

impl MessageReader {
    /// The memory of the buffer, in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.buffer.capacity()
    }

    /// Whether a part of a message has arrived.
    #[must_use]
    pub fn is_within_a_message(&self) -> bool {
        self.start < self.buffer.len()
    }

    /// Appends the next bytes of the stream. Before the call the buffer has no complete message.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.start);
        self.start = 0;
        let len = self.buffer.len() + bytes.len();
        if len > self.buffer.capacity() {
            // The buffer doubles, but not beyond the length of the next message.
            let whole = self
                .announced()
                .map_or(0, |len| PREFIX_BYTES + len.min(MESSAGE_BYTES_MAX));
            let capacity = len.max(whole.min(self.buffer.capacity() * 2));
            self.buffer.reserve_exact(capacity - self.buffer.len());
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Finds the next message, if it has arrived completely.
    ///
    /// # Errors
    /// Returns the status that ends the stream if the message is invalid or too long.
    pub fn next(&self) -> Result<Option<MessageLayout>, Status> {
        let Some(len) = self.announced() else {
            return Ok(None);
        };
        if self.buffer.get(self.start).is_some_and(|&flag| flag != 0) {
            return Err(Status::unimplemented("messages must not be compressed"));
        }
        if len > MESSAGE_BYTES_MAX {
            return Err(Status::resource_exhausted(format!(
                "a message of {len} bytes; the most is {MESSAGE_BYTES_MAX}"
            )));
        }
        let begins = self.start + PREFIX_BYTES;
        if self.buffer.len() < begins + len {
            return Ok(None);
        }
        let layout =
            MessageLayout::from_bytes(&self.buffer, begins..begins + len).ok_or_else(malformed)?;
        let envelope = layout.envelope_bytes();
        if envelope > ENVELOPE_BYTES_MAX {
            let why = format!(
                "headers, metadata and attributes of {envelope} bytes in a message; the most is {ENVELOPE_BYTES_MAX}"
            );
            return Err(Status::resource_exhausted(why));
        }
        Ok(Some(layout))
    }

    /// Takes out the message that [`Self::next`] found.
    ///
    /// # Errors
    /// Returns the status that ends the stream if the message is invalid.
    pub fn take(&mut self, layout: MessageLayout) -> Result<ProcessingRequest, Status> {
        let MessageLayout { message, body } = layout;
        let part = |range: Range<usize>| self.buffer.get(range).unwrap_or_default();
        let Some(BodyField {
            of_request,
            field,
            value,
            content_field,
            content,
        }) = body
        else {
            let decoded = ProcessingRequest::decode(part(message.clone())).map_err(|_| malformed());
            self.consume(message.end);
            return decoded;
        };
        let without = |whole: Range<usize>, gap: Range<usize>| {
            part(whole.start..gap.start).chain(part(gap.end..whole.end))
        };
        let mut decoded =
            ProcessingRequest::decode(without(message.clone(), field)).map_err(|_| malformed())?;
        let rest = HttpBody::decode(without(value, content_field)).map_err(|_| malformed())?;
        let body = HttpBody {
            body: self.take_content(content, message.end),
            ..rest
        };
        decoded.request = Some(if of_request {
            Part::RequestBody(body)
        } else {
            Part::ResponseBody(body)
        });
        Ok(decoded)
    }

    /// Drops all bytes.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// The length of the next message, once its prefix has arrived.
    fn announced(&self) -> Option<usize> {
        let length = self.buffer.get(self.start + 1..self.start + PREFIX_BYTES)?;
        Some(u32::from_be_bytes(length.try_into().ok()?) as usize)
    }

    fn take_content(&mut self, content: Range<usize>, end: usize) -> Vec<u8> {
        if content.len() < MOVED_BYTES_MIN {
            let copy = self.buffer.get(content).unwrap_or_default().to_vec();
            self.consume(end);
            return copy;
        }
        // The bytes after the message came in the same frame as its end.
        let behind = self.buffer.get(end..).unwrap_or_default().to_vec();
        let mut bytes = std::mem::replace(&mut self.buffer, behind);
        self.start = 0;
        bytes.truncate(content.end);
        bytes.drain(..content.start);
        bytes
    }

    fn consume(&mut self, end: usize) {
        self.start = end;
        if end == self.buffer.len() {
            self.buffer.clear();
            self.start = 0;
            if self.buffer.capacity() > IDLE_BYTES_MAX {
                self.buffer = Vec::new();
            }
        }
    }
}

fn malformed() -> Status {
    Status::invalid_argument("not a ProcessingRequest")
}

// === impl MessageLayout ===

impl MessageLayout {
    /// Finds the parts of the message at `message` in `bytes`; `None` if it is invalid.
    fn from_bytes(bytes: &[u8], message: Range<usize>) -> Option<Self> {
        let mut parts = Vec::new();
        for field in ProtoFields::from_bytes(bytes, message.clone()) {
            let field = field?;
            // The request of the message. A message may have only one request.
            if (2..=7).contains(&field.tag) {
                parts.push(field);
                parts.truncate(2);
            }
        }
        let body = match parts.as_slice() {
            [
                ProtoField {
                    tag: tag @ (4 | 5),
                    bytes: whole,
                    value: Some(value),
                },
            ] => BodyField::from_bytes(bytes, *tag == 4, whole, value)?,
            _ => None,
        };
        Some(Self { message, body })
    }

    /// The length of the message without the bytes of a body.
    #[must_use]
    pub fn envelope_bytes(&self) -> usize {
        self.message.len() - self.body.as_ref().map_or(0, |body| body.content.len())
    }
}

// === impl BodyField ===

impl BodyField {
    /// Finds the parts of a body; `Some(None)` if it has no bytes, or has them in several places.
    #[expect(
        clippy::option_option,
        reason = "the outer `None` means an invalid message"
    )]
    fn from_bytes(
        bytes: &[u8],
        of_request: bool,
        whole: &Range<usize>,
        value: &Range<usize>,
    ) -> Option<Option<Self>> {
        let mut contents = Vec::new();
        for field in ProtoFields::from_bytes(bytes, value.clone()) {
            let field = field?;
            if field.tag == 1 {
                contents.push(field);
                contents.truncate(2);
            }
        }
        let [
            ProtoField {
                bytes: content_field,
                value: Some(content),
                ..
            },
        ] = contents.as_slice()
        else {
            return Some(None);
        };
        let field = whole.clone();
        let value = value.clone();
        let content_field = content_field.clone();
        let content = content.clone();
        Some(Some(Self {
            of_request,
            field,
            value,
            content_field,
            content,
        }))
    }
}

// === impl ProtoFields ===

impl<'m> ProtoFields<'m> {
    fn from_bytes(bytes: &'m [u8], range: Range<usize>) -> Self {
        Self {
            bytes,
            at: range.start,
            end: range.end,
        }
    }

    fn varint(&mut self) -> Option<u64> {
        let mut rest = self.bytes.get(self.at..self.end)?;
        let before = rest.len();
        let value = prost::encoding::decode_varint(&mut rest).ok()?;
        self.at += before - rest.len();
        Some(value)
    }

    fn skip(&mut self, len: u64) -> Option<()> {
        let at = self.at.checked_add(usize::try_from(len).ok()?)?;
        self.at = at;
        (at <= self.end).then_some(())
    }

    fn field(&mut self) -> Option<ProtoField> {
        let start = self.at;
        let key = self.varint()?;
        let value = match key & 7 {
            0 => self.varint().map(|_| None)?,
            1 => self.skip(8).map(|()| None)?,
            2 => {
                let len = self.varint()?;
                let begins = self.at;
                self.skip(len)?;
                Some(begins..self.at)
            }
            5 => self.skip(4).map(|()| None)?,
            _ => return None, // groups: no message of Envoy has any
        };
        Some(ProtoField {
            tag: key >> 3,
            bytes: start..self.at,
            value,
        })
    }
}

impl Iterator for ProtoFields<'_> {
    type Item = Option<ProtoField>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.end {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.at = self.end;
        }
        Some(field)
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
    use envoy_types::pb::envoy::service::ext_proc::v3::{
        HttpHeaders, HttpTrailers, ProtocolConfiguration,
    };
    use envoy_types::pb::google::protobuf::Value;
    use proptest::prelude::*;
    use tonic::Code;

    use super::*;

    fn framed(message: &[u8]) -> Vec<u8> {
        [
            &[0],
            &u32::try_from(message.len()).unwrap().to_be_bytes()[..],
            message,
        ]
        .concat()
    }

    fn body(body: Vec<u8>) -> HttpBody {
        HttpBody {
            body,
            end_of_stream: true,
            ..HttpBody::default()
        }
    }

    /// Reads all messages from these bytes, which arrive in pieces.
    fn read(bytes: &[u8], piece: usize) -> Result<Vec<ProcessingRequest>, Status> {
        let mut framing = MessageReader::default();
        let mut messages = Vec::new();
        for piece in bytes.chunks(piece) {
            framing.push(piece);
            while let Some(layout) = framing.next()? {
                messages.push(framing.take(layout)?);
            }
        }
        assert!(!framing.is_within_a_message());
        assert!(framing.memory() <= IDLE_BYTES_MAX.max(piece));
        Ok(messages)
    }

    #[test]
    fn messages_come_out_as_they_went_in_however_they_are_cut() {
        let parts = [
            Part::RequestHeaders(HttpHeaders {
                end_of_stream: true,
                ..HttpHeaders::default()
            }),
            Part::RequestBody(body(b"abc".to_vec())),
            Part::RequestBody(HttpBody::default()),
            Part::ResponseBody(body(vec![7; MOVED_BYTES_MIN])),
            Part::RequestTrailers(HttpTrailers::default()),
        ];
        let protocol_config = Some(ProtocolConfiguration {
            request_body_mode: 4,
            ..ProtocolConfiguration::default()
        });
        let messages: Vec<_> = parts
            .into_iter()
            .map(|part| ProcessingRequest {
                request: Some(part),
                protocol_config,
                ..ProcessingRequest::default()
            })
            .chain([ProcessingRequest::default()])
            .collect();
        let bytes: Vec<u8> = messages
            .iter()
            .flat_map(|message| framed(&message.encode_to_vec()))
            .collect();
        for piece in [1, 5, 1000, bytes.len()] {
            assert_eq!(
                read(&bytes, piece).unwrap(),
                messages,
                "in pieces of {piece}"
            );
        }
    }

    #[test]
    fn a_message_that_is_too_long_is_refused_before_it_comes() {
        let length = u32::try_from(MESSAGE_BYTES_MAX + 1).unwrap().to_be_bytes();
        let mut framing = MessageReader::default();
        framing.push(&[&[0], &length[..]].concat());
        assert_eq!(framing.next().unwrap_err().code(), Code::ResourceExhausted);
        assert!(framing.memory() < 100);
    }

    #[test]
    fn what_is_not_a_body_may_not_be_large() {
        let headers = HeaderMap {
            headers: vec![HeaderValue::default(); ENVELOPE_BYTES_MAX / 2],
        };
        let headers = HttpHeaders {
            headers: Some(headers),
            ..HttpHeaders::default()
        };
        let message = ProcessingRequest {
            request: Some(Part::RequestHeaders(headers)),
            ..ProcessingRequest::default()
        };
        assert_eq!(
            read(&framed(&message.encode_to_vec()), 1 << 20)
                .unwrap_err()
                .code(),
            Code::ResourceExhausted
        );
        // A body that appears twice is not moved: its bytes are read with the rest.
        let twice = |bytes: usize| {
            let body = ProcessingRequest {
                request: Some(Part::RequestBody(body(vec![1; bytes]))),
                ..ProcessingRequest::default()
            };
            framed(&[body.encode_to_vec(), body.encode_to_vec()].concat())
        };
        assert_eq!(
            read(&twice(ENVELOPE_BYTES_MAX), 1 << 20)
                .unwrap_err()
                .code(),
            Code::ResourceExhausted
        );
        assert_eq!(read(&twice(10), 1 << 20).unwrap().len(), 1);
    }

    #[test]
    fn compressed_messages_and_groups_end_the_stream() {
        assert_eq!(
            read(&[1, 0, 0, 0, 0], 9).unwrap_err().code(),
            Code::Unimplemented
        );
        assert_eq!(
            read(&framed(&[0x0b, 0x0c]), 9).unwrap_err().code(),
            Code::InvalidArgument
        );
    }

    #[test]
    fn nothing_expands_more_than_it_is_said_to() {
        // An empty element takes two bytes, and the list is copied once more while it grows.
        for size in [size_of::<HeaderValue>(), size_of::<Value>()] {
            assert!(size / 2 * 2 <= EXPANSION_MAX, "{size}");
        }
    }

    proptest! {
        /// Our reader decodes a message to the same value as prost, and fails where prost fails.
        /// Our reader also fails for messages that it refuses.
        #[test]
        fn it_reads_what_prost_reads(bytes in prop::collection::vec(any::<u8>(), 0..64), nested in prop::collection::vec(any::<u8>(), 0..32), as_body: bool) {
            let bytes = if as_body {
                let mut message = vec![0x22, u8::try_from(nested.len()).unwrap()];
                message.extend_from_slice(&nested);
                message.extend_from_slice(&bytes);
                message
            } else {
                bytes
            };
            let ours = read(&framed(&bytes), 100);
            match (ours, ProcessingRequest::decode(&*bytes)) {
                (Ok(ours), theirs) => prop_assert_eq!(ours, [theirs.unwrap()]),
                (Err(_), _) => {}
            }
        }
    }
}
