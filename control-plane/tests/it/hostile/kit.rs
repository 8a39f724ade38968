//! Addresses and messages of hostile peers.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use control_plane::pool::writer::PoolMember;
use exchange::Timestamp;
use pool_state::{Ejection, LoadReportSum, PeerLoadReport};
use proto::state::daemon_message::Message;
use proto::state::{self, proxy_message};
use scheduler::EndpointRef;
use tonic::transport::{Channel, Endpoint};

use crate::daemon::harness::{DaemonHarness, FilterStream};

/// The address of good peers.
pub(super) const HOME: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// The address of hostile peers: another host, as far as the daemon can see.
pub(super) const ELSEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 66));

/// The node id that all peers share, as with the shipped Envoy files.
pub(super) const NODE: &str = "switchpoint-envoy";

/// Opens a connection from the address `from`.
pub(super) async fn channel(address: SocketAddr, from: IpAddr) -> Channel {
    Endpoint::from_shared(format!("http://{address}"))
        .unwrap()
        .local_address(Some(from))
        .connect()
        .await
        .unwrap()
}

/// Opens a stream, and returns it after Hello and Welcome.
pub(super) async fn filter(channel: &Channel, process_id: u64) -> FilterStream {
    let mut filter = FilterStream::over(channel.clone()).await.unwrap();
    filter
        .hello(proto::SCHEMA, NODE, process_id, &["default"])
        .await;
    let first = filter.next().await;
    assert!(matches!(first, Ok(Message::Welcome(_))), "{first:?}");
    filter
}

/// Returns the endpoints of the pool.
pub(super) fn endpoints(rig: &DaemonHarness) -> Vec<EndpointRef> {
    let pools = rig.shared.pools.views.borrow().clone();
    pools
        .get("default")
        .unwrap()
        .members
        .iter()
        .map(|member: &PoolMember| member.id)
        .collect()
}

/// Returns a row with these failures and no load, written at `written`.
pub(super) fn row_of_failures(written: u64, failures: &[Ejection]) -> Vec<u8> {
    let head = pool_state::LoadReportHead {
        vm: 7,
        written: Timestamp(written),
        ring: 0,
    };
    LoadReportSum::default().row(head, [], failures)
}

/// Returns a row with the largest possible numbers for these endpoints.
pub(super) fn largest_row(endpoints: &[EndpointRef]) -> Vec<u8> {
    let count = endpoints.len() as u64;
    let mut row: Vec<u8> = [
        u64::MAX,
        u64::MAX,
        u64::MAX,
        count | count << 16 | count << 32,
    ]
    .map(u64::to_le_bytes)
    .concat();
    let place = |at: &EndpointRef, low: u64| {
        (u64::from(at.slot.0) | low << 16 | u64::from(at.generation.0) << 32).to_le_bytes()
    };
    let most = [0xff; 24];
    endpoints
        .iter()
        .for_each(|at| row.extend([&place(at, 0xffff)[..], &most].concat()));
    endpoints
        .iter()
        .for_each(|at| row.extend([&place(at, 0)[..], &1_u64.to_le_bytes()].concat()));
    endpoints.iter().for_each(|at| {
        row.extend(
            [
                &place(at, 0)[..],
                &most[..16],
                &(u64::from(u32::MAX)).to_le_bytes(),
            ]
            .concat(),
        );
    });
    row
}

pub(super) fn share(row: Vec<u8>, placements: Vec<u8>) -> proxy_message::Message {
    proxy_message::Message::LoadReport(state::LoadReport {
        pool: "default".to_owned(),
        row,
        placements,
        stamp: 1,
        ..state::LoadReport::default()
    })
}

/// Waits for the next load of other proxies.
pub(super) async fn peers(filter: &mut FilterStream) -> state::PeerLoad {
    loop {
        if let Message::PeerLoad(peers) = filter.next().await.unwrap() {
            return peers;
        }
    }
}

/// Returns the time at which the row was written, and the failures in a row that the daemon passed
/// on.
pub(super) fn failures(row: &[u8]) -> (Timestamp, Vec<Ejection>) {
    let mut read = PeerLoadReport::default();
    LoadReportSum::default().read(&mut read, row.to_vec());
    (read.head().written, read.ejections().collect())
}
