//! The encoding of the order of the requests that the VMs hold for one pool.
//!
//! ```text
//!  head     round | began | rows, bands: 32 bits each | full endpoints
//!  row      VM | written | woken | round | kinds | first tag | next tag | kinds
//!           | endpoints | each endpoint, and its priority
//!  tag      priority, 1 if owed: 32 bits each | flow | rank | key; all 0 for none
//!  kind     priority, requests to refuse: 32 bits each | requests | bytes
//!           | the largest flow, its requests, its bytes
//!  band     priority, flows: 32 bits each | credit | virtual time | turn | flows
//!  flow     id | start | turn | attained | attained at
//!  full     endpoint | priority, tries: 32 bits each
//! ```
//! Ranks, credits, times and tokens are the bits of an `f64`. In the 32 bits for `owed`, bit 1 says
//! whether the row has this tag.

use scheduler::Timestamp;
use scheduler::flow::{
    BandAccount, BandService, FlowAccount, FullEndpoint, OrderRow, OwnerShare, QueuedInBand,
    QueuedTag, RowBand, SharedOrder,
};

use crate::words::{self, WORD, pair, unpair};

/// The bit that says that a row has a tag. This bit is next to the bit for `owed`.
const EXISTS: u32 = 2;

/// A reader of the words of a value, one after another.
struct Words<'b>(std::slice::Iter<'b, [u8; WORD]>);

#[must_use]
pub fn write(order: &SharedOrder) -> Vec<u8> {
    let mut words = vec![
        order.round,
        order.began.0,
        pair(to_u32(order.rows.len()), to_u32(order.bands.len())),
        order.full.len() as u64,
    ];
    order.rows.iter().for_each(|row| write_row(&mut words, row));
    for band in &order.bands {
        let head = pair(band.priority.cast_unsigned(), to_u32(band.flows.len()));
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

fn write_row(words: &mut Vec<u64>, row: &OrderRow) {
    words.extend([
        row.vm,
        row.written.0,
        row.woken.0,
        row.round,
        row.bands.len() as u64,
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
        let RowBand {
            queued,
            largest,
            refuse,
        } = band;
        let refuse = u32::try_from(*refuse).unwrap_or(u32::MAX);
        words.extend([
            pair(queued.priority.cast_unsigned(), refuse),
            queued.requests,
            queued.bytes,
            largest.owner,
            largest.requests,
            largest.bytes,
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

/// Reads an order; `None` if the bytes are not an order.
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
    let (rows, bands) = unpair(words.next()?);
    let full = words.next()?;
    for _ in 0..rows {
        order.rows.push(words.row()?);
    }
    for _ in 0..bands {
        order.bands.push(words.band()?);
    }
    for _ in 0..full {
        let endpoint = words::endpoint(words.next()?)?.0;
        let (priority, tries) = unpair(words.next()?);
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
    #[inline(never)] // because the wasm module should be small
    fn next(&mut self) -> Option<u64> {
        self.0.next().map(|word| u64::from_le_bytes(*word))
    }

    fn float(&mut self) -> Option<f64> {
        self.next().map(f64::from_bits)
    }

    /// Reads the requests of one band in a row.
    fn kind(&mut self) -> Option<RowBand> {
        let (priority, refuse) = unpair(self.next()?);
        let queued = QueuedInBand {
            priority: priority.cast_signed(),
            requests: self.next()?,
            bytes: self.next()?,
        };
        let largest = OwnerShare {
            owner: self.next()?,
            requests: self.next()?,
            bytes: self.next()?,
        };
        Some(RowBand {
            queued,
            largest,
            refuse: refuse.into(),
        })
    }

    fn row(&mut self) -> Option<OrderRow> {
        let mut row = OrderRow {
            vm: self.next()?,
            written: Timestamp(self.next()?),
            woken: Timestamp(self.next()?),
            round: self.next()?,
            ..OrderRow::default()
        };
        let kinds = self.next()?;
        row.first = self.tag()?;
        row.next = self.tag()?;
        for _ in 0..kinds {
            row.bands.push(self.kind()?);
        }
        for _ in 0..self.next()? {
            let endpoint = words::endpoint(self.next()?)?.0;
            let priority = unpair(self.next()?).0;
            row.endpoints.push((endpoint, priority.cast_signed()));
        }
        Some(row)
    }

    fn band(&mut self) -> Option<BandService> {
        let (priority, flows) = unpair(self.next()?);
        let mut band = BandService {
            priority: priority.cast_signed(),
            credit: self.float()?,
            account: BandAccount {
                virtual_time: self.float()?,
                turn: self.next()?,
            },
            ..BandService::default()
        };
        for _ in 0..flows {
            let id = self.next()?;
            let account = FlowAccount {
                start: self.float()?,
                turn: self.next()?,
                attained: self.float()?,
                attained_at: Timestamp(self.next()?),
            };
            band.flows.push((id, account));
        }
        Some(band)
    }

    /// Reads a tag. Returns `Some(None)` if the row has no tag, and `None` if too few words are
    /// left.
    fn tag(&mut self) -> Option<Option<QueuedTag>> {
        let (priority, owed) = unpair(self.next()?);
        let tag = QueuedTag {
            owed: owed & 1 == 1,
            priority: priority.cast_signed(),
            flow: self.next()?,
            rank: self.float()?,
            key: self.next()?,
        };
        Some((owed & EXISTS == EXISTS).then_some(tag))
    }
}

fn to_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
