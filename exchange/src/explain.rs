//! The reasons of a decision as JSON: one compact header, the daemon's answer, or a record to make it again by.

use scheduler::{Decision, EndpointIndex, Explanation, ProfileExplanation, ScoreColumn, Snapshot};
use serde_json::{Map, Value};

use crate::record::Record;
use crate::reply::Refusal;

/// The most endpoints named in a header: it must stay small; `switchpointd explain` tells all.
pub(crate) const HEADER_ENDPOINTS_MAX: usize = 32;

/// What is to be told of a decision, and what was.
#[derive(Debug, Default)]
pub(crate) struct Why {
    /// Endpoints named in the reasons; 0: nobody asked for them.
    pub(crate) endpoints_max: usize,
    /// Is it to be recorded?
    pub(crate) recorded: bool,
    /// The reasons.
    pub(crate) reasons: Option<String>,
    /// The record.
    pub(crate) record: Option<String>,
}

/// `{"profile","picked":[…],"candidates":[{"endpoint","dropped_by","scores":{…},"total"}]}` of at most `endpoints_max` endpoints. Candidates are
/// those of the first profile that ran; the others follow as `"profiles":[{"name","candidates"}]`, and whom they picked as `"prefill"`,
/// `"encode"` and `"data_parallel"`. What was not routed has the drop reason as `"refused"`.
#[must_use]
pub fn reasons(snapshot: &Snapshot, decision: &Decision, explanation: &Explanation, endpoints_max: usize) -> Map<String, Value> {
    let none = ProfileExplanation::default();
    let (first, others) = explanation.profiles.split_first().unwrap_or((&none, &[]));
    let addresses = |indices: &mut dyn Iterator<Item = EndpointIndex>| -> Vec<Value> {
        indices.filter_map(|index| snapshot.endpoint(index)).map(|endpoint| (*endpoint.address).into()).collect()
    };
    let mut fields = Map::new();
    let mut put = |name: &str, value: Vec<Value>| drop(fields.insert(name.to_owned(), value.into()));
    match decision {
        Decision::Route(route) => {
            put("picked", addresses(&mut route.ranked.iter()));
            for (name, mut indices) in [
                ("prefill", route.prefill.as_slice().iter().copied()),
                ("encode", route.encode.iter().copied()),
                ("data_parallel", route.data_parallel.as_slice().iter().copied()),
            ] {
                let named = addresses(&mut indices);
                if !named.is_empty() {
                    put(name, named);
                }
            }
        }
        _ => put("picked", Vec::new()),
    }
    put("candidates", candidates(snapshot, explanation, first, endpoints_max));
    if !others.is_empty() {
        let others = others.iter().map(|profile| {
            let candidates = candidates(snapshot, explanation, profile, endpoints_max);
            serde_json::json!({"name": &*profile.name, "candidates": candidates})
        });
        put("profiles", others.collect());
    }
    if !first.name.is_empty() {
        fields.insert("profile".to_owned(), (*first.name).into());
    }
    if let Some(refusal) = Refusal::of(decision) {
        fields.insert("refused".to_owned(), refusal.reason().into());
    }
    fields
}

// === impl Why ===

impl Why {
    /// Takes down the reasons of a decision.
    pub(crate) fn tell(&mut self, snapshot: &Snapshot, decision: &Decision, explanation: Option<&Explanation>, record: Option<Record>) {
        self.reasons = explanation.map(|e| Value::Object(reasons(snapshot, decision, e, self.endpoints_max)).to_string());
        let picked: Vec<EndpointIndex> = match decision {
            Decision::Route(route) => route.ranked.iter().collect(),
            _ => Vec::new(),
        };
        let addresses = picked.into_iter().filter_map(|index| snapshot.endpoint(index)).map(|endpoint| &*endpoint.address);
        self.record = record.map(|record| record.picked(addresses).to_json());
    }
}

fn candidates(snapshot: &Snapshot, explanation: &Explanation, profile: &ProfileExplanation, max: usize) -> Vec<Value> {
    let candidate = |index| {
        let endpoint = snapshot.endpoint(index)?;
        let dropped_by = explanation.dropped.iter().chain(&profile.dropped).find(|d| d.endpoint == index).map(|d| &*d.by);
        let score = |column: &ScoreColumn| {
            let (_, score) = column.scores.iter().find(|(i, _)| *i == index)?;
            Some((column.scorer.to_string(), rounded(*score)))
        };
        let mut scores = Map::new();
        profile.scores.iter().filter_map(score).for_each(|(name, value)| drop(scores.insert(name, value)));
        let total = profile.totals.iter().find(|(i, _)| *i == index).map(|(_, t)| rounded(*t));
        Some(serde_json::json!({"endpoint": &*endpoint.address, "dropped_by": dropped_by, "scores": scores, "total": total}))
    };
    snapshot.indices().take(max).filter_map(candidate).collect()
}

fn rounded(score: f32) -> Value {
    serde_json::json!((f64::from(score) * 10_000.0).round() / 10_000.0)
}
