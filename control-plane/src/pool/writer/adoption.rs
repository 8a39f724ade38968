//! Takes over the slots and generations that another daemon gave to the endpoints of a pool, so
//! that proxies keep their data on each endpoint. This module is pure.

use std::collections::BTreeMap;

use discovery::Instance;
use scheduler::{ENDPOINTS_MAX, EndpointRef, Slot};

use super::unconfirmed::key;
use crate::pool::member::PoolMember;

/// Gives each of `members` the slot and generation that it has in `saved`. A member that `saved`
/// does not name keeps its own slot and generation. Returns the positions of the members whose slot
/// another member has now. Such members need new slots. No member gets the slot of a departing
/// endpoint.
pub(super) fn adopt(
    members: &mut [PoolMember],
    saved: &[(EndpointRef, Instance)],
    departing: impl Iterator<Item = Slot>,
) -> Vec<usize> {
    let mut taken = [false; ENDPOINTS_MAX];
    let mut take = |slot: Slot| {
        taken
            .get_mut(usize::from(slot.0))
            .is_some_and(|taken| !std::mem::replace(taken, true))
    };
    for slot in departing {
        take(slot);
    }
    let saved: BTreeMap<_, EndpointRef> = saved
        .iter()
        .map(|(id, instance)| (key(instance), *id))
        .collect();
    let mut others = Vec::new();
    for (position, member) in members.iter_mut().enumerate() {
        match saved.get(&key(&member.instance)).filter(|id| take(id.slot)) {
            Some(id) => member.id = *id,
            None => others.push(position),
        }
    }
    others.retain(|position| {
        members
            .get(*position)
            .is_some_and(|member| !take(member.id.slot))
    });
    others
}
