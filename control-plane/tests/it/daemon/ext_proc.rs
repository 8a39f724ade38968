//! The ext_proc server for gateways without the filter, over real gRPC: access, selection of the
//! pool, health and counts.

use std::net::SocketAddr;
use std::time::Duration;

use ::ext_proc::{DESTINATION_FORMAT, POOL};
use control_plane::serve::health::{EXT_PROC, INFERENCE_EXTENSION, LIVENESS, READINESS};
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Part;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as Answer;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpHeaders, ProcessingRequest, ProcessingResponse,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status, Streaming};
use tonic_health::ServingStatus;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use super::harness::{daemon, endpoints, get, get_json, until, write};
use super::tls::{TlsAuthority, connect, tls};

/// The gateway's side of one stream.
pub(super) struct GatewayStream {
    outbound: mpsc::Sender<ProcessingRequest>,
    inbound: Streaming<ProcessingResponse>,
}

pub(super) async fn plain(address: SocketAddr) -> Channel {
    Channel::from_shared(format!("http://{address}"))
        .unwrap()
        .connect()
        .await
        .unwrap()
}

impl GatewayStream {
    pub(super) async fn ask(
        channel: Channel,
        metadata: &[(&'static str, &str)],
    ) -> Result<Self, Status> {
        let (outbound, messages) = mpsc::channel(16);
        let mut request = Request::new(ReceiverStream::new(messages));
        for (key, value) in metadata {
            request.metadata_mut().insert(*key, value.parse().unwrap());
        }
        let inbound = ExternalProcessorClient::new(channel)
            .process(request)
            .await?
            .into_inner();
        Ok(Self { outbound, inbound })
    }

    async fn say(&mut self, pairs: &[(&str, &str)], reply: bool) -> Answer {
        let header = |(name, value): &(&str, &str)| HeaderValue {
            key: (*name).into(),
            raw_value: (*value).into(),
            ..HeaderValue::default()
        };
        let headers = Some(HeaderMap {
            headers: pairs.iter().map(header).collect(),
        });
        let headers = HttpHeaders {
            headers,
            end_of_stream: true,
            ..HttpHeaders::default()
        };
        let part = if reply {
            Part::ResponseHeaders(headers)
        } else {
            Part::RequestHeaders(headers)
        };
        self.outbound
            .send(ProcessingRequest {
                request: Some(part),
                ..ProcessingRequest::default()
            })
            .await
            .unwrap();
        self.inbound
            .message()
            .await
            .unwrap()
            .unwrap()
            .response
            .unwrap()
    }

    /// Sends a request without a body, and returns its destination.
    pub(super) async fn destination(&mut self) -> String {
        match self
            .say(&[(":method", "GET"), (":path", "/v1/models")], false)
            .await
        {
            Answer::RequestHeaders(answer) => {
                let set = answer
                    .response
                    .unwrap()
                    .header_mutation
                    .unwrap()
                    .set_headers;
                let header = set
                    .into_iter()
                    .filter_map(|option| option.header)
                    .find(|h| h.key == "x-gateway-destination-endpoint");
                String::from_utf8(header.unwrap().raw_value).unwrap()
            }
            Answer::ImmediateResponse(reply) => format!("{}", reply.status.unwrap().code),
            other => panic!("{other:?}"),
        }
    }
}

pub(super) async fn serving(channel: &Channel, service: &str) -> Result<bool, Code> {
    let request = HealthCheckRequest {
        service: service.to_owned(),
    };
    let answer = HealthClient::new(channel.clone())
        .check(request)
        .await
        .map_err(|status| status.code())?;
    Ok(answer.into_inner().status == ServingStatus::Serving as i32)
}

#[tokio::test]
async fn health_is_that_of_the_protocol() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("endpoints.yaml");
    write(&file, "endpoints: [");
    let daemon = daemon(&[
        "--endpoints-file",
        file.to_str().unwrap(),
        "--ext-proc-plaintext",
    ])
    .await;
    let health = plain(daemon.health_address.unwrap()).await;
    let ext_proc = plain(daemon.ext_proc_address.unwrap()).await;
    let [liveness, readiness, service] = [LIVENESS, READINESS, EXT_PROC];
    for channel in [&health, &ext_proc] {
        for alive in ["", liveness, INFERENCE_EXTENSION] {
            assert_eq!(
                serving(channel, alive).await,
                Ok(true),
                "{alive:?}: it is alive"
            );
        }
        assert_eq!(
            [
                serving(channel, readiness).await,
                serving(channel, service).await
            ],
            [Ok(false), Ok(false)],
            "it has no state yet"
        );
        assert_eq!(serving(channel, "another").await, Err(Code::NotFound));
    }
    write(&file, &endpoints(&[1]));
    until("it is ready", || async {
        serving(&health, readiness).await == Ok(true)
            && serving(&ext_proc, service).await == Ok(true)
    })
    .await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_stream_says_what_it_wants() {
    let folder = tempfile::tempdir().unwrap();
    let files = ["a", "b"].map(|name| folder.path().join(name));
    write(&files[0], &endpoints(&[1]));
    write(&files[1], &endpoints(&[2, 3]));
    let [a, b] = files.each_ref().map(|file| file.display());
    let pools = folder.path().join("pools.yaml");
    write(
        &pools,
        &format!("pools:\n- {{name: a, endpointsFile: {a}}}\n- {{name: b, endpointsFile: {b}}}\n"),
    );
    let daemon = daemon(&["--pools", pools.to_str().unwrap(), "--ext-proc-plaintext"]).await;
    let channel = plain(daemon.ext_proc_address.unwrap()).await;
    let to = async |metadata: &[(&'static str, &str)]| {
        GatewayStream::ask(channel.clone(), metadata)
            .await
            .unwrap()
            .destination()
            .await
    };
    assert_eq!(to(&[(POOL, "a")]).await, "127.0.0.1:1");
    let single = to(&[(POOL, "b")]).await;
    assert!(
        ["127.0.0.1:2", "127.0.0.1:3"].contains(&single.as_str()),
        "{single}"
    );
    let list = to(&[(POOL, "b"), (DESTINATION_FORMAT, "list")]).await;
    assert!(
        ["127.0.0.1:2,127.0.0.1:3", "127.0.0.1:3,127.0.0.1:2"].contains(&list.as_str()),
        "{list}"
    );
    for (metadata, why) in [
        (&[][..], "which pool?"),
        (&[(POOL, "c")], "no pool \"c\""),
        (
            &[(POOL, "b"), (DESTINATION_FORMAT, "map")],
            "not single or list",
        ),
    ] {
        let Err(refused) = GatewayStream::ask(channel.clone(), metadata).await else {
            panic!("{metadata:?}")
        };
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains(why), "{refused}");
    }
    daemon.stop().await;
}

#[tokio::test]
async fn what_it_does_is_counted_and_what_it_holds_is_released() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1", "--ext-proc-plaintext"]).await;
    let channel = plain(daemon.ext_proc_address.unwrap()).await;
    let row =
        async || get_json(daemon.admin_address, "/debug/endpoints").await["endpoints"][0].clone();
    let mut first = GatewayStream::ask(channel.clone(), &[]).await.unwrap();
    assert_eq!(first.destination().await, "127.0.0.1:1");
    until("the pick is reported", || async {
        row().await["in_flight"] == 1 && row().await["picked"] == 1
    })
    .await;
    first.say(&[(":status", "500")], true).await;
    drop(first);
    let mut second = GatewayStream::ask(channel.clone(), &[]).await.unwrap();
    second.destination().await;
    until("ended requests are released", || async {
        row().await["in_flight"] == 1 && row().await["picked"] == 2
    })
    .await;
    let page = get(daemon.admin_address, "/metrics").await.1;
    for line in [
        "llm_d_epp_extproc_streams_inflight 1",
        "llm_d_epp_extproc_streams_total 2",
    ] {
        assert!(
            page.lines().any(|l| l.starts_with(line)),
            "{line} in\n{page}"
        );
    }
    drop(second);
    until("all of it", || async { row().await["in_flight"] == 0 }).await;
    daemon.stop().await;
}

#[tokio::test]
async fn an_endpoint_that_leaves_keeps_its_slot_until_the_ext_proc_server_acknowledges() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("endpoints.yaml");
    write(&file, &endpoints(&[1, 2]));
    let daemon = daemon(&[
        "--endpoints-file",
        file.to_str().unwrap(),
        "--ext-proc-plaintext",
    ])
    .await;
    let channel = plain(daemon.ext_proc_address.unwrap()).await;
    let list = async || {
        GatewayStream::ask(channel.clone(), &[(DESTINATION_FORMAT, "list")])
            .await
            .unwrap()
            .destination()
            .await
    };
    assert_eq!(list().await.split(',').count(), 2);
    write(&file, &endpoints(&[2]));
    until("the endpoint is gone", || async {
        list().await == "127.0.0.1:2"
    })
    .await;
    let settled = || async {
        let state = get_json(daemon.admin_address, "/debug/state").await;
        state["pools"][0]["departing"] == 0
    };
    until(
        "its slot is free: the ext_proc server acknowledged too",
        settled,
    )
    .await;
    write(&file, &endpoints(&[]));
    until("nobody is left", || async { list().await == "503" }).await;
    daemon.stop().await;
}

#[tokio::test]
async fn plaintext_is_served_only_if_configured() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1"]).await;
    let address = daemon.ext_proc_address.unwrap();
    let clear = Channel::from_shared(format!("http://{address}"))
        .unwrap()
        .connect()
        .await;
    let refused = match clear {
        Err(_) => true,
        Ok(channel) => GatewayStream::ask(channel, &[]).await.is_err(),
    };
    assert!(refused, "TLS is the default");
    daemon.stop().await;
}

#[tokio::test]
async fn a_gateway_without_a_certificate_of_the_client_ca_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let ours = TlsAuthority::new();
    let theirs = TlsAuthority::new();
    let (cert, key) = ours.put(folder.path());
    let ca = folder.path().join("ca.pem");
    write(&ca, &ours.pem);
    let [cert, key, ca] = [&cert, &key, &ca].map(|path| path.to_str().unwrap());
    let daemon = daemon(&[
        "--endpoint",
        "127.0.0.1:1",
        "--ext-proc-tls-cert",
        cert,
        "--ext-proc-tls-key",
        key,
        "--ext-proc-tls-client-ca",
        ca,
    ])
    .await;
    let address = daemon.ext_proc_address.unwrap();
    let served = async |client: Option<&TlsAuthority>| {
        // With TLS 1.3 the client learns of the refusal when it reads.
        let Ok(channel) = connect(address, tls(&ours, client)).await else {
            return false;
        };
        let Ok(mut gateway) = GatewayStream::ask(channel, &[]).await else {
            return false;
        };
        gateway.destination().await == "127.0.0.1:1"
    };
    assert!(!served(None).await, "without a certificate");
    assert!(!served(Some(&theirs)).await, "of another authority");
    assert!(served(Some(&ours)).await);
    daemon.stop().await;
}

#[tokio::test]
async fn certificates_are_read_again_when_they_change() {
    let folder = tempfile::tempdir().unwrap();
    let cert = folder.path().join("cert.pem");
    let key = folder.path().join("key.pem");
    let put = || {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        write(&key, &made.signing_key.serialize_pem());
        write(&cert, &made.cert.pem());
        made.cert.pem()
    };
    let old = put();
    let arguments = [
        "--endpoint",
        "127.0.0.1:1",
        "--ext-proc-tls-cert",
        cert.to_str().unwrap(),
        "--ext-proc-tls-key",
        key.to_str().unwrap(),
    ];
    let daemon = daemon(&arguments).await;
    let address = daemon.ext_proc_address.unwrap();
    let served = async |authority: &str| {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(authority))
            .domain_name("localhost");
        let endpoint = Endpoint::from_shared(format!("https://localhost:{}", address.port()))
            .unwrap()
            .tls_config(tls)
            .unwrap();
        let Ok(channel) = endpoint.connect().await else {
            return false;
        };
        GatewayStream::ask(channel, &[])
            .await
            .unwrap()
            .destination()
            .await
            == "127.0.0.1:1"
    };
    assert!(served(&old).await);
    let new = put();
    until("the new certificate is shown", || served(&new)).await;
    assert!(!served(&old).await);
    tokio::time::timeout(Duration::from_secs(20), daemon.stop())
        .await
        .unwrap();
}
