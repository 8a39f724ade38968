//! The backlog of a pool: the requests that flow control holds in one proxy, or in all other
//! proxies together.
//!
//! ```text
//!  priority | requests      one word each, for each band
//! ```

use scheduler::flow::QueuedInBand;

use crate::words::{self, pair, unpair};

/// The maximum number of bands that are read. No proxy has more bands.
const BANDS_MAX: usize = 64;

/// The maximum number of requests that a proxy can claim to hold in a band.
const REQUESTS_MAX: u64 = 1_000_000;

/// Encodes a backlog, without the bands that have no requests.
#[must_use]
pub fn write(bands: &[QueuedInBand]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for band in bands.iter().filter(|band| band.requests > 0) {
        words::append(
            &mut bytes,
            &[pair(band.priority.cast_unsigned(), 0), band.requests],
        );
    }
    bytes
}

/// Reads a backlog, up to the first incomplete band.
#[must_use]
pub fn read(mut bytes: &[u8]) -> Vec<QueuedInBand> {
    let band = || {
        let ([priority, requests], rest) = words::split(bytes)?;
        bytes = rest;
        Some(QueuedInBand {
            priority: unpair(priority).0.cast_signed(),
            requests: requests.min(REQUESTS_MAX),
            bytes: 0,
        })
    };
    std::iter::from_fn(band).take(BANDS_MAX).collect()
}

/// Adds the requests of `more` to the requests of `sum`, band by band.
pub fn add(sum: &mut Vec<QueuedInBand>, more: &[QueuedInBand]) {
    for band in more {
        match sum.iter_mut().find(|known| known.priority == band.priority) {
            Some(known) => known.requests = known.requests.saturating_add(band.requests),
            None => sum.push(*band),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backlog_is_read_back_and_bounded() {
        let band = |priority, requests| QueuedInBand {
            priority,
            requests,
            bytes: 0,
        };
        let bytes = write(&[band(-10, 3), band(0, 0), band(7, u64::MAX)]);
        assert_eq!(read(&bytes), [band(-10, 3), band(7, REQUESTS_MAX)]);
        assert_eq!(read(&bytes[..17]), [band(-10, 3)]);
        assert_eq!(read(&bytes.repeat(100)).len(), BANDS_MAX);
        let mut sum = vec![band(1, 2)];
        add(&mut sum, &[band(1, 3), band(0, 1)]);
        assert_eq!(sum, [band(1, 5), band(0, 1)]);
    }
}
