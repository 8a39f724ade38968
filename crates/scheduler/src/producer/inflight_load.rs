//! `inflight-load-producer`: sets the load with which a request is counted while it is in flight.

use crate::plugin::{
    InvalidParameter, Parameter, Parameters, RequiredState, producer_name, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::settings::{LoadSettings, ProducerSetting};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "inflight-load-producer",
    kind: PluginKind::Producer,
    doc: readable(
        "Until its first token, a request counts as its uncached prompt tokens. With \
        addEstimatedOutputTokens its expected output also counts, until its end: \
        min(outputRatio * prompt tokens, maxEstimatedOutputTokens, the client's limit).",
    ),
    source: readable("llm-d-router, dataproducer/inflightload"),
    parameters: &[
        Parameter::flag(
            "addEstimatedOutputTokens",
            false,
            "also count expected output tokens",
        ),
        Parameter::number(
            "outputRatio",
            1.5,
            "expected output tokens per prompt token, 0 to 1000",
        ),
        Parameter::number(
            "maxEstimatedOutputTokens",
            0.0,
            "upper bound of expected output tokens, integer; 0: no limit",
        ),
        Parameter::flag(
            "syncCrossReplicaState",
            true,
            "no effect: proxies always share load",
        ),
        producer_name("prefixMatchInfoProducerName"),
    ],
    needs: &[RequiredState::Prompt],
    build,
};

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    LoadSettings::read(parameters).map(|settings| Plugin::Producer(ProducerSetting::Load(settings)))
}

impl LoadSettings {
    pub(crate) fn read(parameters: &Parameters<'_>) -> Result<Self, InvalidParameter> {
        parameters.flag("syncCrossReplicaState")?;
        parameters.text("prefixMatchInfoProducerName")?;
        let output_ratio = parameters.number("outputRatio", 0.0..=1000.0)?;
        let output_tokens_max =
            match parameters.integer("maxEstimatedOutputTokens", 0..=u32::MAX)? {
                0 => u32::MAX,
                max => max,
            };
        Ok(Self {
            output_ratio: if parameters.flag("addEstimatedOutputTokens")? {
                output_ratio
            } else {
                0.0
            },
            output_tokens_max,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::ParameterValue;

    #[test]
    fn output_counts_if_configured_up_to_its_limits() {
        let add = (
            "addEstimatedOutputTokens".to_owned(),
            ParameterValue::Flag(true),
        );
        let settings = |given: &[_]| {
            LoadSettings::read(&Parameters::check(PLUGIN.parameters, given).unwrap()).unwrap()
        };
        assert_eq!(settings(&[]).output_tokens(1000, None), 0);
        assert_eq!(
            settings(std::slice::from_ref(&add)).output_tokens(1000, None),
            1500
        );
        assert_eq!(
            settings(std::slice::from_ref(&add)).output_tokens(1000, Some(16)),
            16,
            "the client's own limit"
        );
        assert_eq!(
            settings(std::slice::from_ref(&add)).output_tokens(u32::MAX, None),
            u32::MAX
        );
        let capped = settings(&[
            add,
            (
                "maxEstimatedOutputTokens".to_owned(),
                ParameterValue::Number(700.0),
            ),
        ]);
        assert_eq!(
            (
                capped.output_tokens(1000, None),
                capped.output_tokens(100, None)
            ),
            (700, 150)
        );
    }
}
