//! The predicted latency of one request at each endpoint, and its headroom: the distance to the
//! SLOs of the request, and to the lowest SLOs of the requests that are already at the endpoint.
//!
//! The predictions are computed when the first plugin of a decision reads them, for all endpoints
//! in one pass. The predictions are kept for the other plugins. If prediction is off or the model
//! gives no prediction, the latency is unknown: then it neither meets nor breaks an SLO.

mod conditions;

use std::cell::OnceCell;

use crate::endpoint::{EndpointIndex, EndpointRef};
use crate::endpoint_table::EndpointTable;
use crate::in_flight::EndpointLoad;
use crate::latency::{Conditions, LatencyModel, NoPrediction, Prediction};
use crate::local_state::LocalState;
use crate::request::Request;
use crate::settings::LatencySettings;
use crate::slo::{Slo, TrackedSlo, ms};

/// The prediction of TTFT or of TPOT, and its limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Headroom {
    pub predicted_ms: f32,
    /// The limit in ms: the lower of the request's own SLO and the lowest SLO at the endpoint. If
    /// neither SLO exists, but the request has one of the other kind (TTFT or TPOT), the limit is
    /// infinite. If the request has no SLO of either kind, the limit is 0, so that the endpoint
    /// with the lowest latency has the most headroom.
    pub limit_ms: f32,
    /// Whether the limit comes from other requests at the endpoint, not from the request itself.
    pub of_others: bool,
}

/// The predicted latency of one request at one endpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EndpointPrediction {
    pub prediction: Prediction,
    /// The predicted time to the first token.
    pub ttft: Headroom,
    /// The predicted time for each further token.
    pub tpot: Headroom,
    /// Whether the endpoint has no request in flight.
    pub idle: bool,
}

/// The predictions for one decision, one for each endpoint.
#[derive(Debug)]
pub struct Predictions {
    /// The settings that say how predictions are used; `None` if prediction is off.
    settings: Option<LatencySettings>,
    column: OnceCell<Vec<Result<EndpointPrediction, NoPrediction>>>,
    /// The predictions of a recorded decision, which are used instead of the model's predictions.
    recorded: Option<Vec<Option<Prediction>>>,
}

// === impl Headroom ===

impl Headroom {
    /// Returns the headroom in ms: negative when the limit is exceeded, infinite without a limit.
    #[must_use]
    pub fn left_ms(self) -> f32 {
        self.limit_ms - self.predicted_ms
    }

    /// Whether the limit is exceeded.
    #[must_use]
    pub fn is_exceeded(self) -> bool {
        self.left_ms() < 0.0
    }
}

// === impl EndpointPrediction ===

impl EndpointPrediction {
    /// Whether the endpoint has no request in flight, or the request and all requests at the
    /// endpoint would keep their SLOs.
    pub fn is_valid(&self) -> bool {
        self.idle || self.meets()
    }

    /// Whether the prediction is within all SLOs, both the SLOs of the request and those of other
    /// requests.
    pub fn meets(&self) -> bool {
        !self.ttft.is_exceeded() && !self.tpot.is_exceeded()
    }

    fn from_prediction(
        prediction: Prediction,
        load: EndpointLoad,
        own: Slo,
        settings: LatencySettings,
    ) -> Self {
        let (ttft_ms, tpot_ms) = settings.counted(&prediction);
        let lowest = own.strictest(load.slo());
        let headroom = |predicted_ms, lowest: Option<u32>, own_us: Option<u32>, factor| Headroom {
            predicted_ms,
            limit_ms: if own.any() {
                lowest.map_or(f32::INFINITY, ms) * factor
            } else {
                0.0
            },
            of_others: lowest != own_us,
        };
        Self {
            prediction,
            ttft: headroom(ttft_ms, lowest.ttft_us, own.ttft_us, 1.0),
            tpot: headroom(
                tpot_ms,
                lowest.tpot_us,
                own.tpot_us,
                settings.slo_buffer_factor,
            ),
            idle: load.requests == 0,
        }
    }
}

// === impl Predictions ===

impl Predictions {
    /// Returns the predictions for a new decision, from the latency model; no predictions if
    /// `settings` is `None`.
    pub(crate) fn new(settings: Option<LatencySettings>) -> Self {
        Self {
            settings,
            column: OnceCell::new(),
            recorded: None,
        }
    }

    /// Returns the predictions of a recorded decision.
    pub(crate) fn recorded(
        settings: Option<LatencySettings>,
        predicted: Vec<Option<Prediction>>,
    ) -> Self {
        Self {
            recorded: Some(predicted),
            ..Self::new(settings)
        }
    }

    /// Returns the predictions, in the order of the table's endpoints; empty if prediction is off.
    pub(crate) fn get(
        &self,
        table: &EndpointTable,
        request: &Request<'_>,
        local: &LocalState<'_>,
    ) -> &[Result<EndpointPrediction, NoPrediction>] {
        self.column
            .get_or_init(|| self.predict(table, request, local))
    }

    /// Computes and returns the predictions, and does not keep them.
    pub(crate) fn predict(
        &self,
        table: &EndpointTable,
        request: &Request<'_>,
        local: &LocalState<'_>,
    ) -> Vec<Result<EndpointPrediction, NoPrediction>> {
        let Some(settings) = self.settings else {
            return Vec::new();
        };
        let load = |index| {
            table
                .id(index)
                .map(|id| local.in_flight.load(id))
                .unwrap_or_default()
        };
        let at_endpoint =
            |(predicted, index): (Result<Prediction, NoPrediction>, EndpointIndex)| {
                predicted.map(|prediction| {
                    EndpointPrediction::from_prediction(
                        prediction,
                        load(index),
                        request.slo,
                        settings,
                    )
                })
            };
        let mut predicted = Vec::with_capacity(table.endpoints().len());
        match (&self.recorded, table.latency()) {
            (Some(recorded), _) => predicted.extend(
                recorded
                    .iter()
                    .map(|known| known.ok_or(NoPrediction::TooLittleData)),
            ),
            (None, Some(model)) => {
                let rows = table.endpoints().iter().zip(table.indices());
                let at_pick = |index| Conditions::at_pick(table, local, request, index);
                model.predict_all(
                    rows.map(|(endpoint, index)| (endpoint.id, at_pick(index))),
                    &mut predicted,
                );
            }
            (None, None) => {}
        }
        predicted
            .into_iter()
            .zip(table.indices())
            .map(at_endpoint)
            .collect()
    }
}

/// Implements [`crate::tracked_slo`].
pub(crate) fn tracked_slo(
    table: &EndpointTable,
    settings: Option<LatencySettings>,
    request: &Request<'_>,
    local: &LocalState<'_>,
    endpoint: EndpointIndex,
) -> TrackedSlo {
    let slo = request.slo;
    let (Some(model), Some(settings), Some(at)) =
        (table.latency(), settings, table.endpoint(endpoint))
    else {
        return TrackedSlo {
            slo,
            counts: slo,
            predicted: None,
        };
    };
    let conditions = Conditions::at_pick(table, local, request, endpoint);
    let predicted = model.predict(at.id, &conditions).ok();
    let (mut ttft_ms, mut tpot_ms) = predicted
        .as_ref()
        .map_or((f32::INFINITY, f32::INFINITY), |p| settings.counted(p));
    if met(slo, (ttft_ms, tpot_ms), settings) != slo {
        // The prediction for the endpoint as it is now breaks the SLO, so the latency at the idle
        // endpoint is predicted too.
        let Conditions {
            prompt_tokens,
            uncached_tokens,
            ..
        } = conditions;
        let idle = Conditions {
            prompt_tokens,
            uncached_tokens,
            ..Conditions::default()
        };
        let (idle_ttft_ms, idle_tpot_ms) = idle_ms(table, model, settings, at.id, &idle);
        ttft_ms = ttft_ms.min(idle_ttft_ms);
        tpot_ms = tpot_ms.min(idle_tpot_ms);
    }
    TrackedSlo {
        slo,
        counts: met(slo, (ttft_ms, tpot_ms), settings),
        predicted,
    }
}

/// Implements [`crate::possible_slo`].
pub(crate) fn possible_slo(
    table: &EndpointTable,
    settings: Option<LatencySettings>,
    endpoint: EndpointRef,
    slo: Slo,
) -> Slo {
    let (Some(model), Some(settings)) = (table.latency(), settings) else {
        return slo;
    };
    let times = idle_ms(table, model, settings, endpoint, &Conditions::default());
    met(slo, times, settings)
}

/// Returns those SLOs of `slo` that `times` (TTFT and TPOT, in ms) meet.
fn met(slo: Slo, times: (f32, f32), settings: LatencySettings) -> Slo {
    let (ttft_ms, tpot_ms) = times;
    Slo {
        ttft_us: slo.ttft_us.filter(|us| ttft_ms <= ms(*us)),
        tpot_us: slo
            .tpot_us
            .filter(|us| tpot_ms <= ms(*us) * settings.slo_buffer_factor),
    }
}

/// Returns the TTFT and TPOT of a request at an idle endpoint, in ms. These times come from the
/// latency model or, if this model gives no prediction, from the step model.
#[inline(never)] // several callers, and the wasm module should be small
fn idle_ms(
    table: &EndpointTable,
    model: &LatencyModel,
    settings: LatencySettings,
    endpoint: EndpointRef,
    idle: &Conditions,
) -> (f32, f32) {
    let by_step = || {
        let step = table.step();
        let (prefill_speed, decode_speed) = step.speed(endpoint);
        (
            step.prefill_ms(idle.uncached_tokens, idle.prompt_tokens) * prefill_speed,
            step.decode_ms(1.0, idle.prompt_tokens) * decode_speed,
        )
    };
    model
        .predict(endpoint, idle)
        .map_or_else(|_| by_step(), |p| settings.counted(&p))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::PipelineSpec;

    fn predicted(own: Slo, others: Slo) -> EndpointPrediction {
        let load = EndpointLoad {
            requests: 1,
            ttft_slo_us: others.ttft_us,
            tpot_slo_us: others.tpot_us,
            ..EndpointLoad::default()
        };
        let prediction = Prediction {
            ttft_ms: 100.0,
            tpot_ms: 20.0,
            ttft_p90_ms: 100.0,
            tpot_p90_ms: 20.0,
        };
        let mut settings = crate::Pipeline::build(&PipelineSpec::default())
            .unwrap()
            .production()
            .latency;
        settings.slo_buffer_factor = 0.5;
        EndpointPrediction::from_prediction(prediction, load, own, settings)
    }

    fn slo(ttft_ms: u32, tpot_ms: u32) -> Slo {
        let us = |ms: u32| (ms > 0).then_some(ms * 1_000);
        Slo {
            ttft_us: us(ttft_ms),
            tpot_us: us(tpot_ms),
        }
    }

    #[test]
    fn the_limit_is_the_strictest_slo_there_and_that_of_tpot_keeps_a_buffer() {
        let of = |own, others| {
            let EndpointPrediction { ttft, tpot, .. } = predicted(own, others);
            (
                (ttft.limit_ms, ttft.of_others),
                (tpot.limit_ms, tpot.of_others),
            )
        };
        assert_eq!(of(slo(200, 50), slo(0, 0)), ((200.0, false), (25.0, false)));
        assert_eq!(
            of(slo(200, 50), slo(150, 80)),
            ((150.0, true), (25.0, false))
        );
        assert_eq!(of(slo(200, 0), slo(0, 30)), ((200.0, false), (15.0, true)));
        assert_eq!(
            of(slo(0, 0), slo(150, 80)),
            ((0.0, true), (0.0, true)),
            "a request without SLOs has no headroom"
        );
    }

    #[test]
    fn a_prediction_equal_to_the_limit_is_in_time() {
        assert!(predicted(slo(100, 40), slo(0, 0)).meets());
        assert!(
            !predicted(slo(99, 40), slo(0, 0)).meets()
                && !predicted(slo(100, 39), slo(0, 0)).meets()
        );
    }
}
