//! Faults on demand: which requests go wrong, how, and for how long.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// How requests go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultMode {
    /// Ends every fault, and opens a closed socket again.
    None,
    /// The process is gone: the listening socket closes, open connections are reset. Takes `for_ms` only.
    Refuse,
    /// The request is read and never answered.
    Hang,
    /// An answer with `status`, `body` and `retry_after`.
    Status,
    /// The connection is reset after the request was read.
    ResetBeforeHeaders,
    /// The connection is reset in the middle of the response headers.
    ResetMidHeaders,
    /// The connection is reset after `after_chunks` chunks of a stream, or in the middle of an unstreamed body.
    ResetMidStream,
}

/// Which requests a fault hits. Admin requests never fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultPaths {
    /// All but `/metrics` and `/health`.
    #[default]
    Inference,
    /// `/metrics`.
    Metrics,
    /// All of them.
    All,
}

impl FaultPaths {
    fn hit(self, path: &str) -> bool {
        match self {
            Self::Inference => !matches!(path, "/metrics" | "/health"),
            Self::Metrics => path == "/metrics",
            Self::All => true,
        }
    }
}

/// A fault as it is ordered: `{"mode":"status","status":503,"count":2}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerFault {
    /// What happens.
    pub mode: FaultMode,
    /// `status` only; 503 unless said.
    pub status: Option<u16>,
    /// `status` only; an OpenAI-shaped error unless said.
    pub body: Option<String>,
    /// `status` only: `retry-after` in seconds.
    pub retry_after: Option<u32>,
    /// `reset_mid_stream` only; 1 unless said.
    pub after_chunks: Option<u32>,
    /// Requests it hits before it ends; without it all of them.
    pub count: Option<u32>,
    /// How long it lasts, ms; without it until `none`.
    pub for_ms: Option<u64>,
    /// Which requests it hits.
    #[serde(default)]
    pub paths: FaultPaths,
}

impl ServerFault {
    /// A fault of this mode with nothing else said.
    pub fn new(mode: FaultMode) -> Self {
        Self {
            mode,
            status: None,
            body: None,
            retry_after: None,
            after_chunks: None,
            count: None,
            for_ms: None,
            paths: FaultPaths::default(),
        }
    }
}

/// The faults in force: one for each kind of path.
#[derive(Debug, Default)]
pub(super) struct FaultTable {
    active: BTreeMap<FaultPaths, (ServerFault, Option<Instant>)>,
}

impl FaultTable {
    pub(super) fn clear(&mut self) {
        self.active.clear();
    }

    pub(super) fn order(&mut self, fault: ServerFault, now: Instant) {
        let until = fault.for_ms.map(|for_ms| now + Duration::from_millis(for_ms));
        self.active.insert(fault.paths, (fault, until));
    }

    /// The fault that hits this request, which counts as hit.
    pub(super) fn hit(&mut self, path: &str, now: Instant) -> Option<ServerFault> {
        self.active.retain(|_, (fault, until)| fault.count != Some(0) && until.is_none_or(|until| now < until));
        let (fault, _) = self.active.values_mut().find(|(fault, _)| fault.paths.hit(path))?;
        if let Some(count) = &mut fault.count {
            *count -= 1;
        }
        Some(fault.clone())
    }

    pub(super) fn list(&self) -> Vec<&ServerFault> {
        self.active.values().map(|(fault, _)| fault).filter(|fault| fault.count != Some(0)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_ends_by_count_by_time_and_by_order() {
        let (mut faults, now) = (FaultTable::default(), Instant::now());
        faults.order(ServerFault { count: Some(2), ..ServerFault::new(FaultMode::Hang) }, now);
        faults.order(ServerFault { for_ms: Some(50), paths: FaultPaths::Metrics, ..ServerFault::new(FaultMode::Status) }, now);
        let hits =
            |faults: &mut FaultTable, path: &str, at_ms: u64| faults.hit(path, now + Duration::from_millis(at_ms)).map(|fault| fault.mode);
        assert_eq!(hits(&mut faults, "/health", 0), None);
        assert_eq!(hits(&mut faults, "/v1/models", 0), Some(FaultMode::Hang));
        assert_eq!(hits(&mut faults, "/anything", 0), Some(FaultMode::Hang));
        assert_eq!(hits(&mut faults, "/anything", 0), None);
        assert_eq!(hits(&mut faults, "/metrics", 49), Some(FaultMode::Status));
        assert_eq!(hits(&mut faults, "/metrics", 50), None);
        faults.order(ServerFault::new(FaultMode::Hang), now);
        faults.clear();
        assert_eq!(hits(&mut faults, "/v1/models", 0), None);
    }
}
