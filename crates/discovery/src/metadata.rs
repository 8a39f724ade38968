//! The metadata of an instance: a JSON object that the instance chooses. This module interprets
//! some keys of this object.
//!
//! ```json
//! {"Model": {"name": "Qwen3-32B", "type": "Completions", "runtime_config": {"total_kv_blocks": 24064, "max_num_seqs": 256}},
//!  "Transport": {"address": "10.1.2.3:9000"},
//!  "MDC": {}}
//! ```
//! Keys are accepted in both spellings that exist, `Model` and `model`, and a model may be an array
//! of models. Other keys are kept and passed on.

use std::net::{IpAddr, SocketAddr};
use std::sync::OnceLock;

use serde_json::{Map, Value};

/// The maximum number of bytes of metadata of one instance, as JSON. A model card with its
/// tokenizer's configuration has tens of kilobytes. etcd accepts at most 1.5 MiB per request.
pub const METADATA_BYTES_MAX: usize = 1 << 20;

/// The maximum number of models of one instance: a base model and hundreds of adapters.
pub const MODELS_MAX: usize = 512;

/// The metadata of an instance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    map: Map<String, Value>,
}

/// A model that an instance serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelCard {
    /// The name of the model in requests.
    pub name: String,
    /// The kind of the model (`Completions`, `Chat`, ...), as the instance writes it.
    pub kind: Option<String>,
    /// The engine's configuration.
    pub runtime: RuntimeConfig,
}

/// The engine's configuration. A value that is `None` is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuntimeConfig {
    /// The number of blocks in the KV cache.
    pub total_kv_blocks: Option<u64>,
    /// The number of tokens in one block.
    pub kv_block_tokens: Option<u64>,
    /// The maximum number of sequences in one batch.
    pub max_num_seqs: Option<u64>,
    /// The maximum number of tokens in one batch.
    pub max_num_batched_tokens: Option<u64>,
}

/// The reason why metadata is refused. Trying again does not help, because the instance has to
/// change its metadata.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetadataError {
    /// The metadata has more than [`METADATA_BYTES_MAX`].
    #[error("{0} bytes of metadata; at most {METADATA_BYTES_MAX} are allowed")]
    TooLarge(usize),
    /// The metadata is not a JSON object.
    #[error("metadata is not a JSON object: {0}")]
    NotAnObject(String),
    /// A key that this module reads has an invalid value.
    #[error("metadata: {0}")]
    Invalid(String),
}

// === impl Metadata ===

impl Metadata {
    /// Creates metadata from a map.
    ///
    /// # Errors
    /// Returns [`MetadataError`] if the metadata is too large, or a key that this module reads has
    /// an invalid value.
    pub fn try_new(map: Map<String, Value>) -> Result<Self, MetadataError> {
        let bytes = serde_json::to_vec(&map)
            .map_err(|e| MetadataError::NotAnObject(e.to_string()))?
            .len();
        Self { map }.validated(bytes)
    }

    /// Parses metadata from JSON text.
    ///
    /// # Errors
    /// Fails as [`Self::try_new`] does, and if the text is not a JSON object.
    pub fn parse(text: &[u8]) -> Result<Self, MetadataError> {
        if text.len() > METADATA_BYTES_MAX {
            return Err(MetadataError::TooLarge(text.len()));
        }
        let map =
            serde_json::from_slice(text).map_err(|e| MetadataError::NotAnObject(e.to_string()))?;
        Self { map }.validated(text.len())
    }

    /// Returns empty metadata.
    #[must_use]
    pub fn empty() -> &'static Self {
        static EMPTY: OnceLock<Metadata> = OnceLock::new();
        EMPTY.get_or_init(Self::default)
    }

    /// Returns the whole object.
    pub fn map(&self) -> &Map<String, Value> {
        &self.map
    }

    /// Returns the value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key)
    }

    /// Returns the keys that this module reads, with their values.
    pub fn understood(&self) -> Map<String, Value> {
        let understood =
            |key: &str| ["Model", "model", "models", "Transport", "transport"].contains(&key);
        self.map
            .iter()
            .filter(|(key, _)| understood(key))
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect()
    }

    /// Returns the models that the instance serves. The list is empty if the metadata names no
    /// model.
    pub fn models(&self) -> Vec<ModelCard> {
        self.try_models().unwrap_or_default()
    }

    /// Returns the address for the instance's traffic, if its metadata sets one. `own` is the
    /// address of the instance. Traffic to another host is refused.
    ///
    /// # Errors
    /// Fails if the address is not `IP:PORT`, has no valid port, or is on another host.
    pub fn transport(&self, own: SocketAddr) -> Result<Option<SocketAddr>, MetadataError> {
        let Some(Value::Object(transport)) = self.either("Transport", "transport") else {
            return Ok(None);
        };
        let invalid = |why: String| MetadataError::Invalid(format!("transport: {why}"));
        if let Some(port) = transport.get("port") {
            let port = port
                .as_u64()
                .and_then(|p| u16::try_from(p).ok())
                .filter(|&p| p > 0);
            return port
                .map(|p| Some(SocketAddr::new(own.ip(), p)))
                .ok_or_else(|| invalid("port is not in 1 to 65535".to_owned()));
        }
        let Some(Value::String(given)) = transport.get("address").or_else(|| transport.get("url"))
        else {
            return Ok(None); // another kind of transport, such as a message bus, cannot be used here
        };
        let bare = given
            .strip_prefix("http://")
            .unwrap_or(given)
            .trim_end_matches('/');
        let address: SocketAddr = bare
            .parse()
            .map_err(|_| invalid(format!("{given:?} is not IP:PORT")))?;
        if address.port() == 0 {
            return Err(invalid(format!("{given:?} has port 0")));
        }
        if address.ip() != own.ip() && !is_anywhere(address.ip()) {
            return Err(invalid(format!(
                "{given:?} is another host than the instance's own, {}",
                own.ip()
            )));
        }
        Ok(Some(SocketAddr::new(own.ip(), address.port())))
    }

    fn validated(self, bytes: usize) -> Result<Self, MetadataError> {
        if bytes > METADATA_BYTES_MAX {
            return Err(MetadataError::TooLarge(bytes));
        }
        self.try_models()?;
        Ok(self)
    }

    fn try_models(&self) -> Result<Vec<ModelCard>, MetadataError> {
        let models = match self.either("Model", "model").or_else(|| self.get("models")) {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(Value::Array(models)) => {
                models.iter().map(model).collect::<Result<Vec<_>, _>>()?
            }
            Some(one) => vec![model(one)?],
        };
        if models.len() > MODELS_MAX {
            return Err(MetadataError::Invalid(format!(
                "{} models; at most {MODELS_MAX} are allowed",
                models.len()
            )));
        }
        Ok(models)
    }

    fn either(&self, one: &str, other: &str) -> Option<&Value> {
        self.map.get(one).or_else(|| self.map.get(other))
    }
}

fn model(value: &Value) -> Result<ModelCard, MetadataError> {
    let invalid = |why: &str| MetadataError::Invalid(format!("model: {why}"));
    let name = match value {
        Value::String(name) => name,
        Value::Object(fields) => match fields.get("name") {
            Some(Value::String(name)) => name,
            _ => return Err(invalid("it has no name")),
        },
        _ => return Err(invalid("neither an object nor a name")),
    };
    if name.is_empty() || name.len() > crate::NAME_BYTES_MAX {
        return Err(invalid("its name is empty or too long"));
    }
    let config = value.get("runtime_config");
    let number = |key| config.and_then(|c| c.get(key)).and_then(Value::as_u64);
    let runtime = RuntimeConfig {
        total_kv_blocks: number("total_kv_blocks"),
        kv_block_tokens: number("kv_cache_block_size"),
        max_num_seqs: number("max_num_seqs"),
        max_num_batched_tokens: number("max_num_batched_tokens"),
    };
    Ok(ModelCard {
        name: name.clone(),
        kind: value.get("type").and_then(Value::as_str).map(str::to_owned),
        runtime,
    })
}

/// Returns whether this is the address that a server reports when it listens on all of its
/// addresses.
fn is_anywhere(ip: IpAddr) -> bool {
    ip.is_unspecified()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Metadata, MetadataError> {
        Metadata::parse(text.as_bytes())
    }

    #[test]
    fn models_in_every_spelling() {
        let runtime = RuntimeConfig {
            total_kv_blocks: Some(24064),
            max_num_seqs: Some(256),
            ..RuntimeConfig::default()
        };
        let full = ModelCard {
            name: "q".to_owned(),
            kind: Some("Completions".to_owned()),
            runtime,
        };
        let config = r#"{"name":"q","type":"Completions","runtime_config":{"total_kv_blocks":24064,"max_num_seqs":256}}"#;
        for key in ["Model", "model"] {
            assert_eq!(
                parse(&format!(r#"{{"{key}":{config}}}"#)).unwrap().models(),
                std::slice::from_ref(&full)
            );
        }
        let names = |text| {
            parse(text)
                .unwrap()
                .models()
                .into_iter()
                .map(|m| m.name)
                .collect::<Vec<_>>()
        };
        assert_eq!(names(r#"{"models":[{"name":"a"},"b"]}"#), ["a", "b"]);
        assert_eq!(names(r#"{"MDC":{}}"#), Vec::<String>::new());
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, expected) in [
            ("[]", "not a JSON object"),
            ("{", "not a JSON object"),
            (r#"{"model":7}"#, "neither an object nor a name"),
            (r#"{"model":{}}"#, "no name"),
            (r#"{"model":""}"#, "empty"),
        ] {
            assert!(
                parse(text).unwrap_err().to_string().contains(expected),
                "{text}"
            );
        }
        let many = format!(r#"{{"models":{:?}}}"#, vec!["m"; MODELS_MAX + 1]);
        assert!(parse(&many).unwrap_err().to_string().contains("513 models"));
        let large = format!(r#"{{"a":"{}"}}"#, "x".repeat(METADATA_BYTES_MAX));
        assert_eq!(
            parse(&large).unwrap_err(),
            MetadataError::TooLarge(METADATA_BYTES_MAX + 8)
        );
        let map = Map::from_iter([(
            "a".to_owned(),
            Value::String("x".repeat(METADATA_BYTES_MAX)),
        )]);
        assert_eq!(
            Metadata::try_new(map).unwrap_err(),
            MetadataError::TooLarge(METADATA_BYTES_MAX + 8)
        );
    }

    #[test]
    fn traffic_goes_to_the_instance_itself_or_nowhere() {
        let own = "10.0.0.1:8080".parse().unwrap();
        let transport = |text: &str| {
            parse(text)
                .unwrap()
                .transport(own)
                .map(|a| a.map(|a| a.to_string()))
                .map_err(|e| e.to_string())
        };
        let to = |address: &str| Ok(Some(address.to_owned()));
        assert_eq!(transport("{}"), Ok(None));
        assert_eq!(transport(r#"{"Transport":{"nats":"subject.7"}}"#), Ok(None));
        assert_eq!(
            transport(r#"{"Transport":{"port":9000}}"#),
            to("10.0.0.1:9000")
        );
        assert_eq!(
            transport(r#"{"transport":{"address":"10.0.0.1:9000"}}"#),
            to("10.0.0.1:9000")
        );
        assert_eq!(
            transport(r#"{"transport":{"url":"http://0.0.0.0:9000/"}}"#),
            to("10.0.0.1:9000")
        );
        for (text, expected) in [
            (
                r#"{"transport":{"address":"10.0.0.2:9000"}}"#,
                "another host",
            ),
            (r#"{"transport":{"address":"10.0.0.1:0"}}"#, "port 0"),
            (r#"{"transport":{"address":"gpu-7:9000"}}"#, "not IP:PORT"),
            (r#"{"transport":{"port":0}}"#, "not in 1 to 65535"),
            (r#"{"transport":{"port":70000}}"#, "not in 1 to 65535"),
        ] {
            assert!(transport(text).unwrap_err().contains(expected), "{text}");
        }
    }
}
