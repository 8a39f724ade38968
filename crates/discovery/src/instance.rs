//! An instance, and the rules that hold for every backend.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::metadata::Metadata;

/// A model server as discovery reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The instance id, unique in its namespace. In Kubernetes it is the name of the pod.
    pub name: String,
    /// The namespace in which the name is unique; [`NAMESPACE_DEFAULT`] when the source has none.
    pub namespace: String,
    /// The generation: which process has this name (in Kubernetes the pod's UID). State that was
    /// learned about another generation does not apply to this generation. The text is empty if the
    /// source has no generation.
    pub generation: String,
    /// The address for requests. The address is always an IP address, because Envoy gets it
    /// unchanged and resolves no names.
    pub address: SocketAddr,
    /// The labels, sorted by key.
    pub labels: Vec<(String, String)>,
    /// The location of the instance's metrics, if it differs from the settings of the pool.
    pub metrics: InstanceMetricsLocation,
    /// The metadata of the instance, if it has any; [`Self::metadata`] reads it.
    pub metadata: Option<Arc<Metadata>>,
    /// The reason why the instance is unconfirmed: the registry reports it as not ready, but the
    /// instance itself does not. An unconfirmed instance may get traffic only while it answers.
    /// `None` means that the instance is ready.
    pub unconfirmed: Option<Arc<str>>,
}

/// The location of an instance's metrics; `None` uses the setting of the pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InstanceMetricsLocation {
    /// The scheme: TLS or plaintext.
    pub scheme: Option<MetricsScheme>,
    /// The port. If neither the instance nor the pool sets one, it is the port of the address.
    pub port: Option<u16>,
    /// The path, with its leading slash.
    pub path: Option<String>,
}

/// The scheme by which metrics are fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsScheme {
    /// Metrics are fetched in plaintext.
    Http,
    /// Metrics are fetched by TLS.
    Https,
}

/// Whether instances may have addresses of this machine (loopback) or of its link (link-local).
///
/// A proxy connects to such an address on its own machine. So a client that may write a local
/// address into a registry could direct prompts to any port of the gateway's pod, or to the
/// metadata service of a cloud.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LocalAddresses {
    /// Instances with local addresses are refused.
    #[default]
    Refused,
    /// Instances with local addresses are accepted, because everything runs on one machine.
    Allowed,
}

/// The namespace of instances whose source names none.
pub const NAMESPACE_DEFAULT: &str = "default";

/// The maximum number of instances of one source. A pool has as many slots.
pub const INSTANCES_MAX: usize = 1024;

/// The maximum number of records of one component that a backend keeps. Records beyond
/// [`INSTANCES_MAX`] are not published until a published record disappears. So all instances can be
/// replaced at the same time.
pub const RECORDS_MAX: usize = 2 * INSTANCES_MAX;

/// The maximum number of bytes of labels of one instance, keys and values together, so that a full
/// pool fits into one message to a proxy.
pub const LABEL_BYTES_MAX: usize = 2048;

/// The maximum number of labels of one instance, so that a full pool fits into one message.
pub const LABELS_MAX: usize = 64;

/// The longest name or namespace, in bytes. DNS names, and so pods, have this limit.
pub const NAME_BYTES_MAX: usize = 253;

// === impl LocalAddresses ===

impl LocalAddresses {
    /// Checks the address of an instance.
    ///
    /// # Errors
    /// Fails if the address is loopback or link-local, and such addresses are refused.
    pub fn check(self, address: SocketAddr) -> Result<(), String> {
        let ip = address.ip().to_canonical();
        let is_link_local = match ip {
            IpAddr::V4(ip) => ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        };
        if self == Self::Refused && (ip.is_loopback() || is_link_local) {
            return Err(format!(
                "{ip} is an address of the machine itself or of its link, which only --local-endpoints allows"
            ));
        }
        Ok(())
    }
}

// === impl Instance ===

impl Instance {
    /// Creates an instance with only a name and an address.
    #[must_use]
    pub fn new(name: impl Into<String>, address: SocketAddr) -> Self {
        Self {
            name: name.into(),
            namespace: NAMESPACE_DEFAULT.to_owned(),
            generation: String::new(),
            address,
            labels: Vec::new(),
            metrics: InstanceMetricsLocation::default(),
            metadata: None,
            unconfirmed: None,
        }
    }

    /// Returns the instance with this metadata.
    #[must_use]
    pub fn with_metadata(self, metadata: Option<Arc<Metadata>>) -> Self {
        Self { metadata, ..self }
    }

    /// Returns the metadata of the instance. The metadata is empty if the instance has none, as for
    /// plain vLLM. The metadata came with the instance, so reading it cannot fail. A change of the
    /// metadata causes another `Added` event with the new value.
    pub fn metadata(&self) -> &Metadata {
        self.metadata.as_deref().unwrap_or(Metadata::empty())
    }
}

/// Checks the rules that hold for every backend: number, sizes, and unique names and addresses.
///
/// # Errors
/// Fails if there are too many instances or if an instance breaks a rule. The error names this
/// instance.
pub fn validate(instances: &[Instance]) -> Result<(), String> {
    if instances.len() > INSTANCES_MAX {
        return Err(format!(
            "{} endpoints; at most {INSTANCES_MAX} are allowed",
            instances.len()
        ));
    }
    validate_all(instances)
}

/// Checks the rules of [`validate`] except for the number.
pub(crate) fn validate_all(instances: &[Instance]) -> Result<(), String> {
    for instance in instances {
        validate_instance(instance)?;
    }
    let mut by_name: Vec<&Instance> = instances.iter().collect();
    by_name.sort_by_key(|i| (&i.namespace, &i.name));
    for pair in by_name.windows(2) {
        if let [a, b] = pair
            && (&a.namespace, &a.name) == (&b.namespace, &b.name)
        {
            return Err(format!(
                "two endpoints are named {:?} in namespace {:?}: {} and {}",
                a.name, a.namespace, a.address, b.address
            ));
        }
    }
    let mut by_address: Vec<&Instance> = instances.iter().collect();
    by_address.sort_by_key(|i| i.address);
    for pair in by_address.windows(2) {
        if let [a, b] = pair
            && a.address == b.address
        {
            return Err(format!(
                "two endpoints have the address {}: {:?} and {:?}",
                a.address, a.name, b.name
            ));
        }
    }
    Ok(())
}

/// Checks one instance against the rules.
///
/// # Errors
/// Fails if the instance breaks a rule, and names the rule.
pub fn validate_instance(instance: &Instance) -> Result<(), String> {
    let Instance {
        name,
        namespace,
        generation,
        address,
        labels,
        metrics,
        metadata: _,
        unconfirmed: _,
    } = instance;
    for (what, text) in [("name", name), ("namespace", namespace)] {
        if text.is_empty()
            || text.len() > NAME_BYTES_MAX
            || text.chars().any(|c| c.is_control() || c.is_whitespace())
        {
            return Err(format!(
                "{what} {text:?} of the endpoint at {address}: 1 to {NAME_BYTES_MAX} bytes without blanks are allowed"
            ));
        }
    }
    if generation.len() > NAME_BYTES_MAX {
        return Err(format!(
            "endpoint {name:?}: generation of {} bytes; at most {NAME_BYTES_MAX} are allowed",
            generation.len()
        ));
    }
    if address.port() == 0 {
        return Err(format!("endpoint {name:?}: port 0 cannot be connected to"));
    }
    // A connection to an IPv6 address that contains an IPv4 address goes to the IPv4 address.
    let ip = address.ip().to_canonical();
    if ip.is_unspecified() || ip.is_multicast() {
        return Err(format!(
            "endpoint {name:?}: {ip} is not the address of a server"
        ));
    }
    if labels.len() > LABELS_MAX {
        return Err(format!(
            "endpoint {name:?}: {} labels; at most {LABELS_MAX} are allowed",
            labels.len()
        ));
    }
    let bytes: usize = labels.iter().map(|(k, v)| k.len() + v.len()).sum();
    if bytes > LABEL_BYTES_MAX {
        return Err(format!(
            "endpoint {name:?}: {bytes} bytes of labels; at most {LABEL_BYTES_MAX} are allowed"
        ));
    }
    if metrics.path.as_ref().is_some_and(|p| !p.starts_with('/')) {
        return Err(format!(
            "endpoint {name:?}: metrics path must begin with '/'"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_the_machine_and_of_its_link_need_to_be_allowed() {
        for local in [
            "127.0.0.1:1",
            "127.9.9.9:1",
            "169.254.169.254:80",
            "[::1]:1",
            "[fe80::1]:1",
            "[febf::1]:1",
            "[::ffff:127.0.0.1]:1",
            "[::ffff:169.254.169.254]:1",
        ] {
            let address = local.parse().unwrap();
            let refused = LocalAddresses::Refused.check(address).unwrap_err();
            assert!(refused.contains("--local-endpoints"), "{local}: {refused}");
            assert_eq!(LocalAddresses::Allowed.check(address), Ok(()), "{local}");
        }
        for remote in ["10.0.0.1:1", "168.254.0.1:1", "[fec0::1]:1", "[fd00::1]:1"] {
            let address = remote.parse().unwrap();
            assert_eq!(LocalAddresses::Refused.check(address), Ok(()), "{remote}");
        }
    }

    #[test]
    fn an_address_that_is_none_is_refused_in_each_form() {
        for none in [
            "0.0.0.0:1",
            "[::]:1",
            "[::ffff:0.0.0.0]:1",
            "224.0.0.1:1",
            "[::ffff:224.0.0.1]:1",
        ] {
            let instance = Instance::new("a", none.parse().unwrap());
            assert!(validate_instance(&instance).is_err(), "{none}");
        }
    }
}
