//! `predicted-latency-producer` and `slo-request-tracker`: set how latency is predicted and
//! compared with SLOs.
//!
//! Predictions and the queues of running requests also work without these plugins, which only
//! change settings. A flag of the daemon switches prediction on.

use crate::plugin::{
    InvalidParameter, Parameter, Parameters, RequiredState, producer_name, readable,
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
        Parameter::number(
            "sloBufferFactor",
            1.0,
            "usable share of the TPOT SLO, 0.001 to 10",
        ),
        Parameter::text(
            "percentile",
            "p90",
            "which prediction must meet the SLO: p90 or mean",
        ),
        Parameter::flag(
            "predictInProduce",
            true,
            "predict; if false, the model learns but does not predict",
        ),
        Parameter::flag(
            "streamingMode",
            false,
            "no effect: each reply shows whether it is streamed",
        ),
        Parameter::text(
            "endpointRoleLabel",
            "",
            "no effect: each endpoint has its own factors",
        ),
        Parameter::flag(
            "useEncoderCacheFeatures",
            false,
            "no effect: the features of the model are fixed",
        ),
        Parameter::number(
            "samplingMean",
            1000.0,
            "no effect: all tokens of a reply are measured, up to 1e9",
        ),
        Parameter::number(
            "maxDecodeTokenSamplesForPrediction",
            0.0,
            "no effect: all tokens of a reply are measured, integer",
        ),
        producer_name("prefixMatchInfoProducerName"),
        producer_name("inFlightLoadProducerName"),
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
        measured latency.",
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
        // An f32 is precise enough, because the factor has a few digits.
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
