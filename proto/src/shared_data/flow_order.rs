//! The requests that the VMs hold for one pool, in one order.
//!
//! ```text
//!  head     round | began | rows, bands: 32 bits each
//!  row      VM | written | woken | round | evictions, kinds: 32 bits each | first tag | next tag | kinds
//!  tag      priority, 1 if owed: 32 bits each | rank | key; all 0 for none
//!  kind     priority | requests | bytes
//!  band     priority, flows: 32 bits each | credit | virtual time | turn | flows
//!  flow     id | start | turn | attained | attained at
//! ```
//! Ranks, credits, times and tokens are bits of a double. Bit 1 of the owed word says that there is
//! a tag.

use scheduler::Timestamp;
use scheduler::flow::{BandAccount, BandHeld, BandService, FlowAccount, HeldTag, OrderRow, SharedOrder};

use crate::words::{self, pair, unpair};

/// The most rows, bands, kinds of a row and flows of a band that are read.
const ENTRIES_MAX: u32 = 1_024;

/// The owed word of a tag: it exists.
const EXISTS: u32 = 2;

/// Writes the order.
#[must_use]
pub fn write(order: &SharedOrder) -> Vec<u8> {
    let mut bytes = Vec::new();
    words::append(&mut bytes, &[order.round, order.began.0, pair(narrow(order.rows.len()), narrow(order.bands.len()))]);
    for row in &order.rows {
        let evict = u32::try_from(row.evict).unwrap_or(u32::MAX);
        words::append(&mut bytes, &[row.vm, row.written.0, row.woken.0, row.round, pair(evict, narrow(row.bands.len()))]);
        [row.first, row.next].into_iter().for_each(|tag| words::append(&mut bytes, &tag_words(tag)));
        row.bands.iter().for_each(|band| words::append(&mut bytes, &[priority_word(band.priority), band.requests, band.bytes]));
    }
    for band in &order.bands {
        let head = pair(band.priority.cast_unsigned(), narrow(band.flows.len()));
        words::append(&mut bytes, &[head, band.credit.to_bits(), band.account.virtual_time.to_bits(), band.account.turn]);
        for (id, flow) in &band.flows {
            words::append(&mut bytes, &[*id, flow.start.to_bits(), flow.turn, flow.attained.to_bits(), flow.attained_at.0]);
        }
    }
    bytes
}

/// Reads an order; `None` if the bytes are not one.
#[must_use]
pub fn read(bytes: &[u8]) -> Option<SharedOrder> {
    let ([round, began, counts], mut rest) = words::split(bytes)?;
    let (rows, bands) = counted(counts)?;
    let mut order = SharedOrder { round, began: Timestamp(began), ..SharedOrder::default() };
    for _ in 0..rows {
        let ([vm, written, woken, round, counts], tail) = words::split(rest)?;
        let ([first, first_rank, first_key, next, next_rank, next_key], mut tail) = words::split(tail)?;
        let (evict, kinds) = unpair(counts);
        let mut row =
            OrderRow { vm, written: Timestamp(written), woken: Timestamp(woken), round, evict: evict.into(), ..OrderRow::default() };
        (row.first, row.next) = (tag([first, first_rank, first_key]), tag([next, next_rank, next_key]));
        for _ in 0..kinds.min(ENTRIES_MAX) {
            let ([priority, requests, bytes], after) = words::split(tail)?;
            row.bands.push(BandHeld { priority: unpair(priority).0.cast_signed(), requests, bytes });
            tail = after;
        }
        order.rows.push(row);
        rest = tail;
    }
    for _ in 0..bands {
        let ([head, credit, virtual_time, turn], mut tail) = words::split(rest)?;
        let (priority, flows) = unpair(head);
        let account = BandAccount { virtual_time: f64::from_bits(virtual_time), turn };
        let mut band = BandService { priority: priority.cast_signed(), credit: f64::from_bits(credit), account, flows: Vec::new() };
        for _ in 0..flows.min(ENTRIES_MAX) {
            let ([id, start, turn, attained, attained_at], after) = words::split(tail)?;
            let [start, attained] = [start, attained].map(f64::from_bits);
            band.flows.push((id, FlowAccount { start, turn, attained, attained_at: Timestamp(attained_at) }));
            tail = after;
        }
        order.bands.push(band);
        rest = tail;
    }
    rest.is_empty().then_some(order)
}

fn counted(counts: u64) -> Option<(u32, u32)> {
    let (rows, bands) = unpair(counts);
    (rows <= ENTRIES_MAX && bands <= ENTRIES_MAX).then_some((rows, bands))
}

fn tag_words(tag: Option<HeldTag>) -> [u64; 3] {
    let words = |tag: HeldTag| [pair(tag.priority.cast_unsigned(), u32::from(tag.owed) | EXISTS), tag.rank.to_bits(), tag.key];
    tag.map_or([0; 3], words)
}

fn tag([head, rank, key]: [u64; 3]) -> Option<HeldTag> {
    let (priority, owed) = unpair(head);
    let tag = HeldTag { owed: owed & 1 == 1, priority: priority.cast_signed(), rank: f64::from_bits(rank), key };
    (owed & EXISTS == EXISTS).then_some(tag)
}

fn priority_word(priority: i32) -> u64 {
    pair(priority.cast_unsigned(), 0)
}

fn narrow(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
