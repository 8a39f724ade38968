//! Decodes raw bytes as observations and feeds the accepted ones to a learner. An accepted
//! observation must survive encoding and decoding. The learned models must survive it too, and
//! predict finite numbers.

#![no_main]

use libfuzzer_sys::fuzz_target;
use proto::observation::{EncodedObservation, OBSERVATION_BYTES};
use scheduler::latency::LatencyModel;
use learning::LatencyLearner;

fuzz_target!(|data: &[u8]| {
    let mut learner = LatencyLearner::default();
    let mut taken = Vec::new();
    for bytes in data.as_chunks::<OBSERVATION_BYTES>().0 {
        let Some(observed) = EncodedObservation::from_bytes(bytes) else {
            continue;
        };
        assert_eq!(
            EncodedObservation::from_bytes(&observed.to_bytes()),
            Some(observed)
        );
        learner.observe(&observed.observation, observed.predicted.as_ref());
        taken.push(observed.observation);
    }
    let step = learner.step(0);
    assert_eq!(
        scheduler::latency::step::StepModel::from_words(&step.words()),
        Ok(step)
    );
    if let Some(model) = learner.publish(0) {
        assert_eq!(
            LatencyModel::from_words(&model.words()).as_ref(),
            Ok(&model)
        );
        for observation in &taken {
            if let Ok(predicted) = model.predict(observation.endpoint, &observation.conditions) {
                assert!(predicted.ttft_ms.is_finite() && predicted.tpot_ms.is_finite());
            }
        }
    }
});
