//! The membership of a pool: its endpoints, their slots, and which of them are hosts in Envoy.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use discovery::Instance;
use scheduler::{ENDPOINTS_MAX, EndpointMetrics, EndpointRef, Slot};

use super::{DepartingHost, Pool, adoption, unconfirmed};
use crate::pool::clock::WallAndMonotonic;
use crate::pool::instance_metadata::{InstanceMetadata, ModelNameBudget};
use crate::pool::member::{Absence, Absentee, PoolMember, member};
use crate::pool::view::EdsSet;

// === impl Pool ===

impl Pool {
    /// Gives the endpoints the slots and generations of a snapshot file or of another daemon,
    /// because proxies know these. An endpoint that was not saved keeps its own slot, unless that
    /// slot is taken now. A pool without a set from discovery takes the saved set.
    pub fn adopt(&mut self, saved: Vec<(EndpointRef, Instance)>, now: WallAndMonotonic) {
        if !self.view.sources.complete {
            self.view.sources.complete = true;
            let eds_revision = self.view.eds.revision;
            let restored = saved
                .into_iter()
                .map(|(id, instance)| member(id, Arc::new(instance), eds_revision, now));
            return self.replace_members(restored.collect());
        }
        // The metrics stay with their member: `replace_members` finds them by the new id.
        let moved = adoption::adopt(
            &mut self.members,
            &saved,
            self.departing.iter().map(|d| d.id.slot),
        );
        let mut members = self.members.clone();
        for position in moved.into_iter().rev() {
            let PoolMember { instance, .. } = members.remove(position);
            self.waiting.push(Absentee {
                instance,
                absence: Absence::NoFreeSlot,
                since: now.wall,
            });
        }
        self.admit_waiting(&mut members, now);
        self.replace_members(members);
    }

    /// Applies a complete set of instances from discovery.
    pub fn replace_instances(&mut self, instances: Vec<Instance>, now: WallAndMonotonic) {
        if !self.view.sources.synced || self.view.sources.discovery_error.is_some() {
            self.view.sources.synced = true;
            self.view.sources.complete = true;
            self.view.sources.discovery_error = None;
            self.touched = true;
        }
        self.apply_set(instances, now);
    }

    pub(super) fn apply_set(&mut self, instances: Vec<Instance>, now: WallAndMonotonic) {
        let (instances, dropped) = self.unconfirmed.select(instances, &self.members, now);
        self.touched |= self.dropped != dropped;
        self.dropped = dropped;
        // A new process at the same address is a new generation and gets its own slot.
        let mut wanted: BTreeMap<_, Instance> = instances
            .into_iter()
            .map(|i| (unconfirmed::key(&i), i))
            .collect();
        let mut members = Vec::with_capacity(wanted.len());
        let mut changed = false;
        for old in &self.members {
            match wanted.remove(&unconfirmed::key(&old.instance)) {
                Some(new) if new == *old.instance => members.push(old.clone()),
                Some(new) => {
                    changed = true;
                    members.push(PoolMember {
                        metadata: InstanceMetadata::from_instance(&new),
                        instance: Arc::new(new),
                        ..old.clone()
                    });
                }
                None => {
                    changed = true;
                    self.departing
                        .push(DepartingHost::new(old, now, self.view.revision + 1));
                }
            }
        }
        self.waiting.clear();
        let waiting = |i| Absentee {
            instance: Arc::new(i),
            absence: Absence::NoFreeSlot,
            since: now.wall,
        };
        self.waiting.extend(wanted.into_values().map(waiting));
        changed |= self.make_room(&mut members, now);
        let kept = members.len();
        self.admit_waiting(&mut members, now);
        self.touched |= !self.waiting.is_empty();
        if changed || members.len() > kept {
            self.replace_members(members);
        }
    }

    pub(super) fn admit_waiting(&mut self, members: &mut Vec<PoolMember>, now: WallAndMonotonic) {
        let mut taken = [false; ENDPOINTS_MAX];
        for id in members
            .iter()
            .map(|m| m.id)
            .chain(self.departing.iter().map(|d| d.id))
        {
            if let Some(slot) = taken.get_mut(usize::from(id.slot.0)) {
                *slot = true;
            }
        }
        let mut free = (0u16..)
            .zip(taken)
            .filter(|(_, taken)| !taken)
            .map(|(slot, _)| Slot(slot));
        let mut room = ModelNameBudget::default();
        for member in &*members {
            room.reserve(&member.metadata.models);
        }
        for waiting in std::mem::take(&mut self.waiting) {
            let fits = room.reserve(&InstanceMetadata::from_instance(&waiting.instance).models);
            let absence = match fits.then(|| free.next()) {
                Some(Some(slot)) => {
                    let generation = self.view.next_generation();
                    let id = EndpointRef { slot, generation };
                    members.push(member(id, waiting.instance, self.view.eds.revision, now));
                    continue;
                }
                Some(None) => Absence::NoFreeSlot,
                None => Absence::TooManyModels,
            };
            self.waiting.push(Absentee { absence, ..waiting });
        }
    }

    /// Removes members whose model names exceed the limit, so that the other members can be sent.
    /// Returns whether any member was removed.
    fn make_room(&mut self, members: &mut Vec<PoolMember>, now: WallAndMonotonic) -> bool {
        let mut room = ModelNameBudget::default();
        let revision = self.view.revision + 1;
        let before = members.len();
        members.retain(|m| {
            let fits = room.reserve(&m.metadata.models);
            if !fits {
                self.departing.push(DepartingHost::new(m, now, revision));
                self.waiting.push(Absentee {
                    instance: Arc::clone(&m.instance),
                    absence: Absence::TooManyModels,
                    since: now.wall,
                });
            }
            fits
        });
        members.len() < before
    }

    /// Replaces the members; metrics stay with their slot and generation.
    pub(super) fn replace_members(&mut self, mut members: Vec<PoolMember>) {
        members.sort_by_key(|m| m.id.slot);
        fit_adapters(&mut members);
        let mut known: BTreeMap<EndpointRef, EndpointMetrics> = self
            .members
            .iter()
            .map(|m| m.id)
            .zip(std::mem::take(&mut self.metrics))
            .collect();
        self.metrics = members
            .iter()
            .map(|m| known.remove(&m.id).unwrap_or_default())
            .collect();
        self.members = members;
        self.view.revision += 1;
        self.view.metrics_revision += 1;
        self.touched = true;
        self.refresh_eds();
    }

    pub(super) fn refresh_eds(&mut self) {
        let instances = self
            .members
            .iter()
            .map(|m| &m.instance)
            .chain(self.departing.iter().map(|d| &d.instance));
        let hosts = instances.filter(|instance| self.hosts.admits(instance));
        let mut addresses: Vec<SocketAddr> = hosts.map(|instance| instance.address).collect();
        addresses.sort_unstable();
        addresses.dedup();
        if *addresses == *self.view.eds.addresses {
            return;
        }
        let revision = self.view.eds.revision + 1;
        for member in &mut self.members {
            // Envoy knows an address that was in EDS before. An endpoint that is not a host does
            // not wait for EDS.
            let address = member.instance.address;
            let eds = &self.view.eds.addresses;
            if addresses.binary_search(&address).is_ok() && eds.binary_search(&address).is_err() {
                member.eds_since = revision;
            }
        }
        self.view.eds = EdsSet {
            revision,
            addresses: addresses.into(),
        };
    }
}

// === impl DepartingHost ===

impl DepartingHost {
    fn new(member: &PoolMember, at: WallAndMonotonic, revision: u64) -> Self {
        Self {
            id: member.id,
            instance: Arc::clone(&member.instance),
            at,
            revision,
        }
    }
}

/// Decides which members' adapters are sent to proxies, so that the names of all models stay within
/// the limit. The models of the metadata come first. Other adapters are served only where requests
/// use them now.
pub(super) fn fit_adapters(members: &mut [PoolMember]) {
    let mut room = ModelNameBudget::default();
    for member in &*members {
        room.reserve(&member.metadata.models);
    }
    for member in members {
        let fits = room.reserve(&member.metadata.served(&member.adapters));
        if !fits && member.adapters_fit {
            tracing::warn!(
                endpoint = member.instance.name,
                "the model names of the pool reach their limit; proxies do not get this engine's adapters"
            );
        }
        member.adapters_fit = fits;
    }
}
