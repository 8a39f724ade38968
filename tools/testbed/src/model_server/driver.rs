//! The task that owns an engine. The task receives commands, publishes tokens, and maps wall time
//! to engine time.
//!
//! Engine time runs `speed` times as fast as wall time. If a timer fires late, tokens are late but
//! steps are not longer: the task catches up step by step, with the times that the engine planned.
//! At speed 0 the task does not wait.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use engine_sim::SimulatedEngineSpec;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::engine::{
    FinishReason, ModelEngine, ModelEngineLoad, ModelSequence, SequenceEvent, SequenceId,
};
use super::stats::{EngineStats, RequestParameters};

/// The maximum number of series of `lora_requests_info` kept. A real page keeps one series per
/// combination of adapters ever seen, and readers take the newest.
const LORA_SERIES_MAX: usize = 8;

/// Bounds of the speed. At a lower speed, wall time would not fit a `Duration`. A higher speed
/// would have no more effect than not waiting at all.
const SPEED_MIN: f64 = 1e-3;
const SPEED_MAX: f64 = 1e6;

/// The engine's message to a request about one of its sequences, which `index` names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SequenceOutput {
    pub index: usize,
    pub kind: OutputKind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum OutputKind {
    Admitted { cached_tokens: u32 },
    Token,
    Finished(FinishReason),
}

/// The data of a metrics page or a state report, taken at one moment.
#[derive(Clone, Debug)]
pub(super) struct EngineReport {
    pub load: ModelEngineLoad,
    pub preemptions: u64,
    pub lora_loads: u64,
    pub stats: EngineStats,
    /// Maps (running adapters, waiting adapters) to a time in seconds since 1970.
    pub lora_series: BTreeMap<[String; 2], f64>,
}

#[derive(Debug)]
enum DriverCommand {
    Submit {
        sequences: Vec<(SequenceId, ModelSequence)>,
        asked: RequestParameters,
        outputs: mpsc::UnboundedSender<SequenceOutput>,
    },
    Abort(Vec<SequenceId>),
    Report(oneshot::Sender<EngineReport>),
    Slow(f64),
    Restart,
}

/// A handle to the task. The task ends when all handles are dropped.
#[derive(Clone, Debug)]
pub(super) struct EngineHandle {
    commands: mpsc::UnboundedSender<DriverCommand>,
    load: watch::Receiver<ModelEngineLoad>,
    next_id: Arc<AtomicU64>,
}

/// The sequences of one request. Dropping this value aborts the sequences that still run, as if the
/// client disconnected.
pub(super) struct GenerationHandle {
    outputs: mpsc::UnboundedReceiver<SequenceOutput>,
    commands: mpsc::UnboundedSender<DriverCommand>,
    ids: Vec<SequenceId>,
    open: usize,
}

impl GenerationHandle {
    /// Returns the next output, or `None` if all sequences have ended or the engine was restarted.
    pub(super) async fn next(&mut self) -> Option<SequenceOutput> {
        if self.open == 0 {
            return None;
        }
        let output = self.outputs.recv().await?;
        self.open -= usize::from(matches!(output.kind, OutputKind::Finished(_)));
        Some(output)
    }

    pub(super) fn is_over(&self) -> bool {
        self.open == 0
    }
}

impl Drop for GenerationHandle {
    fn drop(&mut self) {
        if self.open > 0 {
            let _ = self
                .commands
                .send(DriverCommand::Abort(std::mem::take(&mut self.ids))); // if the task has ended, there is nothing to abort
        }
    }
}

impl EngineHandle {
    /// Starts the task. [`ModelSequence::adapter`] is an index in `adapters`.
    pub(super) fn spawn(spec: SimulatedEngineSpec, speed: f64, adapters: Vec<String>) -> Self {
        let speed = if speed > 0.0 {
            speed.clamp(SPEED_MIN, SPEED_MAX)
        } else {
            0.0
        };
        let (commands, inbox) = mpsc::unbounded_channel();
        let (load_out, load) = watch::channel(ModelEngineLoad::default());
        let driver = EngineDriver {
            engine: ModelEngine::new(spec),
            spec,
            speed,
            adapters,
            epoch: Instant::now(),
            now_ms: 0.0,
            stats: EngineStats::new(unix_seconds(), ms_scale(speed)),
            requests: HashMap::new(),
            lora_series: BTreeMap::new(),
            load: load_out,
        };
        tokio::spawn(driver.run(inbox));
        Self {
            commands,
            load,
            next_id: Arc::default(),
        }
    }

    pub(super) fn load(&self) -> ModelEngineLoad {
        *self.load.borrow()
    }

    pub(super) fn submit(
        &self,
        sequences: Vec<ModelSequence>,
        asked: RequestParameters,
    ) -> GenerationHandle {
        let (sender, outputs) = mpsc::unbounded_channel();
        let first = self
            .next_id
            .fetch_add(sequences.len() as u64, Ordering::Relaxed);
        let sequences: Vec<_> = (first..).map(SequenceId).zip(sequences).collect();
        let ids: Vec<_> = sequences.iter().map(|(id, _)| *id).collect();
        let open = ids.len();
        let _ = self.commands.send(DriverCommand::Submit {
            sequences,
            asked,
            outputs: sender,
        }); // if the task has ended, `next` returns `None` immediately
        GenerationHandle {
            outputs,
            commands: self.commands.clone(),
            ids,
            open,
        }
    }

    /// Returns the current report, or `None` if the task has ended.
    pub(super) async fn report(&self) -> Option<EngineReport> {
        let (sender, report) = oneshot::channel();
        self.commands.send(DriverCommand::Report(sender)).ok()?;
        report.await.ok()
    }

    /// Sets the factor on the measured step times, from the next step on.
    pub(super) fn slow_down(&self, slowdown: f64) {
        let _ = self.commands.send(DriverCommand::Slow(slowdown)); // if the task has ended, there is nothing to slow down
    }

    /// Drops the queue, KV memory and counters, and sets a new start time. Speed and slowdown stay.
    pub(super) fn restart(&self) {
        let _ = self.commands.send(DriverCommand::Restart); // if the task has ended, there is nothing to restart
    }
}

struct EngineDriver {
    engine: ModelEngine,
    spec: SimulatedEngineSpec,
    speed: f64,
    adapters: Vec<String>,
    epoch: Instant,
    now_ms: f64,
    stats: EngineStats,
    requests: HashMap<SequenceId, (usize, u32, mpsc::UnboundedSender<SequenceOutput>)>,
    lora_series: BTreeMap<[String; 2], f64>,
    load: watch::Sender<ModelEngineLoad>,
}

impl EngineDriver {
    async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<DriverCommand>) {
        loop {
            let wake = self.engine.next_event_ms().map(|at_ms| self.wall(at_ms));
            tokio::select! {
                biased;
                command = inbox.recv() => {
                    let Some(command) = command else { return };
                    self.catch_up();
                    self.handle(command);
                }
                () = tokio::time::sleep_until(wake.unwrap_or(self.epoch)), if wake.is_some() => {}
            }
            self.catch_up();
            self.publish();
        }
    }

    fn wall(&self, at_ms: f64) -> Instant {
        self.epoch + Duration::from_secs_f64(at_ms * ms_scale(self.speed))
    }

    fn catch_up(&mut self) {
        let instant = self.speed <= 0.0;
        let until_ms = if instant {
            f64::INFINITY
        } else {
            self.epoch.elapsed().as_secs_f64() * 1e3 * self.speed
        };
        while let Some(at_ms) = self
            .engine
            .next_event_ms()
            .filter(|at_ms| *at_ms <= until_ms)
        {
            self.now_ms = at_ms;
            if !instant {
                self.stats.late.record_ms((until_ms - at_ms) / self.speed);
            }
            for event in self.engine.step(at_ms) {
                self.handle_event(&event);
            }
        }
        if !instant {
            self.now_ms = until_ms;
        }
    }

    fn handle(&mut self, command: DriverCommand) {
        match command {
            DriverCommand::Submit {
                sequences,
                asked,
                outputs,
            } => {
                self.stats.record_parameters(asked);
                for (index, (id, sequence)) in sequences.into_iter().enumerate() {
                    self.requests
                        .insert(id, (index, sequence.prompt_tokens, outputs.clone()));
                    self.engine.submit(self.now_ms, id, sequence);
                }
            }
            DriverCommand::Abort(ids) => {
                for id in ids {
                    if let Some(event) = self.engine.abort(self.now_ms, id) {
                        self.handle_event(&event);
                    }
                }
            }
            DriverCommand::Report(reply) => {
                self.record_adapters();
                let _ = reply.send(EngineReport {
                    load: self.engine.load(),
                    preemptions: self.engine.preemptions(),
                    lora_loads: self.engine.lora_loads(),
                    stats: self.stats.clone(),
                    lora_series: self.lora_series.clone(),
                }); // the receiver may be gone
            }
            DriverCommand::Slow(slowdown) => {
                self.spec.times.slowdown = slowdown;
                self.engine.set_slowdown(slowdown);
            }
            DriverCommand::Restart => {
                // Start times must differ even if two restarts are closer than the resolution of
                // the clock.
                let started_at = unix_seconds().max(self.stats.started_at + 0.01);
                self.engine = ModelEngine::new(self.spec);
                self.stats = EngineStats::new(started_at, ms_scale(self.speed));
                self.requests.clear();
                self.lora_series.clear();
            }
        }
    }

    fn handle_event(&mut self, event: &SequenceEvent) {
        self.stats.record(event);
        let (id, kind) = match *event {
            SequenceEvent::Stepped { .. } => return,
            SequenceEvent::Admitted { id, cached_tokens } => {
                (id, OutputKind::Admitted { cached_tokens })
            }
            SequenceEvent::Token { id, .. } => (id, OutputKind::Token),
            SequenceEvent::Finished { id, finish, .. } => (id, OutputKind::Finished(finish)),
        };
        if let Some((index, prompt_tokens, outputs)) = self.requests.get(&id) {
            if let OutputKind::Admitted { cached_tokens } = kind {
                self.stats.admitted(*prompt_tokens, cached_tokens);
            }
            let _ = outputs.send(SequenceOutput {
                index: *index,
                kind,
            }); // if this fails, the client has disconnected, and the abort follows
        }
        if matches!(kind, OutputKind::Finished(_)) {
            self.requests.remove(&id);
        }
    }

    fn publish(&mut self) {
        let load = self.engine.load();
        self.load
            .send_if_modified(|published| std::mem::replace(published, load) != load);
        self.record_adapters();
    }

    /// Sets the time of the series `vllm:lora_requests_info` for the current adapters to now.
    fn record_adapters(&mut self) {
        if self.adapters.is_empty() {
            return;
        }
        let names = self.engine.adapters().map(|ids| {
            let names: Vec<&str> = ids
                .iter()
                .filter_map(|&id| self.adapters.get(id))
                .map(String::as_str)
                .collect();
            names.join(", ")
        });
        self.lora_series.insert(names, unix_seconds());
        if self.lora_series.len() > LORA_SERIES_MAX
            && let Some(oldest) = self
                .lora_series
                .iter()
                .min_by(|a, b| a.1.total_cmp(b.1))
                .map(|(names, _)| names.clone())
        {
            self.lora_series.remove(&oldest);
        }
    }
}

/// Returns the number of wall seconds per engine ms.
fn ms_scale(speed: f64) -> f64 {
    if speed > 0.0 { 1e-3 / speed } else { 0.0 }
}

fn unix_seconds() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64()
}
