//! Where an engine publishes its KV events.

use std::net::SocketAddr;
use std::sync::Arc;

use discovery::Instance;

/// The endpoint label with the port of the publisher; another text than a port, such as `none`,
/// means no publisher.
pub const PORT_LABEL: &str = "switchpoint/kv-events-port";

/// The endpoint label with the port for replays.
pub const REPLAY_PORT_LABEL: &str = "switchpoint/kv-events-replay-port";

/// The endpoint label with the data-parallel rank, if each rank of a pod has its own port for
/// requests. Engines add the rank to the ports of their events too.
const RANK_LABEL: &str = "llm-d.ai/data-parallel-rank";

/// The ports of publishers, for endpoints without the labels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvEventPorts {
    pub events: Option<u16>,
    pub replay: Option<u16>,
}

/// The publisher of one engine. It has the engine's own host, so discovery cannot send the daemon
/// to another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventTarget {
    /// The address of the endpoint for requests.
    pub endpoint: SocketAddr,
    /// The name of the endpoint.
    pub name: Arc<str>,
    pub events: SocketAddr,
    pub replay: Option<SocketAddr>,
}

// === impl KvEventPorts ===

impl KvEventPorts {
    /// Returns the publisher of an endpoint, if it has one.
    #[must_use]
    pub fn target(&self, instance: &Instance) -> Option<KvEventTarget> {
        let label = |name: &str| {
            let found = instance.labels.iter().find(|(key, _)| key == name);
            found.map(|(_, value)| value.as_str())
        };
        let rank = label(RANK_LABEL).map_or(Some(0), |rank| rank.parse::<u16>().ok())?;
        let address = |name: &str, default: Option<u16>| {
            let port = match label(name) {
                Some(port) => port.parse().ok(),
                None => default,
            };
            let port = port.filter(|&port| port > 0)?.checked_add(rank)?;
            Some(SocketAddr::new(instance.address.ip(), port))
        };
        Some(KvEventTarget {
            endpoint: instance.address,
            name: instance.name.as_str().into(),
            events: address(PORT_LABEL, self.events)?,
            replay: address(REPLAY_PORT_LABEL, self.replay),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports(defaults: KvEventPorts, labels: &[(&str, &str)]) -> Option<(u16, Option<u16>)> {
        let mut instance = Instance::new("e", SocketAddr::from(([10, 0, 0, 1], 8000)));
        instance.labels = labels
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect();
        let target = defaults.target(&instance)?;
        assert_eq!(target.events.ip(), instance.address.ip());
        Some((target.events.port(), target.replay.map(|at| at.port())))
    }

    #[test]
    fn labels_go_before_the_options_and_a_rank_is_added() {
        let none = KvEventPorts::default();
        let both = KvEventPorts {
            events: Some(5557),
            replay: Some(5657),
        };
        assert_eq!(ports(none, &[]), None);
        assert_eq!(ports(both, &[]), Some((5557, Some(5657))));
        assert_eq!(ports(none, &[(PORT_LABEL, "7000")]), Some((7000, None)));
        assert_eq!(ports(both, &[(PORT_LABEL, "none")]), None);
        assert_eq!(ports(both, &[(PORT_LABEL, "0")]), None);
        assert_eq!(
            ports(both, &[(REPLAY_PORT_LABEL, "none")]),
            Some((5557, None))
        );
        assert_eq!(ports(both, &[(RANK_LABEL, "3")]), Some((5560, Some(5660))));
        assert_eq!(ports(both, &[(RANK_LABEL, "x")]), None);
        assert_eq!(ports(both, &[(RANK_LABEL, "65000")]), None);
    }
}
