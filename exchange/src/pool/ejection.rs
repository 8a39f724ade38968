//! Endpoints that just failed are left out for a while, so that the next request does not pay for the same failure.
//!
//! The first failure ejects for [`BASE_MS`], each further one without an answer in between for twice as long, up to [`MAX_MS`]. When the time
//! is over the endpoint is tried again; an answer clears its record. At most half of the ready endpoints are ejected, the worst first: when
//! more fail, failing is no longer a reason to prefer the others.

use scheduler::{EndpointRef, Readiness, Snapshot};

use crate::time::Time;

/// First ejection, in ms: longer than a process takes to restart its listener, shorter than anybody would notice a third of the pool missing.
const BASE_MS: u64 = 1_000;

/// Longest ejection, in ms: how late at most a mended endpoint is tried again.
const MAX_MS: u64 = 30_000;

/// Which endpoints failed lately.
#[derive(Debug, Default)]
pub struct Ejections {
    /// Only endpoints that failed since their last answer: at most one row for each endpoint of the pool.
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    endpoint: EndpointRef,
    failures: u32,
    until: Time,
}

// === impl Ejections ===

impl Ejections {
    /// An attempt on it failed before any response.
    pub fn failed(&mut self, endpoint: EndpointRef, now: Time) {
        let failures = match self.rows.iter_mut().find(|r| r.endpoint == endpoint) {
            // Requests that were already under way say nothing new while it is ejected.
            Some(row) if row.until > now => return,
            Some(row) => {
                row.failures = row.failures.saturating_add(1);
                row.until = now.plus_ms(ejection_ms(row.failures));
                return;
            }
            None => 1,
        };
        self.rows.push(Row { endpoint, failures, until: now.plus_ms(ejection_ms(failures)) });
    }

    /// It answered.
    pub fn answered(&mut self, endpoint: EndpointRef) {
        self.forget(endpoint);
    }

    /// It left the pool.
    pub fn forget(&mut self, endpoint: EndpointRef) {
        self.rows.retain(|r| r.endpoint != endpoint);
    }

    /// Writes who is ejected now, parallel to the snapshot's endpoints; leaves `out` empty when nobody is.
    pub fn mark(&self, snapshot: &Snapshot, now: Time, out: &mut Vec<bool>) {
        out.clear();
        let mut ejected: Vec<&Row> = self.rows.iter().filter(|r| r.until > now).collect();
        if ejected.is_empty() {
            return;
        }
        let ready = snapshot.endpoints().iter().filter(|e| e.readiness == Readiness::Ready).count();
        ejected.sort_unstable_by(|a, b| b.failures.cmp(&a.failures).then(b.until.cmp(&a.until)).then(a.endpoint.cmp(&b.endpoint)));
        ejected.truncate(ready / 2);
        out.extend(snapshot.endpoints().iter().map(|e| ejected.iter().any(|r| r.endpoint == e.id)));
    }
}

fn ejection_ms(failures: u32) -> u64 {
    BASE_MS.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(MAX_MS)
}
