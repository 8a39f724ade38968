//! `predicted-latency-producer` and `slo-request-tracker`: how latency is predicted and compared
//! with SLOs.
//!
//! Predictions and the queues of running requests exist whether a plugin is declared or not; a
//! declared one changes settings. The daemon's flag switches prediction on.

use crate::plugin::{
    InvalidParameter, PRODUCER_NAME, Parameter, ParameterDefault, Parameters, RequiredState,
    readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::settings::{LatencySettings, PredictionPercentile, ProducerSetting};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "predicted-latency-producer",
    kind: PluginKind::Producer,
    doc: readable(
        "Predicts TTFT and TPOT of a request at every endpoint (--latency-prediction). Headroom = \
        min(own SLO, lowest SLO of the requests there) - prediction; the TPOT SLO is multiplied \
        by sloBufferFactor. An SLO that even an idle endpoint could not meet does not count as \
        the lowest.",
    ),
    source: readable("llm-d-router, dataproducer/predictedlatency"),
    parameters: &[
        Parameter {
            name: "sloBufferFactor",
            default: ParameterDefault::Number(1.0),
            doc: readable("usable share of the TPOT SLO, 0.001 to 10"),
        },
        Parameter {
            name: "percentile",
            default: ParameterDefault::Text("p90"),
            doc: readable("which prediction must meet the SLO: p90 or mean"),
        },
        Parameter {
            name: "predictInProduce",
            default: ParameterDefault::Flag(true),
            doc: readable("predict; if false, the model learns but does not predict"),
        },
        Parameter {
            name: "streamingMode",
            default: ParameterDefault::Flag(false),
            doc: readable("no effect: each reply shows whether it is streamed"),
        },
        Parameter {
            name: "endpointRoleLabel",
            default: ParameterDefault::Text(""),
            doc: readable("no effect: each endpoint has its own factors"),
        },
        Parameter {
            name: "useEncoderCacheFeatures",
            default: ParameterDefault::Flag(false),
            doc: readable("no effect: the features of the model are fixed"),
        },
        Parameter {
            name: "samplingMean",
            default: ParameterDefault::Number(1000.0),
            doc: readable("no effect: all tokens of a reply are measured, up to 1e9"),
        },
        Parameter {
            name: "maxDecodeTokenSamplesForPrediction",
            default: ParameterDefault::Number(0.0),
            doc: readable("no effect: all tokens of a reply are measured, integer"),
        },
        Parameter {
            name: "prefixMatchInfoProducerName",
            ..PRODUCER_NAME
        },
        Parameter {
            name: "inFlightLoadProducerName",
            ..PRODUCER_NAME
        },
    ],
    needs: &[
        RequiredState::Latency,
        RequiredState::InFlight,
        RequiredState::PrefixIndex,
        RequiredState::Prompt,
    ],
    build,
};

pub(crate) const TRACKER: PluginType = PluginType {
    name: "slo-request-tracker",
    kind: PluginKind::Producer,
    doc: readable(
        "Keeps the running requests of each endpoint, ordered by SLO, with their predicted and \
        measured latency. It always exists, declared or not.",
    ),
    source: readable("Gateway API Inference Extension, issue 1323"),
    parameters: &[],
    needs: &[RequiredState::Latency, RequiredState::InFlight],
    build: |_| Ok(Plugin::Producer(ProducerSetting::Tracker)),
};

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    LatencySettings::read(parameters)
        .map(|settings| Plugin::Producer(ProducerSetting::Latency(settings)))
}

impl LatencySettings {
    pub(crate) fn read(parameters: &Parameters<'_>) -> Result<Self, InvalidParameter> {
        parameters.number("samplingMean", 0.0..=1e9)?;
        parameters.integer("maxDecodeTokenSamplesForPrediction", 0..=u32::MAX)?;
        #[expect(clippy::cast_possible_truncation, reason = "a factor of a few digits")]
        let slo_buffer_factor = parameters.number("sloBufferFactor", 0.001..=10.0)? as f32;
        let percentile = parameters.choice(
            "percentile",
            &[
                ("p90", PredictionPercentile::P90),
                ("mean", PredictionPercentile::Mean),
            ],
        )?;
        Ok(Self {
            slo_buffer_factor,
            predict: parameters.flag("predictInProduce")?,
            percentile,
        })
    }
}
