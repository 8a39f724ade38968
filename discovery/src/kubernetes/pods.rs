//! The instances of the pods of an InferencePool. Pure.
//!
//! A pod with several target ports is several instances: each port is a data-parallel rank with its
//! own queue and cache.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use crate::backend::{BackendEvent, InstanceReadiness, InstanceRecord, MetadataSource};
use crate::instance::{Instance, NAMESPACE_DEFAULT};

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
        Self { ports, pods: HashMap::new() }
    }

    pub(super) fn apply(&mut self, pod: &Pod) -> Vec<BackendEvent> {
        let new = records(pod, &self.ports);
        let old = self.pods.insert(pod.name_any(), new.clone()).unwrap_or_default();
        difference(&old, new)
    }

    pub(super) fn delete(&mut self, name: &str) -> Vec<BackendEvent> {
        difference(&self.pods.remove(name).unwrap_or_default(), Vec::new())
    }

    pub(super) fn reset(&mut self, pods: &[Pod]) -> Vec<Arc<InstanceRecord>> {
        self.pods = pods.iter().map(|pod| (pod.name_any(), records(pod, &self.ports))).collect();
        self.pods.values().flatten().cloned().collect()
    }
}

fn difference(old: &[Arc<InstanceRecord>], new: Vec<Arc<InstanceRecord>>) -> Vec<BackendEvent> {
    let gone = old.iter().filter(|o| new.iter().all(|n| n.name() != o.name()));
    let mut events: Vec<BackendEvent> = gone.map(|record| BackendEvent::Delete(Arc::from(record.name()))).collect();
    events.extend(new.into_iter().filter(|record| !old.contains(record)).map(BackendEvent::Apply));
    if events.is_empty() {
        events.push(BackendEvent::Alive);
    }
    events
}

fn records(pod: &Pod, ports: &[u16]) -> Vec<Arc<InstanceRecord>> {
    let status = pod.status.as_ref();
    // An evicted pod has no address.
    let Some(ip) = status.and_then(|s| s.pod_ip.as_ref()).and_then(|ip| ip.parse::<IpAddr>().ok()) else { return Vec::new() };
    let readiness = readiness(pod);
    // If two pods have one address, the later one wins.
    let created = pod.creation_timestamp().and_then(|t| u64::try_from(t.0.as_microsecond()).ok()).unwrap_or(0);
    let one = ports.len() == 1;
    let record = |(rank, port): (usize, &u16)| {
        let address = SocketAddr::new(ip, *port);
        let mut labels: Vec<(String, String)> = pod.labels().iter().map(|(k, v)| (k.clone(), v.clone())).collect();
        if !one {
            labels.push((RANK_LABEL.to_owned(), rank.to_string()));
            labels.sort_unstable();
        }
        let name = if one { pod.name_any() } else { format!("{}-rank-{rank}", pod.name_any()) };
        let instance = Instance {
            namespace: pod.namespace().unwrap_or_else(|| NAMESPACE_DEFAULT.to_owned()),
            generation: pod.uid().unwrap_or_default(),
            labels,
            ..Instance::new(name, address)
        };
        Arc::new(InstanceRecord { instance, readiness: readiness.clone(), metadata: MetadataSource::At(address), freshness: created })
    };
    ports.iter().enumerate().map(record).collect()
}

fn readiness(pod: &Pod) -> InstanceReadiness {
    if pod.metadata.deletion_timestamp.is_some() {
        return InstanceReadiness::NotReady("it is terminating".to_owned());
    }
    let status = pod.status.as_ref();
    if let Some(phase @ ("Failed" | "Succeeded")) = status.and_then(|s| s.phase.as_deref()) {
        return InstanceReadiness::NotReady(format!("its phase is {phase}"));
    }
    let ready = status.and_then(|s| s.conditions.as_ref()).and_then(|c| c.iter().find(|c| c.type_ == "Ready"));
    match ready {
        Some(condition) if condition.status == "True" => InstanceReadiness::Ready,
        Some(condition) => InstanceReadiness::NotReady(condition.reason.clone().unwrap_or_else(|| "its readiness probe fails".to_owned())),
        None => InstanceReadiness::NotReady("its readiness is not known yet".to_owned()),
    }
}
