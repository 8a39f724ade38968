//! Reads the objects of a running endpoint picker (its Deployment, the ConfigMap with its
//! configuration, its InferencePool and its Service) as `kubectl get -o yaml` prints them.

mod deployment;

use self::deployment::{containers, deployment, is_picker};
use super::items::GivenItems;
use crate::LlmdPicker;
use control_plane::config::yaml::{self, YamlNode, YamlValue};

/// The maximum number of objects read, so that the search among them stays short.
const OBJECTS_MAX: usize = 10_000;
/// The maximum number of endpoint pickers of one run. Our chart and a daemon have the same maximum
/// of pools.
const PICKERS_MAX: usize = 64;

/// An object with the data that is needed to find it.
#[derive(Debug)]
struct FoundObject<'n> {
    kind: &'n str,
    name: &'n str,
    namespace: &'n str,
    node: &'n YamlNode,
}

/// The objects of all pickers, and the names of other objects.
#[derive(Debug, Default)]
pub struct FoundPickers {
    /// The pickers, in the order of the input.
    pub pickers: Vec<LlmdPicker>,
    /// Objects that belong to no picker, such as `ConfigMap prod/other`.
    pub others: Vec<String>,
}

/// Finds the endpoint pickers in YAML documents. `pool` and `namespace` restrict the search.
///
/// # Errors
/// Returns the line that cannot be read, or the reason why there is no picker.
pub fn read(
    files: &[(String, String)],
    pool: Option<&str>,
    namespace: Option<&str>,
) -> Result<FoundPickers, String> {
    let mut documents = Vec::new();
    for (name, text) in files {
        let read = yaml::parse_all(text).map_err(|(line, why)| format!("{name}:{line}: {why}"))?;
        documents.extend(
            read.into_iter()
                .map(|node| (name.as_str(), node, text.as_str())),
        );
    }
    if let [(_, node, text)] = documents.as_slice()
        && node.get("kind").and_then(YamlNode::text) == Some("EndpointPickerConfig")
    {
        let config = Some(("EndpointPickerConfig".to_owned(), (*text).to_owned()));
        let name = pool.unwrap_or("default").to_owned();
        let picker = LlmdPicker {
            name,
            namespace: namespace.map(str::to_owned),
            config,
            items: GivenItems::default(),
            standalone: false,
        };
        return Ok(FoundPickers {
            pickers: vec![picker],
            others: Vec::new(),
        });
    }
    let mut objects = Vec::new();
    for (file, node, _) in &documents {
        listed(file, node, &mut objects)?;
    }
    let wanted = |name: &str, space: &str| {
        pool.is_none_or(|pool| pool == name)
            && namespace.is_none_or(|wanted| wanted == space || space.is_empty())
    };
    let found = pickers(&objects, &wanted);
    if found.pickers.is_empty() {
        return Err(format!(
            "no endpoint picker among {} objects: there is neither a Deployment with --pool-name nor an InferencePool{}",
            objects.len(),
            pool.map(|pool| format!(" named {pool:?}"))
                .unwrap_or_default()
        ));
    }
    if found.pickers.len() > PICKERS_MAX {
        return Err(format!(
            "{} endpoint pickers; at most {PICKERS_MAX} are read: restrict them with --pool and --namespace",
            found.pickers.len()
        ));
    }
    Ok(found)
}

/// Collects objects, also the objects in lists.
fn listed<'n>(
    file: &str,
    node: &'n YamlNode,
    objects: &mut Vec<FoundObject<'n>>,
) -> Result<(), String> {
    let Some(kind) = node.get("kind").and_then(YamlNode::text) else {
        return Err(format!(
            "{file}:{}: neither a Kubernetes object nor an EndpointPickerConfig: it has no kind; values belong after -f",
            node.line
        ));
    };
    if kind.ends_with("List")
        && let Some(YamlNode {
            value: YamlValue::List(items),
            ..
        }) = node.get("items")
    {
        // Takes the kind of an item from the kind of the list, because an API server leaves out the
        // kind of a list's items.
        let of_list = kind.strip_suffix("List").filter(|kind| !kind.is_empty());
        return items.iter().try_for_each(|item| match of_list {
            Some(kind) if item.get("kind").is_none() && item.get("metadata").is_some() => {
                objects.push(found(kind, item));
                bounded(file, objects)
            }
            _ => listed(file, item, objects),
        });
    }
    objects.push(found(kind, node));
    bounded(file, objects)
}

fn found<'n>(kind: &'n str, node: &'n YamlNode) -> FoundObject<'n> {
    let of = |name: &str| {
        node.at(&["metadata", name])
            .and_then(YamlNode::text)
            .unwrap_or_default()
    };
    FoundObject {
        kind,
        name: of("name"),
        namespace: of("namespace"),
        node,
    }
}

fn bounded(file: &str, objects: &[FoundObject<'_>]) -> Result<(), String> {
    if objects.len() > OBJECTS_MAX {
        Err(format!("{file}: more than {OBJECTS_MAX} objects"))
    } else {
        Ok(())
    }
}

fn pickers(objects: &[FoundObject<'_>], wanted: &dyn Fn(&str, &str) -> bool) -> FoundPickers {
    let mut found = FoundPickers::default();
    let mut used: Vec<&YamlNode> = Vec::new();
    for object in objects
        .iter()
        .filter(|object| ["Deployment", "StatefulSet"].contains(&object.kind))
    {
        let containers = containers(object.node);
        let Some(container) = containers.iter().find(is_picker) else {
            continue;
        };
        let mut items = GivenItems::default();
        deployment(&mut items, object, container, &containers);
        let name = items.text("--pool-name").unwrap_or_else(|| {
            object
                .name
                .strip_suffix("-epp")
                .unwrap_or(object.name)
                .to_owned()
        });
        let namespace = items
            .text("--pool-namespace")
            .unwrap_or_else(|| object.namespace.to_owned());
        if !wanted(&name, &namespace) {
            continue;
        }
        used.push(object.node);
        let config = config_of(&items, object, container, objects, &mut used);
        found.pickers.push(with_pool(
            &name, &namespace, items, config, objects, &mut used,
        ));
    }
    // For a pool without a Deployment, the ConfigMap with a configuration in the pool's namespace
    // is used.
    for object in objects
        .iter()
        .filter(|object| object.kind == "InferencePool")
    {
        if used.iter().any(|node| std::ptr::eq(*node, object.node))
            || !wanted(object.name, object.namespace)
        {
            continue;
        }
        let config = config_near(object, objects, &mut used);
        found.pickers.push(with_pool(
            object.name,
            object.namespace,
            GivenItems::default(),
            config,
            objects,
            &mut used,
        ));
    }
    let unused = objects
        .iter()
        .filter(|object| !used.iter().any(|node| std::ptr::eq(*node, object.node)));
    found.others = unused
        .map(|object| format!("{} {}/{}", object.kind, object.namespace, object.name))
        .collect();
    found
}

/// Adds the InferencePool of a picker, the Service that it names, and the objects that refer to the
/// InferencePool.
fn with_pool<'n>(
    name: &str,
    namespace: &str,
    mut items: GivenItems,
    config: Option<(String, String)>,
    objects: &[FoundObject<'n>],
    used: &mut Vec<&'n YamlNode>,
) -> LlmdPicker {
    let here = |object: &&FoundObject<'_>| {
        object.namespace == namespace || object.namespace.is_empty() || namespace.is_empty()
    };
    if let Some(pool) = objects
        .iter()
        .filter(here)
        .find(|object| object.kind == "InferencePool" && object.name == name)
    {
        used.push(pool.node);
        inference_pool(&mut items, pool);
        let service = service_of(pool);
        if let Some(object) = objects
            .iter()
            .filter(here)
            .find(|object| object.kind == "Service" && object.name == service)
        {
            used.push(object.node);
        }
    }
    for object in objects
        .iter()
        .filter(here)
        .filter(|object| object.kind == "InferenceObjective")
    {
        if object
            .node
            .at(&["spec", "poolRef", "name"])
            .and_then(YamlNode::text)
            == Some(name)
        {
            used.push(object.node);
            items.add(
                "router.inferenceObjectives",
                format!("InferenceObjective {}", object.name),
                YamlValue::Null,
            );
        }
    }
    let standalone = items.is_on("router.proxy.enabled");
    let namespace = Some(namespace.to_owned()).filter(|namespace| !namespace.is_empty());
    LlmdPicker {
        name: name.to_owned(),
        namespace,
        config,
        items,
        standalone,
    }
}

/// Returns the configuration that the flags of a picker name.
fn config_of<'n>(
    items: &GivenItems,
    object: &FoundObject<'_>,
    container: &YamlNode,
    objects: &[FoundObject<'n>],
    used: &mut Vec<&'n YamlNode>,
) -> Option<(String, String)> {
    if let Some(text) = items.text("--config-text") {
        return Some(("--config-text".to_owned(), text));
    }
    let path = items.text("--config-file")?;
    let (folder, file) = path.rsplit_once('/')?;
    let list = |node: Option<&'_ YamlNode>| match node.map(|node| &node.value) {
        Some(YamlValue::List(list)) => list.clone(),
        _ => Vec::new(),
    };
    let mounts = list(container.get("volumeMounts"));
    let mount = mounts.iter().find(|mount| {
        mount
            .get("mountPath")
            .and_then(YamlNode::text)
            .is_some_and(|at| at.trim_end_matches('/') == folder)
    })?;
    let volumes = list(object.node.at(&["spec", "template", "spec", "volumes"]));
    let volume = volumes.iter().find(|volume| {
        volume.get("name").map(|name| &name.value) == mount.get("name").map(|name| &name.value)
    })?;
    let map = volume.at(&["configMap", "name"]).and_then(YamlNode::text)?;
    let found = objects.iter().find(|other| {
        other.kind == "ConfigMap" && other.name == map && other.namespace == object.namespace
    })?;
    used.push(found.node);
    let text = found.node.at(&["data", file]).and_then(YamlNode::text)?;
    Some((format!("ConfigMap {map}, {file}"), text.to_owned()))
}

/// Returns the configuration of a pool without a Deployment. The configuration is in the ConfigMap
/// with the name of the picker's Service, or in the only ConfigMap of the namespace that no other
/// picker uses.
fn config_near<'n>(
    pool: &FoundObject<'_>,
    objects: &[FoundObject<'n>],
    used: &mut Vec<&'n YamlNode>,
) -> Option<(String, String)> {
    let free = |map: &&FoundObject<'n>| {
        map.kind == "ConfigMap"
            && map.namespace == pool.namespace
            && !used.iter().any(|node| std::ptr::eq(*node, map.node))
    };
    let maps: Vec<_> = objects
        .iter()
        .filter(free)
        .filter_map(|map| Some((map, likely_config(map)?)))
        .collect();
    let service = service_of(pool);
    let named = maps.iter().find(|(map, _)| map.name == service);
    let (map, config) = named.or_else(|| maps.first().filter(|_| maps.len() == 1))?;
    used.push(map.node);
    Some(config.clone())
}

/// Returns the name of the Service that an InferencePool names as its picker.
fn service_of<'n>(pool: &FoundObject<'n>) -> &'n str {
    let reference = pool
        .node
        .at(&["spec", "endpointPickerRef", "name"])
        .or_else(|| pool.node.at(&["spec", "extensionRef", "name"]));
    reference.and_then(YamlNode::text).unwrap_or_default()
}

/// Returns the file in a ConfigMap that is a configuration: the only file beside the files of
/// llm-d's chart, or `default-plugins.yaml`.
fn likely_config(map: &FoundObject<'_>) -> Option<(String, String)> {
    let files = map
        .node
        .get("data")?
        .entries()
        .iter()
        .filter_map(|(key, node)| Some((key.name.as_str(), YamlNode::text(node)?)));
    let configs: Vec<(&str, &str)> = files
        .filter(|(_, text)| text.contains("kind: EndpointPickerConfig"))
        .collect();
    let own: Vec<&(&str, &str)> = configs
        .iter()
        .filter(|(name, _)| !["default-plugins.yaml", "payload-agnostic.yaml"].contains(name))
        .collect();
    let (file, text) = match (own.as_slice(), configs.as_slice()) {
        ([only], _) => **only,
        ([], configs) => *configs
            .iter()
            .find(|(name, _)| *name == "default-plugins.yaml")
            .or_else(|| configs.first())?,
        _ => return None,
    };
    Some((format!("ConfigMap {}, {file}", map.name), text.to_owned()))
}

fn inference_pool(items: &mut GivenItems, pool: &FoundObject<'_>) {
    let title = format!("InferencePool {}", pool.name);
    let spec = |way: &[&str]| pool.node.get("spec").and_then(|spec| spec.at(way));
    let mut copy = |path: &str, shown: &str, node: Option<&YamlNode>| {
        if let Some(node) = node {
            items.add(path, format!("{title}, {shown}"), node.value.clone());
        }
    };
    copy(
        "router.modelServers.matchLabels",
        "selector",
        spec(&["selector", "matchLabels"]).or_else(|| spec(&["selector"])),
    );
    copy(
        "router.modelServers.targetPorts",
        "targetPorts",
        spec(&["targetPorts"]),
    );
    copy(
        "router.modelServers.targetPortNumber",
        "targetPortNumber",
        spec(&["targetPortNumber"]),
    );
    copy(
        "router.inferencePool.failureMode",
        "failureMode",
        spec(&["endpointPickerRef", "failureMode"]),
    );
    copy(
        "router.epp.extProcPort",
        "port of endpointPickerRef",
        spec(&["endpointPickerRef", "port", "number"]),
    );
    if spec(&["appProtocol"]).and_then(YamlNode::text) == Some("kubernetes.io/h2c") {
        items.add(
            "router.modelServers.protocol",
            format!("{title}, appProtocol"),
            YamlValue::Text("h2c".to_owned()),
        );
    }
    if let Some(group) = pool
        .node
        .get("apiVersion")
        .filter(|node| YamlNode::text(node) != Some("inference.networking.k8s.io/v1"))
    {
        items.add(
            "inferencePool.apiVersion",
            format!("{title}, apiVersion"),
            group.value.clone(),
        );
    }
    items.add("router.inferencePool.create", title, YamlValue::Null);
}
