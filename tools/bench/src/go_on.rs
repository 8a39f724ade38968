//! An ext_proc server that reads nothing and decides nothing: the cost of any picker that runs
//! behind a socket. `bench steps` compares our ext_proc server with it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::process::Command;
use std::sync::Arc;

use envoy_types::pb::envoy::config::core::v3::{HeaderValue, HeaderValueOption};
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::{
    ExternalProcessor, ExternalProcessorServer,
};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Part;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as Answer;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyResponse, CommonResponse, HeaderMutation, HeadersResponse, ProcessingRequest,
    ProcessingResponse, TrailersResponse,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use futures::{Stream, StreamExt};
use testbed::Result;
use testbed::process::ChildProcess;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

/// Longest message the server accepts: the largest body of the bench, and its headers.
const MESSAGE_BYTES_MAX: usize = 2 << 20;

/// An ext_proc server that sends every request to one endpoint.
#[derive(Debug)]
struct PassThroughProcessor {
    endpoint: Arc<str>,
}

/// Starts the server as a separate process.
///
/// # Errors
/// If this program cannot be started again.
pub(crate) fn start(listen: SocketAddr, endpoint: &str, folder: &Path) -> Result<ChildProcess> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args([
        "go-on",
        "--listen",
        &listen.to_string(),
        "--endpoint",
        endpoint,
    ]);
    ChildProcess::spawn("go-on", &mut command, folder)
}

/// Runs the server until the process is ended.
///
/// # Errors
/// If the server cannot listen.
pub(crate) async fn serve(listen: SocketAddr, endpoint: &str) -> Result<()> {
    let service = ExternalProcessorServer::new(PassThroughProcessor {
        endpoint: endpoint.into(),
    })
    .max_decoding_message_size(MESSAGE_BYTES_MAX);
    Ok(Server::builder()
        .tcp_nodelay(true)
        .add_service(service)
        .serve(listen)
        .await?)
}

#[tonic::async_trait]
impl ExternalProcessor for PassThroughProcessor {
    type ProcessStream = Pin<Box<dyn Stream<Item = Result<ProcessingResponse, Status>> + Send>>;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let endpoint = Arc::clone(&self.endpoint);
        Ok(Response::new(
            request
                .into_inner()
                .map(move |message| message.map(|message| answer(&message, &endpoint)))
                .boxed(),
        ))
    }
}

/// Answers one message. The answer to the request body carries the destination, because Envoy holds
/// the request headers until then; all other messages continue unchanged.
fn answer(message: &ProcessingRequest, endpoint: &str) -> ProcessingResponse {
    let body = |response| BodyResponse {
        response: Some(response),
    };
    let response = match &message.request {
        Some(Part::RequestBody(_)) => Some(Answer::RequestBody(body(destination(endpoint)))),
        Some(Part::ResponseBody(_)) => Some(Answer::ResponseBody(body(CommonResponse::default()))),
        Some(Part::RequestHeaders(_)) => Some(Answer::RequestHeaders(HeadersResponse::default())),
        Some(Part::ResponseHeaders(_)) => Some(Answer::ResponseHeaders(HeadersResponse::default())),
        Some(Part::RequestTrailers(_)) => {
            Some(Answer::RequestTrailers(TrailersResponse::default()))
        }
        Some(Part::ResponseTrailers(_)) => {
            Some(Answer::ResponseTrailers(TrailersResponse::default()))
        }
        None => None,
    };
    let asked = matches!(response, Some(Answer::RequestBody(_)));
    ProcessingResponse {
        response,
        dynamic_metadata: asked.then(|| metadata(endpoint)),
        ..ProcessingResponse::default()
    }
}

/// Dynamic metadata in which Envoy's `override_host` policy looks for the destination.
fn metadata(endpoint: &str) -> Struct {
    let one = |name: &str, kind| Struct {
        fields: HashMap::from([(name.to_owned(), Value { kind: Some(kind) })]),
    };
    one(
        "envoy.lb",
        Kind::StructValue(one(
            "x-gateway-destination-endpoint",
            Kind::StringValue(endpoint.to_owned()),
        )),
    )
}

fn destination(endpoint: &str) -> CommonResponse {
    let headers = [
        ("x-gateway-destination-endpoint", endpoint),
        (
            "x-envoy-retry-on",
            "connect-failure,reset,retriable-status-codes",
        ),
        ("x-envoy-max-retries", "2"),
    ];
    let set = |(key, value): (&str, &str)| HeaderValueOption {
        header: Some(HeaderValue {
            key: key.into(),
            raw_value: value.into(),
            ..HeaderValue::default()
        }),
        ..HeaderValueOption::default()
    };
    let mutation = HeaderMutation {
        set_headers: headers.map(set).into(),
        remove_headers: Vec::new(),
    };
    CommonResponse {
        header_mutation: Some(mutation),
        ..CommonResponse::default()
    }
}
