//! Selects series of a metric: `metric` or `metric{label=value,other="value"}`, as in llm-d's
//! configuration.

use super::exposition::MetricSample;

/// The longest spec, in bytes. Real specs have less than a hundred bytes. The limit keeps the
/// scrape URL short.
pub const SPEC_BYTES_MAX: usize = 512;

/// A metric name, and the label values that a series must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricSpec {
    name: Box<str>,
    labels: Box<[(Box<str>, Box<str>)]>,
}

/// The reason why a spec was refused. The configuration has to change.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidMetricSpec {
    /// The spec is longer than [`SPEC_BYTES_MAX`].
    #[error("longer than {SPEC_BYTES_MAX} bytes")]
    TooLong,
    /// The text before the braces is not a metric name.
    #[error("{0:?} is not a metric name")]
    Name(String),
    /// A brace is missing, or text follows the closing brace.
    #[error("{0:?} must be metric or metric{{label=value,...}}")]
    Braces(String),
    /// A selector is not `label=value`.
    #[error("{0:?} must be label=value")]
    Selector(String),
}

impl MetricSpec {
    /// Parses a spec. Blanks around its parts and quotes around values are ignored.
    ///
    /// # Errors
    /// Returns [`InvalidMetricSpec`], which quotes the invalid part.
    pub fn parse(text: &str) -> Result<Self, InvalidMetricSpec> {
        if text.len() > SPEC_BYTES_MAX {
            return Err(InvalidMetricSpec::TooLong);
        }
        let text = text.trim();
        let (name, selectors) = match text.split_once('{') {
            None => (text, ""),
            Some((name, rest)) => (
                name.trim(),
                rest.strip_suffix('}')
                    .ok_or_else(|| InvalidMetricSpec::Braces(text.into()))?,
            ),
        };
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | ':' | '.');
        if name.is_empty()
            || name.starts_with(|c: char| c.is_ascii_digit())
            || !name.chars().all(legal)
        {
            return Err(InvalidMetricSpec::Name(name.into()));
        }
        let labels = selectors
            .split(',')
            .filter(|part| !part.trim().is_empty())
            .map(selector)
            .collect::<Result<_, _>>()?;
        Ok(Self {
            name: name.into(),
            labels,
        })
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether the series has the required label values. The function does not check the
    /// name of the series.
    #[must_use]
    pub fn selects(&self, sample: &MetricSample<'_>) -> bool {
        self.labels.iter().all(|(key, value)| {
            sample
                .label(key.as_bytes())
                .is_some_and(|found| *found == *value.as_bytes())
        })
    }
}

fn selector(part: &str) -> Result<(Box<str>, Box<str>), InvalidMetricSpec> {
    let invalid = || InvalidMetricSpec::Selector(part.trim().into());
    let (key, value) = part.split_once('=').ok_or_else(invalid)?;
    let key = key.trim();
    let value = value.trim();
    let bare = value
        .strip_prefix('"')
        .map_or(Some(value), |open| open.strip_suffix('"'));
    match bare {
        Some(value) if !key.is_empty() && !value.contains(['"', '{', '}']) => {
            Ok((key.into(), value.into()))
        }
        _ => Err(invalid()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_forms_that_users_write() {
        let plain = MetricSpec::parse(" vllm:num_requests_waiting ").unwrap();
        assert_eq!(plain.name(), "vllm:num_requests_waiting");
        let bare = MetricSpec::parse("nv_trt_llm_request_metrics{request_type=waiting}").unwrap();
        let quoted =
            MetricSpec::parse("nv_trt_llm_request_metrics { request_type = \"waiting\" , }")
                .unwrap();
        assert_eq!(bare, quoted);
    }

    #[test]
    fn refusals_quote_the_wrong_part() {
        let cases = [
            ("", InvalidMetricSpec::Name(String::new())),
            ("two words", InvalidMetricSpec::Name("two words".into())),
            ("1st", InvalidMetricSpec::Name("1st".into())),
            ("m{a=b", InvalidMetricSpec::Braces("m{a=b".into())),
            ("m{a}", InvalidMetricSpec::Selector("a".into())),
            ("m{=b}", InvalidMetricSpec::Selector("=b".into())),
            ("m{a=\"b}", InvalidMetricSpec::Selector("a=\"b".into())),
        ];
        for (text, expected) in cases {
            assert_eq!(MetricSpec::parse(text), Err(expected), "{text:?}");
        }
        assert_eq!(
            MetricSpec::parse(&"m".repeat(SPEC_BYTES_MAX + 1)),
            Err(InvalidMetricSpec::TooLong)
        );
    }
}
