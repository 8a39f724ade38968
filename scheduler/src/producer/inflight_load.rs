//! `inflight-load-producer`: what a request counts for while it is in flight.

use crate::plugin::{Default, InvalidParameter, PRODUCER_NAME, Parameter, Parameters, State, for_people};
use crate::plugin_type::{Kind, Plugin, PluginType};
use crate::settings::{LoadSettings, Producer};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "inflight-load-producer",
    kind: Kind::Producer,
    doc: for_people(
        "A request counts with its uncached prompt tokens until its first token. With \
        addEstimatedOutputTokens it also counts, until its end, with min(outputRatio * prompt \
        tokens, maxEstimatedOutputTokens, the client's limit).",
    ),
    source: for_people("llm-d-router, dataproducer/inflightload"),
    parameters: &[
        Parameter { name: "addEstimatedOutputTokens", default: Default::Flag(false), doc: for_people("also count expected output tokens") },
        Parameter {
            name: "outputRatio",
            default: Default::Number(1.5),
            doc: for_people("expected output tokens per prompt token, 0 to 1000"),
        },
        Parameter {
            name: "maxEstimatedOutputTokens",
            default: Default::Number(0.0),
            doc: for_people("upper bound of expected output tokens, a whole number; 0: no limit"),
        },
        Parameter { name: "syncCrossReplicaState", default: Default::Flag(true), doc: for_people("no effect: proxies always share load") },
        Parameter { name: "prefixMatchInfoProducerName", ..PRODUCER_NAME },
    ],
    needs: &[State::Prompt],
    build,
};

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    LoadSettings::read(parameters).map(|settings| Plugin::Producer(Producer::Load(settings)))
}

impl LoadSettings {
    pub(crate) fn read(parameters: &Parameters<'_>) -> Result<Self, InvalidParameter> {
        parameters.flag("syncCrossReplicaState")?;
        parameters.text("prefixMatchInfoProducerName")?;
        let output_ratio = parameters.number("outputRatio", 0.0..=1000.0)?;
        let output_tokens_max = match parameters.integer("maxEstimatedOutputTokens", 0..=u32::MAX)? {
            0 => u32::MAX,
            max => max,
        };
        Ok(Self { output_ratio: if parameters.flag("addEstimatedOutputTokens")? { output_ratio } else { 0.0 }, output_tokens_max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::Value;

    #[test]
    fn output_counts_when_asked_and_no_more_than_it_can_be() {
        let add = ("addEstimatedOutputTokens".to_owned(), Value::Flag(true));
        let settings = |given: &[_]| LoadSettings::read(&Parameters::check(PLUGIN.parameters, given).unwrap()).unwrap();
        assert_eq!(settings(&[]).output_tokens(1000, None), 0);
        assert_eq!(settings(std::slice::from_ref(&add)).output_tokens(1000, None), 1500);
        assert_eq!(settings(std::slice::from_ref(&add)).output_tokens(1000, Some(16)), 16, "the client's own limit");
        assert_eq!(settings(std::slice::from_ref(&add)).output_tokens(u32::MAX, None), u32::MAX);
        let capped = settings(&[add, ("maxEstimatedOutputTokens".to_owned(), Value::Number(700.0))]);
        assert_eq!((capped.output_tokens(1000, None), capped.output_tokens(100, None)), (700, 150));
    }
}
