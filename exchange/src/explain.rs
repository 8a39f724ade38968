//! The reasons of a decision as one compact JSON header.

use scheduler::{EndpointRef, Explanation, Snapshot};

/// The most endpoints named: a header must stay small; `switchpointd explain` tells all.
const ENDPOINTS_NAMED_MAX: usize = 32;

/// `{"picked":[…],"candidates":[{"endpoint","dropped_by","scores":{…},"total"}]}`, as `switchpointd explain` prints it.
pub(crate) fn header(snapshot: &Snapshot, ranked: &[(EndpointRef, Box<str>)], explanation: &Explanation) -> String {
    let candidates: Vec<serde_json::Value> = snapshot
        .indices()
        .take(ENDPOINTS_NAMED_MAX)
        .filter_map(|index| {
            let endpoint = snapshot.endpoint(index)?;
            let dropped_by = explanation.dropped.iter().find(|d| d.endpoint == index).map(|d| &*d.by);
            let scores: serde_json::Map<String, serde_json::Value> = explanation
                .scores
                .iter()
                .filter_map(|column| {
                    let (_, score) = column.scores.iter().find(|(i, _)| *i == index)?;
                    Some((column.scorer.to_string(), rounded(*score)))
                })
                .collect();
            let total = explanation.totals.iter().find(|(i, _)| *i == index).map(|(_, t)| rounded(*t));
            Some(serde_json::json!({"endpoint": &*endpoint.address, "dropped_by": dropped_by, "scores": scores, "total": total}))
        })
        .collect();
    let picked: Vec<&str> = ranked.iter().map(|(_, address)| &**address).collect();
    serde_json::json!({"picked": picked, "candidates": candidates}).to_string()
}

fn rounded(score: f32) -> serde_json::Value {
    serde_json::json!((f64::from(score) * 10_000.0).round() / 10_000.0)
}
