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
        "Predicts TTFT and TPOT of a request at every endpoint (--latency-prediction). Headroom = min(own SLO, lowest SLO of requests there) - predicted, the TPOT SLO times sloBufferFactor; an SLO that an idle endpoint could not meet is nobody's lowest.",
    ),
    source: for_people("llm-d-router, dataproducer/predictedlatency"),
    parameters: &[
        Parameter {
            name: "sloBufferFactor",
            default: Default::Number(1.0),
            doc: for_people("how much of the TPOT SLO may be used up, 0.001 to 10"),
        },
        Parameter {
            name: "percentile",
            default: Default::Text("p90"),
            doc: for_people("what must be within an SLO: p90, the time nine of ten requests take, or mean, the middle of what is expected"),
        },
        Parameter {
            name: "predictInProduce",
            default: Default::Flag(true),
            doc: for_people("predict; without, requests are only learned from"),
        },
        Parameter {
            name: "streamingMode",
            default: Default::Flag(false),
            doc: for_people("no effect: of each reply it is known whether it is streamed, and only streamed ones have a TTFT"),
        },
        Parameter {
            name: "endpointRoleLabel",
            default: Default::Text(""),
            doc: for_people("no effect: each endpoint is learned by itself, whatever its role"),
        },
        Parameter {
            name: "useEncoderCacheFeatures",
            default: Default::Flag(false),
            doc: for_people("no effect: the model goes by what it measures best with"),
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
        "Keeps the queue of running requests of each endpoint, by SLO, with what was predicted of each and what it saw; there is one, declared or not.",
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
