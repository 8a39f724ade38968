//! A golden case: a pool, a request and a profile as readable text, and the scheduler's decision as
//! text.
//!
//! ```text
//! # What the case shows, in a sentence.
//!
//! plugins                        of no profile: handler, deciders, detector, admitters, producers
//!   disagg-profile-handler deciders.prefill=always-disagg-pd-decider
//!
//! profile                        the default pipeline if left out; has a name if there are several
//!   queue-scorer 2               type, weight, parameter=value ...
//!   ranked_max 3
//!
//! pool                           a table; `-` is unknown, missing columns have their default
//!   name  ready  queue  kv
//!   a     yes    3      0.2
//!
//! request
//!   model  llama
//!   seed   1
//!
//! expect
//!   ...
//! ```
//!
//! The first line begins with `# `. The seed orders endpoints with equal totals. The tests and the
//! example `golden`, which also runs in wasm, use this file.

use scheduler::in_flight::InFlight;
use scheduler::latency::LatencyModel;
use scheduler::metrics::MetricDefinition;
use scheduler::registry::{PluginKind, lookup};
use scheduler::{
    AdapterRoom, Decision, Endpoint, EndpointMetrics, EndpointRef, Explanation, Generation,
    LocalState, LoraMetrics, Pipeline, PipelineSpec, PluginSpec, ProfilePlugin, ProfileSpec,
    Readiness, Request, Rng, Slo, Slot, Snapshot, SubsetHint, TrackedSlo, Version, schedule,
};

#[path = "case/render.rs"]
mod render;
#[path = "case/values.rs"]
mod values;

pub use values::parameters;

/// One endpoint with all its state. The fields are the columns of the table `pool` in a golden
/// case, except for the columns of the endpoint and of its metrics.
#[derive(Clone, Debug)]
pub struct EndpointCase {
    pub endpoint: Endpoint,
    pub metrics: EndpointMetrics,
    pub in_flight: u32,
    pub prefill_tokens: u32,
    pub matched_blocks: u32,
    pub ejected: bool,
    /// The failure rate of the endpoint beyond that of the other endpoints, 0 to 1.
    pub failing: f32,
    /// The time when the endpoint last answered.
    pub last_answer: u64,
    pub last_cold_pick: u64,
    pub last_pick: u64,
    pub adapter_room: AdapterRoom,
    /// The TTFT and TPOT that the model predicts at this endpoint, in ms.
    pub predicted: Option<(f32, f32)>,
    /// The SLO of the first request in flight at this endpoint.
    pub slo: Slo,
}

/// All inputs of one decision, and the text of the expected outcome.
#[derive(Clone, Debug)]
pub struct DecisionCase {
    pub pipeline: PipelineSpec,
    pub pool: Vec<EndpointCase>,
    pub request: RequestCase,
    pub reuse_interval: f32,
    pub evicted_share: f32,
    pub metrics_stale: bool,
    pub seed: u64,
    pub expected: String,
}

#[derive(Clone, Debug)]
pub struct RequestCase {
    pub model: String,
    pub headers: Vec<(String, String)>,
    pub media_items: u32,
    pub priority: i32,
    pub subset: Option<Vec<String>>,
    pub prompt_tokens: u32,
    pub blocks: u32,
    pub block_tokens: u32,
    pub slo: Slo,
    pub prediction_based: bool,
}

// === impl RequestCase ===

impl Default for RequestCase {
    fn default() -> Self {
        Self {
            model: String::new(),
            headers: Vec::new(),
            media_items: 0,
            priority: 0,
            subset: None,
            prompt_tokens: 0,
            blocks: 0,
            block_tokens: 64,
            slo: Slo::default(),
            prediction_based: false,
        }
    }
}

/// A decision, with the names of the endpoints.
#[derive(Clone, Debug, PartialEq)]
pub struct CaseDecision {
    pub names: Vec<String>,
    pub decision: Decision,
    pub explanation: Explanation,
}

/// The number of digits of a score in text.
#[derive(Clone, Copy, Debug)]
pub enum Digits {
    /// Three digits, for display.
    Few,
    /// Enough digits to distinguish any two scores.
    All,
}

// === impl EndpointCase ===

impl EndpointCase {
    /// Makes the endpoint at position `at` of its pool: ready, settled, and without further state.
    pub fn new(at: usize, name: &str) -> Self {
        let endpoint = Endpoint {
            id: EndpointRef {
                slot: Slot(u16::try_from(at).unwrap_or(u16::MAX)),
                generation: Generation(1),
            },
            name: name.into(),
            address: format!("10.0.0.{}:8000", at + 1).into(),
            readiness: Readiness::Ready,
            labels: Box::new([]),
            models: std::sync::Arc::default(),
            age_ms: 60_000,
        };
        Self {
            endpoint,
            metrics: EndpointMetrics::default(),
            in_flight: 0,
            prefill_tokens: 0,
            matched_blocks: 0,
            ejected: false,
            failing: 0.0,
            last_answer: 0,
            last_cold_pick: 0,
            last_pick: 0,
            adapter_room: AdapterRoom::Unknown,
            predicted: None,
            slo: Slo::default(),
        }
    }

    fn set(&mut self, column: &str, cell: &str) -> Result<(), String> {
        match column {
            "name" => {}
            "address" => self.endpoint.address = cell.into(),
            "ready" => {
                self.endpoint.readiness = if yes(cell)? {
                    Readiness::Ready
                } else {
                    Readiness::NotReady
                }
            }
            "models" => {
                let mut models = names(cell);
                models.sort();
                self.endpoint.models = models.into();
            }
            "age_ms" => self.endpoint.age_ms = number(cell)?,
            "adapters" => self.lora().running = names(cell),
            "adapters_waiting" => self.lora().waiting = names(cell),
            "adapters_max" if cell == "-" => self.metrics.lora = None,
            "adapters_max" => self.lora().max = number(cell)?,
            "in_flight" => self.in_flight = number(cell)?,
            "prefill_tokens" => self.prefill_tokens = number(cell)?,
            "matched_blocks" => self.matched_blocks = number(cell)?,
            "ejected" => self.ejected = yes(cell)?,
            "failing" => self.failing = number(cell)?,
            "last_answer" => self.last_answer = number(cell)?,
            "adapter_room" => self.adapter_room = room(cell)?,
            "last_cold_pick" => self.last_cold_pick = number(cell)?,
            "last_pick" => self.last_pick = number(cell)?,
            "ttft" => self.predicted.get_or_insert_default().0 = number(cell)?,
            "tpot" => self.predicted.get_or_insert_default().1 = number(cell)?,
            "ttft_slo" => self.slo.ttft_us = micros(cell)?,
            "tpot_slo" => self.slo.tpot_us = micros(cell)?,
            _ if let Some(metric) = metric(column) => (metric.set)(&mut self.metrics, known(cell)?),
            _ if cell == "-" && column.contains(':') => {}
            _ if let Some(key) = column.strip_prefix("label:") => {
                put(&mut self.endpoint.labels, key, cell.into());
            }
            _ if let Some(key) = column.strip_prefix("attribute:") => {
                put(&mut self.metrics.attributes, key, number(cell)?);
            }
            _ => return Err(format!("unknown column `{column}`")),
        }
        Ok(())
    }

    fn lora(&mut self) -> &mut LoraMetrics {
        self.metrics.lora.get_or_insert_with(LoraMetrics::default)
    }
}

// === impl DecisionCase ===

impl DecisionCase {
    /// Makes a case for this pool, with a request without a prompt.
    pub fn new(pipeline: PipelineSpec, pool: Vec<EndpointCase>) -> Self {
        Self {
            pipeline,
            pool,
            request: RequestCase::default(),
            reuse_interval: scheduler::prefix::REQUESTED_ONCE,
            evicted_share: 0.0,
            metrics_stale: false,
            seed: 1,
            expected: String::new(),
        }
    }

    /// Reads a case. Fails if a line is wrong, and names the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut case = Self::new(PipelineSpec::default(), Vec::new());
        let mut section = "";
        let mut columns = Vec::new();
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let at = |error: String| format!("{error}, in line: {line}");
            match (section, words.as_slice()) {
                ("expect", _) => {
                    case.expected.push_str(line.trim());
                    case.expected.push('\n');
                }
                (_, []) => {}
                (_, [first, ..]) if first.starts_with('#') => {}
                (_, ["plugins"]) => {
                    section = "plugins";
                    case.forget_default();
                }
                (_, ["profile", name @ ..]) if name.len() < 2 => {
                    section = "profile";
                    case.forget_default();
                    let name = name.first().copied().unwrap_or("test").to_owned();
                    case.pipeline.profiles.push(ProfileSpec {
                        name,
                        plugins: Vec::new(),
                    });
                }
                (_, [name @ ("pool" | "request" | "expect")]) => section = name,
                ("plugins", words) => case.plugin(words).map(drop).map_err(at)?,
                ("profile", words) => case.profile_plugin(words).map_err(at)?,
                ("pool", words) if columns.is_empty() => {
                    columns = words.iter().map(|&word| word.to_owned()).collect();
                }
                ("pool", words) => case.row(&columns, words).map_err(at)?,
                ("request", [key, values @ ..]) => case.fact(key, values).map_err(at)?,
                _ => return Err(at("before any section".to_owned())),
            }
        }
        Ok(case)
    }

    /// Removes the default pipeline, before the first section about plugins.
    fn forget_default(&mut self) {
        if self.pipeline == PipelineSpec::default() {
            self.pipeline.plugins.clear();
            self.pipeline.profiles.clear();
        }
    }

    /// Declares a plugin, unless an identical one is declared already. Returns its name.
    fn plugin(&mut self, words: &[&str]) -> Result<String, String> {
        let (&plugin_type, rest) = words.split_first().ok_or("no plugin")?;
        let parameters = parameters(rest);
        let declared = self
            .pipeline
            .plugins
            .iter()
            .filter(|plugin| plugin.plugin_type == plugin_type);
        if let Some(same) = declared
            .clone()
            .find(|plugin| plugin.parameters == parameters)
        {
            return Ok(same.name.clone());
        }
        let name = match declared.count() {
            0 => plugin_type.to_owned(),
            others => format!("{plugin_type}-{}", others + 1),
        };
        match lookup(plugin_type).map(|row| row.kind) {
            Some(PluginKind::ProfileHandler) => self.pipeline.profile_handler.clone_from(&name),
            Some(PluginKind::Detector) if self.pipeline.profiles.is_empty() => {
                self.pipeline.saturation_detector.clone_from(&name);
            }
            _ => {}
        }
        self.pipeline.plugins.push(PluginSpec {
            plugin_type: plugin_type.to_owned(),
            name: name.clone(),
            parameters,
        });
        Ok(name)
    }

    fn profile_plugin(&mut self, words: &[&str]) -> Result<(), String> {
        if let ["ranked_max", length, ..] = words {
            self.pipeline.ranked_max = number(length)?;
            return Ok(());
        }
        let weight = words
            .iter()
            .skip(1)
            .find(|word| !word.contains('='))
            .map_or(Ok(1.0), |word| number(word))?;
        let name = self.plugin(words)?;
        let profile = self.pipeline.profiles.last_mut().ok_or("no profile")?;
        profile.plugins.push(ProfilePlugin { name, weight });
        Ok(())
    }

    fn row(&mut self, columns: &[String], cells: &[&str]) -> Result<(), String> {
        if cells.len() != columns.len() {
            return Err(format!(
                "{} cells under {} columns",
                cells.len(),
                columns.len()
            ));
        }
        let name = columns
            .iter()
            .position(|column| column == "name")
            .and_then(|at| cells.get(at))
            .ok_or("no name")?;
        let mut row = EndpointCase::new(self.pool.len(), name);
        for (column, cell) in columns.iter().zip(cells) {
            row.set(column, cell)?;
        }
        self.pool.push(row);
        Ok(())
    }

    fn fact(&mut self, key: &str, values: &[&str]) -> Result<(), String> {
        let first = || values.first().copied().ok_or("no value");
        match key {
            "model" => self.request.model = first()?.to_owned(),
            "header" => self.request.headers.push((
                first()?.to_owned(),
                values.get(1..).unwrap_or_default().join(" "),
            )),
            "media_items" => self.request.media_items = number(first()?)?,
            "priority" => self.request.priority = number(first()?)?,
            "subset" => {
                self.request.subset = Some(
                    values
                        .iter()
                        .map(|value| value.trim_end_matches(',').to_owned())
                        .collect(),
                );
            }
            "prompt_tokens" => self.request.prompt_tokens = number(first()?)?,
            "blocks" => self.request.blocks = number(first()?)?,
            "block_tokens" => self.request.block_tokens = number(first()?)?,
            "reuse_interval" => self.reuse_interval = number(first()?)?,
            "evicted_share" => self.evicted_share = number(first()?)?,
            "metrics_stale" => self.metrics_stale = yes(first()?)?,
            "seed" => self.seed = number(first()?)?,
            "latency_prediction" => self.pipeline.latency_prediction = yes(first()?)?,
            "ttft_slo" => self.request.slo.ttft_us = micros(first()?)?,
            "tpot_slo" => self.request.slo.tpot_us = micros(first()?)?,
            "prediction_based" => self.request.prediction_based = yes(first()?)?,
            _ => return Err(format!("unknown fact `{key}`")),
        }
        Ok(())
    }

    /// Returns the pool as a snapshot.
    pub fn snapshot(&self) -> Result<Snapshot, String> {
        let pipeline = Pipeline::build(&self.pipeline).map_err(|e| e.to_string())?;
        let endpoints = self.pool.iter().map(|row| row.endpoint.clone()).collect();
        let metrics = self.pool.iter().map(|row| row.metrics.clone()).collect();
        let snapshot = Snapshot::try_new(
            Version {
                term: 1,
                sequence: 1,
            },
            endpoints,
            metrics,
            pipeline,
        )
        .map_err(|e| e.to_string())?;
        let predicted = self
            .pool
            .iter()
            .filter_map(|row| Some((row.endpoint.id, row.predicted?)));
        let model = predicted.fold(
            LatencyModel::constant(100.0, 20.0),
            |model, (id, (ttft, tpot))| {
                // All endpoints have one model, and each endpoint has a factor.
                model.with_endpoint(id, ttft / 100.0, tpot / 20.0)
            },
        );
        let any = self.pool.iter().any(|row| row.predicted.is_some());
        Ok(snapshot.with_latency(any.then(|| std::sync::Arc::new(model))))
    }

    /// Returns the in-flight ledger of the rows.
    pub fn in_flight(&self) -> InFlight {
        let mut in_flight = InFlight::default();
        for row in &self.pool {
            for request in 0..row.in_flight {
                // The ticket is never released, because the case ends before its requests.
                let mut ticket = in_flight.admit(
                    row.endpoint.id,
                    if request == 0 { row.prefill_tokens } else { 0 },
                );
                if request == 0 {
                    in_flight.track(
                        &mut ticket,
                        TrackedSlo {
                            slo: row.slo,
                            counts: row.slo,
                            predicted: None,
                        },
                        "",
                    );
                }
            }
        }
        // The order of these admissions means nothing, so the rows set the last picks.
        self.pool
            .iter()
            .for_each(|row| in_flight.picked_at(row.endpoint.id, row.last_pick));
        in_flight
    }

    /// Schedules the request.
    pub fn decide(&self) -> Result<CaseDecision, String> {
        let snapshot = self.snapshot()?;
        let in_flight = self.in_flight();
        let mut explanation = Explanation::default();
        let decision = self.decide_with(&snapshot, &in_flight, Some(&mut explanation));
        let names = self
            .pool
            .iter()
            .map(|row| row.endpoint.name.to_string())
            .collect();
        Ok(CaseDecision {
            names,
            decision,
            explanation,
        })
    }

    /// Schedules the request on a snapshot and a ledger that were made before.
    pub fn decide_with(
        &self,
        snapshot: &Snapshot,
        in_flight: &InFlight,
        explanation: Option<&mut Explanation>,
    ) -> Decision {
        let hint = self
            .request
            .subset
            .as_ref()
            .map(|entries| SubsetHint::parse(entries.iter().map(String::as_str)));
        let matched_blocks: Vec<u32> = self.pool.iter().map(|row| row.matched_blocks).collect();
        let ejected: Vec<bool> = self.pool.iter().map(|row| row.ejected).collect();
        let last_answers: Vec<u64> = self.pool.iter().map(|row| row.last_answer).collect();
        let failing: Vec<f32> = self.pool.iter().map(|row| row.failing).collect();
        let adapter_rooms: Vec<AdapterRoom> =
            self.pool.iter().map(|row| row.adapter_room).collect();
        let last_cold_picks: Vec<u64> = self.pool.iter().map(|row| row.last_cold_pick).collect();
        let prefix_blocks = vec![0; self.request.blocks as usize];
        let headers: Vec<(&str, &str)> = self
            .request
            .headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        let request = Request {
            model: &self.request.model,
            headers: &headers,
            media_items: self.request.media_items,
            priority: self.request.priority,
            subset: hint.as_ref(),
            prompt_tokens: self.request.prompt_tokens,
            prefix_blocks: &prefix_blocks,
            prefix_block_tokens: self.request.block_tokens,
            slo: self.request.slo,
            prediction_based: self.request.prediction_based,
            stored_id: 0,
            ..Request::default()
        };
        // Every field is named here, so a new field does not compile until a case has it.
        let local = LocalState {
            in_flight,
            matched_blocks: &matched_blocks,
            reuse_interval: self.reuse_interval,
            evicted_share: self.evicted_share,
            ejected: &ejected,
            failing: &failing,
            last_answers: &last_answers,
            last_cold_picks: &last_cold_picks,
            adapter_rooms: &adapter_rooms,
            peers_unreachable: false,
            metrics_stale: self.metrics_stale,
        };
        schedule(
            snapshot,
            &request,
            local,
            &mut Rng::seeded(self.seed),
            explanation,
        )
    }
}

/// Reads milliseconds as µs. `-` means no value.
fn micros(text: &str) -> Result<Option<u32>, String> {
    let us = |ms: u32| {
        ms.checked_mul(1_000)
            .ok_or_else(|| format!("`{text}` is too long"))
    };
    if text == "-" {
        Ok(None)
    } else {
        number(text).and_then(us).map(Some)
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("`{text}` is no such number"))
}

/// Adds an entry to a list that is sorted by key.
fn put<T: Clone>(list: &mut Box<[(Box<str>, T)]>, key: &str, value: T) {
    let mut grown = list.to_vec();
    grown.insert(
        grown.partition_point(|(other, _)| **other < *key),
        (key.into(), value),
    );
    *list = grown.into();
}

/// Returns the metric of a column. Three metrics have a short name too.
fn metric(column: &str) -> Option<&'static MetricDefinition> {
    MetricDefinition::named(match column {
        "queue" => "queue_depth",
        "running" => "running_requests",
        "kv" => "kv_cache_utilization",
        name => name,
    })
}

fn known<T: std::str::FromStr>(cell: &str) -> Result<Option<T>, String> {
    if cell == "-" {
        Ok(None)
    } else {
        number(cell).map(Some)
    }
}

/// Reads `loaded`, `free`, `-`, or `full:N`: the adapter that would be displaced was last used at
/// N.
fn room(cell: &str) -> Result<AdapterRoom, String> {
    match (cell, cell.strip_prefix("full:")) {
        ("-", _) => Ok(AdapterRoom::Unknown),
        ("loaded", _) => Ok(AdapterRoom::Loaded),
        ("free", _) => Ok(AdapterRoom::Free),
        (_, Some(at)) => Ok(AdapterRoom::Full {
            displaced_used: number(at)?,
        }),
        _ => Err(format!("`{cell}` is no room for an adapter")),
    }
}

fn yes(cell: &str) -> Result<bool, String> {
    match cell {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(format!("`{cell}` is neither yes nor no")),
    }
}

fn names(cell: &str) -> Box<[Box<str>]> {
    cell.split(',')
        .filter(|name| *name != "-")
        .map(Into::into)
        .collect()
}
