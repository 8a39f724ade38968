//! Leases ports of 127.0.0.1, so that no two tests on this machine use the same port.
//!
//! If a test gets a free port from the kernel and lets a child process bind it later, another test
//! may get the port in between. So a lease is a locked file, named after the port. The kernel
//! unlocks the file when the process ends, even if the process was killed.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::ops::Range;
use std::process;
use std::sync::atomic::{AtomicU16, Ordering};

use crate::Result;

/// The range of leased ports. It is below Linux's range for outgoing connections (32768 and up), so
/// that no outgoing connection uses a leased port.
const RANGE: Range<u16> = 20_000..30_000;

/// A port of 127.0.0.1, leased until this value is dropped.
#[derive(Debug)]
pub struct ReservedPort {
    number: u16,
    _lock: File,
}

// === impl ReservedPort ===

impl ReservedPort {
    /// Leases a port that no socket listens on.
    ///
    /// # Errors
    /// Fails if the lock files cannot be written, or all ports are taken.
    pub fn lease() -> Result<Self> {
        // Each process starts at another port and continues upwards, so two processes seldom try
        // the same port.
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let spread =
            u16::try_from(process::id().wrapping_mul(61) % u32::from(RANGE.end - RANGE.start))?;
        let locks = std::env::temp_dir().join("switchpoint-e2e-ports");
        fs::create_dir_all(&locks)?;
        for _ in RANGE {
            let step = NEXT.fetch_add(1, Ordering::Relaxed);
            let number = RANGE.start
                + (u32::from(spread) + u32::from(step))
                    .rem_euclid(u32::from(RANGE.end - RANGE.start)) as u16;
            let lock = File::create(locks.join(number.to_string()))?;
            // Tests the port by a connection and binds no socket, because another thread may start
            // a process that would inherit a bound socket.
            if lock.try_lock().is_ok() && TcpStream::connect((Ipv4Addr::LOCALHOST, number)).is_err()
            {
                return Ok(Self {
                    number,
                    _lock: lock,
                });
            }
        }
        Err(format!("no free port in {RANGE:?}").into())
    }

    pub fn number(&self) -> u16 {
        self.number
    }

    /// Returns the address to listen on or to connect to.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.number))
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn leases_are_exclusive_and_end() {
        let leases = (0..50)
            .map(|_| ReservedPort::lease().expect("a port"))
            .collect::<Vec<_>>();
        let numbers =
            std::collections::BTreeSet::from_iter(leases.iter().map(ReservedPort::number));
        assert_eq!(numbers.len(), leases.len());
        let first = leases.first().expect("one").number();
        let again = || {
            File::create(
                std::env::temp_dir()
                    .join("switchpoint-e2e-ports")
                    .join(first.to_string()),
            )
            .expect("a lock file")
        };
        assert!(again().try_lock().is_err(), "held");
        drop(leases);
        assert!(again().try_lock().is_ok(), "given back");
    }

    #[test]
    fn a_port_in_use_is_passed_over() {
        let lease = ReservedPort::lease().expect("a port");
        let _listener = TcpListener::bind(lease.address()).expect("it was free");
        let number = lease.number();
        drop(lease);
        assert!((0..200).all(|_| ReservedPort::lease().expect("a port").number() != number));
    }
}
