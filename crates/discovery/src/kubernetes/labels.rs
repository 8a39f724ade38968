//! Adds the labels of pods, and the reasons why pods are not ready, to the records from slices.
//! This module has no I/O.
//!
//! The slice controller copies the labels of the Service, which are the same for all its pods.
//! Labels that differ between pods (engine, role, adapters) are only on the pods. If a slice and a
//! pod have the same label, the pod's value is used.
//!
//! A slice does not give the reason why an endpoint is not ready. The endpoint is unconfirmed only
//! if the status of its pod shows that the node failed and the pod did not. When the node is back,
//! the pod is ready shortly before the slice reports it. Until then the endpoint stays unconfirmed.

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use super::pods;
use crate::backend::{BackendEvent, InstanceReadiness, InstanceRecord};
use crate::instance::Instance;

/// The labels of pods, by name.
#[derive(Debug, Default)]
pub(super) struct PodLabels(HashMap<String, LabelSet>);

#[derive(Debug, PartialEq, Eq)]
struct LabelSet {
    /// The UID of the pod. A new pod with the same name is a new generation.
    uid: String,
    labels: Vec<(String, String)>,
    /// Whether the last report that the pod is not ready was about its node.
    node_lost: bool,
}

// === impl PodLabels ===

impl PodLabels {
    /// Applies the complete list of pods; returns the names of the pods that changed.
    pub(super) fn reset(&mut self, pods: &[Pod]) -> Vec<String> {
        let before = std::mem::take(&mut self.0);
        self.0 = pods
            .iter()
            .map(|pod| {
                (
                    pod.name_any(),
                    LabelSet::from_pod(pod, before.get(&pod.name_any())),
                )
            })
            .collect();
        self.0
            .iter()
            .filter(|(name, labels)| before.get(*name) != Some(labels))
            .map(|(name, _)| name.clone())
            .collect()
    }

    /// Applies a new or changed pod; returns whether its labels or its readiness changed.
    pub(super) fn apply(&mut self, pod: &Pod) -> bool {
        let labels = LabelSet::from_pod(pod, self.0.get(&pod.name_any()));
        let changed = self.0.get(&pod.name_any()) != Some(&labels);
        self.0.insert(pod.name_any(), labels);
        changed
    }

    /// Removes a pod. The remaining slice records of the pod have no pod labels.
    pub(super) fn delete(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// Returns the record with the labels and the readiness of its pod, if they are known.
    pub(super) fn join(&self, record: &InstanceRecord) -> Arc<InstanceRecord> {
        let of_pod = self
            .0
            .get(record.name())
            .filter(|pod| pod.uid == record.instance.generation);
        let readiness = match &record.readiness {
            InstanceReadiness::Unconfirmed(_) if of_pod.is_some_and(|pod| pod.node_lost) => {
                InstanceReadiness::Unconfirmed(pods::NODE_NOT_READY.to_owned())
            }
            InstanceReadiness::Unconfirmed(why) => InstanceReadiness::NotReady(why.clone()),
            other => other.clone(),
        };
        let Some(LabelSet { labels, .. }) = of_pod else {
            return Arc::new(InstanceRecord {
                readiness,
                ..record.clone()
            });
        };
        let mut all = labels.clone();
        all.extend(
            record
                .instance
                .labels
                .iter()
                .filter(|(key, _)| labels.iter().all(|(known, _)| known != key))
                .cloned(),
        );
        all.sort_unstable();
        let instance = Instance {
            labels: all,
            ..record.instance.clone()
        };
        Arc::new(InstanceRecord {
            instance,
            readiness,
            ..record.clone()
        })
    }

    /// Joins an event from a slice with its pod, as [`Self::join`] does for a record.
    pub(super) fn join_event(&self, event: BackendEvent) -> BackendEvent {
        match event {
            BackendEvent::Apply(record) => BackendEvent::Apply(self.join(&record)),
            other => other,
        }
    }
}

// === impl LabelSet ===

impl LabelSet {
    fn from_pod(pod: &Pod, before: Option<&Self>) -> Self {
        let labels = pod
            .labels()
            .iter()
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        let uid = pod.uid().unwrap_or_default();
        let node_lost = match pods::readiness(pod) {
            InstanceReadiness::Unconfirmed(_) => true,
            InstanceReadiness::NotReady(_) => false,
            InstanceReadiness::Ready => {
                before.is_some_and(|before| before.uid == uid && before.node_lost)
            }
        };
        Self {
            uid,
            labels,
            node_lost,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::backend::{InstanceReadiness, MetadataSource};

    fn pod(uid: &str, labels: &serde_json::Value) -> Pod {
        serde_json::from_value(json!({ "metadata": { "name": "p", "uid": uid, "labels": labels } }))
            .unwrap()
    }

    fn record(uid: &str) -> Arc<InstanceRecord> {
        let address = "10.0.0.1:8000".parse().unwrap();
        let labels = [("engine", "vllm"), ("of", "service")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .to_vec();
        let instance = Instance {
            generation: uid.to_owned(),
            labels,
            ..Instance::new("p", address)
        };
        Arc::new(InstanceRecord {
            instance,
            readiness: InstanceReadiness::Ready,
            metadata: MetadataSource::None,
            freshness: 0,
        })
    }

    fn joined(labels: &PodLabels, uid: &str) -> String {
        let all = labels.join(&record(uid)).instance.labels.clone();
        all.iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn labels_of_the_pod_go_first_and_only_of_this_life_of_it() {
        let mut labels = PodLabels::default();
        assert_eq!(
            joined(&labels, "1"),
            "engine=vllm of=service",
            "not known yet"
        );
        assert_eq!(
            labels.reset(&[pod("1", &json!({ "engine": "sglang", "role": "decode" }))]),
            ["p"]
        );
        assert_eq!(joined(&labels, "1"), "engine=sglang of=service role=decode");
        assert_eq!(
            joined(&labels, "2"),
            "engine=vllm of=service",
            "another pod with the same name"
        );
        assert!(
            labels
                .reset(&[pod("1", &json!({ "engine": "sglang", "role": "decode" }))])
                .is_empty(),
            "nothing changed"
        );
        assert!(!labels.apply(&pod("1", &json!({ "engine": "sglang", "role": "decode" }))));
        assert!(labels.apply(&pod("1", &json!({ "role": "prefill" }))));
        assert_eq!(joined(&labels, "1"), "engine=vllm of=service role=prefill");
        labels.delete("p");
        assert_eq!(joined(&labels, "1"), "engine=vllm of=service");
    }

    #[test]
    fn an_endpoint_is_unconfirmed_only_while_its_pod_shows_that_its_node_is_lost() {
        let with = |conditions: serde_json::Value| -> Pod {
            serde_json::from_value(json!({ "metadata": { "name": "p", "uid": "1" }, "status": { "conditions": conditions } })).unwrap()
        };
        let doubted = || {
            let readiness = InstanceReadiness::Unconfirmed("slice".to_owned());
            Arc::new(InstanceRecord {
                readiness,
                ..(*record("1")).clone()
            })
        };
        let is = |kind: &str, status: &str| json!({ "type": kind, "status": status });
        let mut labels = PodLabels::default();
        let not_ready = InstanceReadiness::NotReady("slice".to_owned());
        assert_eq!(
            labels.join(&doubted()).readiness,
            not_ready,
            "the pod is not known"
        );
        assert!(labels.apply(&with(json!([
            is("Ready", "False"),
            is("ContainersReady", "True")
        ]))));
        assert_eq!(
            labels.join(&doubted()).readiness,
            InstanceReadiness::Unconfirmed(pods::NODE_NOT_READY.to_owned())
        );
        assert_eq!(
            labels.join(&record("1")).readiness,
            InstanceReadiness::Ready,
            "the slice decides first"
        );
        let ready = with(json!([is("Ready", "True"), is("ContainersReady", "True")]));
        assert!(!labels.apply(&ready) && labels.reset(std::slice::from_ref(&ready)).is_empty());
        assert!(
            matches!(
                labels.join(&doubted()).readiness,
                InstanceReadiness::Unconfirmed(_)
            ),
            "the slice follows the pod"
        );
        assert!(labels.apply(&with(json!([
            is("Ready", "False"),
            is("ContainersReady", "False")
        ]))));
        assert_eq!(labels.join(&doubted()).readiness, not_ready);
        labels.apply(&ready);
        assert_eq!(
            labels.join(&doubted()).readiness,
            not_ready,
            "a pod that becomes ready"
        );
    }
}
