//! The owners of index entries. An owner is an internal id for one generation of an endpoint, with
//! an estimate of how much the endpoint has cached.
//!
//! Entries carry an id of 11 bits. Each (slot, generation) pair gets its own id, so that entries of
//! a former generation stop matching immediately, without a walk of the table. A retired id is
//! reused only after a sweep of the whole table.
//!
//! The estimate follows from the ages of the owner's entries, for each class
//! ([`super::age_bands`]).
//!
//! The capacity that an engine reports is nominal: the engine's blocks hold more or less text than
//! the index's blocks, and generated tokens fill the cache as well. So the cached tokens in the
//! engine's replies correct the capacity: an evicted block lowers the capacity, and a cached block
//! beyond the estimate raises it.

use super::age_bands::{AgeBands, EntryState, PARTS};
use super::table::{BlockEntry, ByClass, EntryClass, NO_OWNER};
use crate::endpoint::{ENDPOINTS_MAX, EndpointRef, Generation};
use std::collections::VecDeque;

/// The maximum number of ids: one for each possible endpoint, and the same number for former
/// generations whose entries are not swept yet. Id 0 is [`NO_OWNER`].
pub(super) const OWNERS_MAX: usize = 2 * ENDPOINTS_MAX;

// The ids must fit into an entry, which has eleven bits for the id.
const _: () = assert!(OWNERS_MAX <= 1 << 11, "ids fit into an entry");

/// The number of owners whose entries of a block share buckets, so that one probe answers for all
/// these owners. But if every endpoint has cached a block, the block's entries crowd together. If
/// every endpoint had cached every block, 5 % of the entries would be lost at the load for which
/// the default table is sized. With four owners, 0.9 % would be lost, but each look-up would need
/// twice as many probes.
pub(super) const REGION_OWNERS: usize = 8;

pub(super) const REGIONS: usize = OWNERS_MAX / REGION_OWNERS;

/// The maximum of the true capacity as a multiple of the reported capacity. Text with two bytes per
/// token has this factor, because Switchpoint assumes four bytes per token.
const CAPACITY_FACTOR_MAX: u32 = 2;

/// After this many replies to one client that contradict the estimate, without a reply to another
/// client in between, each further one counts, because other clients no longer use the endpoint.
/// Before, one of them counts for each eighth of the capacity that the endpoint receives. A client
/// can make its prompts miss, for example by a parameter with which the engine reads no cache, or
/// hit where the index knows nothing.
const CONTRADICTIONS_OF_ONE_CLIENT_MAX: u8 = 32;

/// The number of blocks that an endpoint has received since it received one block. Only the age
/// band of that block is known, so the number is a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReuseDistance {
    /// The lower bound of the range, in blocks.
    pub at_least: u32,
    /// The upper bound of the range, in blocks, including the block itself.
    pub at_most: u32,
}

pub(super) struct OwnerTable {
    rows: Vec<Owner>,
    /// The current generation of each slot and the id of this generation, or [`NO_OWNER`] if the
    /// slot has no owner.
    by_slot: Vec<(Generation, u16)>,
    /// The ids whose entries are being swept, oldest first. The second number of each pair is the
    /// number of swept buckets, counted from the creation of the index, at which the id becomes
    /// free.
    retired: VecDeque<(u16, u64)>,
    /// The lowest id that is above all ids that were ever in use.
    used: usize,
}

#[derive(Clone, Copy)]
struct Owner {
    state: OwnerState,
    /// The capacity of the endpoint's cache as the engine reports it, in blocks.
    nominal: u32,
    /// The capacity in blocks, corrected by the cached tokens that the engine reports.
    capacity: u32,
    bands: ByClass<AgeBands>,
    entries: u32,
    /// The client of the last reply, as a hash, and how many of its replies in a row contradicted
    /// the estimate: the maximum if there was no other client.
    client: Option<u32>,
    contradictions: u8,
    /// The client whose contradiction counted last, as a hash, and the lower half of
    /// [`AgeBands::newest`] at that time. A band has an eighth of the capacity.
    counted: (u32, u32),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OwnerState {
    Free,
    Live,
    Retired,
}

pub(super) fn region(owner: u16) -> u16 {
    owner / REGION_OWNERS as u16
}

/// Returns the bit of an owner in a byte for the owners of its region.
pub(super) fn region_bit(owner: u16) -> u8 {
    1 << (owner % REGION_OWNERS as u16)
}

// === impl OwnerTable ===

impl OwnerTable {
    /// Creates a table without owners. `present` is false for an index of zero entries, which needs
    /// no room for owners.
    pub(super) fn new(present: bool) -> Self {
        let (owners, slots) = if present {
            (OWNERS_MAX, ENDPOINTS_MAX)
        } else {
            (0, 0)
        };
        Self {
            rows: vec![Owner::FREE; owners],
            by_slot: vec![(Generation(0), NO_OWNER); slots],
            retired: VecDeque::with_capacity(owners),
            used: 0,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.rows.len() * size_of::<Owner>()
            + self.by_slot.len() * size_of::<(Generation, u16)>()
            + self.rows.len() * size_of::<(u16, u64)>()
    }

    /// Returns the id of `endpoint`, if the endpoint has an id.
    pub(super) fn get(&self, endpoint: EndpointRef) -> Option<u16> {
        let &(generation, id) = self.by_slot.get(usize::from(endpoint.slot.0))?;
        (id != NO_OWNER && generation == endpoint.generation).then_some(id)
    }

    /// Whether the slot of `endpoint` is within the table.
    pub(super) fn has_slot(&self, endpoint: EndpointRef) -> bool {
        usize::from(endpoint.slot.0) < self.by_slot.len()
    }

    /// Assigns the lowest free id to `endpoint`, which must have none. Returns `None` if no id is
    /// free.
    pub(super) fn lend(&mut self, endpoint: EndpointRef, epochs: ByClass<u64>) -> Option<u16> {
        let slot = usize::from(endpoint.slot.0);
        let free = |row: &Owner| row.state == OwnerState::Free;
        let id = self.rows.iter().skip(1).position(free)? + 1;
        *self.by_slot.get_mut(slot)? = (endpoint.generation, id as u16);
        *self.rows.get_mut(id)? = Owner::new(epochs);
        self.used = self.used.max(id + 1);
        Some(id as u16)
    }

    /// Retires the id of the slot, whichever generation has the id. The id becomes free when
    /// `clean_at` buckets have been swept.
    pub(super) fn retire_slot(&mut self, endpoint: EndpointRef, clean_at: u64) {
        let Some((_, held)) = self.by_slot.get_mut(usize::from(endpoint.slot.0)) else {
            return;
        };
        let id = std::mem::replace(held, NO_OWNER);
        if id == NO_OWNER {
            return;
        }
        if let Some(row) = self.rows.get_mut(usize::from(id)) {
            *row = Owner {
                state: OwnerState::Retired,
                ..Owner::FREE
            };
            self.retired.push_back((id, clean_at));
        }
    }

    /// Frees the ids that become free after this many swept buckets. Returns true when no retired
    /// id waits for the sweep.
    pub(super) fn swept(&mut self, buckets: u64) -> bool {
        while let Some(&(id, clean_at)) = self.retired.front()
            && clean_at <= buckets
        {
            self.retired.pop_front();
            if let Some(row) = self.rows.get_mut(usize::from(id)) {
                row.state = OwnerState::Free;
            }
        }
        self.retired.is_empty()
    }

    pub(super) fn is_live(&self, id: u16) -> bool {
        self.row(id)
            .is_some_and(|row| row.state == OwnerState::Live)
    }

    pub(super) fn is_retired(&self, id: u16) -> bool {
        self.row(id)
            .is_some_and(|row| row.state == OwnerState::Retired)
    }

    /// Returns the number of regions in which an owner has, or had, entries.
    pub(super) fn regions(&self) -> u16 {
        self.used.div_ceil(REGION_OWNERS) as u16
    }

    /// Returns the state of `entry`, last touched in `epoch`; the entry is neither cached nor maybe
    /// cached if the owner is not live.
    pub(super) fn holding(&self, entry: BlockEntry, epoch: u64) -> EntryState {
        self.row(entry.owner).map_or(EntryState::default(), |row| {
            row.bands.of(entry.class).state(epoch)
        })
    }

    pub(super) fn gained(&mut self, entry: BlockEntry, epoch: u64) {
        if let Some(row) = self.rows.get_mut(usize::from(entry.owner)) {
            row.entries = row.entries.saturating_add(1);
            row.bands.of_mut(entry.class).gained(entry, epoch);
        }
    }

    pub(super) fn lost(&mut self, entry: BlockEntry, epoch: u64) {
        if let Some(row) = self.rows.get_mut(usize::from(entry.owner)) {
            row.entries = row.entries.saturating_sub(1);
            row.bands.of_mut(entry.class).lost(entry, epoch);
        }
    }

    /// Whether the cache of `id` may be large enough for a prompt of this many blocks.
    pub(super) fn fits(&self, id: u16, blocks: u32) -> bool {
        self.row(id)
            .is_some_and(|row| blocks <= row.nominal.saturating_mul(CAPACITY_FACTOR_MAX))
    }

    /// Sets the capacity that the engine reports, in blocks. The learned correction stays as long
    /// as the reported value does not change.
    pub(super) fn set_capacity(&mut self, id: u16, nominal: u32) {
        if let Some(row) = self
            .rows
            .get_mut(usize::from(id))
            .filter(|row| row.nominal != nominal)
        {
            row.nominal = nominal;
            row.capacity = nominal;
            row.bands.confirmed.settle_anew(nominal);
            row.bands.claimed.settle_anew(nominal);
        }
    }

    pub(super) fn capacity(&self, id: u16) -> Option<u32> {
        self.row(id).map(|row| row.capacity)
    }

    /// Returns how many blocks `id` has received after a confirmed entry whose last touch was in
    /// `epoch`.
    pub(super) fn reuse(&self, id: u16, epoch: u64) -> Option<ReuseDistance> {
        self.row(id)?.bands.confirmed.reuse(epoch)
    }

    /// Records a reply to this client. Returns whether the capacity may be learned from it. A
    /// client whose replies contradict the estimate changes the capacity once in an age band.
    pub(super) fn counts_reply(&mut self, id: u16, client: u64, contradicts: bool) -> bool {
        let Some(row) = self.rows.get_mut(usize::from(id)) else {
            return false;
        };
        let client = client as u32;
        if row.client != Some(client) {
            row.contradictions = row.client.map_or(u8::MAX, |_| 0);
            row.client = Some(client);
        }
        if !contradicts {
            return true;
        }
        row.contradictions = row.contradictions.saturating_add(1);
        let now = (client, row.bands.confirmed.newest() as u32);
        std::mem::replace(&mut row.counted, now) != now
            || row.contradictions > CONTRADICTIONS_OF_ONE_CLIENT_MAX
    }

    pub(super) fn learn(&mut self, id: u16, reuse: ReuseDistance, there: bool) {
        let Some(row) = self.rows.get_mut(usize::from(id)) else {
            return;
        };
        match there {
            true if reuse.at_least >= row.capacity - row.capacity / PARTS => row.grow(),
            true => {}
            false => row.shrink(reuse),
        }
    }

    pub(super) fn learn_more(&mut self, id: u16) {
        if let Some(row) = self.rows.get_mut(usize::from(id)) {
            row.grow();
        }
    }

    /// Updates `id` after touches of a class up to `epoch`: starts an age band when the newest is
    /// full, and recomputes which entries count as cached.
    pub(super) fn touched(&mut self, id: u16, class: EntryClass, epoch: u64) {
        if let Some(row) = self.rows.get_mut(usize::from(id)) {
            let bands = row.bands.of_mut(class);
            bands.age(epoch, row.capacity);
            bands.settle(row.capacity);
        }
    }

    pub(super) fn totals(&self) -> (usize, usize) {
        let live = self.rows.iter().filter(|row| row.state == OwnerState::Live);
        live.fold((0, 0), |(owners, entries), row| {
            (owners + 1, entries + row.entries as usize)
        })
    }

    pub(super) fn retired(&self) -> usize {
        self.retired.len()
    }

    fn row(&self, id: u16) -> Option<&Owner> {
        self.rows.get(usize::from(id))
    }
}

// === impl Owner ===

impl Owner {
    const FREE: Self = Self {
        state: OwnerState::Free,
        nominal: u32::MAX,
        capacity: u32::MAX,
        bands: ByClass {
            confirmed: AgeBands::NONE,
            claimed: AgeBands::NONE,
        },
        entries: 0,
        client: None,
        contradictions: 0,
        counted: (0, 0),
    };

    fn new(epochs: ByClass<u64>) -> Self {
        Self {
            state: OwnerState::Live,
            bands: ByClass {
                confirmed: AgeBands::new(epochs.confirmed),
                claimed: AgeBands::new(epochs.claimed),
            },
            ..Self::FREE
        }
    }

    fn settle(&mut self) {
        self.bands.confirmed.settle(self.capacity);
        self.bands.claimed.settle(self.capacity);
    }

    /// Raises the capacity by an eighth, to at most [`CAPACITY_FACTOR_MAX`] times the reported
    /// capacity. An unlimited capacity stays as it is.
    fn grow(&mut self) {
        let most = self.nominal.saturating_mul(CAPACITY_FACTOR_MAX);
        self.capacity = self
            .capacity
            .saturating_add((self.capacity / PARTS).max(1))
            .min(most);
        self.settle();
    }

    /// Lowers the capacity to the number of blocks that one reported miss suggests, but by at most
    /// an eighth, the step of `grow`. A larger step could be wrong, because running requests take
    /// cache memory only for a while. If the capacity fell too low, no request would be sent to an
    /// endpoint for blocks beyond the capacity, so no report could raise the capacity again. A
    /// missing block that is too recent to be evicted was not computed yet, and is ignored.
    fn shrink(&mut self, ReuseDistance { at_least, at_most }: ReuseDistance) {
        let held = self.bands.confirmed.blocks();
        let believed = self.capacity.min(held);
        if at_least >= believed / PARTS && at_most < believed {
            self.capacity = at_most.max(believed - believed / PARTS);
            self.settle();
        }
    }
}
