//! The scaling signal: seconds of backlog and desired replicas of a group of endpoints, computed
//! from the learned step model and the work in flight.
//!
//! Work is measured in seconds of an average replica. Three quantities decide how many are needed:
//!
//! - **Demand** `d`: replicas kept busy by the requests that arrive, `requests/s × seconds each`.
//! - **Backlog** `W`: seconds of work that is in flight or queued now, at engines and in proxies.
//! - **Staff** `n(d)`: the replicas that a demand `d` needs so that requests begin within the wait
//!   `w` that the SLO allows ([`staffed`]).
//!
//! ```text
//! desired = max(n(d) + spare, (W' + d D) / (D + w))
//!      W' = max(0, W + (d - ready) S - Σ min(a, S))
//! ```
//!
//! The first term keeps up with arrivals. The `spare` replicas in it serve a sudden rise until
//! other replicas have started, because no signal can order replicas in time. The second term works
//! off the backlog within the drain time `D`. After that, at most the allowed wait `w` is left on
//! each replica, so `N (D + w) = W' + d D` (conservation of work). `W'` is the backlog `S` seconds
//! from now, when a replica that is ordered now starts to serve. Until then a replica that was
//! ordered `a` seconds ago does `min(a, S)` seconds of work. `D` is at least `S`, because a replica
//! whose start takes longer than it is needed costs more than it serves.
//!
//! Capacity is computed with full steps of an engine. A batch of `B` sequences shares the constant
//! part `e0` of a decode step, so a token costs `e0/B + e1 + e2 context`, where `B` is the largest
//! batch that fits ([`EngineSeats`]). In the same way prompts share the constant part of a prefill,
//! up to the tokens of a step (chunked prefill: Agrawal et al., "Taming Throughput-Latency Tradeoff
//! in LLM Inference with Sarathi-Serve", 2024).
//!
//! This module applies the bounds of the goal. Hysteresis is left to the autoscaler (the HPA's
//! tolerance and stabilization window), so the number of replicas is not rounded.

mod staffing;
#[cfg(test)]
mod tests;
mod traffic;
pub use staffing::staffed;
pub use traffic::{TrafficTotals, TrafficWindow};

use scheduler::latency::step::StepModel;
use scheduler::metrics::{EndpointMetrics, SEQUENCES_MAX_ATTRIBUTE};

/// The maximum number of sequences that an engine runs at the same time, if the engine reports no
/// limit. The value is vLLM's default.
const SEQUENCES_DEFAULT: f64 = 256.0;

/// The maximum share of the KV cache that can be in use before engines preempt. Source: the
/// simulations of flow control.
const KV_SHARE_MAX: f64 = 0.95;

/// The tokens of prompts that an engine computes in one step: vLLM's default for servers.
const STEP_TOKENS: f64 = 8_192.0;

/// The minimum part of the TTFT SLO that counts as allowed wait, even if the prefill alone takes
/// longer than the SLO.
const WAIT_SHARE_MIN: f64 = 0.1;

/// The maximum number of requests of one owner that count in a mean, as a multiple of the requests
/// of all other owners. The maximum applies if it makes the mean greater.
const TIMES_OTHERS: f64 = 3.0;

/// The largest number in a computation. Larger numbers count as this number, so that products of
/// two numbers stay finite.
const NUMBER_MAX: f64 = 1e15;

/// The stages of a request (prefill, decode) that a group of endpoints serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ScalingRole {
    Prefill,
    Decode,
    Both,
}

/// The operator's goal for the scaling signal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalingGoal {
    /// The TTFT SLO, in seconds.
    pub ttft_s: f64,
    /// The time within which a backlog is worked off, in seconds.
    pub drain_s: f64,
    /// The time from the order of a replica to its first request, in seconds.
    pub startup_s: f64,
    /// The number of replicas in addition to those for a steady load. The additional replicas serve
    /// load that rises faster than a replica starts. A group without work gets no additional
    /// replicas.
    pub spare: f64,
    /// The minimum and maximum number of replicas.
    pub replicas: (u32, u32),
}

/// The mean of the requests that arrive at a group.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RequestMix {
    pub per_second: f64,
    pub prompt_tokens: f64,
    /// The number of uncached tokens of a prompt.
    pub uncached_tokens: f64,
    pub output_tokens: f64,
}

/// The room of an engine, as far as the room is known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineSeats {
    /// The maximum number of sequences that the engine runs at the same time.
    pub sequences_max: Option<f64>,
    /// The number of tokens that fit into the KV cache.
    pub kv_tokens: Option<f64>,
}

/// The work in flight at one endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OutstandingWork {
    /// Relative times of a prefill and of a decode step: see [`StepModel::speed`].
    pub speed: (f32, f32),
    /// The number of requests that proxies have in flight at the endpoint.
    pub requests: f64,
    /// The part of `requests` whose first token has not arrived.
    pub prompts: f64,
    /// The uncached tokens of `prompts`.
    pub uncached_tokens: f64,
    /// The requests that the engine itself reports; `None` if its metrics are unknown.
    pub reported: Option<ReportedRequests>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReportedRequests {
    pub waiting: f64,
    pub running: f64,
}

/// A group of endpoints that are scaled together, because they have the same role and models.
#[derive(Clone, Copy, Debug)]
pub struct ScalingGroup<'g> {
    pub role: ScalingRole,
    /// The cost of a step of the group's engines.
    pub step: &'g StepModel,
    pub mix: RequestMix,
    /// The requests of each owner of proxies. The demands of the owners are added up. The list is
    /// empty if only `mix` is known.
    pub owners: &'g [RequestMix],
    /// Whether `mix` was measured for long enough: see [`TrafficWindow::is_measured`].
    pub measured: bool,
    pub seats: EngineSeats,
    pub endpoints: &'g [OutstandingWork],
    /// The time since the order of each replica that does not serve yet, in seconds.
    pub starting: &'g [f64],
    /// The number of requests that proxies hold until an endpoint has room.
    pub held: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalingSignal {
    /// The time that the group, starting replicas included, needs for all work in flight or queued,
    /// in seconds. The value is `None` if the group has no engines, or if nothing is known about
    /// its engines.
    pub backlog_s: Option<f64>,
    /// The number of replicas that the arriving requests keep busy.
    pub busy: f64,
    /// The share of the time in which a replica may be busy. Spare replicas are not included.
    pub utilization: f64,
    /// The replicas that the goal needs, within its bounds and not rounded.
    pub desired: f64,
}

/// The cost of a mean request, in seconds of an average replica.
#[derive(Clone, Copy, Debug, Default)]
struct RequestCost {
    prefill_s: f64,
    decode_s: f64,
    /// The time of the prefill in an otherwise idle engine.
    alone_s: f64,
    /// The prefill time for each prompt, and for each of its uncached tokens, if steps are shared.
    prompt_s: f64,
    uncached_token_s: f64,
}

/// Computes the signal of `group` for `goal`. Numbers that are negative or not finite count as 0.
#[must_use]
// The casts are exact, because there are thousands of endpoints at most.
pub fn signal(group: &ScalingGroup<'_>, goal: &ScalingGoal) -> ScalingSignal {
    let cost = RequestCost::from_group(group);
    let [least, most] = [goal.replicas.0, goal.replicas.1.max(goal.replicas.0)].map(f64::from);
    let work = cost
        .outstanding(group.endpoints)
        .map(|work| work + known(group.held) * cost.request_s());
    let ready: f64 = group
        .endpoints
        .iter()
        .map(|endpoint| cost.capacity(endpoint))
        .sum();
    let starting = group.starting.len() as f64;
    let capacity = ready + starting;
    let busy = if group.owners.is_empty() {
        known(group.mix.per_second) * cost.request_s()
    } else {
        group.owners.iter().map(|mix| group.busy(*mix)).sum()
    };

    let wait_s = (known(goal.ttft_s) - cost.alone_s).max(known(goal.ttft_s) * WAIT_SHARE_MIN);
    let staff = staffed(busy, wait_s, cost.request_s());
    let works = busy > 0.0 || work.is_some_and(|work| work > 0.0);
    let spare = if works { known(goal.spare) } else { 0.0 };
    let startup_s = known(goal.startup_s);
    let drain_s = known(goal.drain_s).max(startup_s);
    let of_starting: f64 = group
        .starting
        .iter()
        .map(|age_s| known(*age_s).min(startup_s))
        .sum();
    let later_s = (work.unwrap_or(0.0) + (busy - ready) * startup_s - of_starting).max(0.0);
    let drained = (later_s + busy * drain_s) / (drain_s + wait_s).max(f64::MIN_POSITIVE);
    // A group about which nothing is known may have work, so it keeps its size.
    let held = if work.is_none() || !group.measured {
        group.endpoints.len() as f64 + starting
    } else {
        0.0
    };
    ScalingSignal {
        backlog_s: work.filter(|_| capacity > 0.0).map(|work| work / capacity),
        busy,
        utilization: if busy > 0.0 {
            busy / staff
        } else {
            staffing::UTILIZATION_MAX
        },
        desired: (staff + spare).max(drained).max(held).clamp(least, most),
    }
}

/// Returns the number if it is finite and not negative, otherwise 0. The result is at most
/// [`NUMBER_MAX`].
fn known(number: f64) -> f64 {
    if number.is_finite() {
        number.clamp(0.0, NUMBER_MAX)
    } else {
        0.0
    }
}

// === impl ScalingGroup ===

impl ScalingGroup<'_> {
    /// Returns the number of replicas that these requests keep busy.
    fn busy(&self, mix: RequestMix) -> f64 {
        let cost = RequestCost::from_group(&ScalingGroup { mix, ..*self });
        known(mix.per_second) * cost.request_s()
    }
}

// === impl RequestMix ===

impl RequestMix {
    /// Returns the mean of the requests of several owners. An owner may report many requests
    /// without tokens. So each mean is at least the mean in which no owner has more than three
    /// times the requests of all others.
    #[must_use]
    pub fn joined(owners: &[Self]) -> Self {
        let per_second: f64 = owners.iter().map(|mix| known(mix.per_second)).sum();
        let rate = |mix: &Self| {
            if per_second > 0.0 {
                known(mix.per_second)
            } else {
                1.0
            }
        };
        let all: f64 = owners.iter().map(rate).sum();
        let capped = |mix: &Self| rate(mix).min(TIMES_OTHERS * (all - rate(mix)));
        let greater = |of: fn(&Self) -> f64| {
            let mean = |weight: &dyn Fn(&Self) -> f64| {
                let weights: f64 = owners.iter().map(weight).sum();
                let sum: f64 = owners.iter().map(|mix| weight(mix) * known(of(mix))).sum();
                sum / weights.max(f64::MIN_POSITIVE)
            };
            mean(&rate).max(mean(&capped))
        };
        Self {
            per_second,
            prompt_tokens: greater(|mix| mix.prompt_tokens),
            uncached_tokens: greater(|mix| mix.uncached_tokens),
            output_tokens: greater(|mix| mix.output_tokens),
        }
    }
}

// === impl ScalingRole ===

impl ScalingRole {
    /// Returns the role of endpoints with this value of [`ROLE_LABEL`](scheduler::ROLE_LABEL).
    /// Returns `None` if they serve no stage that has a step model.
    #[must_use]
    pub fn from_label(label: Option<&str>) -> Option<Self> {
        match label {
            Some("encode") => None,
            Some("prefill" | "encode-prefill") => Some(Self::Prefill),
            Some("decode") => Some(Self::Decode),
            _ => Some(Self::Both),
        }
    }

    /// Returns the name of the role in labels and pages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }
}

// === impl EngineSeats ===

impl EngineSeats {
    /// Returns the smallest room of these engines. A value that none of the engines reports is
    /// unknown.
    #[must_use]
    pub fn from_metrics<'m>(metrics: &(impl Iterator<Item = &'m EndpointMetrics> + Clone)) -> Self {
        let least = |of: fn(&EndpointMetrics) -> Option<f64>| {
            metrics
                .clone()
                .filter_map(of)
                .filter(|room| *room > 0.0)
                .reduce(f64::min)
        };
        Self {
            sequences_max: least(|m| m.attribute(SEQUENCES_MAX_ATTRIBUTE).map(f64::from)),
            kv_tokens: least(|m| Some(f64::from(m.kv_blocks?) * f64::from(m.kv_block_tokens?))),
        }
    }

    /// Returns the room if flow control also limits an endpoint to this many requests at the same
    /// time.
    #[must_use]
    pub fn at_most(self, requests: Option<f64>) -> Self {
        let both = requests
            .zip(self.sequences_max)
            .map(|(limit, own)| limit.min(own));
        Self {
            sequences_max: both.or(requests).or(self.sequences_max),
            ..self
        }
    }

    /// Returns the maximum number of sequences with `context` tokens each; at least 1.
    fn batch(&self, context: f64) -> f64 {
        let sequences = self.sequences_max.map_or(SEQUENCES_DEFAULT, known);
        let of_kv = self.kv_tokens.map_or(f64::INFINITY, |tokens| {
            known(tokens) * KV_SHARE_MAX / context.max(1.0)
        });
        sequences.min(of_kv).max(1.0)
    }
}

// === impl RequestCost ===

impl RequestCost {
    fn from_group(group: &ScalingGroup<'_>) -> Self {
        let ScalingGroup {
            role,
            step,
            mix,
            seats,
            ..
        } = group;
        let output = known(mix.output_tokens).max(1.0);
        let prompt = known(mix.prompt_tokens);
        let uncached = known(mix.uncached_tokens).min(known(mix.prompt_tokens));
        let ([c0, c1, c2], [e0, e1, e2]) =
            (step.prefill().map(f64::from), step.decode().map(f64::from));
        let context = prompt + output / 2.0;
        // The model is quadratic in one prompt. The attention of tokens in flight is counted as in
        // a mean prompt, so that the work of a prompt is proportional to its tokens.
        let mut cost = Self {
            prompt_s: c0 / 1e3 * (uncached / STEP_TOKENS).min(1.0),
            uncached_token_s: (c1 + c2 * (2.0 * prompt - uncached)) / 1e3,
            prefill_s: 0.0,
            alone_s: 0.0,
            decode_s: output * (e0 / seats.batch(context) + e1 + e2 * context) / 1e3,
        };
        cost.prefill_s = cost.prompt_s + uncached * cost.uncached_token_s;
        cost.alone_s = c0 / 1e3 + uncached * cost.uncached_token_s;
        match role {
            ScalingRole::Prefill => cost.decode_s = 0.0,
            ScalingRole::Decode => {
                cost = Self {
                    decode_s: cost.decode_s,
                    ..Self::default()
                }
            }
            ScalingRole::Both => {}
        }
        cost
    }

    fn request_s(&self) -> f64 {
        self.prefill_s + self.decode_s
    }

    /// Returns the work in flight at all endpoints, in seconds. An endpoint with unknown metrics
    /// has at least the mean work of the endpoints with known metrics. Returns `None` if no proxy
    /// has a request at an endpoint and no engine's metrics are known.
    fn outstanding(&self, endpoints: &[OutstandingWork]) -> Option<f64> {
        let of = |endpoints: &mut dyn Iterator<Item = &OutstandingWork>| {
            endpoints.fold((0_u32, 0.0), |(count, sum), endpoint| {
                (count + 1, sum + self.at(endpoint))
            })
        };
        let (reporting, of_reporting) = of(&mut endpoints
            .iter()
            .filter(|endpoint| endpoint.reported.is_some()));
        let silent = || {
            endpoints
                .iter()
                .filter(|endpoint| endpoint.reported.is_none())
        };
        if reporting == 0 {
            let (count, of_silent) = of(&mut silent());
            return (count == 0 || of_silent > 0.0).then_some(of_silent);
        }
        let mean = of_reporting / f64::from(reporting);
        Some(
            of_reporting
                + silent()
                    .map(|endpoint| self.at(endpoint).max(mean))
                    .sum::<f64>(),
        )
    }

    /// Returns the work in flight at an endpoint, in seconds: the requests that proxies have sent
    /// to the endpoint, and the requests that only the engine reports. The latter count as mean
    /// requests.
    fn at(&self, endpoint: &OutstandingWork) -> f64 {
        let OutstandingWork {
            requests,
            prompts,
            uncached_tokens,
            reported,
            ..
        } = *endpoint;
        let requests = known(requests).max(known(prompts));
        let prompts = known(prompts);
        // A request that decodes has on average a whole mean output left if output lengths are
        // exponentially distributed (residual life, Kleinrock, section 5.2). Real output lengths
        // nearly are.
        let own = prompts * self.prompt_s
            + known(uncached_tokens) * self.uncached_token_s
            + requests * self.decode_s;
        let Some(ReportedRequests { waiting, running }) = reported else {
            return own;
        };
        let others = (known(waiting) + known(running) - requests).max(0.0);
        let others_waiting = (known(waiting) - prompts).clamp(0.0, others);
        own + others * self.decode_s + others_waiting * self.prefill_s
    }

    /// Returns the capacity of an endpoint, in average replicas.
    fn capacity(&self, endpoint: &OutstandingWork) -> f64 {
        let (prefill, decode) = endpoint.speed;
        let [prefill, decode] =
            [prefill, decode].map(|times| f64::from(times).max(f64::from(f32::EPSILON)));
        let request_s = self.request_s();
        if request_s > 0.0 {
            request_s / (self.prefill_s * prefill + self.decode_s * decode)
        } else {
            1.0
        }
    }
}
