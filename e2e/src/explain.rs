//! Requests explanations from the picker with the header `x-switchpoint-explain`. The picker's
//! configuration must allow explanations (`"explain": true`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use http::Request;
use serde::Deserialize;
use serde_json::json;

use testbed::stack::Stack;
use testbed::{Result, client, wait_for};

/// The maximum time until the picker knows a changed pool. The product promises milliseconds.
const POOL_LIMIT: Duration = Duration::from_secs(60);

/// A decision, as the header `x-switchpoint-decision` of the response reports it.
#[derive(Clone, Debug, Deserialize)]
pub struct ExplainedDecision {
    /// The addresses of the ranked list.
    pub picked: Vec<String>,
    /// All endpoints of the snapshot.
    pub candidates: Vec<ExplainedCandidate>,
}

/// One endpoint of the snapshot.
#[derive(Clone, Debug, Deserialize)]
pub struct ExplainedCandidate {
    pub endpoint: String,
    /// The scheduling filter that removed the endpoint, if one did.
    pub dropped_by: Option<String>,
    pub scores: BTreeMap<String, f64>,
}

// === impl ExplainedDecision ===

impl ExplainedDecision {
    /// Sends a chat request through `proxy` and reads the decision. The request is streaming,
    /// because with other responses an engine reports its load, which would change the next
    /// decision.
    ///
    /// # Errors
    /// Fails if the request was not served, or not explained.
    pub async fn ask(proxy: SocketAddr, prompt: &str) -> Result<Self> {
        let body = json!({"model": "demo", "stream": true, "max_tokens": 1, "messages": [{"role": "user", "content": prompt}]});
        let request = Request::post("/v1/chat/completions")
            .header("x-switchpoint-explain", "1")
            .body(client::full(body.to_string()))?;
        let reply = client::send(proxy, request).await?;
        let header = reply.header("x-switchpoint-decision");
        if reply.status != 200 || header.is_empty() {
            return Err(format!("not explained: {} {}", reply.status, reply.text()).into());
        }
        Ok(serde_json::from_str(header)?)
    }

    /// Returns the addresses of all endpoints in the snapshot.
    pub fn endpoints(&self) -> BTreeSet<String> {
        self.candidates
            .iter()
            .map(|candidate| candidate.endpoint.clone())
            .collect()
    }

    /// Returns the score that a scorer gave each endpoint.
    pub fn scores(&self, scorer: &str) -> BTreeMap<String, f64> {
        self.candidates
            .iter()
            .filter_map(|c| Some((c.endpoint.clone(), *c.scores.get(scorer)?)))
            .collect()
    }

    /// Returns whether a scorer gives endpoints different scores. Returns false if the scorer
    /// scores no endpoint.
    pub fn distinguishes(&self, scorer: &str) -> bool {
        let scores = self.scores(scorer);
        scores
            .values()
            .any(|score| Some(score) != scores.values().next())
    }
}

/// Waits until the picker of a stack knows exactly these servers. The stack must allow
/// explanations.
///
/// # Errors
/// Fails if the picker does not know exactly these servers in time.
pub async fn pool_is(stack: &Stack, indices: &[usize]) -> Result<()> {
    let addresses = indices
        .iter()
        .map(|index| Some(stack.servers.get(*index)?.addr().to_string()));
    let wanted = addresses
        .collect::<Option<BTreeSet<_>>>()
        .ok_or("no such server")?;
    let look = || async {
        (ExplainedDecision::ask(stack.address(), "who is there?")
            .await
            .ok()?
            .endpoints()
            == wanted)
            .then_some(())
    };
    wait_for(POOL_LIMIT, &format!("a pool of {wanted:?}"), look).await
}
