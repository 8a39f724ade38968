//! Faults on demand: which requests fail, how, and for how long.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// How requests fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultMode {
    /// Ends every fault and opens a closed socket again.
    None,
    /// Acts as if the process were gone: closes the listening socket and resets open connections.
    /// Of the other fields of [`ServerFault`], this mode uses only `for_ms`.
    Refuse,
    /// Reads the request and never answers it.
    Hang,
    /// Answers with `status`, `body` and `retry_after`.
    Status,
    /// Resets the connection after the request was read.
    ResetBeforeHeaders,
    /// Resets the connection in the middle of the response headers.
    ResetMidHeaders,
    /// Resets the connection after `after_chunks` chunks of a stream, or in the middle of a body
    /// that is not streamed.
    ResetMidStream,
}

/// The requests that a fault affects. Admin requests never fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultPaths {
    /// All requests except `/metrics` and `/health`.
    #[default]
    Inference,
    Metrics,
    /// All requests.
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

/// A command to start or end a fault, such as `{"mode":"status","status":503,"count":2}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerFault {
    pub mode: FaultMode,
    /// The status for `status`; 503 by default.
    pub status: Option<u16>,
    /// The body for `status`; by default an error in OpenAI's format.
    pub body: Option<String>,
    /// The value of `retry-after` for `status`, in seconds.
    pub retry_after: Option<u32>,
    /// The number of chunks before a `reset_mid_stream`; 1 by default.
    pub after_chunks: Option<u32>,
    /// The number of requests after which the fault ends; unlimited by default.
    pub count: Option<u32>,
    /// How long the fault lasts, in ms. By default it lasts until a command with the mode `none`.
    pub for_ms: Option<u64>,
    /// The requests that the fault affects.
    #[serde(default)]
    pub paths: FaultPaths,
}

impl ServerFault {
    /// Creates a fault of this mode with default settings.
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

/// The active faults, at most one for each of [`FaultPaths`].
#[derive(Debug, Default)]
pub(super) struct FaultTable {
    active: BTreeMap<FaultPaths, (ServerFault, Option<Instant>)>,
}

impl FaultTable {
    pub(super) fn clear(&mut self) {
        self.active.clear();
    }

    pub(super) fn order(&mut self, fault: ServerFault, now: Instant) {
        let until = fault
            .for_ms
            .map(|for_ms| now + Duration::from_millis(for_ms));
        self.active.insert(fault.paths, (fault, until));
    }

    /// Returns the fault for this request, and counts the request as affected.
    pub(super) fn hit(&mut self, path: &str, now: Instant) -> Option<ServerFault> {
        self.active.retain(|_, (fault, until)| {
            fault.count != Some(0) && until.is_none_or(|until| now < until)
        });
        let (fault, _) = self
            .active
            .values_mut()
            .find(|(fault, _)| fault.paths.hit(path))?;
        if let Some(count) = &mut fault.count {
            *count -= 1;
        }
        Some(fault.clone())
    }

    pub(super) fn list(&self) -> Vec<&ServerFault> {
        self.active
            .values()
            .map(|(fault, _)| fault)
            .filter(|fault| fault.count != Some(0))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_ends_by_count_by_time_and_by_order() {
        let mut faults = FaultTable::default();
        let now = Instant::now();
        faults.order(
            ServerFault {
                count: Some(2),
                ..ServerFault::new(FaultMode::Hang)
            },
            now,
        );
        faults.order(
            ServerFault {
                for_ms: Some(50),
                paths: FaultPaths::Metrics,
                ..ServerFault::new(FaultMode::Status)
            },
            now,
        );
        let hits = |faults: &mut FaultTable, path: &str, at_ms: u64| {
            faults
                .hit(path, now + Duration::from_millis(at_ms))
                .map(|fault| fault.mode)
        };
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
