//! The connections of gateways. What a gateway holds is bounded for each connection or address, so
//! that no gateway takes room from others. An Envoy has a connection for each worker thread.

use std::net::{IpAddr, SocketAddr};

use http::Extensions;
use tonic::transport::server::TcpConnectInfo;

/// A connection of a gateway, by the address of its remote end. All connections without a known
/// address count as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GatewayConnection(Option<SocketAddr>);

// === impl GatewayConnection ===

impl GatewayConnection {
    /// The connection of a request with these extensions.
    #[must_use]
    pub(super) fn from_extensions(extensions: &Extensions) -> Self {
        let info = extensions.get::<TcpConnectInfo>();
        Self(info.and_then(TcpConnectInfo::remote_addr))
    }

    /// The address of the gateway. All its connections have the same.
    #[must_use]
    pub(super) fn address(self) -> Option<IpAddr> {
        self.0.map(|remote| remote.ip())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_connection_of_a_gateway_counts_on_its_own() {
        let from = |remote_addr: Option<&str>| {
            let mut extensions = Extensions::new();
            extensions.insert(TcpConnectInfo {
                local_addr: None,
                remote_addr: remote_addr.map(|address| address.parse().unwrap()),
            });
            GatewayConnection::from_extensions(&extensions)
        };
        assert_ne!(from(Some("10.0.0.1:1")), from(Some("10.0.0.1:2")));
        let [first, second, other] = ["10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1"]
            .map(|remote_addr| from(Some(remote_addr)).address());
        assert!(first == second && first != other && first.is_some());
        assert_eq!(
            from(None),
            GatewayConnection::from_extensions(&Extensions::new())
        );
    }
}
