//! What an instance is, and the rules every backend holds one to.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::metadata::Metadata;

/// A model server, as discovery knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Its name, unique in its namespace: the instance id. In Kubernetes that of the pod.
    pub name: String,
    /// The namespace of the name; [`NAMESPACE_DEFAULT`] when the source has none.
    pub namespace: String,
    /// Which life of that name this is (in Kubernetes the pod's UID): state learned of another life says nothing about this one. Empty
    /// when the source cannot tell.
    pub incarnation: String,
    /// Where requests go. Always an IP address: Envoy is handed these very bytes and resolves nothing.
    pub address: SocketAddr,
    /// Labels, sorted by key.
    pub labels: Vec<(String, String)>,
    /// Where its metrics are, as far as they are not where the pool says.
    pub metrics: MetricsLocation,
    /// What it says of itself, if anything; [`Self::metadata`] reads it.
    pub metadata: Option<Arc<Metadata>>,
}

/// What an instance says of where its metrics are; `None` is "as the pool says".
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetricsLocation {
    /// By TLS or in clear.
    pub scheme: Option<Scheme>,
    /// Port; that of the address when neither instance nor pool says.
    pub port: Option<u16>,
    /// Path, with its leading slash.
    pub path: Option<String>,
}

/// How metrics are fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// In clear.
    Http,
    /// By TLS.
    Https,
}

/// The namespace of instances whose source names none.
pub const NAMESPACE_DEFAULT: &str = "default";

/// The most instances one source may list: the slots of a pool.
pub const INSTANCES_MAX: usize = 1024;

/// The most bytes of labels one instance may carry, keys and values together: so that a full pool fits one message to a proxy.
pub const LABEL_BYTES_MAX: usize = 2048;

/// The most labels one instance may carry, for the same reason.
pub const LABELS_MAX: usize = 64;

/// The longest name or namespace, in bytes: that of a DNS name, hence of a pod.
pub const NAME_BYTES_MAX: usize = 253;

// === impl Instance ===

impl Instance {
    /// An instance of which no more is known than where it is.
    #[must_use]
    pub fn new(name: impl Into<String>, address: SocketAddr) -> Self {
        Self {
            name: name.into(),
            namespace: NAMESPACE_DEFAULT.to_owned(),
            incarnation: String::new(),
            address,
            labels: Vec::new(),
            metrics: MetricsLocation::default(),
            metadata: None,
        }
    }

    /// The same with this metadata.
    #[must_use]
    pub fn with_metadata(self, metadata: Option<Arc<Metadata>>) -> Self {
        Self { metadata, ..self }
    }

    /// What the instance says of itself; empty when it says nothing (a plain vLLM, say). It came with the instance, so asking costs
    /// nothing and cannot fail; when it changes, another `Added` tells the new value.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        self.metadata.as_deref().unwrap_or(Metadata::empty())
    }
}

/// Holds a set to the rules every backend keeps: sizes, and no two instances with one name or one address.
///
/// # Errors
/// Says what is wrong, naming the instances concerned. Whoever wrote the source is at fault.
pub fn validate(instances: &[Instance]) -> Result<(), String> {
    if instances.len() > INSTANCES_MAX {
        return Err(format!("{} endpoints; at most {INSTANCES_MAX} are allowed", instances.len()));
    }
    for instance in instances {
        validate_instance(instance)?;
    }
    let mut by_name: Vec<&Instance> = instances.iter().collect();
    by_name.sort_by_key(|i| (&i.namespace, &i.name));
    for pair in by_name.windows(2) {
        if let [a, b] = pair
            && (&a.namespace, &a.name) == (&b.namespace, &b.name)
        {
            return Err(format!("two endpoints are named {:?} in namespace {:?}: {} and {}", a.name, a.namespace, a.address, b.address));
        }
    }
    let mut by_address: Vec<&Instance> = instances.iter().collect();
    by_address.sort_by_key(|i| i.address);
    for pair in by_address.windows(2) {
        if let [a, b] = pair
            && a.address == b.address
        {
            return Err(format!("two endpoints have the address {}: {:?} and {:?}", a.address, a.name, b.name));
        }
    }
    Ok(())
}

/// Holds one instance to the rules.
///
/// # Errors
/// Says what is wrong with it.
pub fn validate_instance(instance: &Instance) -> Result<(), String> {
    let Instance { name, namespace, incarnation, address, labels, metrics, metadata: _ } = instance;
    for (what, text) in [("name", name), ("namespace", namespace)] {
        if text.is_empty() || text.len() > NAME_BYTES_MAX || text.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(format!("{what} {text:?} of the endpoint at {address}: 1 to {NAME_BYTES_MAX} bytes without blanks are allowed"));
        }
    }
    if incarnation.len() > NAME_BYTES_MAX {
        return Err(format!("endpoint {name:?}: incarnation of {} bytes; at most {NAME_BYTES_MAX} are allowed", incarnation.len()));
    }
    if address.port() == 0 {
        return Err(format!("endpoint {name:?}: port 0 cannot be connected to"));
    }
    if address.ip().is_unspecified() || address.ip().is_multicast() {
        return Err(format!("endpoint {name:?}: {} is not the address of a server", address.ip()));
    }
    if labels.len() > LABELS_MAX {
        return Err(format!("endpoint {name:?}: {} labels; at most {LABELS_MAX} are allowed", labels.len()));
    }
    let bytes: usize = labels.iter().map(|(k, v)| k.len() + v.len()).sum();
    if bytes > LABEL_BYTES_MAX {
        return Err(format!("endpoint {name:?}: {bytes} bytes of labels; at most {LABEL_BYTES_MAX} are allowed"));
    }
    if metrics.path.as_ref().is_some_and(|p| !p.starts_with('/')) {
        return Err(format!("endpoint {name:?}: metrics path must begin with '/'"));
    }
    Ok(())
}
