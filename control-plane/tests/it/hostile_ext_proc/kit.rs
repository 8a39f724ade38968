//! The daemon as a process, a hostile peer that sends any bytes on a gRPC stream, and a
//! well-behaved neighbour.

use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Part;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as Answer;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpBody, HttpHeaders, ImmediateResponse, ProcessingRequest, ProcessingResponse,
    ProtocolConfiguration,
};
use http_body_util::{BodyExt, StreamBody};
use prost::Message;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::client::GrpcService;
use tonic::codegen::Bytes;
use tonic::transport::{Channel, Endpoint};

use crate::daemon::harness::{get, get_json, until};

/// The maximum memory that the daemon may take in bytes, whatever its peers do. The shipped
/// manifest limits the daemon to 1 GiB.
pub(crate) const RSS_BYTES_MAX: u64 = 700 << 20;

/// The maximum time of a pick of the neighbour. Normally a pick takes a millisecond. The rest is
/// for a busy machine, where the flood itself takes the cores for seconds.
pub(crate) const PICK_MAX: Duration = Duration::from_secs(15);

const PATH: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";

/// A separate daemon process, with one endpoint by default.
pub(crate) struct DaemonProgram {
    child: Child,
    pub(crate) ext_proc: SocketAddr,
    pub(crate) state: SocketAddr,
    pub(crate) admin: SocketAddr,
}

/// One gRPC stream, sent byte by byte.
pub(crate) struct RawStream {
    bytes: mpsc::Sender<Bytes>,
    answers: JoinHandle<(Vec<ProcessingResponse>, Option<Status>)>,
}

/// A client that makes picks all the time.
pub(crate) struct SteadyClient {
    stop: Arc<AtomicBool>,
    picks: Arc<AtomicU64>,
    task: JoinHandle<Duration>,
}

fn free_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
}

// === impl DaemonProgram ===

impl DaemonProgram {
    pub(crate) async fn start() -> Self {
        Self::with_endpoints(&["127.0.0.1:1"]).await
    }

    pub(crate) async fn with_endpoints(endpoints: &[&str]) -> Self {
        let [ext_proc, state, admin] = [(); 3].map(|()| free_port());
        let child = Command::new(env!("CARGO_BIN_EXE_switchpointd"))
            .args(["serve", "--ext-proc-plaintext", "--listen-health", "none"])
            .args([
                "--listen-ext-proc",
                &ext_proc.to_string(),
                "--listen-state",
                &state.to_string(),
                "--listen-admin",
                &admin.to_string(),
            ])
            .args(
                endpoints
                    .iter()
                    .flat_map(|address| ["--endpoint", *address]),
            )
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let program = Self {
            child,
            ext_proc,
            state,
            admin,
        };
        until("the daemon listens", || async {
            tokio::net::TcpStream::connect(ext_proc).await.is_ok()
        })
        .await;
        until("it has state", || async {
            pick(&program.channel().await).await.is_ok()
        })
        .await;
        program
    }

    /// Opens a new connection.
    pub(crate) async fn channel(&self) -> Channel {
        self.endpoint().connect().await.unwrap()
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        Endpoint::from_shared(format!("http://{}", self.ext_proc)).unwrap()
    }

    /// Returns a figure of `/proc/PID/status`, in kB.
    fn status(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))
            .expect("the daemon lives");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    }

    /// Returns the maximum memory of the process so far, in bytes.
    pub(crate) fn peak_rss(&self) -> u64 {
        self.status("VmHWM:") * 1024
    }

    /// Returns the memory of the process now, in bytes.
    pub(crate) fn rss(&self) -> u64 {
        self.status("VmRSS:") * 1024
    }

    /// Returns the CPU time of the process so far.
    pub(crate) fn cpu(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        let ticks: u64 = [fields[11], fields[12]]
            .iter()
            .map(|field| field.parse::<u64>().unwrap())
            .sum();
        Duration::from_millis(ticks * 10) // Linux counts 100 ticks a second.
    }

    /// Returns the value of a metric without labels.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let page = get(self.admin, "/metrics").await.1;
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
            .unwrap_or_else(|| panic!("no {name} in\n{page}"));
        line.parse().unwrap()
    }

    pub(crate) async fn in_flight(&self) -> u64 {
        let page = get_json(self.admin, "/debug/endpoints").await;
        let endpoints = page["endpoints"].as_array().unwrap().iter();
        endpoints
            .map(|row| row["in_flight"].as_u64().unwrap())
            .sum()
    }

    /// Waits until everything that hostile peers held is released.
    pub(crate) async fn settled(&self) {
        until("nothing is in flight", || async {
            self.in_flight().await == 0
        })
        .await;
        until("no stream is open", || async {
            self.metric("llm_d_epp_extproc_streams_inflight").await == 0.0
        })
        .await;
        until("no bytes are held", || async {
            self.metric("switchpoint_ext_proc_held_bytes").await == 0.0
        })
        .await;
    }
}

impl Drop for DaemonProgram {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// === messages ===

pub(crate) fn framed(message: &ProcessingRequest) -> Bytes {
    framed_bytes(&message.encode_to_vec())
}

/// Returns a gRPC message of any bytes.
pub(crate) fn framed_bytes(message: &[u8]) -> Bytes {
    let mut framed = vec![0];
    framed.extend_from_slice(&u32::try_from(message.len()).unwrap().to_be_bytes());
    framed.extend_from_slice(message);
    framed.into()
}

pub(crate) fn said(part: Part) -> ProcessingRequest {
    ProcessingRequest {
        request: Some(part),
        ..ProcessingRequest::default()
    }
}

pub(crate) fn headers(pairs: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    let header = |(name, value): &(&str, &str)| HeaderValue {
        key: (*name).into(),
        raw_value: (*value).into(),
        ..HeaderValue::default()
    };
    HttpHeaders {
        headers: Some(HeaderMap {
            headers: pairs.iter().map(header).collect(),
        }),
        end_of_stream,
        ..HttpHeaders::default()
    }
}

/// Returns the beginning of a chat request whose body is sent in this mode.
pub(crate) fn chat(mode: BodySendMode) -> ProcessingRequest {
    post(mode, &[(":path", "/v1/chat/completions")])
}

/// Returns the beginning of a request with these headers whose body is sent in this mode.
pub(crate) fn post(mode: BodySendMode, more: &[(&str, &str)]) -> ProcessingRequest {
    let config = ProtocolConfiguration {
        request_body_mode: mode.into(),
        response_body_mode: mode.into(),
        ..ProtocolConfiguration::default()
    };
    let headers = headers(&[&[(":method", "POST")][..], more].concat(), false);
    ProcessingRequest {
        protocol_config: Some(config),
        ..said(Part::RequestHeaders(headers))
    }
}

pub(crate) fn body(bytes: impl Into<Vec<u8>>, end_of_stream: bool) -> ProcessingRequest {
    said(Part::RequestBody(HttpBody {
        body: bytes.into(),
        end_of_stream,
        ..HttpBody::default()
    }))
}

pub(crate) fn prompt() -> ProcessingRequest {
    body(
        r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#,
        true,
    )
}

// === impl RawStream ===

impl RawStream {
    pub(crate) fn open(channel: &Channel) -> Self {
        Self::with_metadata(channel, &[])
    }

    pub(crate) fn with_metadata(channel: &Channel, metadata: &[(&str, &str)]) -> Self {
        Self::over(channel, metadata, true)
    }

    /// Opens a stream as a peer that reads no answers.
    pub(crate) fn unread(channel: &Channel) -> Self {
        Self::over(channel, &[], false)
    }

    fn over(channel: &Channel, metadata: &[(&str, &str)], reads: bool) -> Self {
        let (bytes, sent) = mpsc::channel::<Bytes>(4);
        let frames =
            ReceiverStream::new(sent).map(|bytes| Ok::<_, Status>(http_body::Frame::data(bytes)));
        let mut request = http::Request::post(format!("http://d{PATH}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        for (name, value) in metadata {
            request = request.header(*name, *value);
        }
        let request = request
            .body(tonic::body::Body::new(StreamBody::new(frames)))
            .unwrap();
        let mut channel = channel.clone();
        let answers = tokio::spawn(async move {
            let failed = |error: tonic::transport::Error| {
                (Vec::new(), Some(Status::from_error(error.into())))
            };
            if let Err(error) = futures::future::poll_fn(|cx| {
                GrpcService::<tonic::body::Body>::poll_ready(&mut channel, cx)
            })
            .await
            {
                return failed(error);
            }
            match GrpcService::<tonic::body::Body>::call(&mut channel, request).await {
                Ok(response) if reads => read(response).await,
                Ok(_response) => futures::future::pending().await,
                Err(error) => failed(error),
            }
        });
        Self { bytes, answers }
    }

    /// Sends these bytes. Returns false if the daemon accepts no more.
    pub(crate) async fn send(&self, bytes: Bytes) -> bool {
        self.bytes.send(bytes).await.is_ok()
    }

    pub(crate) async fn say(&self, message: &ProcessingRequest) -> bool {
        self.send(framed(message)).await
    }

    pub(crate) fn is_answered(&self) -> bool {
        self.answers.is_finished()
    }

    /// Ends the sending side. Returns all answers, and the status if it is an error.
    pub(crate) async fn end(self) -> (Vec<ProcessingResponse>, Option<Status>) {
        drop(self.bytes);
        tokio::time::timeout(Duration::from_secs(20), self.answers)
            .await
            .expect("the daemon leaves its peer hanging")
            .unwrap()
    }

    /// Sends nothing more, and returns when the daemon has ended the stream.
    pub(crate) async fn ended(self) -> (Vec<ProcessingResponse>, Option<Status>) {
        tokio::time::timeout(Duration::from_secs(20), self.answers)
            .await
            .expect("the daemon leaves its peer hanging")
            .unwrap()
    }

    /// Resets the stream.
    pub(crate) fn leave(self) {
        self.answers.abort();
    }
}

async fn read(
    response: http::Response<tonic::body::Body>,
) -> (Vec<ProcessingResponse>, Option<Status>) {
    let mut bytes = Vec::new();
    let mut trailers = Status::from_header_map(response.headers());
    let mut body = response.into_body();
    while let Some(frame) = body.frame().await {
        match frame {
            // A body that has failed once fails forever, so reading on would never end.
            Err(status) => {
                trailers = Some(status);
                break;
            }
            Ok(frame) => match frame.into_data() {
                Ok(data) => bytes.extend_from_slice(&data),
                Err(frame) => {
                    trailers = frame
                        .into_trailers()
                        .ok()
                        .and_then(|map| Status::from_header_map(&map))
                        .or(trailers);
                }
            },
        }
    }
    let mut answers = Vec::new();
    let mut rest = &bytes[..];
    while let [_, a, b, c, d, more @ ..] = rest {
        let (message, after) = more.split_at(u32::from_be_bytes([*a, *b, *c, *d]) as usize);
        answers.push(ProcessingResponse::decode(message).unwrap());
        rest = after;
    }
    (
        answers,
        trailers.filter(|status| status.code() != tonic::Code::Ok),
    )
}

/// Returns the reply to the client that is among the answers, if the answers have one.
pub(crate) fn immediate(answers: &[ProcessingResponse]) -> Option<&ImmediateResponse> {
    answers.iter().find_map(|answer| match &answer.response {
        Some(Answer::ImmediateResponse(reply)) => Some(reply),
        _ => None,
    })
}

/// Makes one complete chat request, as a well-behaved gateway does. Fails if the request is not
/// sent to the endpoint.
pub(crate) async fn pick(channel: &Channel) -> Result<(), String> {
    let peer = RawStream::open(channel);
    peer.say(&chat(BodySendMode::FullDuplexStreamed)).await;
    peer.say(&prompt()).await;
    let (answers, status) = peer.end().await;
    let routed = answers.iter().any(|answer| {
        matches!(&answer.response, Some(Answer::RequestHeaders(_)))
            && answer.dynamic_metadata.is_some()
    });
    if routed {
        Ok(())
    } else {
        Err(format!("{answers:?} {status:?}"))
    }
}

// === impl SteadyClient ===

impl SteadyClient {
    /// Starts a client that makes picks again and again from now on.
    pub(crate) async fn for_program(program: &DaemonProgram) -> Self {
        let channel = program.channel().await;
        let stop = Arc::new(AtomicBool::new(false));
        let picks = Arc::new(AtomicU64::new(0));
        let stopped = Arc::clone(&stop);
        let counted = Arc::clone(&picks);
        let task = tokio::spawn(async move {
            let mut slowest = Duration::ZERO;
            while !stopped.load(Ordering::Relaxed) {
                let began = Instant::now();
                pick(&channel).await.expect("the neighbour is served");
                slowest = slowest.max(began.elapsed());
                counted.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            slowest
        });
        Self { stop, picks, task }
    }

    /// Stops, checks that every pick was fast, and returns the slowest.
    pub(crate) async fn was_served(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        let slowest = self.task.await.unwrap();
        assert!(self.picks.load(Ordering::Relaxed) > 0, "no pick at all");
        assert!(slowest < PICK_MAX, "a pick took {slowest:?}");
        slowest
    }
}
