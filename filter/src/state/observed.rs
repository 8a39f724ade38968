//! What ended requests tell of their endpoints, on its way from each VM to the daemon's learner: a ring of segments in shared data, of fixed size.
//!
//! Rows are numbered from 0 on, for as long as their VM lives, and a segment says the number of its first. So a reader that is too slow, or a
//! leader that has just begun, finds the oldest row there is, and the daemon sees by the numbers what was lost and what it was told before.
//! Learning from a sample is as good as learning from all, so nothing waits for room: the oldest go.

use exchange::pool::OBSERVATION_BYTES;
use proto::state;

use super::words::{self, WORD};
use crate::host::{Expect, Host};

/// Rows of a segment: 3 to 4 KB, which its VM writes again at the end of each request (about 1 µs, when nobody waits).
const SEGMENT_ROWS: u64 = 32;
/// Segments of a ring. With rows read every 100 ms that is room for 5,000 requests a second in each VM and pool.
const SEGMENTS: u64 = 16;
/// Words at the head of a segment: its VM, and the number of its first row.
const HEAD: usize = 2;

/// A VM's own ring.
#[derive(Debug, Default)]
pub struct Writer {
    vm: u64,
    seat: u16,
    next: u64,
    segment: Vec<u8>,
}

/// How far another VM's ring was read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reader {
    vm: u64,
    next: u64,
}

fn key(pool: &str, seat: u16, number: u64) -> String {
    format!("switchpoint/1/pool/{pool}/observed/{seat}/{}", number / SEGMENT_ROWS % SEGMENTS)
}

// === impl Writer ===

impl Writer {
    /// Appends `rows` for the VM and its seat, and puts them where they are found.
    pub fn append<H: Host>(
        &mut self,
        host: &H,
        (pool, seat, vm): (&str, u16, u64),
        rows: impl IntoIterator<Item = [u8; OBSERVATION_BYTES]>,
    ) {
        if (self.vm, self.seat) != (vm, seat) {
            *self = Self { vm, seat, ..Self::default() };
        }
        let before = self.next;
        for row in rows {
            if self.next.is_multiple_of(SEGMENT_ROWS) {
                if self.next > before {
                    self.flush(host, pool);
                }
                self.segment.clear();
                words::append(&mut self.segment, &[vm, self.next]);
            }
            self.segment.extend_from_slice(&row);
            self.next = self.next.saturating_add(1);
        }
        if self.next > before {
            self.flush(host, pool);
        }
    }

    fn flush<H: Host>(&self, host: &H, pool: &str) {
        // What the host does not take is a gap in the numbers.
        let _ = host.share(&key(pool, self.seat, self.next.saturating_sub(1)), &self.segment, Expect::Any);
    }
}

// === impl Reader ===

impl Reader {
    /// What the VM `vm` at `seat` wrote since the last time: at most the whole ring; `None` when that is nothing.
    pub fn read<H: Host>(&mut self, host: &H, (pool, seat, vm): (&str, u16, u64)) -> Option<state::Observations> {
        if self.vm != vm {
            *self = Self { vm, next: 0 };
        }
        let mut told = state::Observations { pool: pool.to_owned(), vm_id: vm, first: self.next, rows: Vec::new() };
        // Twice: once around to find the oldest, once to read.
        for _ in 0..SEGMENTS.saturating_mul(2) {
            let Some((first, rows)) = segment(host, &key(pool, seat, self.next), vm) else { break };
            let begun = self.next.saturating_sub(self.next % SEGMENT_ROWS);
            if first > begun {
                let oldest = first.saturating_sub(SEGMENTS.saturating_sub(1).saturating_mul(SEGMENT_ROWS));
                self.next = oldest.max(begun.saturating_add(SEGMENT_ROWS));
                // What was read before the gap goes alone: numbers in a message run on.
                if !told.rows.is_empty() {
                    break;
                }
                told.first = self.next;
                continue;
            }
            let known = usize::try_from(self.next.saturating_sub(begun)).unwrap_or(usize::MAX).saturating_mul(OBSERVATION_BYTES);
            let new = rows.get(known..).filter(|_| first == begun).unwrap_or_default();
            told.rows.extend_from_slice(new);
            let count = new.len().checked_div(OBSERVATION_BYTES).unwrap_or(0) as u64;
            self.next = self.next.saturating_add(count);
            if count == 0 || !self.next.is_multiple_of(SEGMENT_ROWS) {
                break;
            }
        }
        (!told.rows.is_empty()).then_some(told)
    }
}

/// The number of the first row of a segment, and its rows; `None` when it is not that VM's, or is none.
fn segment<H: Host>(host: &H, key: &str, vm: u64) -> Option<(u64, Vec<u8>)> {
    let shared = host.shared(key).ok()??;
    let ([writer, first], rows) = words::split::<HEAD>(&shared.bytes)?;
    let sound = writer == vm
        && first.is_multiple_of(SEGMENT_ROWS)
        && rows.len().is_multiple_of(OBSERVATION_BYTES)
        && (rows.len().checked_div(OBSERVATION_BYTES).unwrap_or(0) as u64) <= SEGMENT_ROWS;
    sound.then(|| (first, shared.bytes.get(HEAD.saturating_mul(WORD)..).unwrap_or_default().to_vec()))
}
