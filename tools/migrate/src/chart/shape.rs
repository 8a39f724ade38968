//! Converts values to the types that our chart accepts.

use control_plane::config::yaml::{YamlKey, YamlNode, YamlValue};

use crate::items::plain;
use crate::tree::map;

/// The longest name of a pool in our chart, in characters.
const POOL_NAME_CHARACTERS_MAX: usize = 40;
/// The shape that a value must have in our chart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueShape {
    Map,
    Maps,
    Resources,
    Labels,
    Whole,
    Interval,
    Text,
}

// === impl ValueShape ===

impl ValueShape {
    /// Converts the value to this shape. Returns `None` if the value cannot have this shape.
    pub(super) fn shaped(self, value: &YamlValue) -> Option<YamlValue> {
        match (self, value) {
            (Self::Map, YamlValue::Map(_)) => Some(value.clone()),
            (Self::Maps, YamlValue::List(items)) => items
                .iter()
                .all(|item| matches!(item.value, YamlValue::Map(_)))
                .then(|| value.clone()),
            (Self::Resources, YamlValue::Map(entries)) => {
                let known = |(key, node): &(YamlKey, YamlNode)| {
                    ["requests", "limits"].contains(&key.name.as_str())
                        && matches!(node.value, YamlValue::Map(_))
                };
                entries.iter().all(known).then(|| value.clone())
            }
            (Self::Labels, YamlValue::Map(entries)) => labels(entries),
            (Self::Whole, YamlValue::Number(number)) => {
                (number.fract() == 0.0 && (1.0..1e6).contains(number)).then(|| value.clone())
            }
            (Self::Interval, YamlValue::Text(text)) => is_interval(text).then(|| value.clone()),
            (Self::Text, YamlValue::Text(text)) => (!text.is_empty()).then(|| value.clone()),
            _ => None,
        }
    }

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Map => "a map",
            Self::Maps => "a list of maps",
            Self::Resources => "requests and limits",
            Self::Labels => "a map of text",
            Self::Whole => "a whole number from 1",
            Self::Interval => "a time such as 10s",
            Self::Text => "text",
        }
    }
}

pub(super) fn text(text: &str) -> YamlValue {
    YamlValue::Text(text.to_owned())
}

/// Whether the chart accepts this name, which may have small letters, digits and `-`.
pub(super) fn is_name(name: &str, characters_max: usize) -> bool {
    let inside = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !name.is_empty()
        && name.len() <= characters_max
        && name.chars().all(inside)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// Returns the name of a pool in our chart.
pub(super) fn pool_name(name: &str) -> String {
    let inside = name.chars().map(|c| {
        if c.is_ascii_alphanumeric() {
            c.to_ascii_lowercase()
        } else {
            '-'
        }
    });
    let cut: String = inside
        .skip_while(|c| *c == '-')
        .take(POOL_NAME_CHARACTERS_MAX)
        .collect();
    let cut = cut.trim_end_matches('-');
    if cut.is_empty() {
        "pool".to_owned()
    } else {
        cut.to_owned()
    }
}

/// Returns a map whose values are text, as labels and annotations must be.
pub(super) fn labels(entries: &[(YamlKey, YamlNode)]) -> Option<YamlValue> {
    let scalar = |value: &YamlValue| !matches!(value, YamlValue::Map(_) | YamlValue::List(_));
    let all = entries.iter().map(|(key, node)| {
        scalar(&node.value).then(|| (key.name.as_str(), YamlValue::Text(plain(&node.value))))
    });
    Some(map(all.collect::<Option<Vec<_>>>()?))
}

/// Returns a text such as `app=vllm,env=prod` as a map.
pub(super) fn equalities(text: &str) -> Option<YamlValue> {
    let pair = |term: &str| {
        let (name, value) = term.split_once('=')?;
        let name = name.trim().to_owned();
        let value = value.trim_start_matches('=').trim().to_owned();
        (!name.is_empty() && !name.contains(['!', ' ', '(']) && !value.contains([' ', '(']))
            .then_some((name, value))
    };
    let pairs: Vec<(String, String)> = text.split(',').map(pair).collect::<Option<_>>()?;
    Some(map(pairs
        .iter()
        .map(|(name, value)| (name.as_str(), YamlValue::Text(value.clone())))
        .collect()))
}

/// Returns the ports from every form that the charts know: `8000`, `8000,8001`, `[{number: 8000}]`.
pub(super) fn ports(value: &YamlValue) -> Vec<f64> {
    let port =
        |number: f64| (number.fract() == 0.0 && (1.0..65536.0).contains(&number)).then_some(number);
    match value {
        YamlValue::Number(number) => port(*number).into_iter().collect(),
        YamlValue::Text(text) => text
            .split(',')
            .filter_map(|part| port(part.trim().parse().ok()?))
            .collect(),
        YamlValue::List(items) => items
            .iter()
            .flat_map(|item| {
                item.get("number")
                    .map_or_else(|| ports(&item.value), |number| ports(&number.value))
            })
            .collect(),
        YamlValue::Null | YamlValue::Flag(_) | YamlValue::Map(_) => Vec::new(),
    }
}

/// Returns the port for clients among further ports of llm-d's Service: the port named `http`, else
/// the first port.
pub(super) fn client_port(value: &YamlValue) -> Option<f64> {
    let YamlValue::List(items) = value else {
        return None;
    };
    let named = items.iter().find(|item| {
        item.get("name")
            .is_some_and(|name| plain(&name.value) == "http")
    });
    ports(&named.or_else(|| items.first())?.get("port")?.value)
        .first()
        .copied()
}

pub(super) fn is_interval(text: &str) -> bool {
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = &text[number.len()..];
    !number.is_empty()
        && number.chars().all(|c| c.is_ascii_digit())
        && ["ms", "s", "m", "h"].contains(&unit)
}
