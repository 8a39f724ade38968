//! An endpoints file, in the format of llm-d's `file-discovery`:
//!
//! ```yaml
//! endpoints:
//! - {name: gpu-0, address: "10.0.0.1", port: "8000", labels: {llm-d.ai/engine-type: vllm}}
//! - name: gpu-1
//!   namespace: prod
//!   address: "fd00::2"
//!   port: 8000
//!   metrics: {port: 9400, path: /metrics}
//! ```
//!
//! Beyond llm-d's format, a port may be a number, an address may be IPv6, and `metrics` may set the
//! location of one endpoint's metrics. Unknown keys are refused, because a misspelt key would
//! otherwise be ignored silently.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use futures::stream::StreamExt;
use serde::Deserialize;
use serde::de::{Deserializer, Error, Visitor};

use crate::file_watcher::FileWatcher;
use crate::instance::validate_all;
use crate::{
    INSTANCES_MAX, Instance, InstanceMetricsLocation, LocalAddresses, MetricsScheme,
    NAMESPACE_DEFAULT, SetChange, SetChanges,
};

/// Follows the endpoints file at `path`, which need not exist yet. An invalid endpoint makes the
/// file invalid. The stream leaves out endpoints beyond [`INSTANCES_MAX`], and also reports them as
/// an error.
#[must_use]
pub fn follow(path: impl Into<PathBuf>, local: LocalAddresses) -> SetChanges {
    futures::stream::unfold(FileWatcher::new(path), move |mut file| async move {
        let read = match file.changed().await {
            Ok(text) => parse(&text)
                .and_then(|instances| allowed(instances, local))
                .map_err(|why| format!("{}: {why}", file.path().display())),
            Err(unreadable) => Err(unreadable.to_string()),
        };
        let changes = match read {
            Ok(instances) => limited(instances),
            Err(why) => vec![SetChange::Unreadable(why)],
        };
        Some((futures::stream::iter(changes), file))
    })
    .flatten()
    .boxed()
}

fn allowed(instances: Vec<Instance>, local: LocalAddresses) -> Result<Vec<Instance>, String> {
    for Instance { name, address, .. } in &instances {
        local
            .check(*address)
            .map_err(|why| format!("endpoint {name:?}: {why}"))?;
    }
    Ok(instances)
}

/// Returns the first [`INSTANCES_MAX`] endpoints of the file. If the file has more, also returns an
/// error that names the first endpoint that is left out.
fn limited(mut instances: Vec<Instance>) -> Vec<SetChange> {
    let beyond = instances.split_off(instances.len().min(INSTANCES_MAX));
    let mut changes = vec![SetChange::Reset(instances)];
    if let Some(first) = beyond.first() {
        changes.push(SetChange::Unreadable(format!(
            "{} endpoints; at most {INSTANCES_MAX} are allowed, so {} are left out, from {:?} on",
            INSTANCES_MAX + beyond.len(),
            beyond.len(),
            first.name
        )));
    }
    changes
}

/// Reads the text of an endpoints file, which may have more than [`INSTANCES_MAX`].
///
/// # Errors
/// Fails if the text is not an endpoints file or an entry is invalid, and names the entry.
pub fn parse(text: &str) -> Result<Vec<Instance>, String> {
    let file: EndpointsFile =
        serde_saphyr::from_str(text).map_err(|e| e.without_snippet().to_string())?;
    let instances = file
        .endpoints
        .into_iter()
        .map(instance)
        .collect::<Result<Vec<_>, _>>()?;
    validate_all(&instances)?;
    Ok(instances)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EndpointsFile {
    endpoints: Vec<EndpointEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EndpointEntry {
    name: String,
    namespace: Option<String>,
    address: String,
    port: PortNumber,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    metrics: MetricsEntry,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct MetricsEntry {
    scheme: Option<String>,
    port: Option<PortNumber>,
    path: Option<String>,
}

/// A port as a number or a string, because llm-d writes strings and most users write numbers.
#[derive(Clone, Copy)]
struct PortNumber(u16);

fn instance(row: EndpointEntry) -> Result<Instance, String> {
    let EndpointEntry {
        name,
        namespace,
        address,
        port,
        labels,
        metrics,
    } = row;
    let bare = address
        .strip_prefix('[')
        .and_then(|a| a.strip_suffix(']'))
        .unwrap_or(&address);
    let ip: IpAddr = bare.parse().map_err(|_| {
        format!(
            "endpoint {name:?}: address {address:?} is not an IP address (names are not resolved)"
        )
    })?;
    let scheme = match metrics.scheme.as_deref() {
        None => None,
        Some("http") => Some(MetricsScheme::Http),
        Some("https") => Some(MetricsScheme::Https),
        Some(other) => {
            return Err(format!(
                "endpoint {name:?}: metrics scheme {other:?} is neither \"http\" nor \"https\""
            ));
        }
    };
    let metrics = InstanceMetricsLocation {
        scheme,
        port: metrics.port.map(|p| p.0),
        path: metrics.path,
    };
    let namespace = namespace.unwrap_or_else(|| NAMESPACE_DEFAULT.to_owned());
    Ok(Instance {
        namespace,
        labels: labels.into_iter().collect(),
        metrics,
        ..Instance::new(name, SocketAddr::new(ip, port.0))
    })
}

// === impl PortNumber ===

impl<'de> Deserialize<'de> for PortNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PortVisitor;

        impl Visitor<'_> for PortVisitor {
            type Value = PortNumber;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a port, 1 to 65535, as number or string")
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<PortNumber, E> {
                u16::try_from(value)
                    .ok()
                    .filter(|&p| p > 0)
                    .map(PortNumber)
                    .ok_or_else(|| E::custom(format!("port {value} is not in 1 to 65535")))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<PortNumber, E> {
                self.visit_u64(u64::try_from(value).unwrap_or(0))
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<PortNumber, E> {
                value
                    .parse()
                    .map_err(|_| E::custom(format!("port {value:?} is not a number")))
                    .and_then(|n| self.visit_u64(n))
            }
        }

        deserializer.deserialize_any(PortVisitor)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_format_of_the_reference_and_ours() {
        let text = r#"
endpoints:
- {name: sim-0, address: "127.0.0.1", port: "8001"}
- {name: sim-1, namespace: prod, address: "fd00::2", port: 8002, labels: {b: "2", a: x}}
- {name: sim-2, address: "[fd00::3]", port: 8003, metrics: {scheme: https, port: "9400", path: /m}}
"#;
        let [a, b, c] = parse(text).unwrap().try_into().unwrap();
        assert_eq!(
            (
                a.name.as_str(),
                a.namespace.as_str(),
                a.address.to_string().as_str()
            ),
            ("sim-0", "default", "127.0.0.1:8001")
        );
        assert_eq!(
            (b.namespace.as_str(), b.address.to_string().as_str()),
            ("prod", "[fd00::2]:8002")
        );
        assert_eq!(
            b.labels,
            [
                ("a".to_owned(), "x".to_owned()),
                ("b".to_owned(), "2".to_owned())
            ]
        );
        let metrics = InstanceMetricsLocation {
            scheme: Some(MetricsScheme::Https),
            port: Some(9400),
            path: Some("/m".to_owned()),
        };
        assert_eq!(
            (c.address.to_string().as_str(), c.metrics),
            ("[fd00::3]:8003", metrics)
        );
        assert_eq!(parse("endpoints: []").unwrap(), []);
    }

    #[test]
    fn mistakes_are_named() {
        let row = |rest: &str| {
            format!("endpoints:\n- {{name: a, address: 10.0.0.1, port: 1}}\n- {rest}\n")
        };
        for (text, expected) in [
            (
                row("{name: b, address: gpu-1, port: 1}"),
                "not an IP address",
            ),
            (
                row("{name: b, address: 10.0.0.2, port: 0}"),
                "not in 1 to 65535",
            ),
            (row("{name: b, address: 10.0.0.2, port: 65536}"), "line 3"),
            (
                row("{name: b, address: 10.0.0.2, port: http}"),
                "not a number",
            ),
            (row("{name: b, address: 10.0.0.2}"), "port"),
            (
                row("{name: b, address: 0.0.0.0, port: 1}"),
                "not the address of a server",
            ),
            (row("{name: '', address: 10.0.0.2, port: 1}"), "name"),
            (
                row("{name: a, address: 10.0.0.2, port: 1}"),
                "10.0.0.1:1 and 10.0.0.2:1",
            ),
            (
                row("{name: b, address: 10.0.0.1, port: 1}"),
                "\"a\" and \"b\"",
            ),
            (
                row("{name: b, address: 10.0.0.2, port: 1, weight: 3}"),
                "weight",
            ),
            (
                row("{name: b, address: 10.0.0.2, port: 1, metrics: {scheme: ftp}}"),
                "ftp",
            ),
            (
                row("{name: b, address: 10.0.0.2, port: 1, metrics: {path: m}}"),
                "'/'",
            ),
            ("endpoint: []".to_owned(), "endpoint"),
            (String::new(), ""),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    async fn followed(text: &str, local: LocalAddresses) -> Vec<SetChange> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("endpoints.yaml");
        std::fs::write(&path, text).unwrap();
        let ready = async |changes: &mut SetChanges| {
            tokio::time::timeout(std::time::Duration::from_secs(1), changes.next()).await
        };
        let mut changes = follow(path, local);
        let mut all = Vec::new();
        while let Ok(Some(change)) = ready(&mut changes).await {
            all.push(change);
        }
        all
    }

    #[tokio::test(start_paused = true)]
    async fn one_endpoint_too_many_costs_that_endpoint() {
        let many: String = (0..1025)
            .map(|i| format!("- {{name: e{i}, address: 10.0.0.1, port: {}}}\n", i + 1))
            .collect();
        let changes = followed(&format!("endpoints:\n{many}"), LocalAddresses::Refused).await;
        let [SetChange::Reset(first), SetChange::Unreadable(why)] = &*changes else {
            panic!("{changes:?}")
        };
        assert_eq!((first.len(), &*first[0].name), (1024, "e0"));
        assert!(why.contains("1 are left out, from \"e1024\" on"), "{why}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_local_address_needs_to_be_allowed() {
        let text = "endpoints: [{name: a, address: 127.0.0.1, port: 1}]";
        let refused = followed(text, LocalAddresses::Refused).await;
        assert!(
            matches!(&*refused, [SetChange::Unreadable(why)] if why.contains("--local-endpoints")),
            "{refused:?}"
        );
        let allowed = followed(text, LocalAddresses::Allowed).await;
        assert!(matches!(&*allowed, [SetChange::Reset(set)] if set.len() == 1));
    }

    proptest! {
        #[test]
        fn whatever_is_read_keeps_the_rules(text in "endpoints:\n(- \\{name: [a-c]{0,2}, address: [0-9a-f:.]{1,9}, port: ['0-9]{1,6}\\}\n){0,4}") {
            if let Ok(instances) = parse(&text) {
                prop_assert_eq!(validate_all(&instances), Ok(()));
            }
        }
    }
}
