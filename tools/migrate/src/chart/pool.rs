//! Makes the values of one pool.

use control_plane::config::yaml::YamlValue;

use super::shape::{equalities, is_name, labels, pool_name, ports, text};
use super::{ValuesWriter, makes_pool};
use crate::LlmdPicker;
use crate::items::GivenItems;
use crate::picker::MigratedConfig;
use crate::table::MigrationVerdict;
use crate::tree::{list, map};

/// The longest name of an InferencePool in our chart, in characters.
const POOL_CHARACTERS_MAX: usize = 63;
/// The longest name of a namespace in Kubernetes, in characters.
const NAMESPACE_CHARACTERS_MAX: usize = 63;
/// The maximum number of target ports of an InferencePool.
const TARGET_PORTS_MAX: usize = 8;
/// The port of model servers whose ports the input does not name.
const PORT_DEFAULT: f64 = 8000.0;

// === impl ValuesWriter ===

impl ValuesWriter<'_> {
    pub(super) fn pool(
        &mut self,
        picker: &LlmdPicker,
        config: &MigratedConfig,
        shared: bool,
    ) -> YamlValue {
        let name = pool_name(&picker.name);
        let mut pool = vec![("name", text(&name))];
        if name != picker.name {
            self.note(
                MigrationVerdict::Changed,
                "the name of the pool",
                Some(&text(&picker.name)),
                "pools[].name",
                "names of pools are short, of small letters, digits and -",
            );
        }
        match &picker.namespace {
            Some(namespace) if is_name(namespace, NAMESPACE_CHARACTERS_MAX) => {
                pool.push(("namespace", text(namespace)));
            }
            Some(namespace) => {
                self.note(
                    MigrationVerdict::Unknown,
                    "the namespace of the pool",
                    Some(&text(namespace)),
                    "",
                    "is no name of a namespace",
                );
            }
            None => {}
        }
        if shared {
            pool.push(("hosts", list(vec![text(&name)])));
            self.note(
                MigrationVerdict::Changed,
                "the Service of each picker",
                None,
                "pools[].hosts",
                "several pools behind one gateway differ by host: write the hosts that clients use",
            );
        }
        pool.push(if makes_pool(&picker.items) {
            ("modelServers", self.model_servers(&picker.items))
        } else {
            ("inferencePool", self.reference(picker))
        });
        if picker
            .items
            .text("router.modelServers.protocol")
            .is_some_and(|protocol| ["grpc", "h2c"].contains(&protocol.as_str()))
        {
            pool.push(("appProtocol", text("kubernetes.io/h2c")));
        }
        if let Some(tree) = &config.tree {
            pool.push(("config", tree.value.clone()));
        }
        map(pool)
    }

    /// Returns the values that name an existing InferencePool.
    fn reference(&mut self, picker: &LlmdPicker) -> YamlValue {
        if !is_name(&picker.name, POOL_CHARACTERS_MAX) {
            self.note(
                MigrationVerdict::Unknown,
                "the name of the InferencePool",
                Some(&text(&picker.name)),
                "",
                "the chart takes names of small letters, digits and -",
            );
        }
        let mut reference = vec![("name", text(&picker.name))];
        let group = picker
            .items
            .text("inferencePool.apiVersion")
            .or_else(|| picker.items.text("--pool-group"));
        if group.is_some_and(|group| group.starts_with("inference.networking.x-k8s.io")) {
            reference.push(("apiVersion", text("inference.networking.x-k8s.io/v1alpha2")));
        }
        map(reference)
    }

    /// Returns the labels and ports of an InferencePool that the chart makes.
    fn model_servers(&mut self, items: &GivenItems) -> YamlValue {
        let selector = items
            .get("--endpoint-selector")
            .or_else(|| items.get("router.modelServers.matchLabels"));
        let labels = match selector {
            Some(YamlValue::Map(entries)) if !entries.is_empty() => labels(entries),
            Some(YamlValue::Text(text)) => equalities(text),
            _ => None,
        };
        let labels = labels.unwrap_or_else(|| {
            let reason =
                "must be a map, or equalities such as app=vllm: replace the label CHANGE-ME";
            self.note(
                MigrationVerdict::Unknown,
                "the labels of the model servers",
                selector,
                "pools[].modelServers.matchLabels",
                reason,
            );
            map(vec![("CHANGE-ME", text(""))])
        });
        let given = [
            "--endpoint-target-ports",
            "router.modelServers.targetPorts",
            "router.modelServers.targetPortNumber",
        ];
        let given = given.iter().find_map(|path| items.get(path));
        let ports = given.map_or_else(|| vec![PORT_DEFAULT], ports);
        let mut servers = vec![("matchLabels", labels)];
        if (1..=TARGET_PORTS_MAX).contains(&ports.len()) {
            servers.push((
                "targetPorts",
                list(
                    ports
                        .into_iter()
                        .map(|port| map(vec![("number", YamlValue::Number(port))]))
                        .collect(),
                ),
            ));
        } else {
            self.note(
                MigrationVerdict::Unknown,
                "the ports of the model servers",
                given,
                "pools[].modelServers.targetPorts",
                "must be 1 to 8 numbers from 1 to 65535",
            );
        }
        map(servers)
    }
}
