//! The measurements of an engine, and bounds for them.

use std::time::Duration;

/// The measurements of one engine.
#[derive(Clone, Debug)]
pub struct MatrixResult {
    pub engine: &'static str,
    /// The largest number of requests of one burst at one server.
    pub worst_burst: u64,
    /// The number of servers that got a conversation's first turn. `None` if the picker does not
    /// read the prompts.
    pub servers_used: Option<usize>,
    /// The share of later turns that went to the server of the first turn, 0 to 1. `None` if the
    /// picker does not read the prompts.
    pub returned: Option<f64>,
    /// The number of requests of the steady load at the busiest server, divided by the mean of all
    /// servers.
    pub busiest_over_mean: f64,
    /// The time from the change of the endpoints file to the first request at the new server;
    /// `None` if no request came within 10 s.
    pub new_after: Option<Duration>,
}

/// The bounds of an engine. The steady load has one bound for all engines, [`BUSIEST_MAX`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatrixBounds {
    /// The maximum number of requests in a burst at one server.
    pub burst_max: u64,
    /// The minimum number of servers that conversations use.
    pub servers_used_min: usize,
    /// The minimum share of later turns that go to the server of the first turn.
    pub returned_min: f64,
}

/// The bounds on a quiet machine, for docs/reference/engines.md.
pub const BOUNDS: MatrixBounds = MatrixBounds {
    burst_max: 5,
    servers_used_min: 6,
    returned_min: 0.97,
};

/// The bounds of most engines in tests. The bounds are wide, because tests run beside other tests
/// on a busy machine, where workers learn of each other's picks late. A random choice of servers
/// still breaks the bounds, because a random choice gives 9 of 64 requests to one of 16 servers.
/// `crates/exchange/tests/engines` has tight bounds, in virtual time.
const BUSY_BOUNDS: MatrixBounds = MatrixBounds {
    burst_max: 7,
    servers_used_min: 4,
    returned_min: 0.9,
};

/// The maximum number of requests of the steady load at the busiest server, divided by the mean.
pub const BUSIEST_MAX: f64 = 1.3;

/// Engines with wider bounds in tests. On a quiet machine (docs/reference/engines.md) all
/// conversations are spread. A known fault is that requests are spread badly over engines that
/// answer immediately. No worker ever finds such an engine busy, so only the order of past picks
/// distinguishes the servers.
const OPEN: [(&str, MatrixBounds); 5] = [
    (
        "constant-per-token",
        MatrixBounds {
            servers_used_min: 2,
            ..BUSY_BOUNDS
        },
    ),
    (
        "no-metrics",
        MatrixBounds {
            servers_used_min: 2,
            ..BUSY_BOUNDS
        },
    ),
    (
        "frozen-metrics",
        MatrixBounds {
            servers_used_min: 2,
            ..BUSY_BOUNDS
        },
    ),
    (
        "no-usage",
        MatrixBounds {
            servers_used_min: 2,
            ..BUSY_BOUNDS
        },
    ),
    (
        AT_ONCE,
        MatrixBounds {
            burst_max: 8,
            ..BUSY_BOUNDS
        },
    ),
];

/// The name of the engine that answers immediately. Conversations need not return to a server of
/// this engine, because a cached prompt saves less than a millisecond on such a server, which the
/// policy cannot distinguish. So the policy sends the requests to all servers in rotation.
pub(super) const AT_ONCE: &str = "at-once";

/// Bounds for all engines if requests alternate between two proxies, on a busy machine. Proxies
/// learn of each other's requests through the daemon, later than the workers of one proxy do. So a
/// turn 20 ms after the previous one may reach a proxy that does not yet know of the previous turn.
/// On a quiet machine all turns return.
const OPEN_OF_TWO_PROXIES: MatrixBounds = MatrixBounds {
    burst_max: 7,
    servers_used_min: 2,
    returned_min: 0.75,
};

// === impl MatrixResult ===

impl MatrixResult {
    /// Whether the result is within the bounds of the engine, behind `proxies` proxies. The time
    /// until a new server is picked may be ten times the limit on a quiet machine.
    #[must_use]
    pub fn is_good(&self, proxies: u32) -> bool {
        let of_one = OPEN
            .iter()
            .find(|(open, _)| *open == self.engine)
            .map_or(BUSY_BOUNDS, |(_, bounds)| *bounds);
        let bounds = if proxies > 1 {
            OPEN_OF_TWO_PROXIES
        } else {
            of_one
        };
        let returns = self
            .returned
            .is_none_or(|returned| returned >= bounds.returned_min)
            && self
                .servers_used
                .is_none_or(|used| used >= bounds.servers_used_min);
        self.worst_burst <= bounds.burst_max
            && (returns || self.engine == AT_ONCE)
            && self.busiest_over_mean <= BUSIEST_MAX
            && self.new_after.is_some()
    }
}
