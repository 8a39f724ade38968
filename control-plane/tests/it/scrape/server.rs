//! A metrics endpoint on 127.0.0.1 that answers as the test chooses.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures::stream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// The way in which the server answers.
#[derive(Clone, Debug)]
pub enum ServerAnswer {
    /// The server answers any query with this page.
    Page(String),
    /// The server serves only the series named in the query, like prometheus_client.
    HonoursFilter(String),
    /// The server serves nothing if the request has a query, like prometheus_client in
    /// multi-process mode.
    EmptyWhenFiltered(String),
    /// The server answers 400 if the request has a query.
    RefusesQueries(String),
    Status(u16),
    Redirect(String),
    /// The server sends gzip, although the client did not request it.
    Compressed,
    /// The server sends an endless page, with or without a content-length.
    Huge {
        announced: bool,
    },
    /// The server announces more bytes than it sends, then closes the connection.
    CutShort(String),
    NotHttp,
    /// The server reads and never answers.
    Silent,
    /// The server sends headers, then a byte now and then.
    Trickle,
}

#[derive(Clone)]
struct MetricsServerState {
    answer: Arc<Mutex<ServerAnswer>>,
    models: Arc<Mutex<ServerAnswer>>,
    queries: Arc<Mutex<Vec<String>>>,
    connections: Arc<Mutex<usize>>,
}

pub struct MetricsServer {
    pub address: String,
    shared: MetricsServerState,
}

/// Returns a page as vLLM writes it, with other series around the needed series.
pub fn page(waiting: u32, running: u32, kv: f64) -> String {
    let mut page = String::from(
        "# TYPE python_gc_objects_collected_total counter\npython_gc_objects_collected_total{generation=\"0\"} 1\n",
    );
    page += "process_start_time_seconds 1.76e+09\n";
    page += &format!("vllm:num_requests_running{{engine=\"0\",model_name=\"m\"}} {running}\n");
    page += &format!("vllm:num_requests_waiting{{engine=\"0\",model_name=\"m\"}} {waiting}\n");
    page += &format!("vllm:kv_cache_usage_perc{{engine=\"0\",model_name=\"m\"}} {kv}\n");
    page += "vllm:prompt_tokens_total{engine=\"0\",model_name=\"m\"} 10\nvllm:generation_tokens_total{engine=\"0\",model_name=\"m\"} 10\n";
    for bucket in 0..200 {
        page += &format!(
            "vllm:time_to_first_token_seconds_bucket{{engine=\"0\",le=\"{bucket}\",model_name=\"m\"}} 0\n"
        );
    }
    page + "vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"1000\"} 1\n"
}

impl MetricsServer {
    pub async fn start(answer: ServerAnswer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = MetricsServerState {
            answer: Arc::new(Mutex::new(answer)),
            models: Arc::new(Mutex::new(ServerAnswer::Status(404))),
            queries: Arc::default(),
            connections: Arc::default(),
        };
        tokio::spawn(accept(listener, shared.clone()));
        Self { address, shared }
    }

    pub fn answer(&self, answer: ServerAnswer) {
        *self.shared.answer.lock().unwrap() = answer;
    }

    /// Sets the answer of `/v1/models`, which is 404 at first.
    pub fn answer_models(&self, answer: ServerAnswer) {
        *self.shared.models.lock().unwrap() = answer;
    }

    /// Returns the query of every request so far. It is empty for a request without a query.
    pub fn queries(&self) -> Vec<String> {
        self.shared.queries.lock().unwrap().clone()
    }

    pub fn connections(&self) -> usize {
        *self.shared.connections.lock().unwrap()
    }

    pub fn port(&self) -> u16 {
        self.address.rsplit_once(':').unwrap().1.parse().unwrap()
    }
}

/// Accepts connections and counts them. A real server (axum) gives the answers that an HTTP server
/// can give, and this function gives the others.
async fn accept(listener: TcpListener, shared: MetricsServerState) {
    let inner = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let inner_address = inner.local_addr().unwrap();
    let router = Router::new()
        .route("/v1/models", get(models))
        .fallback(get(reply))
        .with_state(shared.clone());
    tokio::spawn(async move { axum::serve(inner, router).await });
    while let Ok((mut outer, _)) = listener.accept().await {
        *shared.connections.lock().unwrap() += 1;
        let shared = shared.clone();
        tokio::spawn(async move {
            let answer = shared.answer.lock().unwrap().clone();
            match answer {
                ServerAnswer::NotHttp => raw(&mut outer, &shared, "SSH-2.0-nonsense\r\n").await,
                ServerAnswer::CutShort(page) => {
                    raw(
                        &mut outer,
                        &shared,
                        &format!("HTTP/1.1 200 OK\r\ncontent-length: 99999\r\n\r\n{page}"),
                    )
                    .await;
                }
                _ => {
                    let mut inner = TcpStream::connect(inner_address).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut outer, &mut inner).await;
                }
            }
        });
    }
}

async fn raw(stream: &mut TcpStream, shared: &MetricsServerState, answer: &str) {
    let mut request = [0; 4096];
    let read = stream.read(&mut request).await.unwrap_or(0);
    shared
        .queries
        .lock()
        .unwrap()
        .push(format!("{read} raw bytes"));
    let _ = stream.write_all(answer.as_bytes()).await;
}

async fn reply(
    State(shared): State<MetricsServerState>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response {
    assert_eq!(
        headers.get(header::ACCEPT_ENCODING),
        None,
        "compression would only cost both sides"
    );
    let query = query.unwrap_or_default();
    shared.queries.lock().unwrap().push(query.clone());
    let answer = shared.answer.lock().unwrap().clone();
    answer_with(answer, &query).await
}

async fn models(State(shared): State<MetricsServerState>) -> Response {
    shared.queries.lock().unwrap().push("models".to_owned());
    let answer = shared.models.lock().unwrap().clone();
    answer_with(answer, "").await
}

async fn answer_with(answer: ServerAnswer, query: &str) -> Response {
    let endless = || {
        Body::from_stream(stream::repeat_with(|| {
            Ok::<_, std::io::Error>(Bytes::from("a_bucket{le=\"1\"} 0\n".repeat(1000)))
        }))
    };
    match answer {
        ServerAnswer::Page(page) => page.into_response(),
        ServerAnswer::HonoursFilter(page) => filtered(&page, query).into_response(),
        ServerAnswer::EmptyWhenFiltered(_) | ServerAnswer::RefusesQueries(_)
            if query.is_empty() =>
        {
            full_page(answer).into_response()
        }
        ServerAnswer::EmptyWhenFiltered(_) => "".into_response(),
        ServerAnswer::RefusesQueries(_) => StatusCode::BAD_REQUEST.into_response(),
        ServerAnswer::Status(status) => StatusCode::from_u16(status).unwrap().into_response(),
        ServerAnswer::Redirect(to) => (StatusCode::FOUND, [(header::LOCATION, to)]).into_response(),
        ServerAnswer::Compressed => {
            ([(header::CONTENT_ENCODING, "gzip")], "not really").into_response()
        }
        ServerAnswer::Huge { announced: true } => {
            ([(header::CONTENT_LENGTH, "1000000000")], endless()).into_response()
        }
        ServerAnswer::Huge { announced: false } => endless().into_response(),
        ServerAnswer::Trickle => Body::from_stream(stream::unfold((), |()| async {
            tokio::time::sleep(Duration::from_millis(10)).await;
            Some((Ok::<_, std::io::Error>(Bytes::from("#")), ()))
        }))
        .into_response(),
        ServerAnswer::Silent | ServerAnswer::NotHttp | ServerAnswer::CutShort(_) => {
            std::future::pending().await
        }
    }
}

fn full_page(answer: ServerAnswer) -> String {
    match answer {
        ServerAnswer::EmptyWhenFiltered(page) | ServerAnswer::RefusesQueries(page) => page,
        _ => String::new(),
    }
}

fn filtered(page: &str, query: &str) -> String {
    let names: Vec<String> = query
        .split('&')
        .filter_map(|pair| pair.strip_prefix("name%5B%5D="))
        .map(|name| name.replace("%3A", ":"))
        .collect();
    let wanted = |line: &&str| {
        names.is_empty()
            || names
                .iter()
                .any(|name| line.split(['{', ' ']).next() == Some(name))
    };
    page.lines()
        .filter(wanted)
        .map(|line| format!("{line}\n"))
        .collect()
}
