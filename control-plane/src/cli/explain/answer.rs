//! The daemon's part of `explain`: decides a request, or repeats a recorded decision, with the live
//! state of a pool or a variation of that state.

use std::sync::Arc;

use exchange::record::ParsedRecord;
use exchange::{
    Exchange, ExchangeSettings, ExchangeStep, HeaderTrust, HeadersStep, ManagedPool, Timestamp,
};
use pool_state::queues::QueuedReason;
use proto::LearnedModels;
use scheduler::flow::FLOW_CONTROL;
use scheduler::in_flight::EndpointLoad;
use scheduler::objects::Objects;
use scheduler::{EndpointRef, Pipeline, PipelineSpec, Snapshot, Version};
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::{ExplainRequest, WaitingCaller, check_answer};
use crate::config;
use crate::error::error_text;
use crate::pool::writer::PoolView;
use crate::state::counters::CounterTotals;
use crate::state::shared::DaemonState;

/// The maximum number of addresses that a question may leave out: as many as a pool can have.
const WITHOUT_MAX: usize = scheduler::ENDPOINTS_MAX;

/// The largest configuration in a question, in bytes. A ConfigMap in Kubernetes has the same limit.
const CONFIG_BYTES_MAX: usize = 1 << 20;

/// Answers a question from the current state. Stops between two steps if `caller` no longer waits.
/// No step takes long: it reads a text of limited length, or decides one request.
///
/// # Errors
/// Fails if the daemon does not serve the pool or has no state of the pool yet, if the question is
/// invalid, if its answer is too long, or if the caller no longer waits.
pub fn answer(
    shared: &DaemonState,
    question: &ExplainRequest,
    caller: &WaitingCaller,
) -> Result<Value, String> {
    question.check()?;
    let pools = shared.pools.views.borrow().clone();
    let name = match (&question.pool, shared.pools.names.as_slice()) {
        (Some(name), _) => name.as_str(),
        (None, [only]) => only,
        (None, names) => return Err(format!("which pool? There are {}", names.join(", "))),
    };
    let known = shared.pools.names.iter().any(|known| **known == *name);
    let view = pools.get(name).ok_or_else(|| {
        if known {
            format!("pool {name} has no endpoints yet")
        } else {
            format!("no pool {name}")
        }
    })?;
    let learned = shared
        .learned
        .models
        .borrow()
        .get(name)
        .and_then(|learned| proto::learned((**learned).clone()).ok());
    let live = |has_queues| {
        caller.check()?;
        let live = live(view, question, has_queues)?;
        caller.check()?;
        Ok::<_, String>(with_models(live, learned.as_ref()))
    };
    let mut answer = match ParsedRecord::from_json(&question.request) {
        Ok(record) => replay(&record, &live(true)?, question)?,
        Err(_) => {
            all_there(view, &question.without)?;
            let totals = shared.reports.totals(name, Instant::now());
            let mut fresh = FreshRequest::decide(live(true)?, learned.clone(), &totals, question)?;
            if let Some(held) = fresh.held {
                // A request that flow control holds has no pick yet. The pick that the request
                // would get now shows why it waits.
                fresh = FreshRequest::decide(live(false)?, learned.clone(), &totals, question)?;
                fresh
                    .answer
                    .insert("held".to_owned(), queued_members(view, &held));
            }
            fresh.answer
        }
    };
    answer.insert("pool".to_owned(), name.into());
    Ok(Value::Object(answer))
}

/// Returns the current pool with the changes from the question. The pool has flow control only if
/// `has_queues`.
fn live(view: &PoolView, question: &ExplainRequest, has_queues: bool) -> Result<Snapshot, String> {
    let other = question.config.as_deref().map(other_pipeline).transpose()?;
    let other = other.map(|other| PipelineSpec {
        latency_prediction: view.pipeline.latency_prediction,
        ..other
    });
    let mut spec = other.unwrap_or_else(|| (*view.pipeline).clone());
    spec.plugins
        .retain(|plugin| has_queues || plugin.plugin_type != FLOW_CONTROL);
    let pipeline = Pipeline::build(&spec).map_err(error_text)?;
    let now = Instant::now();
    let present = view.members.iter().zip(view.metrics.iter());
    let kept = present.filter(|(member, _)| {
        !question
            .without
            .contains(&member.instance.address.to_string())
    });
    let (endpoints, metrics) = kept
        .map(|(member, metrics)| (member.endpoint(now), metrics.clone()))
        .unzip();
    let objects = Objects::build(&view.objects).map_err(error_text)?;
    let version = Version {
        term: 0,
        sequence: view.revision,
    };
    Snapshot::try_new(version, endpoints, metrics, pipeline)
        .map(|s| s.with_objects(objects))
        .map_err(error_text)
}

/// Replaces the pool's models by the models that proxies use now.
fn with_models(live: Snapshot, learned: Option<&LearnedModels>) -> Snapshot {
    match learned {
        Some(learned) => live
            .with_step(Arc::new(learned.step.clone()))
            .with_latency(learned.latency.clone().map(Arc::new)),
        None => live,
    }
}

/// Refuses a question that leaves out an address that is not in the pool, because an answer with
/// all endpoints would mislead.
fn all_there(view: &PoolView, addresses: &[String]) -> Result<(), String> {
    let there = |address: &String| {
        view.members
            .iter()
            .any(|member| member.instance.address.to_string() == *address)
    };
    addresses
        .iter()
        .find(|address| !there(address))
        .map_or(Ok(()), |address| {
            Err(format!("no endpoint {address} in pool {}", view.name))
        })
}

fn other_pipeline(text: &str) -> Result<PipelineSpec, String> {
    let (report, config) = config::read(text);
    config
        .map(|config| config.pipeline)
        .ok_or_else(|| report.complaints("config"))
}

/// Decides a recorded decision again, with the inputs of the record.
fn replay(
    record: &ParsedRecord,
    live: &Snapshot,
    question: &ExplainRequest,
) -> Result<Map<String, Value>, String> {
    let replay = record.replay(live, &question.without).map_err(error_text)?;
    let mut answer = members(&exchange::explain::reasons(
        &replay.snapshot,
        &replay.decision,
        &replay.explanation,
        None,
        usize::MAX,
    ))?;
    answer.insert("was_picked".to_owned(), record.was_picked().into());
    Ok(answer)
}

// === impl ExplainRequest ===

impl ExplainRequest {
    /// Refuses a question that is too large for any pool or configuration.
    fn check(&self) -> Result<(), String> {
        if self.without.len() > WITHOUT_MAX {
            return Err(format!(
                "`without` has {} addresses; a pool has at most {WITHOUT_MAX}",
                self.without.len()
            ));
        }
        match &self.config {
            Some(config) if config.len() > CONFIG_BYTES_MAX => Err(format!(
                "`config` has {} bytes; at most {CONFIG_BYTES_MAX} are read",
                config.len()
            )),
            _ => Ok(()),
        }
    }
}

/// A request, decided as if it had just arrived.
struct FreshRequest {
    answer: Map<String, Value>,
    /// The reason why flow control holds the request, if it does.
    held: Option<QueuedReason>,
}

impl FreshRequest {
    fn decide(
        live: Snapshot,
        learned: Option<LearnedModels>,
        totals: &CounterTotals,
        question: &ExplainRequest,
    ) -> Result<Self, String> {
        let now = Timestamp(0);
        let mut pool = ManagedPool::new(rand::random(), 0);
        let metrics = live.metrics().to_vec();
        let refreshed = live
            .with_metrics(live.version(), metrics)
            .map_err(error_text)?;
        pool.install(live, 0, u32::MAX);
        pool.refresh(refreshed, now);
        if let Some(learned) = learned {
            pool.install_models(learned.step, learned.latency);
        }
        pool.set_peer_loads(loads(totals));
        let settings = ExchangeSettings {
            objective_header: HeaderTrust::Trust,
            slo_headers: HeaderTrust::Trust,
            ..ExchangeSettings::default()
        };
        let mut exchange = Exchange::new(now).with_explanation();
        let pairs = || {
            let pseudo = [(":method", "POST"), (":path", question.path.as_str())].into_iter();
            let given = question
                .headers
                .iter()
                .map(|(name, value)| (name.as_str(), value.as_str()));
            pseudo
                .chain(given)
                .map(|(name, value)| (name.as_bytes(), value.as_bytes()))
        };
        if let HeadersStep::Ready = exchange.request_headers(&settings, pairs(), false) {
            return Err(format!("{} asks whether the proxy is ready", question.path));
        }
        exchange.capture_headers(&pool, pairs());
        let step = exchange.decide(
            &settings,
            &mut pool,
            question.subset.as_deref().map(str::as_bytes),
            question.request.as_bytes(),
            now,
        );
        let held = exchange.queued_reason(&pool, now);
        let mut answer = exchange
            .reasons()
            .map_or_else(|| Ok(undecided()), members)?;
        if let ExchangeStep::Reply(reply) = step {
            let body = serde_json::from_slice(&reply.body).unwrap_or(Value::Null);
            answer.insert(
                "reply".to_owned(),
                json!({"status": reply.status, "body": body}),
            );
        }
        answer.insert(
            "note".to_owned(),
            "the daemon does not have the proxies' prefix index: explained as if no endpoint had cached a prefix of this prompt".into(),
        );
        Ok(Self { answer, held })
    }
}

/// Returns the requests and tokens that proxies have in flight at each endpoint.
fn loads(totals: &CounterTotals) -> impl Iterator<Item = (EndpointRef, EndpointLoad)> {
    totals.endpoints.iter().map(|(&(generation, slot), row)| {
        let load = EndpointLoad {
            requests: u32::try_from(row.requests).unwrap_or(u32::MAX),
            prefill_tokens: row.prefill_tokens,
            decode_tokens: row.decode_tokens,
            ..EndpointLoad::default()
        };
        (EndpointRef { slot, generation }, load)
    })
}

/// Returns the reason why a request is held, in the form that the access log has.
fn queued_members(view: &PoolView, held: &QueuedReason) -> Value {
    let full = held
        .full_at
        .and_then(|full| view.members.iter().find(|member| member.id == full));
    json!({"ms": held.ms, "priority": held.priority, "full": full.map(|member| member.instance.address.to_string())})
}

/// Returns the explanation of a request that is answered before any endpoint is compared.
fn undecided() -> Map<String, Value> {
    ["picked", "candidates"]
        .map(|list| (list.to_owned(), json!([])))
        .into_iter()
        .collect()
}

fn members(json: &str) -> Result<Map<String, Value>, String> {
    check_answer(json.len())?;
    Ok(serde_json::from_str(json).unwrap_or_default())
}
