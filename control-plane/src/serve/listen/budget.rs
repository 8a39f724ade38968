//! How many connections each listener may hold, out of the file descriptors that the process has.

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
    /// Operators and tools.
    Admin,
    /// Prometheus.
    Metrics,
}

/// The most connections of one listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionBudget {
    /// At once, waiting and served.
    pub connections_max: usize,
}

/// The number of descriptors assumed where the system sets no limit.
const DESCRIPTORS_MAX: u64 = 1 << 20;

/// The fewest connections a listener gets, however few descriptors there are: the room that waits is a quarter of it.
const CONNECTIONS_MIN: usize = 8;

/// Raises the soft limit of open files to the hard one: scraping and proxies together may need more than the usual 1,024.
pub fn raise_descriptors() {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    let before = limit.current;
    limit.current = limit.maximum;
    match setrlimit(Resource::Nofile, limit) {
        Ok(()) => tracing::debug!(?before, now = ?limit.current, "the limit of open files is raised"),
        Err(error) => tracing::warn!(%error, limit = ?before, "the limit of open files cannot be raised"),
    }
}

/// File descriptors that this process may have open.
fn descriptors() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(DESCRIPTORS_MAX).min(DESCRIPTORS_MAX)
}

// === impl ListenerName ===

impl ListenerName {
    /// The name in its option, `--listen-NAME`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::State => "state",
            Self::ExtProc => "ext-proc",
            Self::Health => "health",
            Self::Admin => "admin",
            Self::Metrics => "metrics",
        }
    }

    /// What it may hold by the limit of open files of this moment.
    #[must_use]
    pub fn budget(self) -> ConnectionBudget {
        self.budget_of(descriptors())
    }

    /// At most so many connections, and at most this part (in 32nds) of all descriptors. The parts add up to 15 of 32, and to 19 while connections
    /// close ([`ConnectionBudget::open_max`]): the rest is for scraping, discovery and files, which no client can take away.
    fn budget_of(self, descriptors: u64) -> ConnectionBudget {
        let (connections_max, part) = match self {
            // A few thousand proxies with two connections each.
            Self::State => (8_192, 8),
            // A connection for each worker of each gateway.
            Self::ExtProc => (8_192, 4),
            // Probes, scrapers and operators: a few at a time.
            Self::Health | Self::Admin | Self::Metrics => (256, 1),
        };
        let of_descriptors = usize::try_from(descriptors.saturating_mul(part) / 32).unwrap_or(usize::MAX);
        ConnectionBudget { connections_max: of_descriptors.clamp(CONNECTIONS_MIN, connections_max) }
    }
}

// === impl ConnectionBudget ===

impl ConnectionBudget {
    /// Connections without a request so far.
    pub(super) fn waiting_max(self) -> usize {
        self.connections_max / 4
    }

    /// Connections that asked something.
    pub(super) fn served_max(self) -> usize {
        self.connections_max - self.waiting_max()
    }

    /// Connections with those that were told to close and still hold a descriptor, for as long as a task takes to run.
    pub(super) fn open_max(self) -> usize {
        self.connections_max + self.waiting_max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [ListenerName; 5] =
        [ListenerName::State, ListenerName::ExtProc, ListenerName::Health, ListenerName::Admin, ListenerName::Metrics];

    #[test]
    fn clients_cannot_take_the_descriptors_that_scraping_needs() {
        for descriptors in [256, 1_024, 65_536, DESCRIPTORS_MAX] {
            let taken: usize = ALL.iter().map(|listener| listener.budget_of(descriptors).open_max()).sum();
            assert!(u64::try_from(taken).unwrap() <= descriptors * 19 / 32, "{taken} of {descriptors}");
        }
    }

    #[test]
    fn budgets_grow_with_the_limit_up_to_their_maximum() {
        assert_eq!(ListenerName::State.budget_of(1_024), ConnectionBudget { connections_max: 256 });
        assert_eq!(ListenerName::Health.budget_of(1_024), ConnectionBudget { connections_max: 32 });
        assert_eq!(ListenerName::State.budget_of(DESCRIPTORS_MAX), ConnectionBudget { connections_max: 8_192 });
        assert_eq!(ListenerName::Metrics.budget_of(64), ConnectionBudget { connections_max: 8 });
    }
}
