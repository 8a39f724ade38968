//! `approx-prefix-cache-producer`: sets how prompts are cut into blocks, and how many blocks the
//! prefix index keeps.

use crate::plugin::{InvalidParameter, Parameter, Parameters, RequiredState, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::prefix::{BLOCK_BYTES_MAX, BLOCKS_MAX};
use crate::settings::{BYTES_PER_TOKEN, PrefixSettings, ProducerSetting};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "approx-prefix-cache-producer",
    kind: PluginKind::Producer,
    doc: readable(
        "Cuts prompts into blocks of blockSizeTokens and records which endpoint received which \
        block; beyond block 128 it records only every fourth block. All plugins share one index.",
    ),
    source: readable("llm-d-router, dataproducer/approximateprefix"),
    parameters: &[
        Parameter::number(
            "blockSizeTokens",
            16.0,
            "tokens per block, integer; less than 64 counts as 64",
        ),
        Parameter::number(
            "maxPrefixTokensToMatch",
            1_048_576.0,
            "tokens of a prompt to look up, integer; 0: use maxPrefixBlocksToMatch",
        ),
        Parameter::number(
            "maxPrefixBlocksToMatch",
            2048.0,
            "blocks of a prompt to look up if maxPrefixTokensToMatch is 0, integer; 0: the maximum",
        ),
        Parameter::number(
            "lruCapacityPerServer",
            31_250.0,
            "blocks to remember for an endpoint whose KV cache size is unknown, integer from 1",
        ),
        Parameter::flag(
            "autoTune",
            true,
            "remember as many blocks as the KV cache has, if the engine reports its size",
        ),
    ],
    needs: &[RequiredState::Prompt],
    build,
};

/// The minimum size of a block, in tokens. llm-d clamps the size to the same minimum.
const BLOCK_TOKENS_MIN: u32 = 64;

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    PrefixSettings::read(parameters)
        .map(|settings| Plugin::Producer(ProducerSetting::Prefix(settings)))
}

impl PrefixSettings {
    pub(crate) fn read(parameters: &Parameters<'_>) -> Result<Self, InvalidParameter> {
        let block_tokens_max = u32::try_from(BLOCK_BYTES_MAX / BYTES_PER_TOKEN).unwrap_or(u32::MAX);
        let block_tokens = parameters
            .integer("blockSizeTokens", 0..=block_tokens_max)?
            .max(BLOCK_TOKENS_MIN);
        let blocks = parameters.integer("maxPrefixBlocksToMatch", 0..=u32::MAX)?;
        let blocks = match parameters.integer("maxPrefixTokensToMatch", 0..=u32::MAX)? {
            0 => blocks,
            tokens => (tokens / block_tokens).max(1),
        };
        let blocks = usize::try_from(blocks).unwrap_or(BLOCKS_MAX);
        Ok(Self {
            block_tokens,
            blocks_max: if blocks == 0 {
                BLOCKS_MAX
            } else {
                blocks.min(BLOCKS_MAX)
            },
            blocks_per_endpoint: parameters.integer("lruCapacityPerServer", 1..=u32::MAX)?,
            auto_tune: parameters.flag("autoTune")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::ParameterValue;

    fn settings(given: &[(&str, f64)]) -> PrefixSettings {
        let given: Vec<_> = given
            .iter()
            .map(|&(name, value)| (name.to_owned(), ParameterValue::Number(value)))
            .collect();
        PrefixSettings::read(&Parameters::check(PLUGIN.parameters, &given).unwrap()).unwrap()
    }

    #[test]
    fn blocks_are_not_small_and_prompts_not_endless() {
        let default = PrefixSettings {
            block_tokens: 64,
            blocks_max: 16_384,
            blocks_per_endpoint: 31_250,
            auto_tune: true,
        };
        assert_eq!(settings(&[]), default);
        assert_eq!(default.block_bytes(), 256);
        let large = settings(&[
            ("blockSizeTokens", 128.0),
            ("maxPrefixTokensToMatch", 100_000.0),
        ]);
        assert_eq!((large.block_tokens, large.blocks_max), (128, 781));
        assert_eq!(settings(&[("maxPrefixTokensToMatch", 1.0)]).blocks_max, 1);
        let most = (BLOCK_BYTES_MAX / BYTES_PER_TOKEN) as f64;
        assert_eq!(
            settings(&[("blockSizeTokens", most)]).block_bytes(),
            BLOCK_BYTES_MAX
        );
        let given = [(
            "blockSizeTokens".to_owned(),
            ParameterValue::Number(most + 1.0),
        )];
        assert!(
            PrefixSettings::read(&Parameters::check(PLUGIN.parameters, &given).unwrap()).is_err(),
            "larger than is hashed"
        );
        assert_eq!(
            settings(&[("maxPrefixTokensToMatch", 0.0)]).blocks_max,
            2048,
            "the count of blocks holds when tokens are 0"
        );
        assert_eq!(
            settings(&[
                ("maxPrefixTokensToMatch", 0.0),
                ("maxPrefixBlocksToMatch", 0.0)
            ])
            .blocks_max,
            BLOCKS_MAX
        );
        assert_eq!(
            settings(&[("maxPrefixTokensToMatch", 4e9)]).blocks_max,
            BLOCKS_MAX
        );
    }
}
