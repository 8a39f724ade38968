//! Tests the shipped manifests for gateways without gateways. A real Envoy runs the configuration
//! that a gateway would make of a manifest. As in a gateway, Envoy starts with its bootstrap and
//! discovers the rest, because Envoy treats discovered clusters differently from static ones.
//!
//! The Envoy fragments of a manifest are used unchanged, except for a list of [`Substitution`]s.
//! Substitutions replace what a test machine does not have, such as the name of a Service. A
//! substitution is made only where the manifest has exactly the listed value.
//! [`PlacedFragment::check`] undoes the substitutions in Envoy's configuration and compares it with
//! the manifest, so nothing else can have changed.

pub mod envoy_gateway;
pub mod istio;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use testbed::{Result, root};

/// The host name of the daemon's Service in the manifests.
pub const DAEMON: &str = "switchpointd.switchpoint.svc.cluster.local";

/// The JSON pointer to the daemon's address in the daemon's cluster.
const DAEMON_AT: &str =
    "/load_assignment/endpoints/0/lb_endpoints/0/endpoint/address/socket_address";

/// The JSON pointers to a proxy's certificate, its key and the certificate authority in the
/// daemon's cluster, with the file names in the manifests and in a test's folder.
const CERTIFICATES: [(&str, &str, &str); 3] = [
    (
        "/transport_socket/typed_config/common_tls_context/tls_certificates/0/certificate_chain/filename",
        "tls.crt",
        "proxy.pem",
    ),
    (
        "/transport_socket/typed_config/common_tls_context/tls_certificates/0/private_key/filename",
        "tls.key",
        "proxy.key",
    ),
    (
        "/transport_socket/typed_config/common_tls_context/validation_context/trusted_ca/filename",
        "ca.crt",
        "ca.pem",
    ),
];

/// The path where the manifests mount the Secret with the certificates and the key.
pub const MOUNTED: &str = "/etc/switchpoint-tls";

/// The lists of [`AssembledConfig::config`] that a control plane delivers, and the types of their
/// resources.
const DELIVERED: [(&str, &str); 3] = [
    ("clusters", "envoy.config.cluster.v3.Cluster"),
    ("listeners", "envoy.config.listener.v3.Listener"),
    ("routes", "envoy.config.route.v3.RouteConfiguration"),
];

/// The JSON pointer to the clusters that Envoy starts with.
const OWN_CLUSTERS: &str = "/bootstrap/static_resources/clusters";

/// The wasm module that `make wasm` builds, relative to Envoy's working directory.
const MODULE: &str = "target/wasm32-wasip1/release/switchpoint.wasm";

/// The ports and files of a test, which replace those in the manifests.
#[derive(Clone, Debug)]
pub struct LocalPorts {
    pub listener: u16,
    pub admin: u16,
    /// The daemon's port for the state stream.
    pub state: u16,
    /// A folder that [`testbed::certificates::Authority::folder`] made for [`DAEMON`]. The tests
    /// also write files that Envoy discovers into this folder.
    pub folder: PathBuf,
}

/// A value of a manifest's fragment that a test replaces.
#[derive(Clone, Debug)]
pub struct Substitution {
    /// The JSON pointer to the value in the fragment.
    pub at: &'static str,
    /// The value in the manifest.
    pub meant: Value,
    /// The value in the test.
    pub here: Value,
}

/// A fragment of a manifest, and its position in Envoy's configuration.
#[derive(Clone, Debug)]
pub struct PlacedFragment {
    /// The fragment in the manifest.
    pub meant: Value,
    /// The substitutions made in the fragment.
    pub substituted: Vec<Substitution>,
    /// The position of the fragment in the configuration.
    pub at: FragmentPlace,
}

#[derive(Clone, Debug)]
pub enum FragmentPlace {
    /// The item with this name in the list at this JSON pointer.
    Named(&'static str, String),
    /// The fragment is merged into the object at this JSON pointer.
    In(String),
    /// The only resource of a file that Envoy discovers.
    File(PathBuf),
}

/// Envoy's configuration, assembled from a manifest.
#[derive(Clone, Debug)]
pub struct AssembledConfig {
    /// An object with `bootstrap`, with which Envoy starts, and the lists `clusters`, `listeners`
    /// and `routes`, which Envoy discovers.
    pub config: Value,
    /// The fragments of the manifest, with their positions.
    pub placed: Vec<PlacedFragment>,
}

/// Reads all objects of a manifest in `envoy-config/`.
///
/// # Errors
/// Fails if the file is missing or is not YAML.
pub fn read(file: &str) -> Result<Vec<Value>> {
    let text = std::fs::read_to_string(root().join("envoy-config").join(file))?;
    Ok(serde_saphyr::from_multiple(&text).map_err(|error| format!("{file}: {error}"))?)
}

/// Returns the only object of a kind.
///
/// # Errors
/// Fails if no object has this kind, or more than one object.
pub fn only<'o>(objects: &'o [Value], kind: &str) -> Result<&'o Value> {
    let mut found = objects.iter().filter(|object| object["kind"] == kind);
    match (found.next(), found.next()) {
        (Some(object), None) => Ok(object),
        (found, _) => Err(format!(
            "{} {kind}",
            if found.is_some() {
                "more than one"
            } else {
                "no"
            }
        )
        .into()),
    }
}

/// Returns the ports of the test's Envoy, and the folder of the test. `shipped` is the shipped file
/// as the test adapted it.
///
/// # Errors
/// Fails if `shipped` lacks a port of the shipped file.
pub fn local(shipped: &Value, folder: &Path) -> Result<LocalPorts> {
    let port = |pointer: &str| -> Result<u16> {
        let port = shipped
            .pointer(pointer)
            .and_then(Value::as_u64)
            .ok_or_else(|| format!("no port at {pointer}"))?;
        Ok(u16::try_from(port)?)
    };
    Ok(LocalPorts {
        listener: port("/static_resources/listeners/0/address/socket_address/port_value")?,
        admin: port("/admin/address/socket_address/port_value")?,
        state: port(&format!(
            "/static_resources/clusters/1{DAEMON_AT}/port_value"
        ))?,
        folder: folder.to_owned(),
    })
}

// === impl Substitution ===

impl Substitution {
    /// Replaces the daemon's address by one on this machine.
    fn daemon(state: u16) -> Self {
        let address = |address: &str, port: u16| json!({"address": address, "port_value": port});
        Self {
            at: DAEMON_AT,
            meant: address(DAEMON, 9004),
            here: address("127.0.0.1", state),
        }
    }

    /// Replaces the daemon's address and the certificates by those on this machine.
    fn state_cluster(local: &LocalPorts) -> Vec<Self> {
        let file = |(at, meant, here): (&'static str, &str, &str)| Self {
            at,
            meant: json!(format!("{MOUNTED}/{meant}")),
            here: json!(local.folder.join(here)),
        };
        [Self::daemon(local.state)]
            .into_iter()
            .chain(CERTIFICATES.map(file))
            .collect()
    }

    /// Replaces the module by a local file.
    fn module(at: &'static str, meant: Value) -> Self {
        Self {
            at,
            meant,
            here: json!({"local": {"filename": MODULE}}),
        }
    }

    /// Replaces discovery from the control plane by discovery from a file.
    fn discovered(at: &'static str, meant: Value, file: &Path) -> Self {
        let mut here = meant.clone();
        if let Some(fields) = here.as_object_mut() {
            fields.remove("ads");
            fields.insert("path_config_source".to_owned(), json!({"path": file}));
        }
        Self { at, meant, here }
    }

    fn make(&self, fragment: &mut Value) -> Result<()> {
        exchange(fragment, self.at, &self.meant, &self.here)
    }

    fn undo(&self, fragment: &mut Value) -> Result<()> {
        exchange(fragment, self.at, &self.here, &self.meant)
    }
}

fn exchange(fragment: &mut Value, at: &str, from: &Value, to: &Value) -> Result<()> {
    let found = fragment
        .pointer_mut(at)
        .ok_or_else(|| format!("nothing at {at}"))?;
    if found != from {
        return Err(format!("at {at} is {found} instead of {from}").into());
    }
    *found = to.clone();
    Ok(())
}

// === impl PlacedFragment ===

impl PlacedFragment {
    /// Puts `meant` into the list at `list`, before the item named `before`, or at the end if
    /// `before` is `None`.
    fn insert(
        made: &mut AssembledConfig,
        list: &'static str,
        before: Option<&str>,
        meant: &Value,
        substituted: Vec<Substitution>,
    ) -> Result<()> {
        let mut fragment = meant.clone();
        substituted.iter().try_for_each(|s| s.make(&mut fragment))?;
        let items = made
            .config
            .pointer_mut(list)
            .and_then(Value::as_array_mut)
            .ok_or_else(|| format!("no list at {list}"))?;
        let at = match before {
            Some(name) => items
                .iter()
                .position(|item| item["name"] == name)
                .ok_or_else(|| format!("no {name} at {list}"))?,
            None => items.len(),
        };
        let name = meant["name"]
            .as_str()
            .ok_or("a fragment without a name")?
            .to_owned();
        items.insert(at, fragment);
        made.placed.push(Self {
            meant: meant.clone(),
            substituted,
            at: FragmentPlace::Named(list, name),
        });
        Ok(())
    }

    /// Writes `meant` to the file from which Envoy discovers it.
    fn discover(
        made: &mut AssembledConfig,
        file: PathBuf,
        meant: &Value,
        substituted: Vec<Substitution>,
    ) -> Result<()> {
        let mut resource = meant.clone();
        substituted.iter().try_for_each(|s| s.make(&mut resource))?;
        write(
            &file,
            "envoy.config.core.v3.TypedExtensionConfig",
            vec![resource],
        )?;
        made.placed.push(Self {
            meant: meant.clone(),
            substituted,
            at: FragmentPlace::File(file),
        });
        Ok(())
    }

    /// Merges `meant` into the object at `at`, as protobuf does. Messages are merged field by
    /// field, and lists are appended.
    fn merge(made: &mut AssembledConfig, at: String, meant: &Value) -> Result<()> {
        let into = made
            .config
            .pointer_mut(&at)
            .ok_or_else(|| format!("nothing at {at}"))?;
        merge(into, meant);
        made.placed.push(Self {
            meant: meant.clone(),
            substituted: Vec::new(),
            at: FragmentPlace::In(at),
        });
        Ok(())
    }

    /// Checks that Envoy's configuration has what the manifest says, except for the substitutions.
    ///
    /// # Errors
    /// Fails if Envoy's configuration differs. The error has both.
    pub fn check(&self, config: &Value) -> Result<()> {
        let there = match &self.at {
            FragmentPlace::Named(list, name) => {
                let mut items = config
                    .pointer(list)
                    .and_then(Value::as_array)
                    .into_iter()
                    .flatten();
                items.find(|item| item["name"] == **name).cloned()
            }
            FragmentPlace::In(at) => config.pointer(at).cloned(),
            FragmentPlace::File(file) => Some(resource(file)?),
        };
        let mut there = there.ok_or_else(|| format!("nothing at {:?}", self.at))?;
        self.substituted
            .iter()
            .try_for_each(|s| s.undo(&mut there))?;
        let same = match self.at {
            FragmentPlace::Named(..) | FragmentPlace::File(_) => there == self.meant,
            FragmentPlace::In(_) => holds(&there, &self.meant),
        };
        if same {
            Ok(())
        } else {
            Err(format!("at {:?} is\n{there}\ninstead of\n{}", self.at, self.meant).into())
        }
    }
}

// === impl AssembledConfig ===

impl AssembledConfig {
    /// Checks all fragments ([`PlacedFragment::check`]). Also checks that the configuration has at
    /// least `fragments_min` fragments.
    ///
    /// # Errors
    /// Fails if a fragment differs from the manifest, or the configuration has too few fragments.
    pub fn check(&self, fragments_min: usize) -> Result<()> {
        if self.placed.len() < fragments_min {
            return Err(format!("only {} fragments were placed", self.placed.len()).into());
        }
        self.placed
            .iter()
            .try_for_each(|placed| placed.check(&self.config))
    }

    /// Writes what Envoy discovers to files in `folder`. Returns the bootstrap.
    ///
    /// # Errors
    /// Fails if the folder cannot be written.
    pub fn deliver(&self, folder: &Path) -> Result<Value> {
        for (list, kind) in DELIVERED {
            write(
                &delivery(folder, list),
                kind,
                self.config[list].as_array().cloned().unwrap_or_default(),
            )?;
        }
        let mut bootstrap = self.config["bootstrap"].clone();
        bootstrap["dynamic_resources"] = json!({"cds_config": source(folder, "clusters"), "lds_config": source(folder, "listeners")});
        Ok(bootstrap)
    }
}

/// Returns the cluster that a gateway makes of a Service. No request uses this cluster, because a
/// patch sends the requests to another cluster.
fn unused(name: &str) -> Value {
    json!({"name": name, "type": "STATIC", "load_assignment": {"cluster_name": name}})
}

/// Returns the file from which Envoy discovers a list.
fn delivery(folder: &Path, list: &str) -> PathBuf {
    folder.join(format!("{list}.json"))
}

/// Returns the `config_source` by which Envoy discovers a list from its file.
fn source(folder: &Path, list: &str) -> Value {
    json!({"path_config_source": {"path": delivery(folder, list)}, "resource_api_version": "V3"})
}

/// Writes resources of a type to a file from which Envoy discovers them.
fn write(file: &Path, kind: &str, mut resources: Vec<Value>) -> Result<()> {
    resources
        .iter_mut()
        .for_each(|resource| resource["@type"] = json!(format!("type.googleapis.com/{kind}")));
    Ok(std::fs::write(
        file,
        json!({"version_info": "1", "resources": resources}).to_string(),
    )?)
}

/// Reads the resource that was written to `file`.
fn resource(file: &Path) -> Result<Value> {
    let mut response: Value = serde_json::from_slice(&std::fs::read(file)?)?;
    let mut resource = response["resources"][0].take();
    resource
        .as_object_mut()
        .ok_or("no resource")?
        .remove("@type");
    Ok(resource)
}

fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                match into.get_mut(key) {
                    Some(there) => merge(there, value),
                    None => drop(into.insert(key.clone(), value.clone())),
                }
            }
        }
        (Value::Array(into), Value::Array(from)) => into.extend(from.iter().cloned()),
        (into, from) => *into = from.clone(),
    }
}

/// Returns whether `whole` contains all of `part`.
fn holds(whole: &Value, part: &Value) -> bool {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => part
            .iter()
            .all(|(key, value)| whole.get(key).is_some_and(|w| holds(w, value))),
        (Value::Array(whole), Value::Array(part)) => part.iter().all(|value| whole.contains(value)),
        (whole, part) => whole == part,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made() -> AssembledConfig {
        AssembledConfig {
            config: json!({"list": [{"name": "last"}], "one": {"a": 1, "l": [1]}}),
            placed: Vec::new(),
        }
    }

    #[test]
    fn what_was_substituted_is_found_and_what_else_changed_too() -> Result<()> {
        let meant = json!({"name": "daemon", "load_assignment": {"endpoints": [{"lb_endpoints": [{"endpoint": {"address":
            {"socket_address": {"address": DAEMON, "port_value": 9004}}}}]}]}});
        let mut made = made();
        PlacedFragment::insert(
            &mut made,
            "/list",
            Some("last"),
            &meant,
            vec![Substitution::daemon(7)],
        )?;
        assert_eq!(made.config.pointer("/list/1/name"), Some(&json!("last")));
        made.check(1)?;
        assert!(made.check(2).is_err());
        let mut elsewhere = made.clone();
        elsewhere.config["list"][0]["connect_timeout"] = json!("1s");
        assert!(elsewhere.check(1).is_err());
        assert!(
            PlacedFragment::insert(
                &mut made,
                "/list",
                None,
                &json!({"name": "x"}),
                vec![Substitution::daemon(7)]
            )
            .is_err(),
            "nothing to substitute"
        );
        Ok(())
    }

    #[test]
    fn a_merge_adds_and_what_is_lost_of_it_is_found() -> Result<()> {
        let mut made = made();
        PlacedFragment::merge(
            &mut made,
            "/one".to_owned(),
            &json!({"b": {"c": 2}, "l": [2], "a": 3}),
        )?;
        assert_eq!(
            made.config["one"],
            json!({"a": 3, "b": {"c": 2}, "l": [1, 2]})
        );
        made.check(1)?;
        made.config["one"]["b"]["c"] = json!(4);
        assert!(made.check(1).is_err());
        Ok(())
    }
}
