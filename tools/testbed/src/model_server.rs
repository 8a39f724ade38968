//! A simulated model server: clients see it as a vLLM pod, but it runs on a laptop.
//!
//! ```text
//!  socket ──▶ http ──▶ request ──▶ driver (owns engine) ──▶ reply ──▶ client
//!  can close   faults,   prompts,    engine: batching, KV     SSE or
//!  and reset   echo      limits      blocks, step times       JSON
//! ```
//! Everything that tests depend on is real: sockets close and reset, streams break in the middle,
//! queues build up because steps take the times measured on real engines, and prefixes are cached
//! because their blocks are in memory. Only the text is not real: it is seeded filler, and a token
//! has four bytes.
//!
//! The engine ([`engine`]) is a pure state machine owned by one task ([`driver`]). All other
//! modules read what the task publishes.

mod admin;
mod driver;
mod engine;
mod faults;
mod http;
mod metrics;
mod reply;
mod request;
mod response;
mod roles;
mod socket;
mod stats;
mod text;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use engine_sim::SimulatedEngineSpec;
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use driver::EngineHandle;
use faults::FaultTable;
use metrics::PageOptions;
use request::{ModelApi, ServedModels};

pub use engine_sim::EngineProfile;
pub use faults::{FaultMode, FaultPaths, ServerFault};
pub use metrics::{EngineNames, MetricOverrides};
pub use roles::ServerRole;

/// Settings of a model server.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Engine")]
pub struct ModelServerOptions {
    /// The address to listen on; port 0 takes a free port.
    #[arg(skip = ModelServerOptions::default().listen)]
    pub listen: SocketAddr,

    /// Model and GPU whose measured step times and KV memory to use
    #[arg(long, default_value_t = ModelServerOptions::default().profile, value_parser = profiles())]
    pub profile: EngineProfile,

    /// Name of the model; repeat the flag for further names of the model [default: the profile's]
    #[arg(long = "model", value_name = "NAME")]
    pub models: Vec<String>,

    /// LoRA adapter served beside the model; repeat the flag for several
    #[arg(long = "lora", value_name = "NAME")]
    pub loras: Vec<String>,

    /// Adapters that fit into GPU memory at once
    #[arg(long, value_name = "N", default_value_t = ModelServerOptions::default().max_lora)]
    pub max_lora: usize,

    /// Time to load an adapter into GPU memory, ms of engine time
    #[arg(long, value_name = "MS", default_value_t = ModelServerOptions::default().lora_load_ms)]
    pub lora_load_ms: u32,

    /// Speed relative to the real engine; 0 means not to wait at all
    #[arg(long, value_name = "X", default_value_t = ModelServerOptions::default().speed)]
    pub speed: f64,

    /// Factor on the measured step times, for another accelerator or an accelerator that throttles
    #[arg(long, value_name = "X", default_value_t = ModelServerOptions::default().slowdown, value_parser = slowdown)]
    pub slowdown: f64,

    /// Seed of output lengths and text: all servers with one seed give the same answer to a prompt
    #[arg(long, default_value_t = ModelServerOptions::default().seed)]
    pub seed: u64,

    /// Mean output length in tokens if the request does not fix it
    #[arg(long, value_name = "TOKENS", default_value_t = ModelServerOptions::default().output_tokens_mean)]
    pub output_tokens_mean: u32,

    /// Maximum number of sequences that run at once
    #[arg(long, value_name = "N", default_value_t = ModelServerOptions::default().max_num_seqs)]
    pub max_num_seqs: usize,

    /// Maximum number of tokens computed in one step (chunked prefill)
    #[arg(long, value_name = "TOKENS", default_value_t = ModelServerOptions::default().max_num_batched_tokens)]
    pub max_num_batched_tokens: u32,

    /// Longest prompt and output together, in tokens (of four bytes); at most what KV memory holds
    #[arg(long, value_name = "TOKENS", default_value_t = ModelServerOptions::default().max_model_len)]
    pub max_model_len: u32,

    /// KV blocks of 16 tokens [default: the profile's]
    #[arg(long, value_name = "N")]
    pub num_gpu_blocks: Option<u32>,

    /// The engine whose names the core gauges of /metrics have
    #[arg(long, value_enum, default_value_t = ModelServerOptions::default().engine, help_heading = "Behaviour")]
    pub engine: EngineNames,

    /// Report vllm:gpu_cache_usage_perc, as older versions of vLLM do, instead of
    /// vllm:kv_cache_usage_perc
    #[arg(long, help_heading = "Behaviour")]
    pub old_metric_names: bool,

    /// Ignore ?name[]= on /metrics and always return the whole page
    #[arg(long, help_heading = "Behaviour")]
    pub no_name_filter: bool,

    /// Send the ORCA header on streamed replies too, which vLLM does not
    #[arg(long, help_heading = "Behaviour")]
    pub orca_on_streams: bool,

    /// Answer inference from a template, without an engine and without reading the prompt: least
    /// CPU, for overhead benches. Every answer has --output-tokens-mean tokens, streamed in one
    /// write if the body has "stream":true
    #[arg(long, help_heading = "Behaviour")]
    pub bare: bool,

    /// The stage of a request that the server serves. A decode server calls the other stages as the
    /// picker's headers say
    #[arg(long, value_enum, default_value_t = ModelServerOptions::default().role, help_heading = "Behaviour")]
    pub role: ServerRole,

    /// Wait before each write of a stream, ms
    #[arg(long, value_name = "MS", default_value_t = ModelServerOptions::default().chunk_delay_ms, help_heading = "Behaviour")]
    pub chunk_delay_ms: u64,

    /// Stream events sent in one write, after the first token
    #[arg(long, value_name = "N", default_value_t = ModelServerOptions::default().chunks_per_write, help_heading = "Behaviour")]
    pub chunks_per_write: u32,

    /// Split the writes of a stream into pieces of this many bytes, a millisecond apart; 0 does not
    /// split
    #[arg(long, value_name = "BYTES", default_value_t = ModelServerOptions::default().bytes_per_write, help_heading = "Behaviour")]
    pub bytes_per_write: usize,
}

impl Default for ModelServerOptions {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            profile: EngineProfile::Llama8bH100,
            models: Vec::new(),
            loras: Vec::new(),
            max_lora: 4,
            // The time to read a rank-16 adapter of an 8B model from host memory and lay it out.
            lora_load_ms: 50,
            speed: 1.0,
            slowdown: 1.0,
            seed: 0,
            // The mean is 211 in Azure's conversation trace, and 28 in its code trace.
            output_tokens_mean: 128,
            max_num_seqs: 256,
            max_num_batched_tokens: 8192,
            max_model_len: 131_072,
            num_gpu_blocks: None,
            engine: EngineNames::Vllm,
            old_metric_names: false,
            no_name_filter: false,
            orca_on_streams: false,
            bare: false,
            role: ServerRole::Both,
            chunk_delay_ms: 0,
            chunks_per_write: 1,
            bytes_per_write: 0,
        }
    }
}

impl ModelServerOptions {
    fn kv_blocks(&self) -> u32 {
        let measured =
            || u32::try_from(self.profile.kv_tokens()).unwrap_or(u32::MAX) / engine::BLOCK_TOKENS;
        self.num_gpu_blocks.unwrap_or_else(measured).max(1)
    }

    fn engine_spec(&self) -> SimulatedEngineSpec {
        let mut spec = self.profile.spec(engine::BLOCK_TOKENS as usize);
        spec.times.slowdown = self.slowdown;
        spec.kv_blocks = self.kv_blocks() as usize;
        spec.budget = self.max_num_seqs.max(self.max_num_batched_tokens as usize);
        spec.sequences_max = self.max_num_seqs.max(1);
        spec.adapter_places = if self.loras.is_empty() {
            0
        } else {
            self.max_lora.max(1)
        };
        spec.adapter_load_ms = f64::from(self.lora_load_ms);
        spec
    }

    fn served(&self) -> ServedModels {
        let models = if self.models.is_empty() {
            vec![self.profile.model().to_owned()]
        } else {
            self.models.clone()
        };
        let model_len = self
            .max_model_len
            .min(self.kv_blocks().saturating_mul(engine::BLOCK_TOKENS));
        ServedModels {
            models,
            adapters: self.loras.clone(),
            model_len,
        }
    }
}

fn profiles() -> impl TypedValueParser<Value = EngineProfile> {
    PossibleValuesParser::new(EngineProfile::ALL.map(EngineProfile::name))
        .try_map(|name| name.parse::<EngineProfile>())
}

/// The allowed range of the slowdown. Beyond this range the simulation would mean nothing.
const SLOWDOWN: std::ops::RangeInclusive<f64> = 0.01..=100.0;

fn slowdown(text: &str) -> Result<f64, String> {
    let slowdown = text.parse().map_err(|_| "not a number".to_owned())?;
    if SLOWDOWN.contains(&slowdown) {
        Ok(slowdown)
    } else {
        Err(format!("must be within {SLOWDOWN:?}"))
    }
}

/// The state that the parts of one server share.
#[derive(Debug)]
struct ModelServerState {
    address: SocketAddr,
    options: ModelServerOptions,
    served: ServedModels,
    engine: EngineHandle,
    socket: mpsc::UnboundedSender<(socket::SocketCommand, oneshot::Sender<()>)>,
    faults: Mutex<FaultTable>,
    overrides: Mutex<MetricOverrides>,
    log: Mutex<http::RequestLog>,
    replies: AtomicU64,
}

impl ModelServerState {
    fn faults(&self) -> MutexGuard<'_, FaultTable> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn overrides(&self) -> MutexGuard<'_, MetricOverrides> {
        self.overrides
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn log(&self) -> MutexGuard<'_, http::RequestLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a command to the accept loop. Returns when the accept loop has carried out the
    /// command.
    async fn command_socket(&self, order: socket::SocketCommand) {
        let (done, carried_out) = oneshot::channel();
        let _ = self.socket.send((order, done)); // if this fails, the server is stopping
        let _ = carried_out.await; // if this fails, the server is stopping
    }

    fn page_options(&self) -> PageOptions {
        PageOptions {
            names: self.options.engine,
            old_names: self.options.old_metric_names,
            model: self.served.models.first().cloned().unwrap_or_default(),
            kv_blocks: self.options.kv_blocks(),
            max_lora: self.options.engine_spec().adapter_places,
        }
    }

    fn reply_id(&self, api: ModelApi) -> String {
        let kind = match api {
            ModelApi::Chat => "chatcmpl",
            ModelApi::Completions => "cmpl",
            ModelApi::Responses => "resp",
            ModelApi::Messages | ModelApi::CountTokens => "msg",
            ModelApi::Embeddings => "embd",
        };
        format!(
            "{kind}-{:04x}{:012x}",
            self.address.port(),
            self.replies.fetch_add(1, Ordering::Relaxed)
        )
    }
}

/// A running server. Dropping this value stops the server immediately and closes the server's
/// connections.
#[derive(Debug)]
pub struct ModelServer {
    server: Arc<ModelServerState>,
    task: JoinHandle<()>,
}

impl ModelServer {
    /// Starts a server. The caller must be in a tokio runtime.
    ///
    /// # Errors
    /// Fails if `options.listen` cannot be bound.
    pub fn start(options: ModelServerOptions) -> io::Result<Self> {
        let listener = socket::listen(options.listen)?;
        let address = listener.local_addr()?;
        let (orders, inbox) = mpsc::unbounded_channel();
        let server = Arc::new(ModelServerState {
            address,
            served: options.served(),
            engine: EngineHandle::spawn(
                options.engine_spec(),
                options.speed,
                options.loras.clone(),
            ),
            socket: orders,
            faults: Mutex::default(),
            overrides: Mutex::default(),
            log: Mutex::default(),
            replies: AtomicU64::default(),
            options,
        });
        let shared = server.clone();
        let handler = move |connection, request| http::handle(shared.clone(), connection, request);
        let task = tokio::spawn(socket::serve(address, listener, inbox, handler));
        Ok(Self { server, task })
    }

    pub fn addr(&self) -> SocketAddr {
        self.server.address
    }

    /// Starts a fault; [`FaultMode::None`] ends all faults.
    pub async fn fault(&self, fault: ServerFault) {
        self.server.order(fault, None).await;
    }

    /// Replaces the false values on `/metrics` and in the ORCA header; an empty map removes all
    /// false values.
    pub fn override_metrics(&self, overrides: MetricOverrides) {
        *self.server.overrides() = overrides;
    }

    /// Sets the factor on the measured step times, from the next step on.
    pub fn slow_down(&self, slowdown: f64) {
        self.server
            .engine
            .slow_down(slowdown.clamp(*SLOWDOWN.start(), *SLOWDOWN.end()));
    }

    /// Restarts the server like a new process: the KV cache, the queue and the counters are empty,
    /// all connections are reset, and the start time is new. The server refuses connections for
    /// `down`.
    pub async fn restart(&self, down: Option<Duration>) {
        self.server.restart(down, None).await;
    }

    /// Returns the report of `GET /admin/state`.
    ///
    /// # Errors
    /// Fails if the engine has stopped.
    pub async fn state(&self) -> io::Result<Value> {
        self.server.state().await.map_err(io::Error::other)
    }

    /// Stops gracefully: accepts no new connections, and lets requests in flight end within
    /// `limit`.
    pub async fn drain(mut self, limit: Duration) {
        let (done, _) = oneshot::channel(); // the end of the task shows that the server has stopped
        let _ = self
            .server
            .socket
            .send((socket::SocketCommand::Drain, done)); // the accept loop may have ended
        if tokio::time::timeout(limit, &mut self.task).await.is_err() {
            tracing::warn!(address = %self.addr(), "the server stops although requests are still in flight");
        }
    }
}

impl Drop for ModelServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Starts a task that serves admin orders for `servers` on `listen`. Returns the address and the
/// task.
///
/// # Errors
/// Fails if `listen` cannot be bound.
pub fn serve_admin(
    listen: SocketAddr,
    servers: &[ModelServer],
) -> io::Result<(SocketAddr, JoinHandle<io::Result<()>>)> {
    let listener = socket::listen(listen)?;
    let address = listener.local_addr()?;
    let servers = servers
        .iter()
        .map(|running| running.server.clone())
        .collect();
    Ok((address, tokio::spawn(admin::serve(listener, servers))))
}
