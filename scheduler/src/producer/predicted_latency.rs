//! `predicted-latency-producer` and `slo-request-tracker`: what is predicted of requests, and by what their SLOs are held.
//!
//! Predictions, and the queues of running requests they are compared with, are there whether a plugin is declared or not; a declared one sets
//! what differs from the defaults. What switches prediction on is the daemon's flag.

use crate::plugin::{Default, InvalidParameter, PRODUCER_NAME, Parameter, Parameters, State, for_people};
use crate::plugin_type::{Kind, Plugin, PluginType};
use crate::settings::{LatencySettings, Percentile, Producer};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "predicted-latency-producer",
    kind: Kind::Producer,
    doc: for_people(
        "Predicts TTFT and TPOT of a request at every endpoint (--latency-prediction). Headroom = \
        min(own SLO, lowest SLO of the requests there) - prediction; the TPOT SLO is multiplied \
        by sloBufferFactor. An SLO that even an idle endpoint could not meet does not count as \
        the lowest.",
    ),
    source: for_people("llm-d-router, dataproducer/predictedlatency"),
    parameters: &[
        Parameter { name: "sloBufferFactor", default: Default::Number(1.0), doc: for_people("usable share of the TPOT SLO, 0.001 to 10") },
        Parameter { name: "percentile", default: Default::Text("p90"), doc: for_people("which prediction must meet the SLO: p90 or mean") },
        Parameter {
            name: "predictInProduce",
            default: Default::Flag(true),
            doc: for_people("predict; if false, the model learns but does not predict"),
        },
        Parameter {
            name: "streamingMode",
            default: Default::Flag(false),
            doc: for_people("no effect: only streamed replies have a TTFT, and each reply shows whether it is streamed"),
        },
        Parameter {
            name: "endpointRoleLabel",
            default: Default::Text(""),
            doc: for_people("no effect: each endpoint has its own factors, whatever its role"),
        },
        Parameter {
            name: "useEncoderCacheFeatures",
            default: Default::Flag(false),
            doc: for_people("no effect: the features of the model are fixed"),
        },
        Parameter {
            name: "samplingMean",
            default: Default::Number(1000.0),
            doc: for_people("no effect: all tokens of a reply are measured, up to 1e9"),
        },
        Parameter {
            name: "maxDecodeTokenSamplesForPrediction",
            default: Default::Number(0.0),
            doc: for_people("no effect: all tokens of a reply are measured, a whole number"),
        },
        Parameter { name: "prefixMatchInfoProducerName", ..PRODUCER_NAME },
        Parameter { name: "inFlightLoadProducerName", ..PRODUCER_NAME },
    ],
    needs: &[State::Latency, State::InFlight, State::PrefixIndex, State::Prompt],
    build,
};

pub(crate) const TRACKER: PluginType = PluginType {
    name: "slo-request-tracker",
    kind: Kind::Producer,
    doc: for_people(
        "Keeps the running requests of each endpoint, ordered by SLO, with their predicted and \
        measured latency. It always exists, declared or not.",
    ),
    source: for_people("Gateway API Inference Extension, issue 1323"),
    parameters: &[],
    needs: &[State::Latency, State::InFlight],
    build: |_| Ok(Plugin::Producer(Producer::Tracker)),
};

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    LatencySettings::read(parameters).map(|settings| Plugin::Producer(Producer::Latency(settings)))
}

impl LatencySettings {
    pub(crate) fn read(parameters: &Parameters<'_>) -> Result<Self, InvalidParameter> {
        parameters.number("samplingMean", 0.0..=1e9)?;
        parameters.integer("maxDecodeTokenSamplesForPrediction", 0..=u32::MAX)?;
        #[expect(clippy::cast_possible_truncation, reason = "a factor of a few digits")]
        let slo_buffer_factor = parameters.number("sloBufferFactor", 0.001..=10.0)? as f32;
        let percentile = parameters.choice("percentile", &[("p90", Percentile::P90), ("mean", Percentile::Mean)])?;
        Ok(Self { slo_buffer_factor, predict: parameters.flag("predictInProduce")?, percentile })
    }
}
