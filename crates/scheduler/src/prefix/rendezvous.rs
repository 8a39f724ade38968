//! Chooses an endpoint for a prompt that is cached nowhere, by rendezvous hashing on the prompt's
//! beginning, with bounded load.
//!
//! Proxies without a connection to each other choose the same endpoint, since slots and generations
//! come from the daemon and are the same everywhere. A hash of the beginning and of an endpoint's
//! identity gives the endpoint a number. The endpoint with the highest number is chosen, unless
//! this endpoint already has more than its share of the load; then the endpoint with the next
//! highest number is chosen. So if an endpoint joins or leaves, only the prompts of this endpoint
//! move. A prompt that every client sends overflows to other endpoints and does not overload one
//! endpoint.
//!
//! Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998);
//! Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads" (2018).

use crate::endpoint::EndpointRef;
use crate::rng::Rng;

/// The maximum load of an endpoint that still gets requests, as a multiple of the mean: the c of
/// the second paper, 5/4.
const SHARE_NUMERATOR: u64 = 5;
const SHARE_DENOMINATOR: u64 = 4;

/// Returns the position among `endpoints` of the rendezvous endpoint for prompts that begin with
/// `head`. `requests` gives the requests in flight at a position, or `None` if the endpoint at this
/// position may not be picked. Returns `None` if no endpoint may be picked.
#[must_use]
pub fn rendezvous_endpoint(
    head: u64,
    endpoints: &[EndpointRef],
    requests: impl Fn(usize) -> Option<u32>,
) -> Option<usize> {
    let may = || (0..endpoints.len()).filter_map(|at| Some((at, u64::from(requests(at)?))));
    let (count, total) = may().fold((0_u64, 0_u64), |(count, total), (_, requests)| {
        (count + 1, total + requests)
    });
    // The total includes the request for which this function chooses. At least one endpoint has no
    // more than the mean, so this endpoint is within the bound.
    let bound = ((total + 1) * SHARE_NUMERATOR).div_ceil(count.max(1) * SHARE_DENOMINATOR);
    let within = may().filter(|(_, requests)| *requests < bound);
    within
        .filter_map(|(at, _)| Some((rank(head, *endpoints.get(at)?), at)))
        .max()
        .map(|(_, at)| at)
}

fn rank(head: u64, endpoint: EndpointRef) -> u64 {
    let identity = u64::from(endpoint.slot.0) << 32 | u64::from(endpoint.generation.0);
    Rng::seeded(head ^ Rng::seeded(identity).next_u64()).next_u64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::{Generation, Slot};
    use crate::rng::Rng;
    use proptest::prelude::*;

    fn endpoints(slots: impl IntoIterator<Item = u16>) -> Vec<EndpointRef> {
        slots
            .into_iter()
            .map(|slot| EndpointRef {
                slot: Slot(slot),
                generation: Generation(3),
            })
            .collect()
    }

    fn idle(_: usize) -> Option<u32> {
        Some(0)
    }

    #[test]
    fn heads_are_spread_evenly() {
        let all = endpoints(0..16);
        let mut counts = [0_u32; 16];
        for head in 0..16_000 {
            counts[rendezvous_endpoint(Rng::seeded(head).next_u64(), &all, idle).unwrap()] += 1;
        }
        assert!(
            counts.iter().all(|count| (850..1_150).contains(count)),
            "{counts:?}"
        );
    }

    #[test]
    fn proxies_of_any_release_agree_on_the_rendezvous_endpoint() {
        let all = endpoints(0..16);
        let homes = [0, 1, 2, u64::MAX, 0x0123_4567_89ab_cdef]
            .map(|head| rendezvous_endpoint(head, &all, idle).unwrap());
        assert_eq!(homes, [9, 4, 9, 1, 12]);
    }

    #[test]
    fn a_head_of_all_prompts_overflows_in_order() {
        let all = endpoints(0..8);
        let mut requests = [0_u32; 8];
        for _ in 0..80 {
            requests[rendezvous_endpoint(7, &all, |at| Some(requests[at])).unwrap()] += 1;
        }
        assert_eq!(requests.iter().sum::<u32>(), 80);
        assert!(
            requests.iter().all(|&requests| requests <= 13),
            "a quarter above the mean of ten: {requests:?}"
        );
        assert_eq!(
            requests.iter().max(),
            requests.get(rendezvous_endpoint(7, &all, idle).unwrap()),
            "the home has the most"
        );
    }

    #[test]
    fn without_a_candidate_there_is_no_rendezvous_endpoint() {
        assert_eq!(
            (
                rendezvous_endpoint(7, &[], idle),
                rendezvous_endpoint(7, &endpoints(0..3), |_| None)
            ),
            (None, None)
        );
        assert_eq!(
            rendezvous_endpoint(7, &endpoints(0..3), |at| (at == 1).then_some(u32::MAX)),
            Some(1),
            "the only one, however loaded"
        );
    }

    proptest! {
        /// Checks that only the prompts of an endpoint that leaves move, and that the order of the
        /// endpoints does not matter.
        #[test]
        fn only_the_prompts_of_an_endpoint_that_left_move(head: u64, slots in prop::collection::btree_set(0..1024_u16, 2..40), removed: prop::sample::Index) {
            let all = endpoints(slots.iter().copied());
            let removed = removed.index(all.len());
            let before = all[rendezvous_endpoint(head, &all, idle).unwrap()];
            let after = all[rendezvous_endpoint(head, &all, |at| (at != removed).then_some(0)).unwrap()];
            prop_assert!(before == after || before == all[removed]);
            let backwards: Vec<_> = all.iter().rev().copied().collect();
            prop_assert_eq!(before, backwards[rendezvous_endpoint(head, &backwards, idle).unwrap()]);
        }

        #[test]
        fn the_rendezvous_endpoint_is_within_the_bound(head: u64, loads in prop::collection::vec(prop::option::of(0..50_u32), 1..40)) {
            let all = endpoints(0..loads.len() as u16);
            let may: Vec<u32> = loads.iter().flatten().copied().collect();
            match rendezvous_endpoint(head, &all, |at| loads[at]) {
                None => prop_assert!(may.is_empty()),
                Some(at) => {
                    let mean = f64::from(may.iter().sum::<u32>() + 1) / may.len() as f64;
                    prop_assert!(f64::from(loads[at].unwrap()) < mean * 1.25 + 1.0);
                }
            }
        }
    }
}
