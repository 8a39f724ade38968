//! The reasons for a decision as JSON: for the compact response header, for the daemon's answer,
//! and as a record that can be replayed.

use pool_state::DecisionMaker;
use pool_state::queues::QueuedReason;
use scheduler::latency::NoPrediction;
use scheduler::{
    Decision, EndpointIndex, EndpointPrediction, Explanation, LocalState, ProfileExplanation,
    Request, Rng, Slo, Snapshot,
};

use crate::json::write::JsonWriter;
use crate::record::DecisionRecord;
use crate::reply::Refusal;

/// The maximum number of endpoints in the explanation header, which must stay small.
/// `switchpointd explain` shows all.
pub(crate) const HEADER_ENDPOINTS_MAX: usize = 32;

/// After this many bytes, [`reasons`] writes no more endpoints: 8 KiB for each endpoint of the
/// largest pool. With the default policy an endpoint takes less than 1 KiB, but each endpoint
/// repeats the names of all scorers, and a name may be long.
pub const REASONS_BYTES_MAX: usize = scheduler::ENDPOINTS_MAX * (8 << 10);

/// The requested reports on a decision, and the reports themselves.
#[derive(Debug, Default)]
pub(crate) struct DecisionReason {
    /// The maximum number of endpoints in the reasons. 0 means that no reasons are wanted.
    pub(crate) endpoints_max: usize,
    /// Whether the ranked endpoints are wanted for a trace.
    pub(crate) traced: bool,
    /// Names of the request headers to record, if the decision is recorded.
    pub(crate) recorded: Option<Box<str>>,
    /// The reason why the request was held before, if it was.
    pub(crate) held: Option<QueuedReason>,
    pub(crate) reasons: Option<String>,
    pub(crate) record: Option<String>,
    /// The ranked endpoints with their costs.
    pub(crate) candidates: Option<String>,
}

/// `{"profile","picked":[…],"candidates":[{"endpoint","dropped_by","scores":{…},"cost":{…},"total","predicted"}]}`
/// with at most `endpoints_max` endpoints, up to [`REASONS_BYTES_MAX`]. Candidates come from the
/// first profile. The other profiles follow as `"profiles":[{"name","candidates"}]`, with their
/// picks as `"prefill"`, `"encode"` and `"data_parallel"`. A request that was not routed has its
/// drop reason as `"refused"`. A request that flow control held has
/// `"held":{"ms","priority","full"}`: the duration, and the endpoint that had no room at the last
/// try.
#[must_use]
pub fn reasons(
    snapshot: &Snapshot,
    decision: &Decision,
    explanation: &Explanation,
    held: Option<&QueuedReason>,
    endpoints_max: usize,
) -> String {
    let none = ProfileExplanation::default();
    let (first, others) = explanation.profiles.split_first().unwrap_or((&none, &[]));
    let shown: Vec<EndpointIndex> = snapshot.indices().take(endpoints_max).collect();
    let mut w = JsonWriter::default();
    w.object(|w| {
        if !first.name.is_empty() {
            w.name("profile").string(&first.name);
        }
        picked(w, snapshot, decision);
        if let Some(held) = held {
            let full = snapshot
                .indices()
                .filter_map(|index| snapshot.endpoint(index))
                .find(|endpoint| Some(endpoint.id) == held.full_at);
            w.name("held").object(|w| {
                w.name("ms").plain(held.ms);
                w.name("priority").plain(held.priority);
                w.name("full")
                    .option(full, |w, endpoint| w.string(&endpoint.address));
            });
        }
        w.name("candidates");
        candidates(w, snapshot, explanation, first, &shown);
        if !others.is_empty() {
            w.name("profiles").array(|w| {
                for profile in others {
                    w.object(|w| {
                        w.name("name").string(&profile.name);
                        w.name("candidates");
                        candidates(w, snapshot, explanation, profile, &shown);
                    });
                }
            });
        }
    });
    w.finish()
}

fn picked(w: &mut JsonWriter, snapshot: &Snapshot, decision: &Decision) {
    let mut put = |name: &str, indices: &[EndpointIndex]| {
        let endpoints = indices.iter().filter_map(|&index| snapshot.endpoint(index));
        w.name(name)
            .strings(endpoints.map(|endpoint| &*endpoint.address));
    };
    match decision {
        Decision::Route(route) => {
            put("picked", &route.ranked.iter().collect::<Vec<_>>());
            let stages = [
                ("prefill", route.prefill.as_slice()),
                ("encode", &route.encode),
                ("data_parallel", route.data_parallel.as_slice()),
            ];
            stages
                .into_iter()
                .filter(|(_, indices)| !indices.is_empty())
                .for_each(|(name, indices)| put(name, indices));
        }
        _ => put("picked", &[]),
    }
    if let Some(refusal) = Refusal::from_decision(decision) {
        w.name("refused").string(refusal.reason());
    }
}

// === impl DecisionReason ===

impl DecisionMaker for DecisionReason {
    fn decide(
        &mut self,
        snapshot: &Snapshot,
        request: &Request<'_>,
        local: LocalState<'_>,
        rng: &mut Rng,
    ) -> Decision {
        let record = self.recorded.take().and_then(|headers| {
            DecisionRecord::from_decision(snapshot, request, local, rng, &headers)
        });
        let explains = self.endpoints_max > 0 || self.traced;
        let mut explanation = explains.then(Explanation::default);
        let decision = scheduler::schedule(snapshot, request, local, rng, explanation.as_mut());
        if explains || record.is_some() {
            self.report(snapshot, &decision, explanation.as_ref(), record);
        }
        decision
    }
}

impl DecisionReason {
    fn report(
        &mut self,
        snapshot: &Snapshot,
        decision: &Decision,
        explanation: Option<&Explanation>,
        record: Option<DecisionRecord>,
    ) {
        let picked: Vec<EndpointIndex> = match decision {
            Decision::Route(route) => route.ranked.iter().collect(),
            _ => Vec::new(),
        };
        let wanted = explanation.filter(|_| self.endpoints_max > 0);
        self.reasons = wanted.map(|e| {
            reasons(
                snapshot,
                decision,
                e,
                self.held.as_ref(),
                self.endpoints_max,
            )
        });
        self.candidates = explanation
            .filter(|_| self.traced)
            .map(|e| ranked(snapshot, e, &picked));
        let addresses = picked
            .into_iter()
            .filter_map(|index| snapshot.endpoint(index))
            .map(|endpoint| &*endpoint.address);
        self.record = record.map(|record| record.to_json(addresses));
    }
}

/// The candidates of [`reasons`] that were picked, best first.
fn ranked(snapshot: &Snapshot, explanation: &Explanation, picked: &[EndpointIndex]) -> String {
    let mut w = JsonWriter::default();
    let none = ProfileExplanation::default();
    candidates(
        &mut w,
        snapshot,
        explanation,
        explanation.profiles.first().unwrap_or(&none),
        picked,
    );
    w.finish()
}

fn candidates(
    w: &mut JsonWriter,
    snapshot: &Snapshot,
    explanation: &Explanation,
    profile: &ProfileExplanation,
    shown: &[EndpointIndex],
) {
    w.array(|w| {
        for &index in shown {
            if w.bytes() > REASONS_BYTES_MAX {
                break;
            }
            let Some(endpoint) = snapshot.endpoint(index) else {
                continue;
            };
            let dropped_by = explanation
                .dropped
                .iter()
                .chain(&profile.dropped)
                .find(|d| d.endpoint == index)
                .map(|d| &*d.by);
            let total = profile
                .totals
                .iter()
                .find(|(i, _)| *i == index)
                .map(|(_, total)| *total);
            w.object(|w| {
                w.name("endpoint").string(&endpoint.address);
                w.name("dropped_by").option(dropped_by, JsonWriter::string);
                w.name("scores").object(|w| {
                    for column in &profile.scores {
                        if let Some((_, score)) = column.scores.iter().find(|(i, _)| *i == index) {
                            w.name(&column.scorer).rounded(*score);
                        }
                    }
                });
                for column in &profile.scores {
                    if let Some((_, terms)) = column.cost_terms.iter().find(|(i, _)| *i == index) {
                        cost(w, terms);
                    }
                }
                w.name("total").option(total, |w, total| w.rounded(total));
                let uncached = explanation.uncached_tokens.get(index.get()).copied();
                w.name("predicted").option(uncached, |w, uncached| {
                    w.object(|w| {
                        w.name("cached_tokens")
                            .plain(explanation.prompt_tokens.saturating_sub(uncached));
                        w.name("uncached_tokens").plain(uncached);
                        if let Some(prospect) = explanation.predictions.get(index.get()) {
                            prospect_members(w, prospect, explanation.asks);
                        }
                    });
                });
            });
        }
    });
}

/// Writes the terms of the cost that a scorer compared, in ms.
fn cost(w: &mut JsonWriter, terms: &[(&'static str, f32)]) {
    w.name("cost").object(|w| {
        for (name, ms) in terms {
            w.name(name).rounded(*ms);
        }
    });
}

/// Writes the prediction. For a request with an SLO, also writes the headroom, and which times
/// would be too long.
fn prospect_members(
    w: &mut JsonWriter,
    prospect: &Result<EndpointPrediction, NoPrediction>,
    asks: Slo,
) {
    let prospect = match prospect {
        Ok(prospect) => prospect,
        Err(why) => return w.name("abstains").string(why.reason()),
    };
    let times = [("ttft", prospect.ttft), ("tpot", prospect.tpot)];
    for (name, time) in times {
        w.name(name).object(|w| {
            w.name("ms").rounded(time.predicted_ms);
            if asks.any() && time.limit_ms.is_finite() {
                w.name("limit_ms").rounded(time.limit_ms);
                w.name("limit_of").string(if time.of_others {
                    "others there"
                } else {
                    "the request"
                });
                w.name("headroom_ms").rounded(time.left_ms());
            }
        });
    }
    if asks.any() {
        w.name("valid").plain(prospect.is_valid());
        w.name("idle").plain(prospect.idle);
        w.name("late").strings(
            times
                .into_iter()
                .filter(|(_, time)| time.is_exceeded())
                .map(|(name, _)| name),
        );
    }
}
