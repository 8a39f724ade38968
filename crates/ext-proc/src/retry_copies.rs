//! Limits the request bodies that gateways keep for retries. A gateway keeps such a body until the
//! reply has ended, so its copies could fill the gateway's memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use exchange::KeptBodies;

use super::gateway_connection::GatewayConnection;

/// The maximum number of bytes that a gateway keeps for retries of the requests of one connection:
/// as much as one worker with the filter keeps.
const COPIES_BYTES_MAX: usize = 64 << 20;

/// All bodies that gateways keep for retries. Each connection in the map keeps some.
#[derive(Debug, Default)]
pub struct RetryCopies(Mutex<HashMap<GatewayConnection, KeptBodies>>);

/// A body that a gateway keeps for a retry. Dropping it makes room for another one.
#[derive(Debug)]
pub struct RetryCopy {
    all: Arc<RetryCopies>,
    gateway: GatewayConnection,
    client: u64,
    bytes: usize,
}

// === impl RetryCopies ===

impl RetryCopies {
    fn lock(&self) -> MutexGuard<'_, HashMap<GatewayConnection, KeptBodies>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl RetryCopy ===

impl RetryCopy {
    /// Counts a body of this client, if there is room for it.
    pub fn keep(
        all: &Arc<RetryCopies>,
        gateway: GatewayConnection,
        client: u64,
        bytes: usize,
    ) -> Option<Self> {
        let mut gateways = all.lock();
        let kept = gateways.entry(gateway).or_default();
        let may = kept.keep(client, bytes, COPIES_BYTES_MAX);
        if kept.is_empty() {
            gateways.remove(&gateway);
        }
        may.then(|| Self {
            all: Arc::clone(all),
            gateway,
            client,
            bytes,
        })
    }
}

impl Drop for RetryCopy {
    fn drop(&mut self) {
        let mut gateways = self.all.lock();
        if let Some(kept) = gateways.get_mut(&self.gateway) {
            kept.release(self.client, self.bytes);
            if kept.is_empty() {
                gateways.remove(&self.gateway);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tonic::transport::server::TcpConnectInfo;

    use super::*;

    fn gateway(remote_addr: &str) -> GatewayConnection {
        let mut extensions = http::Extensions::new();
        extensions.insert(TcpConnectInfo {
            local_addr: None,
            remote_addr: Some(remote_addr.parse().unwrap()),
        });
        GatewayConnection::from_extensions(&extensions)
    }

    #[test]
    fn the_copies_of_one_gateway_take_no_room_from_another_gateway() {
        let all = Arc::new(RetryCopies::default());
        let keep_all = |address| -> Vec<_> {
            let one = || RetryCopy::keep(&all, gateway(address), 1, 1 << 20);
            std::iter::from_fn(one).collect()
        };
        let first = keep_all("10.0.0.1:1");
        assert_eq!(
            first.len(),
            56,
            "seven eighths, because the client is alone"
        );
        assert_eq!(keep_all("10.0.0.2:1").len(), 56);
        drop(first);
        assert!(all.lock().is_empty());
    }
}
