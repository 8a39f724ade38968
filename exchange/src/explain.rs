//! The reasons of a decision as one compact JSON header.

use scheduler::{Explanation, ProfileExplanation, ScoreColumn, Snapshot};

use crate::pool::Picked;

/// The most endpoints named: a header must stay small; `switchpointd explain` tells all.
const ENDPOINTS_NAMED_MAX: usize = 32;

/// `{"picked":[…],"candidates":[{"endpoint","dropped_by","scores":{…},"total"}]}`, as `switchpointd explain` prints it. Candidates are those of
/// the first profile that ran; the others follow as `"profiles":[{"name","candidates"}]`, and whom they picked as `"prefill"`, `"encode"` and
/// `"data_parallel"`.
pub(crate) fn header(snapshot: &Snapshot, picked: &Picked, explanation: &Explanation) -> String {
    let none = ProfileExplanation::default();
    let (first, others) = explanation.profiles.split_first().unwrap_or((&none, &[]));
    let ranked: Vec<&str> = picked.ranked.iter().map(|(_, address)| &**address).collect();
    let mut fields = serde_json::Map::new();
    fields.insert("picked".to_owned(), ranked.into());
    fields.insert("candidates".to_owned(), candidates(snapshot, explanation, first).into());
    for (name, addresses) in
        [("prefill", picked.prefill.as_slice()), ("encode", picked.encode.as_slice()), ("data_parallel", picked.data_parallel.as_slice())]
    {
        if !addresses.is_empty() {
            fields.insert(name.to_owned(), addresses.iter().map(|address| serde_json::Value::from(&**address)).collect());
        }
    }
    let others = others.iter().map(|profile| {
        let candidates = candidates(snapshot, explanation, profile);
        serde_json::json!({"name": &*profile.name, "candidates": candidates})
    });
    let others: serde_json::Value = others.collect();
    if others.as_array().is_some_and(|others| !others.is_empty()) {
        fields.insert("profiles".to_owned(), others);
    }
    serde_json::Value::Object(fields).to_string()
}

fn candidates(snapshot: &Snapshot, explanation: &Explanation, profile: &ProfileExplanation) -> Vec<serde_json::Value> {
    let candidate = |index| {
        let endpoint = snapshot.endpoint(index)?;
        let dropped_by = explanation.dropped.iter().chain(&profile.dropped).find(|d| d.endpoint == index).map(|d| &*d.by);
        let score = |column: &ScoreColumn| {
            let (_, score) = column.scores.iter().find(|(i, _)| *i == index)?;
            Some((column.scorer.to_string(), rounded(*score)))
        };
        let scores: serde_json::Map<String, serde_json::Value> = profile.scores.iter().filter_map(score).collect();
        let total = profile.totals.iter().find(|(i, _)| *i == index).map(|(_, t)| rounded(*t));
        Some(serde_json::json!({"endpoint": &*endpoint.address, "dropped_by": dropped_by, "scores": scores, "total": total}))
    };
    snapshot.indices().take(ENDPOINTS_NAMED_MAX).filter_map(candidate).collect()
}

fn rounded(score: f32) -> serde_json::Value {
    serde_json::json!((f64::from(score) * 10_000.0).round() / 10_000.0)
}
