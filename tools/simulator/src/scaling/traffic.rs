//! The traffic of the scaling campaign: requests whose rate changes within minutes.

use learning::scaling::{
    EngineSeats, OutstandingWork, RequestMix, ScalingGoal, ScalingGroup, ScalingRole, signal,
};
use scheduler::latency::step::StepModel;

use crate::hardware::QWEN_32B_H200;
use crate::workload::Sampler;

/// The length of the arrivals, in s.
pub(super) const LASTING_S: f64 = 3_600.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TrafficShape {
    /// A day in an hour: up and down once, prompts as long as those of chats.
    Day,
    /// A base load, and a burst of four minutes every 20 minutes.
    Bursts,
    /// A step to three times the load after 15 minutes, which ends 25 minutes later; long outputs.
    Step,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ArrivingRequest {
    /// The time of arrival, ms.
    pub(super) at: f64,
    pub(super) prompt: u32,
    pub(super) output: u32,
}

/// Log-normal lengths: the mean in tokens, and the standard deviation of the logarithm.
#[derive(Clone, Copy)]
struct Lengths {
    mean: f64,
    sigma: f64,
}

// === impl TrafficShape ===

impl TrafficShape {
    /// Returns how many replicas the requests that arrive at this time keep busy.
    fn busy(self, at_s: f64) -> f64 {
        match self {
            Self::Day => 1.0 + 4.0 * (std::f64::consts::PI * at_s / LASTING_S).sin().powi(2),
            Self::Bursts => {
                let minute = (at_s / 60.0) % 20.0;
                if (8.0..12.0).contains(&minute) {
                    4.5
                } else {
                    1.5
                }
            }
            Self::Step if (900.0..2_400.0).contains(&at_s) => 4.5,
            Self::Step => 1.5,
        }
    }

    fn lengths(self) -> [Lengths; 2] {
        let [prompt, output] = match self {
            Self::Day => [(1_200.0, 1.0), (250.0, 0.8)],
            Self::Bursts => [(3_000.0, 0.8), (120.0, 0.8)],
            Self::Step => [(600.0, 0.8), (600.0, 0.7)],
        };
        [prompt, output].map(|(mean, sigma)| Lengths { mean, sigma })
    }

    /// Returns the requests of a run, in order of arrival.
    pub(super) fn requests(self, seed: u64) -> Vec<ArrivingRequest> {
        let mut dice = Sampler::seeded(seed ^ 0x5ca1e);
        let [prompts, outputs] = self.lengths();
        let each_s = seconds(prompts.mean, outputs.mean);
        let mut at_s = 0.0;
        let mut requests = Vec::new();
        loop {
            // The rate is taken as constant between two requests, because it changes slowly.
            at_s += dice.exponential() * each_s / self.busy(at_s);
            if at_s >= LASTING_S {
                return requests;
            }
            let [prompt, output] = [prompts, outputs].map(|lengths| lengths.draw(&mut dice));
            requests.push(ArrivingRequest {
                at: at_s * 1e3,
                prompt,
                output,
            });
        }
    }
}

// === impl Lengths ===

impl Lengths {
    /// The maximum length in tokens, so that every request fits into an engine.
    const MOST: f64 = 16_000.0;

    fn draw(self, dice: &mut Sampler) -> u32 {
        let tokens = self.mean * (self.sigma * dice.normal() - self.sigma * self.sigma / 2.0).exp();
        tokens.clamp(4.0, Self::MOST) as u32
    }
}

/// Returns the exact step times of the engine.
pub(super) fn exact_step() -> StepModel {
    let times = QWEN_32B_H200.times;
    let [prefill, decode] = [
        [0.0, times.prefill[1], times.prefill[2]],
        [
            times.decode[0] + times.overhead,
            times.decode[1],
            times.decode[2],
        ],
    ];
    StepModel::from_parts(
        prefill.map(|ms| ms as f32),
        decode.map(|ms| ms as f32),
        200.0,
    )
}

pub(super) fn seats() -> EngineSeats {
    let spec = QWEN_32B_H200;
    EngineSeats {
        sequences_max: Some(spec.sequences_max as f64),
        kv_tokens: Some((spec.kv_blocks * spec.block_tokens) as f64),
    }
}

/// Returns for how many seconds a request with these tokens keeps a replica busy, by the exact step
/// times.
pub(super) fn seconds(prompt_tokens: f64, output_tokens: f64) -> f64 {
    let step = exact_step();
    let mix = RequestMix {
        per_second: 1.0,
        prompt_tokens,
        uncached_tokens: prompt_tokens,
        output_tokens,
    };
    let goal = ScalingGoal {
        ttft_s: 1.0,
        drain_s: 1.0,
        startup_s: 0.0,
        spare: 0.0,
        replicas: (0, 1),
    };
    let endpoints: &[OutstandingWork] = &[];
    signal(
        &ScalingGroup {
            role: ScalingRole::Both,
            step: &step,
            mix,
            owners: &[],
            measured: true,
            seats: seats(),
            endpoints,
            starting: &[],
            held: 0.0,
        },
        &goal,
    )
    .busy
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn requests_keep_as_many_replicas_busy_as_the_shape_says() {
        for shape in TrafficShape::value_variants().iter().copied() {
            let requests = shape.requests(1);
            let wanted: f64 = (0..LASTING_S as u32)
                .map(|at| shape.busy(f64::from(at)))
                .sum();
            let found: f64 = requests
                .iter()
                .map(|r| seconds(f64::from(r.prompt), f64::from(r.output)))
                .sum();
            // `busy` is exact only for mean requests. A long request costs more than in proportion
            // to its tokens.
            assert!(
                (found / wanted - 1.0).abs() < 0.2,
                "{shape:?}: {found} of {wanted}"
            );
            assert!(requests.is_sorted_by(|a, b| a.at <= b.at) && requests != shape.requests(2));
        }
    }
}
