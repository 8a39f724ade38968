//! Follows custom resources of several kinds in one namespace. Each item of the stream is the whole
//! set.
//!
//! A kind that is not installed has no objects. The stream tries such a kind again later, because
//! it may be installed then. After an error, the last set stays.

use std::collections::BTreeMap;

use futures::stream::{BoxStream, SelectAll, StreamExt};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, Client, ResourceExt};
use serde_json::Value;

use super::listing::{ObjectWatch, ObjectWatchEvent};

/// A kind of custom resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CustomKind {
    /// The API group.
    pub group: &'static str,
    /// The version to read.
    pub version: &'static str,
    /// The name of the kind.
    pub kind: &'static str,
    /// The name in URLs.
    pub plural: &'static str,
}

struct ObjectFollower {
    events: SelectAll<BoxStream<'static, (usize, ObjectWatchEvent<DynamicObject>)>>,
    /// Objects by kind and name; `None` until the kind was listed.
    sets: Vec<Option<BTreeMap<String, Value>>>,
}

/// Follows all objects of these kinds in `kube_namespace`, without the fields that the API server
/// manages. An error says why the objects cannot be read now. The last set stays in use.
#[must_use]
pub fn follow_objects(
    client: &Client,
    kube_namespace: &str,
    kinds: &[CustomKind],
) -> BoxStream<'static, Result<Vec<Value>, String>> {
    let streams = kinds.iter().enumerate().map(|(at, kind)| {
        let gvk = GroupVersionKind::gvk(kind.group, kind.version, kind.kind);
        let api = Api::namespaced_with(
            client.clone(),
            kube_namespace,
            &ApiResource::from_gvk_with_plural(&gvk, kind.plural),
        );
        futures::stream::unfold(ObjectWatch::of_kind(api), move |mut listing| async move {
            Some(((at, listing.next().await), listing))
        })
        .boxed()
    });
    let follow = ObjectFollower {
        events: futures::stream::select_all(streams),
        sets: vec![None; kinds.len()],
    };
    futures::stream::unfold(follow, |mut follow| async move {
        Some((follow.next().await?, follow))
    })
    .boxed()
}

// === impl ObjectFollower ===

impl ObjectFollower {
    async fn next(&mut self) -> Option<Result<Vec<Value>, String>> {
        loop {
            let (at, event) = self.events.next().await?;
            let set = self.sets.get_mut(at)?;
            match event {
                ObjectWatchEvent::All(objects) => {
                    *set = Some(
                        objects
                            .iter()
                            .map(|object| (object.name_any(), value(object)))
                            .collect(),
                    );
                }
                ObjectWatchEvent::Applied(object) => drop(
                    set.get_or_insert_default()
                        .insert(object.name_any(), value(&object)),
                ),
                ObjectWatchEvent::Deleted(object) => {
                    drop(set.get_or_insert_default().remove(&object.name_any()));
                }
                ObjectWatchEvent::Failed(why) => return Some(Err(why)),
            }
            if let Some(all) = self
                .sets
                .iter()
                .map(Option::as_ref)
                .collect::<Option<Vec<_>>>()
            {
                return Some(Ok(all
                    .into_iter()
                    .flat_map(|set| set.values().cloned())
                    .collect()));
            }
        }
    }
}

/// Returns an object without the fields that readers do not need.
fn value(object: &DynamicObject) -> Value {
    let types = object.types.clone().unwrap_or_default();
    let mut value = object.data.clone();
    value["apiVersion"] = types.api_version.into();
    value["kind"] = types.kind.into();
    let created = object.creation_timestamp().map(|t| t.0.to_string());
    value["metadata"] =
        serde_json::json!({ "name": object.name_any(), "namespace": object.namespace() });
    if let Some(created) = created {
        value["metadata"]["creationTimestamp"] = created.into();
    }
    if let Some(fields) = value.as_object_mut() {
        fields.remove("status");
    }
    value
}
