//! Merges all EndpointSlices of a component. This module has no I/O.
//!
//! An endpoint may be in several slices at the same time: while it moves, if it is dual-stack, or
//! if two Services select it. Slices change one at a time. So records are kept by slice. An
//! endpoint is the merge of its records, and is removed with its last record. The time for an event
//! depends on the size of its own slice, not on the number of slices.
//!
//! Several slices may have a record of one endpoint. The merge prefers a ready record, then an IPv4
//! record (an endpoint has one address), then the record whose slice has the newest trigger time.
//! So of two pods with one name, the later pod is used. The order has no ties, so the result does
//! not depend on the order of events.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;

use crate::backend::{BackendEvent, InstanceReadiness, InstanceRecord, MetadataSource};
use crate::instance::{Instance, NAMESPACE_DEFAULT};

/// Labels that describe the slice, not the endpoint.
const SLICE_LABELS: &[&str] = &[
    "kubernetes.io/service-name",
    "service.kubernetes.io/headless",
];
const SLICE_LABEL_PREFIX: &str = "endpointslice.kubernetes.io/";

const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";
const ZONE_LABEL: &str = "topology.kubernetes.io/zone";
const NODE_LABEL: &str = "kubernetes.io/hostname";

/// The port of a slice that belongs to the instance. The instance serves `/metadata` at this port
/// and, unless its metadata sets another port, its traffic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortRule {
    /// The name of the port. `None` means the first port of the slice.
    pub name: Option<String>,
    /// The port to use if a slice has no port, or none with that name.
    pub fallback: Option<u16>,
}

/// The merge of all slices.
#[derive(Debug)]
pub struct SliceIndex {
    ports: PortRule,
    /// The endpoints of each slice.
    slices: HashMap<Arc<str>, BTreeSet<Arc<str>>>,
    /// The records of each endpoint, by slice. One slice may name an endpoint twice.
    endpoints: HashMap<Arc<str>, Vec<SliceRecord>>,
}

#[derive(Clone, Debug)]
struct SliceRecord {
    slice: Arc<str>,
    record: Arc<InstanceRecord>,
}

// === impl SliceIndex ===

impl SliceIndex {
    /// Creates an index without slices.
    #[must_use]
    pub fn new(ports: PortRule) -> Self {
        Self {
            ports,
            slices: HashMap::new(),
            endpoints: HashMap::new(),
        }
    }

    /// Applies a new or changed slice; returns the resulting events.
    pub fn apply(&mut self, slice: &EndpointSlice) -> Vec<BackendEvent> {
        let name: Arc<str> = slice.name_any().into();
        let records = records(slice, &self.ports);
        self.replace(&name, records)
    }

    /// Removes a slice; returns the resulting events.
    pub fn delete(&mut self, name: &str) -> Vec<BackendEvent> {
        self.replace(&name.into(), Vec::new())
    }

    /// Applies the complete list of slices. Returns the whole set of records.
    pub fn reset(&mut self, slices: &[EndpointSlice]) -> Vec<Arc<InstanceRecord>> {
        self.slices.clear();
        self.endpoints.clear();
        for slice in slices {
            let name: Arc<str> = slice.name_any().into();
            self.insert(&name, records(slice, &self.ports));
        }
        self.all()
    }

    /// Returns the whole set of records.
    pub fn all(&self) -> Vec<Arc<InstanceRecord>> {
        self.endpoints
            .values()
            .filter_map(|said| best(said))
            .cloned()
            .collect()
    }

    /// Returns the merged record of one endpoint.
    pub fn get(&self, name: &str) -> Option<Arc<InstanceRecord>> {
        self.endpoints
            .get(name)
            .and_then(|said| best(said))
            .cloned()
    }

    fn replace(
        &mut self,
        slice: &Arc<str>,
        records: Vec<Arc<InstanceRecord>>,
    ) -> Vec<BackendEvent> {
        let mut before: BTreeMap<Arc<str>, Option<Arc<InstanceRecord>>> = BTreeMap::new();
        let new = records.iter().map(|record| Arc::from(record.name()));
        for id in self
            .slices
            .get(slice)
            .into_iter()
            .flatten()
            .cloned()
            .chain(new)
        {
            let said = self.endpoints.get(&id).and_then(|said| best(said)).cloned();
            before.insert(id, said);
        }
        for id in self.slices.remove(slice).unwrap_or_default() {
            if let Some(said) = self.endpoints.get_mut(&id) {
                said.retain(|said| said.slice != *slice);
                if said.is_empty() {
                    self.endpoints.remove(&id);
                }
            }
        }
        self.insert(slice, records);
        let mut events = Vec::new();
        for (id, before) in before {
            match (self.endpoints.get(&id).and_then(|said| best(said)), before) {
                (Some(now), before) if before.as_ref() != Some(now) => {
                    events.push(BackendEvent::Apply(Arc::clone(now)));
                }
                (None, Some(_)) => events.push(BackendEvent::Delete(id)),
                _ => {}
            }
        }
        if events.is_empty() {
            events.push(BackendEvent::Alive);
        }
        events
    }

    fn insert(&mut self, slice: &Arc<str>, records: Vec<Arc<InstanceRecord>>) {
        let mut ids = BTreeSet::new();
        for record in records {
            let id: Arc<str> = record.name().into();
            self.endpoints
                .entry(Arc::clone(&id))
                .or_default()
                .push(SliceRecord {
                    slice: Arc::clone(slice),
                    record,
                });
            ids.insert(id);
        }
        if !ids.is_empty() {
            self.slices.insert(Arc::clone(slice), ids);
        }
    }
}

fn best(said: &[SliceRecord]) -> Option<&Arc<InstanceRecord>> {
    let rank = |said: &SliceRecord| {
        let InstanceRecord {
            instance,
            readiness,
            freshness,
            ..
        } = &*said.record;
        let ready = *readiness == InstanceReadiness::Ready;
        let v4 = instance.address.is_ipv4();
        (
            ready,
            v4,
            *freshness,
            instance.generation.clone(),
            instance.address,
            Reverse(Arc::clone(&said.slice)),
        )
    };
    said.iter()
        .max_by_key(|said| rank(said))
        .map(|said| &said.record)
}

/// Returns the records of one slice, without entries that cannot be used (without an address, or
/// with a name instead).
fn records(slice: &EndpointSlice, rule: &PortRule) -> Vec<Arc<InstanceRecord>> {
    // Slices of type FQDN have no defined semantics and are deprecated.
    if !["IPv4", "IPv6"].contains(&slice.address_type.as_str()) {
        return Vec::new();
    }
    let template = template(slice);
    let port = port(slice.ports.as_deref().unwrap_or_default(), rule);
    let endpoints = slice.endpoints.iter().flatten();
    endpoints
        .filter_map(|endpoint| record(endpoint, &template, port).map(Arc::new))
        .collect()
}

/// Returns the common values of all endpoints of a slice. The name in the record is the name of the
/// Service.
fn template(slice: &EndpointSlice) -> InstanceRecord {
    let service = slice
        .labels()
        .get("kubernetes.io/service-name")
        .map_or("service", String::as_str);
    let trigger = slice
        .annotations()
        .get(TRIGGER_TIME)
        .and_then(|t| t.parse::<Timestamp>().ok());
    let labels = slice.labels().iter().filter(|(key, _)| {
        !key.starts_with(SLICE_LABEL_PREFIX) && !SLICE_LABELS.contains(&key.as_str())
    });
    let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    InstanceRecord {
        instance: Instance {
            namespace: slice
                .namespace()
                .unwrap_or_else(|| NAMESPACE_DEFAULT.to_owned()),
            labels: labels
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect(),
            ..Instance::new(service, address)
        },
        readiness: InstanceReadiness::Ready,
        metadata: MetadataSource::None,
        freshness: trigger
            .and_then(|t| u64::try_from(t.as_microsecond()).ok())
            .unwrap_or(0),
    }
}

/// Returns the record of one endpoint, at this port of its slice.
fn record(
    endpoint: &Endpoint,
    template: &InstanceRecord,
    port: Option<u16>,
) -> Option<InstanceRecord> {
    let ip: IpAddr = endpoint.addresses.first()?.parse().ok()?; // further addresses have no meaning
    let address = SocketAddr::new(ip, port.unwrap_or(0));
    let mut instance = template.instance.clone();
    instance.address = address;
    let places = [
        (ZONE_LABEL, &endpoint.zone),
        (NODE_LABEL, &endpoint.node_name),
    ];
    for (label, place) in places {
        instance
            .labels
            .extend(place.iter().map(|place| (label.to_owned(), place.clone())));
    }
    instance.labels.sort_unstable();
    instance.labels.dedup_by(|a, b| a.0 == b.0);
    let pod = endpoint
        .target_ref
        .as_ref()
        .filter(|target| target.kind.as_deref() == Some("Pod"))
        .cloned()
        .unwrap_or_default();
    instance.name = pod
        .name
        .unwrap_or_else(|| format!("{}-{ip}", instance.name).replace(':', "-"));
    instance.namespace = pod.namespace.unwrap_or(instance.namespace);
    instance.generation = pod.uid.unwrap_or_default();
    let readiness = match port {
        None => InstanceReadiness::NotReady(
            "its slice has no such port, and no port is configured".to_owned(),
        ),
        Some(_) => readiness(endpoint.conditions.as_ref()),
    };
    Some(InstanceRecord {
        instance,
        readiness,
        metadata: MetadataSource::At(address),
        freshness: template.freshness,
    })
}

/// Reads the readiness of an endpoint from its conditions. `ready` alone is not enough: with
/// `publishNotReadyAddresses` it is always true, even for a server that does not serve. A slice
/// does not show whether the server or its node is not ready. Only the pod shows this difference
/// ([`super::labels`]).
fn readiness(conditions: Option<&EndpointConditions>) -> InstanceReadiness {
    let Some(EndpointConditions {
        ready,
        serving,
        terminating,
    }) = conditions
    else {
        return InstanceReadiness::Ready;
    };
    if terminating.unwrap_or(false) {
        InstanceReadiness::NotReady("it is terminating".to_owned())
    } else if !ready.unwrap_or(true) {
        InstanceReadiness::Unconfirmed("its readiness probe fails".to_owned())
    } else if !serving.unwrap_or(true) {
        InstanceReadiness::Unconfirmed("it is not serving, though published as ready".to_owned())
    } else {
        InstanceReadiness::Ready
    }
}

fn port(ports: &[EndpointPort], rule: &PortRule) -> Option<u16> {
    let meant = match &rule.name {
        Some(name) => ports.iter().find(|port| port.name.as_ref() == Some(name)),
        None => ports.first(),
    };
    meant
        .and_then(|port| port.port)
        .and_then(|port| u16::try_from(port).ok())
        .filter(|&port| port > 0)
        .or(rule.fallback)
}

#[cfg(test)]
mod tests;
