//! EDS as Envoy uses it.

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::config::endpoint::v3::ClusterLoadAssignment;
use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use envoy_types::pb::envoy::service::endpoint::v3::endpoint_discovery_service_client::EndpointDiscoveryServiceClient;
use envoy_types::pb::google::protobuf::value::Kind;
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use super::harness::{DaemonHarness, EnvoyStream, assignment, instance, ports};

#[tokio::test]
async fn the_set_is_named_after_the_pool_and_can_be_failed_open() {
    let rig = DaemonHarness::start(vec![instance("a", 1), instance("b", 2)]).await;
    let mut envoy = EnvoyStream::connect(rig.address, "n").await;
    let response = envoy.next().await.unwrap();
    assert_eq!(response.type_url, control_plane::serve::eds::TYPE_URL);
    let set = assignment(&response);
    assert_eq!(set.cluster_name, "default");
    for endpoint in set.endpoints.iter().flat_map(|l| &l.lb_endpoints) {
        let open = &endpoint.metadata.as_ref().unwrap().filter_metadata["envoy.lb"].fields["open"];
        assert_eq!(open.kind, Some(Kind::StringValue("1".to_owned())));
    }
}

#[tokio::test]
async fn a_name_that_is_requested_again_is_answered_again() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let mut envoy = EnvoyStream::connect(rig.address, "n").await;
    let first = envoy.next().await.unwrap();
    envoy.send(&first.nonce, None, &[]).await;
    envoy.send(&first.nonce, None, &["default"]).await;
    let again = envoy.next().await.unwrap();
    assert_eq!(ports(&again), [1]);
    assert_ne!(again.nonce, first.nonce);
}

#[tokio::test]
async fn another_type_is_refused_by_name() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let channel = tonic::transport::Channel::from_shared(format!("http://{}", rig.address))
        .unwrap()
        .connect()
        .await
        .unwrap();
    let (outbound, messages) = mpsc::channel(1);
    let mut inbound = EndpointDiscoveryServiceClient::new(channel)
        .delta_endpoints(ReceiverStream::new(messages))
        .await
        .unwrap()
        .into_inner();
    let request = DeltaDiscoveryRequest {
        type_url: "type.googleapis.com/envoy.config.cluster.v3.Cluster".to_owned(),
        ..Default::default()
    };
    outbound.send(request).await.unwrap();
    let status = inbound.message().await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("Cluster"), "{}", status.message());
}

#[tokio::test]
async fn the_incremental_variant_sends_the_same_set() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let channel = tonic::transport::Channel::from_shared(format!("http://{}", rig.address))
        .unwrap()
        .connect()
        .await
        .unwrap();
    let (outbound, messages) = mpsc::channel(4);
    let mut inbound = EndpointDiscoveryServiceClient::new(channel)
        .delta_endpoints(ReceiverStream::new(messages))
        .await
        .unwrap()
        .into_inner();
    let node = Some(Node {
        id: "n".to_owned(),
        ..Node::default()
    });
    let subscribe = DeltaDiscoveryRequest {
        node,
        resource_names_subscribe: vec!["default".to_owned()],
        ..Default::default()
    };
    outbound.send(subscribe).await.unwrap();
    let first = inbound.message().await.unwrap().unwrap();
    assert_eq!(first.resources[0].name, "default");
    outbound
        .send(DeltaDiscoveryRequest {
            response_nonce: first.nonce,
            ..Default::default()
        })
        .await
        .unwrap();
    rig.reset(vec![instance("a", 1), instance("b", 2)]).await;
    let second = inbound.message().await.unwrap().unwrap();
    let set = ClusterLoadAssignment::decode(
        second.resources[0]
            .resource
            .as_ref()
            .unwrap()
            .value
            .as_slice(),
    )
    .unwrap();
    assert_eq!(set.endpoints[0].lb_endpoints.len(), 2);
    assert_ne!(first.resources[0].version, second.resources[0].version);
}
