//! The maximum number of connections of each listener, as a share of the process's file
//! descriptors.

use rustix::process::{Resource, getrlimit, setrlimit};

/// A listener of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerName {
    /// State and EDS, for proxies.
    State,
    /// The Endpoint Picker Protocol, for gateways.
    ExtProc,
    /// gRPC health, for probes.
    Health,
    /// The admin pages, for operators and tools.
    Admin,
    /// Metrics, for Prometheus.
    Metrics,
    /// The scaling signal, for KEDA.
    Scaler,
}

/// The maximum number of connections of one listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionBudget {
    /// The maximum number of open connections, also of those that have sent no request yet.
    pub connections_max: usize,
}

/// The number of descriptors assumed if the system sets no limit.
const DESCRIPTORS_MAX: u64 = 1 << 20;

/// The minimum number of connections of a listener, even with few descriptors. A quarter of these
/// connections may wait for a first request.
const CONNECTIONS_MIN: usize = 8;

/// Raises the soft limit of open files to the hard limit, because scraping and proxies together may
/// need more than the usual 1,024.
pub fn raise_descriptors() {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    let before = limit.current;
    limit.current = limit.maximum;
    match setrlimit(Resource::Nofile, limit) {
        Ok(()) => tracing::debug!(?before, now = ?limit.current, "raised the limit of open files"),
        Err(error) => {
            tracing::warn!(%error, limit = ?before, "cannot raise the limit of open files");
        }
    }
}

/// Returns the number of file descriptors that this process may have open.
fn descriptors() -> u64 {
    getrlimit(Resource::Nofile)
        .current
        .unwrap_or(DESCRIPTORS_MAX)
        .min(DESCRIPTORS_MAX)
}

// === impl ListenerName ===

impl ListenerName {
    /// Returns the name of the listener in its option, `--listen-NAME`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::State => "state",
            Self::ExtProc => "ext-proc",
            Self::Health => "health",
            Self::Admin => "admin",
            Self::Metrics => "metrics",
            Self::Scaler => "scaler",
        }
    }

    /// Returns the budget under the current limit of open files.
    #[must_use]
    pub fn budget(self) -> ConnectionBudget {
        self.budget_of(descriptors())
    }

    /// Returns the budget of a listener: at most `connections_max` connections, and at most `part`
    /// 32nds of all descriptors. The parts add up to 16 of 32, or to 20 while connections close
    /// ([`ConnectionBudget::open_max`]). The rest is for scraping, discovery and files, and clients
    /// cannot use it up.
    fn budget_of(self, descriptors: u64) -> ConnectionBudget {
        let (connections_max, part) = match self {
            // There is room for a few thousand proxies with two connections each.
            Self::State => (8_192, 8),
            // Each worker of each gateway needs one connection.
            Self::ExtProc => (8_192, 4),
            // Probes, scrapers and operators have a few connections at a time.
            Self::Health | Self::Admin | Self::Metrics | Self::Scaler => (256, 1),
        };
        let of_descriptors =
            usize::try_from(descriptors.saturating_mul(part) / 32).unwrap_or(usize::MAX);
        ConnectionBudget {
            connections_max: of_descriptors.clamp(CONNECTIONS_MIN, connections_max),
        }
    }
}

// === impl ConnectionBudget ===

impl ConnectionBudget {
    /// Returns the maximum number of connections that have made no request so far.
    pub(super) fn waiting_max(self) -> usize {
        self.connections_max / 4
    }

    /// Returns the maximum number of connections that have made a request.
    pub(super) fn served_max(self) -> usize {
        self.connections_max - self.waiting_max()
    }

    /// Returns the maximum number of open descriptors. The number includes the descriptors of
    /// connections that must close, which stay open until the connection's task runs.
    pub(super) fn open_max(self) -> usize {
        self.connections_max + self.waiting_max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [ListenerName; 6] = [
        ListenerName::State,
        ListenerName::ExtProc,
        ListenerName::Health,
        ListenerName::Admin,
        ListenerName::Metrics,
        ListenerName::Scaler,
    ];

    #[test]
    fn clients_cannot_take_the_descriptors_that_scraping_needs() {
        for descriptors in [256, 1_024, 65_536, DESCRIPTORS_MAX] {
            let taken: usize = ALL
                .iter()
                .map(|listener| listener.budget_of(descriptors).open_max())
                .sum();
            assert!(
                u64::try_from(taken).unwrap() <= descriptors * 20 / 32,
                "{taken} of {descriptors}"
            );
        }
    }

    #[test]
    fn budgets_grow_with_the_limit_up_to_their_maximum() {
        assert_eq!(
            ListenerName::State.budget_of(1_024),
            ConnectionBudget {
                connections_max: 256
            }
        );
        assert_eq!(
            ListenerName::Health.budget_of(1_024),
            ConnectionBudget {
                connections_max: 32
            }
        );
        assert_eq!(
            ListenerName::State.budget_of(DESCRIPTORS_MAX),
            ConnectionBudget {
                connections_max: 8_192
            }
        );
        assert_eq!(
            ListenerName::Metrics.budget_of(64),
            ConnectionBudget { connections_max: 8 }
        );
    }
}
