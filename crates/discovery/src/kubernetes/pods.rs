//! The instances of the pods of an InferencePool. This module has no I/O.
//!
//! A pod with several target ports is several instances, because each port is a data-parallel rank
//! with its own queue and cache.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use crate::backend::{BackendEvent, InstanceReadiness, InstanceRecord, MetadataSource};
use crate::instance::{Instance, NAMESPACE_DEFAULT};

/// The reason why a pod with ready containers is not ready.
pub(super) const NODE_NOT_READY: &str = "its node is not ready; its containers were ready last";

/// The label with the data-parallel rank of an instance.
pub(super) const RANK_LABEL: &str = "llm-d.ai/data-parallel-rank";

/// The pods of a pool.
#[derive(Debug)]
pub(super) struct PodIndex {
    ports: Vec<u16>,
    pods: HashMap<String, Vec<Arc<InstanceRecord>>>,
}

// === impl PodIndex ===

impl PodIndex {
    pub(super) fn new(ports: Vec<u16>) -> Self {
        Self {
            ports,
            pods: HashMap::new(),
        }
    }

    pub(super) fn apply(&mut self, pod: &Pod) -> Vec<BackendEvent> {
        let new = records(pod, &self.ports);
        let old = self
            .pods
            .insert(pod.name_any(), new.clone())
            .unwrap_or_default();
        difference(&old, new)
    }

    pub(super) fn delete(&mut self, name: &str) -> Vec<BackendEvent> {
        difference(&self.pods.remove(name).unwrap_or_default(), Vec::new())
    }

    pub(super) fn reset(&mut self, pods: &[Pod]) -> Vec<Arc<InstanceRecord>> {
        self.pods = pods
            .iter()
            .map(|pod| (pod.name_any(), records(pod, &self.ports)))
            .collect();
        self.pods.values().flatten().cloned().collect()
    }
}

fn difference(old: &[Arc<InstanceRecord>], new: Vec<Arc<InstanceRecord>>) -> Vec<BackendEvent> {
    let removed = old
        .iter()
        .filter(|o| new.iter().all(|n| n.name() != o.name()));
    let mut events: Vec<BackendEvent> = removed
        .map(|record| BackendEvent::Delete(Arc::from(record.name())))
        .collect();
    events.extend(
        new.into_iter()
            .filter(|record| !old.contains(record))
            .map(BackendEvent::Apply),
    );
    if events.is_empty() {
        events.push(BackendEvent::Alive);
    }
    events
}

fn records(pod: &Pod, ports: &[u16]) -> Vec<Arc<InstanceRecord>> {
    let status = pod.status.as_ref();
    // An evicted pod has no address.
    let Some(ip) = status
        .and_then(|s| s.pod_ip.as_ref())
        .and_then(|ip| ip.parse::<IpAddr>().ok())
    else {
        return Vec::new();
    };
    let readiness = readiness(pod);
    // If two pods have the same address, the pod that was created later gets the address.
    let created = pod
        .creation_timestamp()
        .and_then(|t| u64::try_from(t.0.as_microsecond()).ok())
        .unwrap_or(0);
    let one = ports.len() == 1;
    let record = |(rank, port): (usize, &u16)| {
        let address = SocketAddr::new(ip, *port);
        let mut labels: Vec<(String, String)> = pod
            .labels()
            .iter()
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect();
        if !one {
            labels.push((RANK_LABEL.to_owned(), rank.to_string()));
            labels.sort_unstable();
        }
        let name = if one {
            pod.name_any()
        } else {
            format!("{}-rank-{rank}", pod.name_any())
        };
        let instance = Instance {
            namespace: pod
                .namespace()
                .unwrap_or_else(|| NAMESPACE_DEFAULT.to_owned()),
            generation: pod.uid().unwrap_or_default(),
            labels,
            ..Instance::new(name, address)
        };
        Arc::new(InstanceRecord {
            instance,
            readiness: readiness.clone(),
            metadata: MetadataSource::At(address),
            freshness: created,
        })
    };
    ports.iter().enumerate().map(record).collect()
}

/// Reads the readiness of a pod from its conditions.
///
/// A node is not ready if its kubelet has not renewed its lease for the grace period, 50 s by
/// default. Then the node lifecycle controller sets `Ready` of its pods to `False`. The controller
/// leaves `ContainersReady` and the reason as they are. A kubelet whose probe fails also sets
/// `ContainersReady` to `False`, and a kubelet that waits for a readiness gate gives a reason. So a
/// pod that is not ready, without a reason and with ready containers, is only unconfirmed. After an
/// outage of the API server that is longer than the grace period, this is true of every pod.
pub(super) fn readiness(pod: &Pod) -> InstanceReadiness {
    if pod.metadata.deletion_timestamp.is_some() {
        return InstanceReadiness::NotReady("it is terminating".to_owned());
    }
    let status = pod.status.as_ref();
    if let Some(phase @ ("Failed" | "Succeeded")) = status.and_then(|s| s.phase.as_deref()) {
        return InstanceReadiness::NotReady(format!("its phase is {phase}"));
    }
    let conditions = status.and_then(|s| s.conditions.as_ref());
    let condition = |name: &str| conditions.and_then(|all| all.iter().find(|c| c.type_ == name));
    let containers_ready = condition("ContainersReady").is_some_and(|c| c.status == "True");
    match condition("Ready") {
        Some(condition) if condition.status == "True" => InstanceReadiness::Ready,
        Some(condition)
            if containers_ready && condition.reason.as_ref().is_none_or(String::is_empty) =>
        {
            InstanceReadiness::Unconfirmed(NODE_NOT_READY.to_owned())
        }
        Some(condition) => InstanceReadiness::NotReady(
            condition
                .reason
                .clone()
                .unwrap_or_else(|| "its readiness probe fails".to_owned()),
        ),
        None => InstanceReadiness::NotReady("its readiness is not known yet".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn readiness_of(conditions: &Value) -> String {
        let pod = serde_json::from_value(
            json!({ "metadata": { "name": "p" }, "status": { "conditions": conditions } }),
        )
        .unwrap();
        match readiness(&pod) {
            InstanceReadiness::Ready => "ready".to_owned(),
            InstanceReadiness::Unconfirmed(_) => "unconfirmed".to_owned(),
            InstanceReadiness::NotReady(why) => why,
        }
    }

    #[test]
    fn conditions_show_whether_the_pod_or_its_node_is_not_ready() {
        let both = |ready: &str, containers: &str, reason: &str| {
            readiness_of(
                &json!([{ "type": "Ready", "status": ready, "reason": reason }, { "type": "ContainersReady", "status": containers }]),
            )
        };
        assert_eq!(both("True", "True", ""), "ready");
        assert_eq!(
            both("False", "True", ""),
            "unconfirmed",
            "as the node lifecycle controller writes it"
        );
        assert_eq!(
            both("False", "False", "ContainersNotReady"),
            "ContainersNotReady",
            "as a kubelet writes a failed probe"
        );
        assert_eq!(
            both("False", "True", "ReadinessGatesNotReady"),
            "ReadinessGatesNotReady"
        );
        assert_eq!(both("False", "False", ""), "");
        assert_eq!(
            readiness_of(&json!([{ "type": "Ready", "status": "False" }])),
            "its readiness probe fails"
        );
        assert_eq!(readiness_of(&json!([])), "its readiness is not known yet");
    }

    #[test]
    fn a_terminating_pod_is_never_unconfirmed() {
        let conditions = json!([{ "type": "Ready", "status": "False" }, { "type": "ContainersReady", "status": "True" }]);
        let metadata = json!({ "name": "p", "deletionTimestamp": "2026-11-25T00:00:00Z" });
        let pod = serde_json::from_value(
            json!({ "metadata": metadata, "status": { "conditions": conditions } }),
        )
        .unwrap();
        assert_eq!(
            readiness(&pod),
            InstanceReadiness::NotReady("it is terminating".to_owned())
        );
    }
}
