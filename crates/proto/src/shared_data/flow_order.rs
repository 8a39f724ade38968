//! The requests that the VMs hold for one pool, in one order.
//!
//! ```text
//!  head     round | began | rows, bands: 32 bits each | full endpoints
//!  row      VM | written | woken | round | evictions, kinds: 32 bits each | first tag | next tag | kinds
//!           | endpoints | each endpoint, and its priority
//!  tag      priority, 1 if owed: 32 bits each | flow | rank | key; all 0 for none
//!  kind     priority | requests | bytes
//!  band     priority, flows: 32 bits each | credit | virtual time | turn | flows
//!  flow     id | start | turn | attained | attained at
//!  full     endpoint | priority, tries: 32 bits each
//! ```
//! Ranks, credits, times and tokens are bits of a double. Bit 1 of the owed word says that there is
//! a tag.

use scheduler::Timestamp;
use scheduler::flow::{
    BandAccount, BandHeld, BandService, FlowAccount, FullEndpoint, HeldTag, OrderRow, SharedOrder,
};

use crate::words::{self, WORD, pair, unpair};

/// The owed word of a tag: it exists.
const EXISTS: u32 = 2;

/// The words of a value, one after the other.
struct Words<'b>(std::slice::Iter<'b, [u8; WORD]>);

#[must_use]
pub fn write(order: &SharedOrder) -> Vec<u8> {
    let mut words = vec![
        order.round,
        order.began.0,
        pair(narrow(order.rows.len()), narrow(order.bands.len())),
        order.full.len() as u64,
    ];
    for row in &order.rows {
        let evict = u32::try_from(row.evict).unwrap_or(u32::MAX);
        words.extend([
            row.vm,
            row.written.0,
            row.woken.0,
            row.round,
            pair(evict, narrow(row.bands.len())),
        ]);
        for tag in [row.first, row.next] {
            words.extend(tag.map_or([0; 4], |tag| {
                [
                    pair(tag.priority.cast_unsigned(), u32::from(tag.owed) | EXISTS),
                    tag.flow,
                    tag.rank.to_bits(),
                    tag.key,
                ]
            }));
        }
        for band in &row.bands {
            words.extend([
                pair(band.priority.cast_unsigned(), 0),
                band.requests,
                band.bytes,
            ]);
        }
        words.push(row.endpoints.len() as u64);
        for (endpoint, priority) in &row.endpoints {
            words.extend([
                words::of_endpoint(*endpoint, 0),
                pair(priority.cast_unsigned(), 0),
            ]);
        }
    }
    for band in &order.bands {
        let head = pair(band.priority.cast_unsigned(), narrow(band.flows.len()));
        words.extend([
            head,
            band.credit.to_bits(),
            band.account.virtual_time.to_bits(),
            band.account.turn,
        ]);
        for (id, flow) in &band.flows {
            words.extend([
                *id,
                flow.start.to_bits(),
                flow.turn,
                flow.attained.to_bits(),
                flow.attained_at.0,
            ]);
        }
    }
    for full in &order.full {
        words.extend([
            words::of_endpoint(full.endpoint, 0),
            pair(full.priority.cast_unsigned(), full.tries),
        ]);
    }
    words::write(&words, &[])
}

/// Reads an order; `None` if the bytes are not one.
#[must_use]
pub fn read(bytes: &[u8]) -> Option<SharedOrder> {
    let (chunks, []) = bytes.as_chunks() else {
        return None;
    };
    let mut words = Words(chunks.iter());
    let mut order = SharedOrder {
        round: words.next()?,
        began: Timestamp(words.next()?),
        ..SharedOrder::default()
    };
    let ((rows, bands), full) = (unpair(words.next()?), words.next()?);
    for _ in 0..rows {
        let mut row = OrderRow {
            vm: words.next()?,
            written: Timestamp(words.next()?),
            woken: Timestamp(words.next()?),
            round: words.next()?,
            ..OrderRow::default()
        };
        let (evict, kinds) = unpair(words.next()?);
        row.evict = evict.into();
        row.first = words.tag()?;
        row.next = words.tag()?;
        for _ in 0..kinds {
            let priority = unpair(words.next()?).0.cast_signed();
            row.bands.push(BandHeld {
                priority,
                requests: words.next()?,
                bytes: words.next()?,
            });
        }
        for _ in 0..words.next()? {
            let endpoint = words::endpoint(words.next()?)?.0;
            let priority = unpair(words.next()?).0;
            row.endpoints.push((endpoint, priority.cast_signed()));
        }
        order.rows.push(row);
    }
    for _ in 0..bands {
        let (priority, flows) = unpair(words.next()?);
        let mut band = BandService {
            priority: priority.cast_signed(),
            credit: words.float()?,
            ..BandService::default()
        };
        band.account = BandAccount {
            virtual_time: words.float()?,
            turn: words.next()?,
        };
        for _ in 0..flows {
            let id = words.next()?;
            let start = words.float()?;
            let turn = words.next()?;
            let attained = words.float()?;
            let attained_at = Timestamp(words.next()?);
            band.flows.push((
                id,
                FlowAccount {
                    start,
                    turn,
                    attained,
                    attained_at,
                },
            ));
        }
        order.bands.push(band);
    }
    for _ in 0..full {
        let ((endpoint, _), (priority, tries)) =
            (words::endpoint(words.next()?)?, unpair(words.next()?));
        order.full.push(FullEndpoint {
            endpoint,
            priority: priority.cast_signed(),
            tries,
        });
    }
    words.0.as_slice().is_empty().then_some(order)
}

// === impl Words ===

impl Words<'_> {
    #[inline(never)] // for a small module
    fn next(&mut self) -> Option<u64> {
        self.0.next().map(|word| u64::from_le_bytes(*word))
    }

    fn float(&mut self) -> Option<f64> {
        self.next().map(f64::from_bits)
    }

    /// A tag, if there is one; `None` without enough words.
    fn tag(&mut self) -> Option<Option<HeldTag>> {
        let ((priority, owed), flow, rank, key) = (
            unpair(self.next()?),
            self.next()?,
            self.float()?,
            self.next()?,
        );
        let tag = HeldTag {
            owed: owed & 1 == 1,
            priority: priority.cast_signed(),
            flow,
            rank,
            key,
        };
        Some((owed & EXISTS == EXISTS).then_some(tag))
    }
}

fn narrow(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
