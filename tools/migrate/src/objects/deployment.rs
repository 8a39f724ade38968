//! The Deployment of a picker: its container, with arguments and environment, and other containers.

use control_plane::config::yaml::{YamlNode, YamlValue};

use super::FoundObject;
use crate::items::{GivenItem, GivenItems, plain};
use crate::values::variable;

/// Containers beside the endpoint picker: how their names or images begin, and the value that makes
/// llm-d's chart add them.
const SIDECARS: [(&str, &str); 8] = [
    ("envoy", "router.proxy.enabled"),
    ("docker.io/envoyproxy", "router.proxy.enabled"),
    ("agentgateway", "router.proxy.enabled"),
    ("training-server", "router.latencyPredictor.enabled"),
    ("prediction-server", "router.latencyPredictor.enabled"),
    ("vllm-render", "router.tokenizer.enabled"),
    ("tokenizer", "router.tokenizer.enabled"),
    ("uds-tokenizer", "router.tokenizer.enabled"),
];

pub(super) fn containers(object: &YamlNode) -> Vec<&YamlNode> {
    match object
        .at(&["spec", "template", "spec", "containers"])
        .map(|node| &node.value)
    {
        Some(YamlValue::List(containers)) => containers.iter().collect(),
        _ => Vec::new(),
    }
}

/// Whether a container runs an endpoint picker.
pub(super) fn is_picker(container: &&&YamlNode) -> bool {
    let arguments = arguments(container);
    let flagged = |name: &str| {
        arguments.iter().any(|argument| {
            argument
                .strip_prefix(name)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        })
    };
    ["--pool-name", "--endpoint-selector", "-pool-name"]
        .into_iter()
        .any(flagged)
}

pub(super) fn arguments(container: &YamlNode) -> Vec<String> {
    let of = |name: &str| match container.get(name).map(|node| &node.value) {
        Some(YamlValue::List(list)) => list.iter().map(|node| plain(&node.value)).collect(),
        _ => Vec::new(),
    };
    [of("command"), of("args")].concat()
}

pub(super) fn deployment(
    items: &mut GivenItems,
    object: &FoundObject<'_>,
    container: &YamlNode,
    containers: &[&YamlNode],
) {
    let title = format!("{} {}", object.kind, object.name);
    let mut copy = |path: &str, shown: &str, node: Option<&YamlNode>| {
        if let Some(node) = node {
            items.add(path, format!("{title}, {shown}"), node.value.clone());
        }
    };
    copy(
        "router.epp.replicas",
        "replicas",
        object.node.at(&["spec", "replicas"]),
    );
    let pod = object.node.at(&["spec", "template", "spec"]);
    copy(
        "router.epp.affinity",
        "affinity",
        pod.and_then(|pod| pod.get("affinity")),
    );
    copy(
        "router.epp.tolerations",
        "tolerations",
        pod.and_then(|pod| pod.get("tolerations")),
    );
    copy(
        "router.epp.podAnnotations",
        "annotations of pods",
        object
            .node
            .at(&["spec", "template", "metadata", "annotations"]),
    );
    copy("router.epp.image", "image", container.get("image"));
    copy(
        "router.epp.resources",
        "resources",
        container
            .get("resources")
            .filter(|node| !node.entries().is_empty()),
    );
    flags(items, &title, &arguments(container));
    if let Some(YamlNode {
        value: YamlValue::List(list),
        ..
    }) = container.get("env")
    {
        for (i, (name, _, value)) in list.iter().map(variable).enumerate() {
            match name {
                Some(name) => items.add(
                    &format!("${name}"),
                    format!("{title}, variable {name}"),
                    value,
                ),
                None => items.unknown(&format!("{title}, env[{i}]"), value),
            }
        }
    }
    for other in containers
        .iter()
        .filter(|other| !std::ptr::eq(**other, container))
    {
        sidecar(items, &title, other);
    }
}

fn sidecar(items: &mut GivenItems, title: &str, container: &YamlNode) {
    let of = |name: &str| {
        container
            .get(name)
            .and_then(YamlNode::text)
            .unwrap_or_default()
    };
    let name = of("name");
    let image = of("image");
    let shown = format!("{title}, container {name}");
    let Some((_, switch)) = SIDECARS
        .iter()
        .find(|(start, _)| name.starts_with(start) || image.starts_with(start))
    else {
        return items.unknown(&shown, YamlValue::Text(image.to_owned()));
    };
    items.add(switch, shown.clone(), YamlValue::Flag(true));
    if *switch == "router.proxy.enabled" {
        if name.contains("agentgateway") || image.contains("agentgateway") {
            items.add(
                "router.proxy.proxyType",
                shown.clone(),
                YamlValue::Text("agentgateway".to_owned()),
            );
        }
        if let Some(resources) = container
            .get("resources")
            .filter(|node| !node.entries().is_empty())
        {
            items.add(
                "router.proxy.resources",
                format!("{shown}, resources"),
                resources.value.clone(),
            );
        }
    }
}

/// Reads arguments as Go's flags: `--name=value`, `--name value`, `--name` alone for true; one dash
/// or two.
fn flags(items: &mut GivenItems, title: &str, arguments: &[String]) {
    let mut rest = arguments.iter().peekable();
    while let Some(argument) = rest.next() {
        let Some(flag) = argument
            .strip_prefix("--")
            .or_else(|| argument.strip_prefix('-'))
            .filter(|flag| !flag.is_empty())
        else {
            if argument.starts_with('/')
                && items.all().iter().all(|item| !item.path.starts_with("--"))
            {
                continue; // the argument is the path of the program
            }
            items.unknown(
                &format!("{title}, argument {argument}"),
                YamlValue::Text(argument.clone()),
            );
            continue;
        };
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name, value.trim_matches('"').to_owned()),
            None => (
                flag,
                rest.next_if(|next| !next.starts_with('-') || next.len() == 1)
                    .cloned()
                    .unwrap_or_else(|| "true".to_owned()),
            ),
        };
        items.push(GivenItem {
            path: format!("--{name}"),
            shown: format!("{title}, --{name}"),
            value: YamlValue::Text(value),
        });
    }
}
