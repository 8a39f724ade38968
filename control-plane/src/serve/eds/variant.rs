//! The responses of both variants of EDS: state of the world and incremental.

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
    DeltaDiscoveryResponse, DiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Any, Struct, Value};
use prost::Message;

use super::request::{DeltaRequest, SotwRequest, XdsRequest};
use super::subscription::DueResponse;
use crate::pool::writer::PoolView;
use crate::state::pool_views::PoolViews;

/// The only resource type that this daemon serves.
pub const TYPE_URL: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

/// The differences of the two variants: their messages.
pub(super) trait XdsVariant: Send + 'static {
    type XdsRequest: XdsRequest<Response = Self::XdsResponse>;
    type XdsResponse: Message + 'static;

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
    type XdsRequest = SotwRequest;
    type XdsResponse = DiscoveryResponse;

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
    type XdsRequest = DeltaRequest;
    type XdsResponse = DeltaDiscoveryResponse;

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
