//! The samples to which the learner fits shapes. The window is bounded and stratified, so an hour
//! of short prompts at idle endpoints does not displace the samples of long prompts in a queue.

use std::collections::VecDeque;

use scheduler::EndpointRef;
use scheduler::latency::{Conditions, Prediction};
use scheduler::sort::sort_by;

/// The two learned times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LatencyTarget {
    Ttft,
    Tpot,
}

/// A request from which the learner has learned.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestSample {
    pub(super) endpoint: EndpointRef,
    pub(super) conditions: Conditions,
    /// The measured times, as logarithms of ms.
    pub(super) ttft: Option<f32>,
    pub(super) tpot: Option<f32>,
    /// The offset of the sample's endpoint when the learner last observed or refreshed it, relative
    /// to the mean of all endpoints, as a logarithm.
    ttft_relative: f32,
    tpot_relative: f32,
    /// The sequence number of this sample among all samples.
    number: u64,
}

#[derive(Clone, Debug)]
pub(super) struct SampleWindow {
    strata: [VecDeque<RequestSample>; STRATA],
    next: u64,
}

/// The upper ends of the classes of samples by waiting requests, and by uncached prompt tokens.
/// Each pair of classes is a stratum.
const QUEUES: [f32; 4] = [1.0, 4.0, 16.0, 64.0];
const TOKENS: [f32; 3] = [256.0, 2_048.0, 8_192.0];

const STRATA: usize = (QUEUES.len() + 1) * (TOKENS.len() + 1);

/// The maximum number of samples in a stratum. If all strata are full, their samples take a third
/// of a megabyte, and a fit takes some tens of ms.
const STRATUM_MAX: usize = 150;

pub(super) const SAMPLES_MAX: usize = STRATA * STRATUM_MAX;

// === impl SampleWindow ===

impl Default for SampleWindow {
    fn default() -> Self {
        Self {
            strata: std::array::from_fn(|_| VecDeque::new()),
            next: 0,
        }
    }
}

impl SampleWindow {
    /// Adds a sample; a full stratum drops its oldest.
    pub(super) fn push(&mut self, sample: RequestSample) {
        let class = |ends: &[f32], value: f32| ends.iter().filter(|end| value >= **end).count();
        let queue = class(&QUEUES, sample.conditions.queued.unwrap_or(0.0));
        let stratum =
            queue * (TOKENS.len() + 1) + class(&TOKENS, sample.conditions.uncached_tokens);
        let Some(stratum) = self.strata.get_mut(stratum) else {
            return;
        };
        if stratum.len() >= STRATUM_MAX {
            stratum.pop_front();
        }
        stratum.push_back(RequestSample {
            number: self.next,
            ..sample
        });
        self.next += 1;
    }

    pub(super) fn len(&self) -> usize {
        self.strata.iter().map(VecDeque::len).sum()
    }

    pub(super) fn by_age(&self) -> Vec<RequestSample> {
        let mut samples: Vec<RequestSample> = self.strata.iter().flatten().copied().collect();
        sort_by(&mut samples, |a, b| a.number < b.number);
        samples
    }

    /// Takes over the relative offsets from `samples`, which are all samples of the window, oldest
    /// first.
    pub(super) fn refresh(&mut self, samples: &[RequestSample]) {
        for sample in self.strata.iter_mut().flatten() {
            if let Ok(at) = samples.binary_search_by(|other| other.number.cmp(&sample.number)) {
                *sample = samples.get(at).copied().unwrap_or(*sample);
            }
        }
    }
}

// === impl LatencyTarget ===

impl LatencyTarget {
    /// Returns the predicted median and p90 of this time, ms.
    pub(super) fn median_and_p90(self, prediction: &Prediction) -> [f32; 2] {
        match self {
            Self::Ttft => [prediction.ttft_ms, prediction.ttft_p90_ms],
            Self::Tpot => [prediction.tpot_ms, prediction.tpot_p90_ms],
        }
    }
}

// === impl RequestSample ===

impl RequestSample {
    /// Creates a sample. `ttft` and `tpot` are logarithms of ms, where known.
    pub(super) fn new(
        endpoint: EndpointRef,
        conditions: Conditions,
        ttft: Option<f32>,
        tpot: Option<f32>,
    ) -> Self {
        Self {
            endpoint,
            conditions,
            ttft,
            tpot,
            ttft_relative: 0.0,
            tpot_relative: 0.0,
            number: 0,
        }
    }

    pub(super) fn log(&self, which: LatencyTarget) -> Option<f32> {
        match which {
            LatencyTarget::Ttft => self.ttft,
            LatencyTarget::Tpot => self.tpot,
        }
    }

    pub(super) fn relative(&self, which: LatencyTarget) -> f32 {
        match which {
            LatencyTarget::Ttft => self.ttft_relative,
            LatencyTarget::Tpot => self.tpot_relative,
        }
    }

    pub(super) fn relative_mut(&mut self, which: LatencyTarget) -> &mut f32 {
        match which {
            LatencyTarget::Ttft => &mut self.ttft_relative,
            LatencyTarget::Tpot => &mut self.tpot_relative,
        }
    }
}
