//! `token-producer`: estimates the tokens of a prompt. The producer neither runs nor calls a
//! tokenizer. The estimate of four bytes per token is right within a factor of two over languages
//! and code. This is enough, because replies correct the number, and plugins only compare endpoints
//! for one prompt.

use crate::plugin::{InvalidParameter, Parameter, Parameters, RequiredState, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::settings::{ProducerSetting, TokenSettings};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "token-producer",
    kind: PluginKind::Producer,
    doc: readable(
        "Tokens = text bytes / 4 until replies report usage, then the average that they report; \
        plus, for each image, video or audio clip, width * height / factor of the default \
        resolution (dynamic) or staticToken (static).",
    ),
    source: readable("llm-d-router, dataproducer/tokenizer"),
    parameters: &[
        Parameter::structured(
            "estimate",
            "{image: {mode: dynamic, defaultResolution: {width: 640, height: 360}, dynamic: {factor: 1024}, static: {staticToken: 0}}}",
            "tokens of an image",
        ),
        Parameter::text(
            "modelName",
            "",
            "leave it out: it requires a tokenizer server; Switchpoint estimates tokens",
        ),
    ],
    needs: &[RequiredState::Prompt],
    build,
};

const ESTIMATE: &[Parameter] = &[Parameter::structured(
    "image",
    "{mode, defaultResolution, dynamic, static}",
    "tokens of an image",
)];
const IMAGE: &[Parameter] = &[
    Parameter::text("mode", "dynamic", "dynamic or static"),
    Parameter::structured(
        "defaultResolution",
        "{width: 640, height: 360}",
        "pixels; images are not looked into",
    ),
    Parameter::structured("dynamic", "{factor: 1024}", "pixels for each token"),
    Parameter::structured("static", "{staticToken: 0}", "tokens of an image"),
];
const RESOLUTION: &[Parameter] = &[
    Parameter::number("width", 640.0, "pixels, integer up to 65536"),
    Parameter::number("height", 360.0, "pixels, integer up to 65536"),
];
const DYNAMIC: &[Parameter] = &[Parameter::number(
    "factor",
    1024.0,
    "pixels for each token, integer from 1",
)];
const STATIC: &[Parameter] = &[Parameter::number("staticToken", 0.0, "tokens, integer")];

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    TokenSettings::read(parameters)
        .map(|settings| Plugin::Producer(ProducerSetting::Token(settings)))
}

impl TokenSettings {
    pub(crate) fn read(parameters: &Parameters<'_>) -> Result<Self, InvalidParameter> {
        parameters.choice("modelName", &[("", ())])?;
        let given = parameters
            .nested("estimate", ESTIMATE, |estimate| {
                estimate.nested("image", IMAGE, image_tokens)
            })?
            .flatten();
        let media_tokens = match given {
            Some(tokens) => tokens,
            None => image_tokens(&Parameters::check(IMAGE, &[])?)?,
        };
        Ok(Self { media_tokens })
    }
}

fn image_tokens(image: &Parameters<'_>) -> Result<u32, InvalidParameter> {
    let or_default =
        |name: &str,
         known: &'static [Parameter],
         read: fn(&Parameters<'_>) -> Result<u32, InvalidParameter>| {
            image
                .nested(name, known, read)?
                .map_or_else(|| read(&Parameters::check(known, &[])?), Ok)
        };
    let pixels = |of: &Parameters<'_>| {
        Ok(of
            .integer("width", 0..=65_536)?
            .saturating_mul(of.integer("height", 0..=65_536)?))
    };
    let pixels = or_default("defaultResolution", RESOLUTION, pixels)?;
    let factor = or_default("dynamic", DYNAMIC, |of| of.integer("factor", 1..=u32::MAX))?;
    let fixed = or_default("static", STATIC, |of| {
        of.integer("staticToken", 0..=u32::MAX)
    })?;
    Ok(
        if image.choice("mode", &[("dynamic", true), ("static", false)])? {
            pixels.checked_div(factor).unwrap_or(0)
        } else {
            fixed
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::ParameterValue;

    fn map(name: &str, value: ParameterValue) -> (String, ParameterValue) {
        (
            name.to_owned(),
            ParameterValue::Map(match value {
                ParameterValue::Map(entries) => entries,
                other => vec![("staticToken".to_owned(), other)],
            }),
        )
    }

    #[test]
    fn an_image_counts_for_its_pixels_or_a_fixed_number() {
        let read = |given: &[(String, ParameterValue)]| {
            TokenSettings::read(&Parameters::check(PLUGIN.parameters, given)?)
                .map(|s| s.media_tokens)
        };
        assert_eq!(read(&[]), Ok(225), "640 x 360 / 1024");
        let fixed = vec![
            ("mode".to_owned(), ParameterValue::Text("static".to_owned())),
            map("static", ParameterValue::Number(77.0)),
        ];
        let image = ParameterValue::Map(vec![("image".to_owned(), ParameterValue::Map(fixed))]);
        assert_eq!(read(&[("estimate".to_owned(), image)]), Ok(77));
        let refusal = read(&[(
            "modelName".to_owned(),
            ParameterValue::Text("llama".to_owned()),
        )])
        .unwrap_err()
        .to_string();
        assert!(
            refusal.contains("Switchpoint estimates tokens"),
            "{refusal}"
        );
    }
}
