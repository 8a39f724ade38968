//! Reads the file of `--pools`, which configures several pools of one daemon.
//!
//! ```yaml
//! pools:
//! - {name: llama, endpointsFile: llama.yaml, config: llama-config.yaml, objects: objects/}
//! - {name: qwen, endpoints: ["10.0.0.1:8000", "gpu-2:8000"], strictModels: true}
//! - name: deepseek
//!   kubernetes: {namespace: dynamo, components: [{name: decode, role: decode}, {name: prefill, role: prefill}]}
//!   objectsKubernetes: prod
//! - {name: mixtral, inferencePool: {namespace: prod, name: mixtral}, objectsKubernetes: true}
//! ```
//! The file is read once, at start, because adding or removing a pool changes Envoy's configuration
//! anyway. The files that this file names are read again when they change. Relative paths start at
//! the daemon's working directory, as on the command line.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::pool::discovery_source::{
    DirectorySource, DiscoverySource, EtcdSource, InferencePoolSource, KubernetesSource,
};
use crate::pool::objects::{ObjectsSource, PoolName};

/// The maximum number of pools of one daemon. Each pool has its own scraper and at most 1,024
/// endpoints.
pub const POOLS_MAX: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSource {
    pub name: String,
    pub endpoints: EndpointsSource,
    /// The configuration file of the pool, if any.
    pub config: Option<PathBuf>,
    pub objects: ObjectsSource,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndpointsSource {
    /// A file, which is read again when it changes.
    File(PathBuf),
    /// A fixed list of `host:port`.
    List(Vec<String>),
    /// Servers that a discovery source reports.
    Discovered(DiscoverySource),
}

// === impl PoolSource ===

impl PoolSource {
    /// Returns the name that objects use for the pool: the name of its InferencePool if it has one,
    /// otherwise the name in this file.
    #[must_use]
    pub fn named(&self) -> PoolName {
        let inference_pool = match &self.endpoints {
            EndpointsSource::Discovered(discovered) => discovered.inference_pool(),
            EndpointsSource::File(_) | EndpointsSource::List(_) => None,
        };
        inference_pool.unwrap_or_else(|| PoolName::anywhere(&self.name))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolsFile {
    pools: Vec<PoolEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PoolEntry {
    name: String,
    endpoints_file: Option<PathBuf>,
    endpoints: Option<Vec<String>>,
    kubernetes: Option<KubernetesSource>,
    inference_pool: Option<InferencePoolSource>,
    directory: Option<DirectorySource>,
    etcd: Option<EtcdSource>,
    config: Option<PathBuf>,
    objects: Option<PathBuf>,
    objects_kubernetes: Option<ObjectsKubernetes>,
    strict_models: Option<bool>,
}

/// Whether objects come from Kubernetes, and from which namespace.
#[derive(Deserialize)]
#[serde(untagged)]
enum ObjectsKubernetes {
    /// With `true`, objects come from the namespace of the endpoints. With `false`, objects do not
    /// come from Kubernetes.
    There(bool),
    /// Objects come from this namespace.
    Namespace(String),
}

/// Reads the file at `path`. `given` is used for pools that set no objects of their own.
///
/// # Errors
/// Fails if the file cannot be read or an entry is invalid.
pub async fn read(path: &Path, given: &ObjectsSource) -> Result<Vec<PoolSource>, String> {
    let text = discovery::file_watcher::read(path)
        .await
        .map_err(|e| e.to_string())?;
    parse(&text, given).map_err(|why| format!("{}: {why}", path.display()))
}

fn parse(text: &str, given: &ObjectsSource) -> Result<Vec<PoolSource>, String> {
    let file: PoolsFile =
        serde_saphyr::from_str(text).map_err(|e| e.without_snippet().to_string())?;
    if file.pools.is_empty() || file.pools.len() > POOLS_MAX {
        return Err(format!(
            "{} pools; 1 to {POOLS_MAX} are allowed",
            file.pools.len()
        ));
    }
    let mut names = BTreeSet::new();
    let mut sources = Vec::with_capacity(file.pools.len());
    for entry in file.pools {
        if !names.insert(entry.name.clone()) {
            return Err(format!("two pools are named {:?}", entry.name));
        }
        sources.push(entry.source(given)?);
    }
    Ok(sources)
}

// === impl PoolEntry ===

impl PoolEntry {
    fn source(self, given: &ObjectsSource) -> Result<PoolSource, String> {
        use DiscoverySource::{Directory, Etcd, InferencePool, Kubernetes};
        use EndpointsSource::{Discovered, File, List};
        let name = self.name;
        if name.is_empty() || name.len() > discovery::NAME_BYTES_MAX {
            return Err(format!(
                "pool name {name:?}: 1 to {} bytes are allowed",
                discovery::NAME_BYTES_MAX
            ));
        }
        let mut sources = [
            self.endpoints_file.map(File),
            self.endpoints.map(List),
            self.kubernetes.map(|k| Discovered(Kubernetes(k))),
            self.inference_pool.map(|p| Discovered(InferencePool(p))),
            self.directory.map(|d| Discovered(Directory(d))),
            self.etcd.map(|e| Discovered(Etcd(e))),
        ]
        .into_iter()
        .flatten();
        let (Some(endpoints), None) = (sources.next(), sources.next()) else {
            return Err(format!(
                "pool {name:?}: give exactly one of endpointsFile, endpoints, kubernetes, inferencePool, etcd and directory"
            ));
        };
        let mut objects = given.clone();
        objects.strict_models = self.strict_models.unwrap_or(given.strict_models);
        if self.objects.is_some() || self.objects_kubernetes.is_some() {
            objects.kubernetes = match self.objects_kubernetes {
                None => None,
                Some(_) if self.objects.is_some() => {
                    return Err(format!(
                        "pool {name:?}: give objects or objectsKubernetes, not both"
                    ));
                }
                Some(given) => given.namespace(&name, &endpoints)?,
            };
            objects.path = self.objects;
        }
        Ok(PoolSource {
            name,
            endpoints,
            config: self.config,
            objects,
        })
    }
}

// === impl ObjectsKubernetes ===

impl ObjectsKubernetes {
    fn namespace(self, pool: &str, endpoints: &EndpointsSource) -> Result<Option<String>, String> {
        let there = match endpoints {
            EndpointsSource::Discovered(discovered) => discovered.kube_namespace(),
            EndpointsSource::File(_) | EndpointsSource::List(_) => None,
        };
        match (self, there) {
            (Self::Namespace(namespace), _) => Ok(Some(namespace)),
            (Self::There(false), _) => Ok(None),
            (Self::There(true), Some(there)) => Ok(Some(there.to_owned())),
            (Self::There(true), None) => Err(format!(
                "pool {pool:?}: objectsKubernetes: true works only with kubernetes or inferencePool; otherwise give the namespace"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_of_an_inference_pool_are_where_it_is_and_call_it_by_its_name() {
        let text = "pools:\n- {name: a, inferencePool: {namespace: prod, name: llama}, objectsKubernetes: true}\n\
                    - {name: b, inferencePool: {name: qwen}, objectsKubernetes: true}\n\
                    - {name: c, inferencePool: {name: qwen}, objectsKubernetes: false}\n\
                    - {name: d, endpoints: ['10.0.0.1:8000'], objectsKubernetes: ml}\n";
        let given = ObjectsSource {
            kubernetes: Some("all".to_owned()),
            ..ObjectsSource::default()
        };
        let pools = parse(text, &given).unwrap();
        let namespaces: Vec<Option<&str>> = pools
            .iter()
            .map(|pool| pool.objects.kubernetes.as_deref())
            .collect();
        assert_eq!(
            namespaces,
            [Some("prod"), Some("default"), None, Some("ml")]
        );
        let name = |name: &str, namespace: Option<&str>| PoolName {
            name: name.into(),
            namespace: namespace.map(Into::into),
        };
        let names: Vec<PoolName> = pools.iter().map(PoolSource::named).collect();
        assert_eq!(
            names,
            [
                name("llama", Some("prod")),
                name("qwen", Some("default")),
                name("qwen", Some("default")),
                name("d", None)
            ]
        );
    }

    #[test]
    fn reads_pools_of_both_kinds() {
        let text = "pools:\n- {name: a, endpointsFile: a.yaml, config: c.yaml}\n- {name: b, endpoints: ['10.0.0.1:8000']}\n";
        let [a, b] = parse(text, &ObjectsSource::default())
            .unwrap()
            .try_into()
            .unwrap();
        assert_eq!(
            (a.endpoints, a.config),
            (
                EndpointsSource::File("a.yaml".into()),
                Some("c.yaml".into())
            )
        );
        assert_eq!(
            b.endpoints,
            EndpointsSource::List(vec!["10.0.0.1:8000".to_owned()])
        );
    }

    #[test]
    fn what_the_pages_show_can_be_used() {
        for (page, pools) in [
            (include_str!("../../../docs/how-to/discovery.md"), 6),
            (include_str!("../../../README.md"), 2),
        ] {
            let shown = page
                .split("```yaml\n")
                .skip(1)
                .filter_map(|rest| rest.split("```").next());
            let files: Vec<&str> = shown.filter(|text| text.starts_with("pools:")).collect();
            assert!(!files.is_empty(), "a page shows a file of pools");
            let found: usize = files
                .iter()
                .map(|text| parse(text, &ObjectsSource::default()).unwrap().len())
                .sum();
            assert_eq!(found, pools);
        }
    }

    #[test]
    fn objects_of_a_pool_go_before_those_of_all() {
        let text = "pools:\n- {name: a, endpoints: ['10.0.0.1:8000'], objects: own, strictModels: false}\n- {name: b, endpoints: ['10.0.0.1:8000']}\n";
        let source = |path: &str, strict_models| ObjectsSource {
            path: Some(path.into()),
            strict_models,
            ..ObjectsSource::default()
        };
        let [a, b] = parse(text, &source("all", true))
            .unwrap()
            .try_into()
            .unwrap();
        assert_eq!(
            (a.objects, b.objects),
            (source("own", false), source("all", true))
        );
    }

    #[test]
    fn says_what_is_wrong() {
        for (text, expected) in [
            ("pools: []", "0 pools"),
            (
                "pools:\n- {name: a, endpoints: [x]}\n- {name: a, endpoints: [y]}",
                "two pools are named \"a\"",
            ),
            ("pools: [{name: a}]", "one of endpointsFile"),
            (
                "pools: [{name: a, endpoints: [], endpointsFile: f}]",
                "one of endpointsFile",
            ),
            (
                "pools: [{name: a, directory: {path: p, namespace: n, components: []}, endpointsFile: f}]",
                "one of endpointsFile",
            ),
            (
                "pools: [{name: a, directory: {path: p, namespace: n, components: [{name: d, rule: x}]}}]",
                "rule",
            ),
            (
                "pools: [{name: a, kubernetes: {components: []}}]",
                "namespace",
            ),
            ("pools: [{name: '', endpoints: []}]", "pool name"),
            (
                "pools: [{name: a, endpoints: [x], objectsKubernetes: true}]",
                "give the namespace",
            ),
            ("pools: [{name: a, endpoint: []}]", "endpoint"),
        ] {
            let error = parse(text, &ObjectsSource::default()).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
