//! Adds the labels of pods to the records from slices. Pure.
//!
//! The slice controller copies the labels of the Service, which are the same for all its pods.
//! Labels that differ between pods (engine, role, adapters that fit) are only on the pods. If both
//! have a label, the pod's value wins.

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use crate::backend::{BackendEvent, InstanceRecord};
use crate::instance::Instance;

/// The labels of pods, by name.
#[derive(Debug, Default)]
pub(super) struct PodLabels(HashMap<String, LabelSet>);

#[derive(Debug, PartialEq, Eq)]
struct LabelSet {
    /// UID of the pod: a new pod with the same name is a new generation.
    uid: String,
    labels: Vec<(String, String)>,
}

// === impl PodLabels ===

impl PodLabels {
    /// Applies the complete list of pods; returns the names of those whose labels changed.
    pub(super) fn reset(&mut self, pods: &[Pod]) -> Vec<String> {
        let before = std::mem::take(&mut self.0);
        self.0 = pods.iter().map(|pod| (pod.name_any(), LabelSet::of(pod))).collect();
        self.0.iter().filter(|(name, labels)| before.get(*name) != Some(labels)).map(|(name, _)| name.clone()).collect()
    }

    /// Applies a new or changed pod; returns whether its labels changed.
    pub(super) fn apply(&mut self, pod: &Pod) -> bool {
        let labels = LabelSet::of(pod);
        let changed = self.0.get(&pod.name_any()) != Some(&labels);
        self.0.insert(pod.name_any(), labels);
        changed
    }

    /// Removes a pod. Its remaining slice records have no pod labels.
    pub(super) fn delete(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// Returns the record with the labels of its pod, if they are known.
    pub(super) fn join(&self, record: Arc<InstanceRecord>) -> Arc<InstanceRecord> {
        let of_pod = self.0.get(record.name()).filter(|pod| pod.uid == record.instance.generation);
        let Some(LabelSet { labels, .. }) = of_pod else { return record };
        let mut all = labels.clone();
        all.extend(record.instance.labels.iter().filter(|(key, _)| labels.iter().all(|(known, _)| known != key)).cloned());
        all.sort_unstable();
        let instance = Instance { labels: all, ..record.instance.clone() };
        Arc::new(InstanceRecord { instance, ..(*record).clone() })
    }

    /// Like [`Self::join`], for an event from a slice.
    pub(super) fn join_event(&self, event: BackendEvent) -> BackendEvent {
        match event {
            BackendEvent::Apply(record) => BackendEvent::Apply(self.join(record)),
            other => other,
        }
    }
}

// === impl LabelSet ===

impl LabelSet {
    fn of(pod: &Pod) -> Self {
        let labels = pod.labels().iter().map(|(key, value)| (key.clone(), value.clone())).collect();
        Self { uid: pod.uid().unwrap_or_default(), labels }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::backend::{InstanceReadiness, MetadataSource};

    fn pod(uid: &str, labels: &serde_json::Value) -> Pod {
        serde_json::from_value(json!({ "metadata": { "name": "p", "uid": uid, "labels": labels } })).unwrap()
    }

    fn record(uid: &str) -> Arc<InstanceRecord> {
        let address = "10.0.0.1:8000".parse().unwrap();
        let labels = [("engine", "vllm"), ("of", "service")].map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
        let instance = Instance { generation: uid.to_owned(), labels, ..Instance::new("p", address) };
        Arc::new(InstanceRecord { instance, readiness: InstanceReadiness::Ready, metadata: MetadataSource::None, freshness: 0 })
    }

    fn joined(labels: &PodLabels, uid: &str) -> String {
        let all = labels.join(record(uid)).instance.labels.clone();
        all.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn labels_of_the_pod_go_first_and_only_of_this_life_of_it() {
        let mut labels = PodLabels::default();
        assert_eq!(joined(&labels, "1"), "engine=vllm of=service", "not known yet");
        assert_eq!(labels.reset(&[pod("1", &json!({ "engine": "sglang", "role": "decode" }))]), ["p"]);
        assert_eq!(joined(&labels, "1"), "engine=sglang of=service role=decode");
        assert_eq!(joined(&labels, "2"), "engine=vllm of=service", "another pod with the same name");
        assert!(labels.reset(&[pod("1", &json!({ "engine": "sglang", "role": "decode" }))]).is_empty(), "nothing changed");
        assert!(!labels.apply(&pod("1", &json!({ "engine": "sglang", "role": "decode" }))));
        assert!(labels.apply(&pod("1", &json!({ "role": "prefill" }))));
        assert_eq!(joined(&labels, "1"), "engine=vllm of=service role=prefill");
        labels.delete("p");
        assert_eq!(joined(&labels, "1"), "engine=vllm of=service");
    }
}
