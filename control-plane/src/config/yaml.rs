//! YAML as a tree that remembers where everything stood, so that a message can point at it.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

/// A node of the tree.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Line, from 1.
    pub line: u64,
    /// What stands there.
    pub value: Value,
}

/// What can stand in a file.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Nothing.
    Null,
    /// true or false.
    Flag(bool),
    /// A number.
    Number(f64),
    /// Text.
    Text(String),
    /// A list.
    List(Vec<Node>),
    /// Keys with their lines, and values; in order, no key twice.
    Map(Vec<(Key, Node)>),
}

/// A key of a map.
#[derive(Clone, Debug, PartialEq)]
pub struct Key {
    /// Line, from 1.
    pub line: u64,
    /// The key.
    pub name: String,
}

/// Reads one document.
///
/// # Errors
/// Where it stops being YAML, and why.
pub fn parse(text: &str) -> Result<Node, (u64, String)> {
    let spanned: Spanned<Value> = serde_saphyr::from_str(text).map_err(|e| {
        let line = e.location().map_or(0, |l| l.line());
        (line, e.without_snippet().to_string())
    })?;
    Ok(node(spanned))
}

fn node(spanned: Spanned<Value>) -> Node {
    Node { line: spanned.referenced.line(), value: spanned.value }
}

// === impl Value ===

impl Value {
    /// What it is, for messages.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Null => "nothing",
            Self::Flag(_) => "true or false",
            Self::Number(_) => "a number",
            Self::Text(_) => "text",
            Self::List(_) => "a list",
            Self::Map(_) => "a map",
        }
    }

    /// The same without lines, for readers of JSON.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        match self {
            Self::Null => serde_json::Value::Null,
            Self::Flag(flag) => (*flag).into(),
            Self::Number(number) => (*number).into(),
            Self::Text(text) => text.as_str().into(),
            Self::List(list) => list.iter().map(|n| n.value.to_json()).collect(),
            Self::Map(map) => serde_json::Value::Object(map.iter().map(|(k, n)| (k.name.clone(), n.value.to_json())).collect()),
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ValueVisitor;

        impl<'de> Visitor<'de> for ValueVisitor {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any YAML value")
            }

            fn visit_unit<E: Error>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }

            fn visit_none<E: Error>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }

            fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
                deserializer.deserialize_any(self)
            }

            fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
                Ok(Value::Flag(value))
            }

            #[expect(clippy::cast_precision_loss, reason = "no setting is a whole number beyond 2^53")]
            fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
                Ok(Value::Number(value as f64))
            }

            #[expect(clippy::cast_precision_loss, reason = "no setting is a whole number beyond 2^53")]
            fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
                Ok(Value::Number(value as f64))
            }

            fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
                Ok(Value::Number(value))
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
                Ok(Value::Text(value.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
                let mut list = Vec::new();
                while let Some(item) = seq.next_element::<Spanned<Value>>()? {
                    list.push(node(item));
                }
                Ok(Value::List(list))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(key) = map.next_key::<Spanned<String>>()? {
                    let key = Key { line: key.referenced.line(), name: key.value };
                    entries.push((key, node(map.next_value::<Spanned<Value>>()?)));
                }
                Ok(Value::Map(entries))
            }
        }

        deserializer.deserialize_any(ValueVisitor)
    }
}
