//! The messages of both variants of EDS: state of the world and incremental.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;

use envoy_types::pb::envoy::config::core::v3::address::Address as AddressKind;
use envoy_types::pb::envoy::config::core::v3::socket_address::{PortSpecifier, Protocol};
use envoy_types::pb::envoy::config::core::v3::{Address, Metadata, SocketAddress};
use envoy_types::pb::envoy::config::endpoint::v3::lb_endpoint::HostIdentifier;
use envoy_types::pb::envoy::config::endpoint::v3::{
    ClusterLoadAssignment, Endpoint, LbEndpoint, LocalityLbEndpoints,
};
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Any, Struct, Value};
use envoy_types::pb::google::rpc;
use prost::Message;

use super::subscription::DueResponse;
use crate::pool::writer::PoolView;
use crate::serve::state_stream::admission::REASON_BYTES_MAX;
use crate::state::pool_views::PoolViews;

/// The only resource type that this daemon serves.
pub const TYPE_URL: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

/// The parts of a request that matter, for both variants.
pub(super) struct EdsRequest {
    pub(super) node_id: Option<String>,
    pub(super) type_url: String,
    pub(super) names: SubscriptionChange,
    pub(super) nonce: String,
    pub(super) error: Option<String>,
}

pub(super) enum SubscriptionChange {
    /// All names that are subscribed now.
    All(Vec<String>),
    /// Names added and names removed.
    Delta {
        more: Vec<String>,
        fewer: Vec<String>,
    },
}

/// The differences of the two variants: their messages.
pub(super) trait XdsVariant: Send + 'static {
    type XdsRequest: Send + 'static;
    type XdsResponse: Send + 'static;

    fn bytes(request: &Self::XdsRequest) -> usize;
    fn parse_request(request: Self::XdsRequest) -> EdsRequest;
    fn build_response(
        due: &DueResponse,
        names: &BTreeSet<String>,
        pools: &PoolViews,
        version: String,
    ) -> Self::XdsResponse;
}

pub(super) struct SotwXds;
pub(super) struct DeltaXds;

// === impl SotwXds ===

impl XdsVariant for SotwXds {
    type XdsRequest = DiscoveryRequest;
    type XdsResponse = DiscoveryResponse;

    fn bytes(request: &DiscoveryRequest) -> usize {
        request.encoded_len()
    }

    fn parse_request(request: DiscoveryRequest) -> EdsRequest {
        EdsRequest {
            node_id: request.node.map(|n| n.id),
            type_url: request.type_url,
            names: SubscriptionChange::All(request.resource_names),
            nonce: request.response_nonce,
            error: request.error_detail.map(reason),
        }
    }

    fn build_response(
        due: &DueResponse,
        names: &BTreeSet<String>,
        pools: &PoolViews,
        version: String,
    ) -> DiscoveryResponse {
        let resources = names
            .iter()
            .filter_map(|name| pools.get(name))
            .map(resource)
            .collect();
        DiscoveryResponse {
            version_info: version,
            resources,
            type_url: TYPE_URL.to_owned(),
            nonce: due.nonce.clone(),
            ..DiscoveryResponse::default()
        }
    }
}

// === impl DeltaXds ===

impl XdsVariant for DeltaXds {
    type XdsRequest = DeltaDiscoveryRequest;
    type XdsResponse = DeltaDiscoveryResponse;

    fn bytes(request: &DeltaDiscoveryRequest) -> usize {
        request.encoded_len()
    }

    fn parse_request(request: DeltaDiscoveryRequest) -> EdsRequest {
        EdsRequest {
            node_id: request.node.map(|n| n.id),
            type_url: request.type_url,
            names: SubscriptionChange::Delta {
                more: request.resource_names_subscribe,
                fewer: request.resource_names_unsubscribe,
            },
            nonce: request.response_nonce,
            error: request.error_detail.map(reason),
        }
    }

    fn build_response(
        due: &DueResponse,
        _names: &BTreeSet<String>,
        pools: &PoolViews,
        version: String,
    ) -> DeltaDiscoveryResponse {
        let resources = due
            .changed
            .iter()
            .filter_map(|name| pools.get(name))
            .map(|view| Resource {
                name: view.name.to_string(),
                version: version.clone(),
                resource: Some(resource(view)),
                ..Resource::default()
            })
            .collect();
        DeltaDiscoveryResponse {
            system_version_info: version,
            resources,
            type_url: TYPE_URL.to_owned(),
            nonce: due.nonce.clone(),
            ..DeltaDiscoveryResponse::default()
        }
    }
}

/// Returns the reason why Envoy refused a response, truncated to [`REASON_BYTES_MAX`].
fn reason(error: rpc::Status) -> String {
    let rpc::Status { mut message, .. } = error;
    message.truncate(message.floor_char_boundary(REASON_BYTES_MAX));
    message
}

fn resource(view: &PoolView) -> Any {
    let assignment = ClusterLoadAssignment {
        cluster_name: view.name.to_string(),
        endpoints: vec![LocalityLbEndpoints {
            lb_endpoints: view
                .eds
                .addresses
                .iter()
                .map(|&address| lb_endpoint(address))
                .collect(),
            ..LocalityLbEndpoints::default()
        }],
        ..ClusterLoadAssignment::default()
    };
    Any {
        type_url: TYPE_URL.to_owned(),
        value: assignment.encode_to_vec(),
    }
}

fn lb_endpoint(address: SocketAddr) -> LbEndpoint {
    let socket_address = SocketAddress {
        protocol: Protocol::Tcp.into(),
        address: address.ip().to_string(),
        port_specifier: Some(PortSpecifier::PortValue(u32::from(address.port()))),
        ..SocketAddress::default()
    };
    let address = Address {
        address: Some(AddressKind::SocketAddress(socket_address)),
    };
    let open = Value {
        kind: Some(Kind::StringValue("1".to_owned())),
    };
    let metadata = Metadata {
        filter_metadata: HashMap::from([(
            "envoy.lb".to_owned(),
            Struct {
                fields: HashMap::from([("open".to_owned(), open)]),
            },
        )]),
        ..Metadata::default()
    };
    LbEndpoint {
        metadata: Some(metadata),
        host_identifier: Some(HostIdentifier::Endpoint(Endpoint {
            address: Some(address),
            ..Endpoint::default()
        })),
        ..LbEndpoint::default()
    }
}
