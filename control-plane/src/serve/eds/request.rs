//! The requests of both variants of EDS, and their codec.
//!
//! The messages have only the fields that the daemon reads. Envoy's first request also names all of
//! its extensions. Skipping such fields takes no memory, but decoding them would take up to
//! eighty times their size.

use std::marker::PhantomData;

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryResponse, DiscoveryResponse};
use prost::Message;
use prost::bytes::Buf;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstEncoder;

use crate::serve::state_stream::admission::REASON_BYTES_MAX;

/// A request of either variant.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct EdsRequest {
    pub(super) node_id: Option<String>,
    pub(super) type_url: String,
    pub(super) names: SubscriptionChange,
    pub(super) nonce: String,
    pub(super) error: Option<String>,
    /// The size of the whole message, with the fields that were skipped.
    pub(super) bytes: usize,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum SubscriptionChange {
    /// All names that are subscribed now.
    All(Vec<String>),
    /// The names that were added, and the names that were removed.
    Delta {
        more: Vec<String>,
        fewer: Vec<String>,
    },
}

/// A request message of one variant.
pub(super) trait XdsRequest: Message + Default + 'static {
    /// The message that answers the request.
    type Response: Message + 'static;

    fn into_request(self, bytes: usize) -> EdsRequest;
}

/// A `DiscoveryRequest`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct SotwRequest {
    #[prost(message, optional, tag = "2")]
    node: Option<NodeId>,
    #[prost(string, repeated, tag = "3")]
    resource_names: Vec<String>,
    #[prost(string, tag = "4")]
    type_url: String,
    #[prost(string, tag = "5")]
    response_nonce: String,
    #[prost(message, optional, tag = "6")]
    error_detail: Option<ErrorDetail>,
}

/// A `DeltaDiscoveryRequest`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct DeltaRequest {
    #[prost(message, optional, tag = "1")]
    node: Option<NodeId>,
    #[prost(string, tag = "2")]
    type_url: String,
    #[prost(string, repeated, tag = "3")]
    resource_names_subscribe: Vec<String>,
    #[prost(string, repeated, tag = "4")]
    resource_names_unsubscribe: Vec<String>,
    #[prost(string, tag = "6")]
    response_nonce: String,
    #[prost(message, optional, tag = "7")]
    error_detail: Option<ErrorDetail>,
}

/// A `Node`.
#[derive(Clone, PartialEq, Eq, Message)]
struct NodeId {
    #[prost(string, tag = "1")]
    id: String,
}

/// A `google.rpc.Status`.
#[derive(Clone, PartialEq, Eq, Message)]
struct ErrorDetail {
    #[prost(string, tag = "2")]
    message: String,
}

/// Receives requests of type `R` and sends their answers.
#[derive(Debug)]
pub(super) struct EdsCodec<R>(PhantomData<R>);

// === impl SotwRequest ===

impl XdsRequest for SotwRequest {
    type Response = DiscoveryResponse;

    fn into_request(self, bytes: usize) -> EdsRequest {
        EdsRequest {
            node_id: self.node.map(|node| node.id),
            type_url: self.type_url,
            names: SubscriptionChange::All(self.resource_names),
            nonce: self.response_nonce,
            error: self.error_detail.map(ErrorDetail::reason),
            bytes,
        }
    }
}

// === impl DeltaRequest ===

impl XdsRequest for DeltaRequest {
    type Response = DeltaDiscoveryResponse;

    fn into_request(self, bytes: usize) -> EdsRequest {
        EdsRequest {
            node_id: self.node.map(|node| node.id),
            type_url: self.type_url,
            names: SubscriptionChange::Delta {
                more: self.resource_names_subscribe,
                fewer: self.resource_names_unsubscribe,
            },
            nonce: self.response_nonce,
            error: self.error_detail.map(ErrorDetail::reason),
            bytes,
        }
    }
}

// === impl ErrorDetail ===

impl ErrorDetail {
    /// Returns the reason why Envoy refused a response, truncated to [`REASON_BYTES_MAX`].
    fn reason(self) -> String {
        let Self { mut message } = self;
        message.truncate(message.floor_char_boundary(REASON_BYTES_MAX));
        message
    }
}

// === impl EdsCodec ===

impl<R> Default for EdsCodec<R> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<R: XdsRequest> Codec for EdsCodec<R> {
    type Encode = R::Response;
    type Decode = EdsRequest;
    type Encoder = ProstEncoder<R::Response>;
    type Decoder = Self;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        Self(PhantomData)
    }
}

impl<R: XdsRequest> Decoder for EdsCodec<R> {
    type Item = EdsRequest;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<EdsRequest>, Status> {
        let bytes = buffer.remaining();
        let request = R::decode(buffer).map_err(|why| Status::invalid_argument(why.to_string()))?;
        Ok(Some(request.into_request(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::config::core::v3::{Extension, Node};
    use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest};
    use envoy_types::pb::google::rpc;

    use super::*;

    /// A node as in the first request of an Envoy that has many extensions.
    fn node() -> Node {
        Node {
            id: "n".to_owned(),
            extensions: vec![Extension::default(); 10_000],
            ..Node::default()
        }
    }

    fn refused() -> rpc::Status {
        rpc::Status {
            code: 3,
            message: "ä".repeat(REASON_BYTES_MAX),
            ..rpc::Status::default()
        }
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn expected(names: SubscriptionChange) -> EdsRequest {
        EdsRequest {
            node_id: Some("n".to_owned()),
            type_url: "type".to_owned(),
            names,
            nonce: "nonce".to_owned(),
            error: Some("ä".repeat(REASON_BYTES_MAX / 2)),
            bytes: 9,
        }
    }

    /// Decodes a message as `R`, and checks that `R` drops the extensions of the node.
    fn decoded<R: XdsRequest>(message: &impl Message) -> EdsRequest {
        let bytes = message.encode_to_vec();
        let request = R::decode(bytes.as_slice()).unwrap();
        assert!(bytes.len() > 20_000 && request.encoded_len() < 3 * REASON_BYTES_MAX);
        request.into_request(9)
    }

    #[test]
    fn both_variants_have_the_fields_of_envoy_without_its_extensions() {
        let sotw = DiscoveryRequest {
            version_info: "1".to_owned(),
            node: Some(node()),
            resource_names: names(&["a", "b"]),
            type_url: "type".to_owned(),
            response_nonce: "nonce".to_owned(),
            error_detail: Some(refused()),
            ..DiscoveryRequest::default()
        };
        let all = SubscriptionChange::All(names(&["a", "b"]));
        assert_eq!(decoded::<SotwRequest>(&sotw), expected(all));
        let delta = DeltaDiscoveryRequest {
            node: Some(node()),
            type_url: "type".to_owned(),
            resource_names_subscribe: names(&["a"]),
            resource_names_unsubscribe: names(&["b", "c"]),
            initial_resource_versions: [("a".to_owned(), "1".to_owned())].into(),
            response_nonce: "nonce".to_owned(),
            error_detail: Some(refused()),
            ..DeltaDiscoveryRequest::default()
        };
        let change = SubscriptionChange::Delta {
            more: names(&["a"]),
            fewer: names(&["b", "c"]),
        };
        assert_eq!(decoded::<DeltaRequest>(&delta), expected(change));
    }
}
