//! Who is there: discovery of model servers.
//!
//! Every backend is reduced to one stream of [`Change`]s, first of all a [`Change::Reset`]: the consumer replaces its whole set by it, so
//! a backend may resynchronise at any moment by sending another. An error never empties a set: a backend that cannot read its source
//! says so with [`Change::Unreadable`] and what was last read stays in force.
//!
//! Backends: [`file`] (an endpoints file, read again when its content changes) and [`fixed`] (a list given once).
#![forbid(unsafe_code)]

use std::net::SocketAddr;

use futures::stream::{BoxStream, StreamExt};

pub mod content;
pub mod file;

/// A model server, as discovery knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Its name, unique in its namespace.
    pub name: String,
    /// The namespace of the name; [`NAMESPACE_DEFAULT`] when the source has none.
    pub namespace: String,
    /// Where requests go. Always an IP address: Envoy is handed these very bytes and resolves nothing.
    pub address: SocketAddr,
    /// Labels, sorted by key.
    pub labels: Vec<(String, String)>,
    /// Where its metrics are, as far as they are not where the pool says.
    pub metrics: MetricsLocation,
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

/// What a backend tells. The first of a stream that is not [`Change::Unreadable`] is a [`Change::Reset`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The whole set; replaces all that was told before.
    Reset(Vec<Instance>),
    /// The source cannot be read or breaks a rule, for this reason. What was last told stays in force.
    Unreadable(String),
}

/// A stream of changes that ends only with its backend.
pub type Changes = BoxStream<'static, Change>;

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

/// A set that never changes.
#[must_use]
pub fn fixed(instances: Vec<Instance>) -> Changes {
    futures::stream::iter([Change::Reset(instances)]).chain(futures::stream::pending()).boxed()
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

fn validate_instance(instance: &Instance) -> Result<(), String> {
    let Instance { name, namespace, address, labels, metrics } = instance;
    for (what, text) in [("name", name), ("namespace", namespace)] {
        if text.is_empty() || text.len() > NAME_BYTES_MAX || text.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(format!("{what} {text:?} of the endpoint at {address}: 1 to {NAME_BYTES_MAX} bytes without blanks are allowed"));
        }
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
