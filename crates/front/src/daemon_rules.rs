//! The rules of the link to the daemon that all pickers inside Envoy obey.

use exchange::Timestamp;
use proto::state;

/// The first pause after a failure, in ms. The pause doubles with each further failure.
const BACKOFF_MS: u64 = 100;
/// The longest pause, in ms, while a pool has no state. Requests may wait for the state for at most
/// two seconds.
const COLD_BACKOFF_MS: u64 = 250;
/// The interval at which counters are sent, in ms.
pub const REPORT_MS: u64 = 1_000;
/// The maximum age, in ms, at which a stamp (the time of a report, which the daemon returns) is
/// used. An older stamp is ignored, because the daemon was away.
const DELAY_MAX_MS: u64 = proto::SHARE_EXPIRY_MS;
/// The divisor that gives the weight of a new measurement in the mean delay: 1 / `DELAYS`.
const DELAYS: u32 = 8;

/// The delay between two proxies: the age of other proxies' reports when they arrive at this proxy.
/// This age is assumed to equal the age of this proxy's reports when they arrive at the other
/// proxies.
#[derive(Debug, Default)]
pub struct ReportDelay {
    /// The last stamp that the daemon returned.
    stamp: u64,
    /// A recent mean of the delay, in µs; 0 before the first measurement.
    mean_us: u32,
}

// === impl ReportDelay ===

impl ReportDelay {
    /// Handles a stamp that the daemon returned. A new stamp shows that the daemon forwarded a
    /// report of this process, and then this returns the delay of the oldest change in that report,
    /// in µs. The stamp is assumed to take as long to return as the report takes to reach the other
    /// proxies.
    pub fn receive(&mut self, stamp: u64, now: Timestamp) -> Option<u32> {
        let before = std::mem::replace(&mut self.stamp, stamp);
        let delay = now.us_since(Timestamp(stamp));
        if stamp == 0 || stamp == before || delay > DELAY_MAX_MS * 1_000 {
            return None;
        }
        let delay = u32::try_from(delay).unwrap_or(u32::MAX);
        let mean = if self.mean_us == 0 {
            delay
        } else {
            self.mean_us
        };
        self.mean_us = mean
            .saturating_sub(mean / DELAYS)
            .saturating_add(delay / DELAYS);
        Some(delay)
    }

    /// Returns the recent mean of the delay, in µs; 0 before the first measurement.
    #[must_use]
    pub fn mean_us(&self) -> u32 {
        self.mean_us
    }
}

/// Returns the pause before the next attempt to reach the daemon, in ms. `failures` counts the
/// failed attempts, `longest_ms` limits the pause, and `is_cold` says whether a pool has no state.
/// Half of the pause is random, so that proxies connect at different times.
#[must_use]
pub fn retry_pause_ms(failures: u32, is_cold: bool, longest_ms: u64, entropy: u64) -> u64 {
    let doublings = failures.saturating_sub(1).min(20);
    let longest = if is_cold { COLD_BACKOFF_MS } else { longest_ms };
    let half = (BACKOFF_MS << doublings).min(longest) / 2;
    let chance = entropy.checked_rem(half.saturating_add(1)).unwrap_or(0);
    half.saturating_add(chance)
}

/// Returns the first message to the daemon.
#[must_use]
pub fn hello(node_id: String, process_id: u64, pools: Vec<String>) -> state::Hello {
    state::Hello {
        schema: proto::SCHEMA,
        node_id,
        process_id,
        pools,
        release: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// Returns why this proxy cannot use a daemon that sent this welcome; `None` if it can.
#[must_use]
pub fn schema_mismatch(welcome: &state::Welcome) -> Option<String> {
    let oldest = proto::SCHEMA_MIN;
    let newest = proto::SCHEMA;
    let theirs = welcome.schema;
    (!(oldest..=newest).contains(&theirs)).then(|| {
        format!(
            "it speaks state schema {theirs}, this filter {oldest} to {newest}: run both of one release or of two in a row"
        )
    })
}

/// Returns a log line for each kind of pool that the daemon does not serve to this proxy.
pub fn unserved_pools(welcome: &state::Welcome) -> impl Iterator<Item = String> + '_ {
    let kinds = [
        (
            "the daemon does not know these pools of the filter's configuration",
            &welcome.unknown_pools,
        ),
        (
            "the daemon refuses these pools to this proxy's certificate",
            &welcome.refused_pools,
        ),
    ];
    kinds
        .into_iter()
        .filter(|(_, pools)| !pools.is_empty())
        .map(|(why, pools)| [why, ": ", &pools.join(", ")].concat())
}

/// Decodes the percent-escapes of a gRPC message: `%20` is a space.
#[must_use]
pub fn percent_decoded(text: &[u8]) -> String {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, after)) = rest.split_first() {
        let escaped = after
            .get(..2)
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        let (byte, after) = match escaped.filter(|_| byte == b'%') {
            Some(escaped) => (escaped, after.get(2..).unwrap_or_default()),
            None => (byte, after),
        };
        plain.push(byte);
        rest = after;
    }
    String::from_utf8_lossy(&plain).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_half_of_each_is_random() {
        let range = |failures, is_cold| {
            let of = |entropy| retry_pause_ms(failures, is_cold, 2_000, entropy);
            // An entropy of half the pause gives the largest random part.
            (0..2_001).map(of).fold((u64::MAX, 0), |(least, most), ms| {
                (least.min(ms), most.max(ms))
            })
        };
        assert_eq!(range(1, false), (50, 100));
        assert_eq!(range(3, false), (200, 400));
        assert_eq!(range(60, false), (1_000, 2_000));
        assert_eq!(range(60, true), (125, 250));
    }

    #[test]
    fn a_daemon_of_another_schema_is_named() {
        let of = |schema| {
            schema_mismatch(&state::Welcome {
                schema,
                ..state::Welcome::default()
            })
        };
        assert_eq!(of(proto::SCHEMA), None);
        assert!(of(proto::SCHEMA + 1).is_some_and(|why| why.starts_with("it speaks state schema")));
    }

    #[test]
    fn what_the_daemon_said_is_readable() {
        assert_eq!(
            percent_decoded(b"the%20daemon%20is%2c well%2"),
            "the daemon is, well%2"
        );
        assert_eq!(
            percent_decoded("100% \u{00fc}%zz%C3%BC%".as_bytes()),
            "100% \u{00fc}%zz\u{00fc}%"
        );
    }
}
