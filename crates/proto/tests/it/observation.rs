//! Observations are read back as they were written, and each number is checked.

use proptest::prelude::*;
use proto::observation::{EncodedObservation, OBSERVATION_BYTES};
use scheduler::latency::{Conditions, RequestEnd};
use scheduler::{EndpointRef, Generation, Slot};

fn maybe(range: std::ops::RangeInclusive<f32>) -> impl Strategy<Value = Option<f32>> {
    prop::option::of(range)
}

prop_compose! {
    fn observation()(
        place in (0..1024_u16, any::<u32>(), 0..3_usize, any::<bool>()),
        scraped in (maybe(0.0..=1e6), maybe(0.0..=1e6), maybe(0.0..=1.0)),
        ledger in (0.0..=1e6_f32, 0.0..=1e7_f32, 0.0..=1e7_f32, 0.0..=1e6_f32, 0.0..=1.0_f32),
        times in (maybe(0.0..=3.6e6), maybe(0.0..=3.6e6)),
        tokens in (prop::option::of(0..1_000_000_u32), prop::option::of(0..1_000_000_u32), prop::option::of(0..1_000_000_u32)),
        parts in (maybe(0.01..=1e5), maybe(0.01..=1e5), maybe(0.01..=1e5)),
    ) -> EncodedObservation {
        use scheduler::latency::{FirstToken, Observation, Prediction, TokenGap};
        let (requests, prefill_tokens, context_tokens, prompt_tokens, uncached) = ledger;
        let uncached_tokens = prompt_tokens * uncached;
        let conditions = Conditions {
            queued: scraped.0, running: scraped.1, requests, prefill_tokens, context_tokens, kv_utilization: scraped.2, prompt_tokens, uncached_tokens,
        };
        EncodedObservation {
            observation: Observation {
                endpoint: EndpointRef { slot: Slot(place.0), generation: Generation(place.1) },
                conditions,
                ended: [RequestEnd::Done, RequestEnd::Aborted, RequestEnd::Failed][place.2],
                ttft_ms: times.0,
                tpot_ms: times.1,
                output_tokens: tokens.0,
                first_token: parts.0.map(|service_ms| FirstToken { uncached_tokens, prompt_tokens, service_ms }),
                gap: parts.1.map(|gap_ms| TokenGap { batch: requests, context_tokens, gap_ms }),
            },
            predicted: parts.2.map(|ms| Prediction { ttft_ms: ms, tpot_ms: ms / 9.0, ttft_p90_ms: ms * 2.0, tpot_p90_ms: ms / 3.0 }),
            prompt_tokens: tokens.1,
            cached_tokens: tokens.2,
            estimated: place.3,
        }
    }
}

proptest! {
    #[test]
    fn an_observation_comes_back_from_its_bytes(observed in observation()) {
        prop_assert_eq!(EncodedObservation::from_bytes(&observed.to_bytes()), Some(observed));
    }

    /// Checks that each number must be within its range, or all numbers of its part must be
    /// unknown.
    #[test]
    fn one_number_out_of_range_makes_the_bytes_invalid(
        observed in observation(),
        (at, word) in proptest::sample::select((3..OBSERVATION_BYTES / 4).map(|at| (at, (-1.0_f32).to_bits())).chain([(0, 1024), (2, 3), (2, 0x103), (2, 0x200)]).collect::<Vec<_>>()),
    ) {
        let mut bytes = observed.to_bytes();
        bytes[4 * at..4 * at + 4].copy_from_slice(&word.to_le_bytes());
        prop_assert_eq!(EncodedObservation::from_bytes(&bytes), None, "word {}", at);
    }

    /// Checks that any bytes are either an observation with every number in its range, or invalid.
    #[test]
    fn no_bytes_can_hurt(observed in observation(), at in 0..OBSERVATION_BYTES / 4, word in prop_oneof![
        Just(f32::NAN.to_bits()), Just(f32::INFINITY.to_bits()), Just((-1.0_f32).to_bits()), Just(1e30_f32.to_bits()), Just(u32::MAX), any::<u32>(),
    ]) {
        let mut bytes = observed.to_bytes();
        bytes[4 * at..4 * at + 4].copy_from_slice(&word.to_le_bytes());
        if let Some(read) = EncodedObservation::from_bytes(&bytes) {
            let observation = read.observation;
            prop_assert_eq!(observation.conditions.checked(), Some(observation.conditions));
            let sane = |ms: Option<f32>| ms.is_none_or(|ms| (0.0..=3_600_000.0).contains(&ms));
            prop_assert!(sane(observation.ttft_ms) && sane(observation.tpot_ms) && sane(read.predicted.map(|p| p.ttft_p90_ms)));
            prop_assert!(sane(observation.first_token.map(|t| t.service_ms)) && sane(observation.gap.map(|g| g.gap_ms)));
            prop_assert!(usize::from(observation.endpoint.slot.0) < scheduler::ENDPOINTS_MAX);
        }
    }
}
