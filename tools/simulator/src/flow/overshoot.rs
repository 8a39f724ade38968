//! Counts the requests that proxies sent to an engine beyond its room. Such requests exist because
//! two proxies can use the same room before they receive each other's reports.
//!
//! A request is *beyond* the room if the engine had no room for the request when a proxy sent it,
//! given all requests that all proxies had sent to the engine. A proxy that had known of all these
//! requests would have held the request. The request counts as beyond the room until its first
//! token.

use crate::world::RequestOutcome;

/// Returns the maximum number of requests beyond the room that were at one engine at the same time.
pub(super) fn most_at_once(sent: &[&RequestOutcome]) -> usize {
    most_open(
        sent,
        |outcome| (outcome.engine, 0),
        |outcome| outcome.at + outcome.ttft,
    )
}

/// Returns the maximum number of requests beyond the room that one engine got from one proxy within
/// a period of this many ms.
pub(super) fn most_of_one_proxy(ms: f64, sent: &[&RequestOutcome]) -> usize {
    most_open(
        sent,
        |outcome| (outcome.engine, outcome.proxy),
        |outcome| outcome.sent + ms,
    )
}

/// Returns the share of the sent requests that were beyond the room.
pub(super) fn share_beyond(sent: &[&RequestOutcome]) -> f64 {
    sent.iter().filter(|outcome| outcome.is_beyond).count() as f64 / sent.len().max(1) as f64
}

/// Returns the maximum number of requests beyond the room that were at one place at the same time.
/// Each request counts from the time when it was sent until `ends`.
fn most_open(
    sent: &[&RequestOutcome],
    place: impl Fn(&RequestOutcome) -> (usize, usize),
    ends: impl Fn(&RequestOutcome) -> f64,
) -> usize {
    let mut beyond: Vec<&RequestOutcome> = sent
        .iter()
        .copied()
        .filter(|outcome| outcome.is_beyond)
        .collect();
    beyond.sort_by(|a, b| a.sent.total_cmp(&b.sent));
    let mut open: Vec<&RequestOutcome> = Vec::new();
    let mut most = 0;
    for outcome in beyond {
        open.retain(|other| ends(other) > outcome.sent);
        open.push(outcome);
        most = most.max(
            open.iter()
                .filter(|other| place(other) == place(outcome))
                .count(),
        );
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(sent: f64, engine: usize, proxy: usize, is_beyond: bool) -> RequestOutcome {
        RequestOutcome {
            at: sent,
            sent,
            engine,
            proxy,
            ttft: 50.0,
            is_beyond,
            ..RequestOutcome::default()
        }
    }

    #[test]
    fn requests_too_many_count_until_their_first_token() {
        let all = [
            outcome(0.0, 0, 0, true),
            outcome(4.0, 0, 0, true),
            outcome(5.0, 1, 0, true),
            outcome(30.0, 0, 0, false),
            outcome(40.0, 0, 1, true),
            outcome(41.0, 0, 0, true),
            outcome(60.0, 0, 0, true),
        ];
        let all: Vec<&RequestOutcome> = all.iter().collect();
        assert_eq!((most_at_once(&all), most_of_one_proxy(10.0, &all)), (4, 2));
        assert_eq!(share_beyond(&all), 6.0 / 7.0);
        assert_eq!((most_at_once(&[]), share_beyond(&[])), (0, 0.0));
    }
}
