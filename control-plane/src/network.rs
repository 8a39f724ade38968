//! The part of an IP address that identifies a host.

use std::net::{IpAddr, Ipv6Addr};

/// The number of leading bits of an IPv6 address that identify a host. A host chooses the other
/// bits itself.
const IPV6_NETWORK_BITS: u32 = 64;

/// Returns the part of an address that a host cannot choose itself.
#[must_use]
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) if address.is_loopback() => address.into(),
        IpAddr::V6(address) => {
            let own = u128::MAX << (u128::BITS - IPV6_NETWORK_BITS);
            Ipv6Addr::from_bits(address.to_bits() & own).into()
        }
    }
}
