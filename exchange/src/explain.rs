//! The reasons of a decision as one compact JSON header.

use scheduler::{EndpointRef, Explanation, ProfileExplanation, ScoreColumn, Snapshot};

/// The most endpoints named: a header must stay small; `switchpointd explain` tells all.
const ENDPOINTS_NAMED_MAX: usize = 32;

/// `{"picked":[…],"candidates":[{"endpoint","dropped_by","scores":{…},"total"}]}`, as `switchpointd explain` prints it. Candidates are those of
/// the first profile that ran; the others follow as `"profiles":[{"name","candidates"}]`.
pub(crate) fn header(snapshot: &Snapshot, ranked: &[(EndpointRef, Box<str>)], explanation: &Explanation) -> String {
    let none = ProfileExplanation::default();
    let (first, others) = explanation.profiles.split_first().unwrap_or((&none, &[]));
    let picked: Vec<&str> = ranked.iter().map(|(_, address)| &**address).collect();
    let mut value = serde_json::json!({"picked": picked, "candidates": candidates(snapshot, explanation, first)});
    if let (Some(fields), false) = (value.as_object_mut(), others.is_empty()) {
        let others = others.iter().map(|profile| {
            let candidates = candidates(snapshot, explanation, profile);
            serde_json::json!({"name": &*profile.name, "candidates": candidates})
        });
        fields.insert("profiles".to_owned(), others.collect());
    }
    value.to_string()
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
