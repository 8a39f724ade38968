//! gRPC through a real Envoy to servers with HTTP/2 without TLS, with `h2c.yaml`: one request for
//! each parser of gRPC.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};

use http::{HeaderMap, HeaderValue, Request, Response, Version};
use http_body_util::BodyExt as _;
use hyper::body::{Bytes, Frame, Incoming};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use testbed::Result;
use testbed::client::{Body, ClientReply, Http2Client, frames, full};
use testbed::envoy::EnvoyConfig;
use testbed::stack::Stack;
use tokio::net::TcpListener;

/// The path, version and body of each request received.
type ReceivedRequests = Arc<Mutex<Vec<(String, Version, Bytes)>>>;

/// A gRPC server that accepts only HTTP/2 and answers each request with the message `message`.
struct GrpcServer {
    address: SocketAddr,
    requests: ReceivedRequests,
}

impl GrpcServer {
    async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let came = ReceivedRequests::default();
        let noted = Arc::clone(&came);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let noted = Arc::clone(&noted);
                let service = service_fn(move |request| answer(request, Arc::clone(&noted)));
                // hyper rejects a client that does not speak HTTP/2.
                tokio::spawn(
                    http2::Builder::new(TokioExecutor::new())
                        .serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        Ok(Self {
            address,
            requests: came,
        })
    }

    fn came(&self) -> Vec<(String, Version, Bytes)> {
        std::mem::take(&mut self.requests.lock().expect("no panic before"))
    }
}

async fn answer(
    request: Request<Incoming>,
    came: ReceivedRequests,
) -> std::result::Result<Response<Body>, Infallible> {
    let path = request.uri().path().to_owned();
    let version = request.version();
    let body = request
        .into_body()
        .collect()
        .await
        .map(http_body_util::Collected::to_bytes)
        .unwrap_or_default();
    came.lock()
        .expect("no panic before")
        .push((path, version, body));
    let trailers = HeaderMap::from_iter([(
        http::HeaderName::from_static("grpc-status"),
        HeaderValue::from_static("0"),
    )]);
    let mut reply = Response::new(frames(vec![
        Frame::data(framed(b"message").into()),
        Frame::trailers(trailers),
    ]));
    reply
        .headers_mut()
        .insert("content-type", HeaderValue::from_static("application/grpc"));
    Ok(reply)
}

/// Returns a gRPC frame.
fn framed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len())
        .expect("a short message")
        .to_be_bytes();
    [&[0][..], &length, message].concat()
}

/// Returns a protobuf field of bytes, with its length as a varint of two bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let length = u16::try_from(bytes.len()).expect("a short field");
    let varint = [(length & 0x7f) as u8 | 0x80, (length >> 7) as u8];
    [&[number << 3 | 2][..], &varint, bytes].concat()
}

/// Returns a chat request of Vertex AI's gRPC API.
fn vertex_chat(json: &str) -> Vec<u8> {
    let http_body = [field(1, b"application/json"), field(2, json.as_bytes())].concat();
    framed(
        &[
            field(1, b"projects/p/locations/l/endpoints/e"),
            field(2, &http_body),
        ]
        .concat(),
    )
}

/// Makes the edit of Envoy's configuration that `h2c.yaml` describes.
fn by_h2c(config: &mut Value) {
    let fragment = EnvoyConfig::shipped("h2c.yaml")
        .expect("a shipped file")
        .value()
        .clone();
    let cluster = config
        .pointer_mut("/static_resources/clusters/0")
        .and_then(Value::as_object_mut)
        .expect("the pool's cluster");
    assert_eq!(cluster["name"], "inference-pool");
    cluster.extend(fragment.as_object().expect("keys of a cluster").clone());
}

fn with_parser(folder: &Path, parser: &str) -> Result<String> {
    let file = folder.join("config.json");
    let config = json!({
        "apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig", "plugins": [{"type": parser}, {"type": "queue-scorer"}],
        "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": "queue-scorer"}]}],
        "parser": {"pluginRef": parser},
    });
    std::fs::write(&file, config.to_string())?;
    Ok(file.display().to_string())
}

/// Sends one message to `path` with this parser. Returns the reply and the requests that the server
/// received.
async fn sent(
    parser: &str,
    path: &str,
    message: Vec<u8>,
) -> Result<(ClientReply, Vec<(String, Version, Bytes)>)> {
    let server = GrpcServer::start().await?;
    let folder = tempfile::tempdir()?;
    let config = with_parser(folder.path(), parser)?;
    let stack = Stack::builder()
        .servers(0)
        .stranger(server.address)
        .envoy_config(by_h2c)
        .picker(json!({"explain": true}));
    let stack = stack
        .daemon_arguments(&["--config", &config])
        .shared_envoy()
        .start()
        .await?;
    let request = Request::post(path)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("x-switchpoint-explain", "1");
    let reply = Http2Client::connect(stack.address())
        .await?
        .send(request.body(full(message))?)
        .await?;
    Ok((reply, server.came()))
}

fn is_whole(reply: &ClientReply) -> bool {
    let status = reply
        .trailers
        .as_ref()
        .and_then(|trailers| trailers.get("grpc-status"));
    reply.status == 200
        && reply.body == framed(b"message")
        && status.is_some_and(|status| status == "0")
}

fn prompt_tokens(reply: &ClientReply) -> Result<u64> {
    let decision: Value = serde_json::from_str(reply.header("x-switchpoint-decision"))?;
    let predicted = &decision["candidates"][0]["predicted"];
    predicted["uncached_tokens"]
        .as_u64()
        .ok_or_else(|| format!("no prompt in {decision}").into())
}

#[tokio::test]
async fn a_grpc_chat_of_vertex_ai_is_read_and_goes_on_by_h2c() -> Result<()> {
    let path = "/google.cloud.aiplatform.v1beta1.PredictionService/ChatCompletions";
    let chat = json!({"model": "demo", "messages": [{"role": "user", "content": "many words ".repeat(100)}]});
    let message = vertex_chat(&chat.to_string());
    let (reply, came) = sent("vertexai-parser", path, message.clone()).await?;
    assert!(is_whole(&reply), "{reply:?}");
    assert_eq!(
        came,
        [(path.to_owned(), Version::HTTP_2, Bytes::from(message))],
        "the message arrives unchanged"
    );
    assert!(
        prompt_tokens(&reply)? > 200,
        "the prompt is counted: {}",
        reply.header("x-switchpoint-decision")
    );

    let (wrong, came) = sent("vertexai-parser", path, vertex_chat("{no JSON")).await?;
    assert!(
        !is_whole(&wrong) && came.is_empty(),
        "an unreadable message is a client error: {wrong:?}"
    );
    Ok(())
}

#[tokio::test]
async fn a_grpc_request_of_vllm_goes_on_unread_by_h2c() -> Result<()> {
    let path = "/vllm.grpc.engine.VllmEngine/Generate";
    let message = framed(&field(1, b"request-1"));
    let (reply, came) = sent("vllmgrpc-parser", path, message.clone()).await?;
    assert!(is_whole(&reply), "{reply:?}");
    assert_eq!(
        came,
        [(path.to_owned(), Version::HTTP_2, Bytes::from(message))]
    );
    assert_eq!(prompt_tokens(&reply)?, 4, "by the size of its body");
    Ok(())
}
