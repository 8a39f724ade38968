//! The encoding of a load report of a pool. The report has the requests in flight from one VM, one
//! process, or all other proxies together, and the endpoint failures that the sender knows.
//!
//! ```text
//!  head     vm | written | ring | counts      one word each; counts = loads, SLOs, failures: 16 bits each
//!  load     slot requests generation          16, 16 and 32 bits
//!           prefill tokens | decode tokens    32 bits each, as all below
//!           prompts | their tokens            of the pending prefills
//!           uncached tokens | attention       of the pending prefills
//!  SLOs     slot . generation | TTFT TPOT     the lowest SLOs in µs, 0 for none
//!  failure  slot . generation | known since | ejected until | failures
//!                                             bit 32 of the last word: another proxy reported it,
//!                                             bit 33: answers were the reason
//! ```
//! After the head come the loads, then the SLOs, then the failures. `pool-state` defines how a
//! report changes in place.

use scheduler::in_flight::{EndpointLoad, PendingPrefills};
use scheduler::{ENDPOINTS_MAX, EndpointRef, Timestamp};

use crate::words::{self, WORD, pair, unpair};

/// The size of the head in bytes.
const HEAD_BYTES: usize = 4 * WORD;
/// The size of the load of one endpoint, in bytes.
pub const LOAD_BYTES: usize = 4 * WORD;
/// The size of the SLOs of one endpoint, in bytes.
pub const SLOS_BYTES: usize = 2 * WORD;
/// The size of one failure in bytes.
pub const FAILURE_BYTES: usize = 4 * WORD;

/// The maximum time, in ms, that an ejection reported by another process may still last. The other
/// process may be hostile, or its clock may be wrong. The pool may limit an ejection that another
/// process reports further.
pub const PEER_EJECTION_MS_MAX: u64 = 30_000;

/// The maximum number of prompts of one process that can wait at an endpoint. The number of
/// requests has the same limit. With numbers of 16 bits, the sum over all processes of a daemon
/// does not overflow.
pub const PROMPTS_MAX: u32 = 0xffff;

/// The bit in the word of a failure's number that marks a failure reported by another proxy.
const OUTSIDE_FLAG: u64 = 1 << 32;

/// The bit in the word of a failure's number that marks a failure whose reason was the endpoint's
/// answers.
const BY_ANSWERS_FLAG: u64 = 1 << 33;

/// The head of a report, before its loads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadReportHead {
    /// The random number of the VM that wrote the report; 0 means that no VM wrote it.
    pub vm: u64,
    pub written: Timestamp,
    /// The position up to which the writer's placements are published. The host of the load sharing
    /// defines the format of the position.
    pub ring: u64,
}

/// The head of a report and the number of entries of each kind after the head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadReportLayout {
    pub head: LoadReportHead,
    pub loads: usize,
    pub slos: usize,
    pub failures: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailureEntry {
    pub endpoint: EndpointRef,
    /// The time when the failure became known.
    pub since: Timestamp,
    /// The end of the ejection; 0 after the endpoint answered again.
    pub until: Timestamp,
    /// The number of ejections without a success in between; 0 after the endpoint answered again.
    pub failures: u32,
    /// Whether another proxy reported the failure.
    pub outside: bool,
    /// Whether the endpoint's answers were the reason for the failure.
    pub by_answers: bool,
}

// === impl LoadReportHead ===

impl LoadReportHead {
    /// The size of an empty report in bytes.
    pub const BYTES: usize = HEAD_BYTES;

    /// The value of `vm` in the report of all other proxies together.
    pub const OUTSIDE: u64 = u64::MAX;

    /// Overwrites the head at the beginning of `report` with this head. Returns false if `report`
    /// is too short.
    pub fn stamp(self, report: &mut [u8]) -> bool {
        let Some(to) = report.as_chunks_mut::<WORD>().0.first_chunk_mut::<3>() else {
            return false;
        };
        *to = [self.vm, self.written.0, self.ring].map(u64::to_le_bytes);
        true
    }

    /// Overwrites the head of a report as [`Self::stamp`] does, for a writer with another clock.
    /// Converts the times in the report to the local clock, as if the report had been written now.
    /// Only this function limits the numbers that another process reports, in the daemon and in the
    /// proxies. Afterwards, no failure is from the future, no failure ejects for longer than
    /// [`PEER_EJECTION_MS_MAX`], and no load has more than [`PROMPTS_MAX`] prompts. Returns false,
    /// without effect, when the bytes are not a report.
    #[must_use]
    pub fn receive(self, report: &mut [u8]) -> bool {
        let Some(layout) = LoadReportLayout::parse(report) else {
            return false;
        };
        let written = layout.head.written.0;
        for load in layout.loads_mut(report) {
            let [at, tokens, prompts, work] = words::of_bytes(load);
            let (prompts, prompt_tokens) = unpair(prompts);
            if prompts > PROMPTS_MAX {
                *load = words::to_bytes([at, tokens, pair(PROMPTS_MAX, prompt_tokens), work]);
            }
        }
        let ejection_ns_max = Timestamp(0).plus_ms(PEER_EJECTION_MS_MAX).0;
        for failure in layout.failures_mut(report) {
            let [at, since, until, failures] = words::of_bytes(failure);
            let since = self.written.0.saturating_sub(written.saturating_sub(since));
            // The time 0 is not converted, because 0 means that the endpoint answered again.
            let until = if until == 0 {
                0
            } else {
                self.written
                    .0
                    .saturating_add(until.saturating_sub(written).min(ejection_ns_max))
            };
            *failure = words::to_bytes([at, since, until, failures]);
        }
        self.stamp(report)
    }
}

// === impl LoadReportLayout ===

impl LoadReportLayout {
    /// Reads the head; `None` when the bytes are not a complete report.
    #[must_use]
    pub fn parse(report: &[u8]) -> Option<Self> {
        let ([vm, written, ring, counts], entries) = words::split(report)?;
        let count = |shift: u32| {
            usize::try_from(counts >> shift & 0xffff)
                .ok()
                .filter(|count| *count <= ENDPOINTS_MAX)
        };
        let loads = count(0)?;
        let slos = count(16)?;
        let failures = count(32)?;
        let is_whole =
            entries.len() == loads * LOAD_BYTES + slos * SLOS_BYTES + failures * FAILURE_BYTES;
        is_whole.then_some(Self {
            head: LoadReportHead {
                vm,
                written: Timestamp(written),
                ring,
            },
            loads,
            slos,
            failures,
        })
    }

    /// Appends the head of a report with these numbers of entries.
    pub fn append(&self, report: &mut Vec<u8>) {
        let LoadReportHead { vm, written, ring } = self.head;
        let counts = self.loads as u64 | (self.slos as u64) << 16 | (self.failures as u64) << 32;
        words::append(report, &[vm, written.0, ring, counts]);
    }

    /// Returns the loads in the bytes from which this layout was read.
    pub fn loads<'r>(&self, report: &'r [u8]) -> &'r [[u8; LOAD_BYTES]] {
        report
            .get(HEAD_BYTES..self.slos_at())
            .map_or(&[], |bytes| bytes.as_chunks().0)
    }

    pub fn slos<'r>(&self, report: &'r [u8]) -> &'r [[u8; SLOS_BYTES]] {
        report
            .get(self.slos_at()..self.failures_at())
            .map_or(&[], |bytes| bytes.as_chunks().0)
    }

    pub fn failures<'r>(&self, report: &'r [u8]) -> &'r [[u8; FAILURE_BYTES]] {
        report
            .get(self.failures_at()..)
            .map_or(&[], |bytes| bytes.as_chunks().0)
    }

    fn loads_mut<'r>(&self, report: &'r mut [u8]) -> &'r mut [[u8; LOAD_BYTES]] {
        report
            .get_mut(HEAD_BYTES..self.slos_at())
            .unwrap_or_default()
            .as_chunks_mut()
            .0
    }

    fn failures_mut<'r>(&self, report: &'r mut [u8]) -> &'r mut [[u8; FAILURE_BYTES]] {
        report
            .get_mut(self.failures_at()..)
            .unwrap_or_default()
            .as_chunks_mut()
            .0
    }

    fn slos_at(&self) -> usize {
        HEAD_BYTES + self.loads * LOAD_BYTES
    }

    fn failures_at(&self) -> usize {
        self.slos_at() + self.slos * SLOS_BYTES
    }
}

// === entries ===

/// Encodes the load of an endpoint, without its SLOs. A number that is too large for its bits
/// becomes the largest number that fits.
#[must_use]
#[inline]
pub fn encode_load(endpoint: EndpointRef, load: &EndpointLoad) -> [u8; LOAD_BYTES] {
    let requests = u16::try_from(load.requests).unwrap_or(u16::MAX);
    let PendingPrefills {
        prompts,
        prompt_tokens,
        uncached_tokens,
        attention,
    } = load.prefills;
    words::to_bytes([
        words::of_endpoint(endpoint, requests),
        pair(to_u32(load.prefill_tokens), to_u32(load.decode_tokens)),
        pair(prompts, to_u32(prompt_tokens)),
        pair(to_u32(uncached_tokens), to_u32(attention)),
    ])
}

/// Decodes the load of an endpoint; `None` for a slot that no snapshot has.
#[must_use]
#[inline]
pub fn decode_load(entry: &[u8; LOAD_BYTES]) -> Option<(EndpointRef, EndpointLoad)> {
    let [at, tokens, prompts, work] = words::of_bytes(entry);
    let (endpoint, requests) = words::endpoint(at)?;
    let [(prefill, decode), (prompts, prompt), (uncached, attention)] =
        [tokens, prompts, work].map(unpair);
    let prefills = PendingPrefills {
        prompts,
        prompt_tokens: prompt.into(),
        uncached_tokens: uncached.into(),
        attention: attention.into(),
    };
    let load = EndpointLoad {
        requests: u32::from(requests),
        prefill_tokens: u64::from(prefill),
        decode_tokens: u64::from(decode),
        prefills,
        ..EndpointLoad::default()
    };
    Some((endpoint, load))
}

pub fn append_slos(report: &mut Vec<u8>, endpoint: EndpointRef, load: &EndpointLoad) {
    words::append(
        report,
        &[
            words::of_endpoint(endpoint, 0),
            pair(load.ttft_slo_us.unwrap_or(0), load.tpot_slo_us.unwrap_or(0)),
        ],
    );
}

/// Decodes the SLOs of an endpoint, as a load with all other fields 0; `None` for a slot that no
/// snapshot has.
#[must_use]
pub fn decode_slos(entry: &[u8; SLOS_BYTES]) -> Option<(EndpointRef, EndpointLoad)> {
    let [at, slos] = words::of_bytes(entry);
    let (ttft, tpot) = unpair(slos);
    let some = |slo: u32| (slo > 0).then_some(slo);
    let slos = EndpointLoad {
        ttft_slo_us: some(ttft),
        tpot_slo_us: some(tpot),
        ..EndpointLoad::default()
    };
    words::endpoint(at).map(|(endpoint, _)| (endpoint, slos))
}

pub fn append_failure(report: &mut Vec<u8>, failure: &FailureEntry) {
    let flag = |is_set: bool, flag: u64| if is_set { flag } else { 0 };
    let failures = u64::from(failure.failures)
        | flag(failure.outside, OUTSIDE_FLAG)
        | flag(failure.by_answers, BY_ANSWERS_FLAG);
    words::append(
        report,
        &[
            words::of_endpoint(failure.endpoint, 0),
            failure.since.0,
            failure.until.0,
            failures,
        ],
    );
}

/// Decodes a failure; `None` for a slot that no snapshot has.
#[must_use]
pub fn decode_failure(entry: &[u8; FAILURE_BYTES]) -> Option<FailureEntry> {
    let [at, since, until, failures] = words::of_bytes(entry);
    Some(FailureEntry {
        endpoint: words::endpoint(at)?.0,
        since: Timestamp(since),
        until: Timestamp(until),
        failures: unpair(failures).0,
        outside: failures & OUTSIDE_FLAG != 0,
        by_answers: failures & BY_ANSWERS_FLAG != 0,
    })
}

/// Returns 0 if the loads are the same. Compares word by word, because the C library compares byte
/// by byte.
#[must_use]
#[inline]
pub fn difference(one: &[u8; LOAD_BYTES], other: &[u8; LOAD_BYTES]) -> u64 {
    let ([a, b, c, d], [e, f, g, h]): ([u64; 4], [u64; 4]) =
        (words::of_bytes(one), words::of_bytes(other));
    (a ^ e) | (b ^ f) | (c ^ g) | (d ^ h)
}

fn to_u32(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_differ_where_any_of_their_words_do() {
        let load = [7; LOAD_BYTES];
        assert_eq!(difference(&load, &load), 0);
        for changed in 1..16_u8 {
            let mut other = load;
            for word in (0..4).filter(|word| changed >> word & 1 == 1) {
                other[word * WORD] = 8;
            }
            assert_ne!(difference(&load, &other), 0, "words {changed:#b}");
        }
    }

    #[test]
    fn bytes_that_are_no_report_are_not_received() {
        let head = LoadReportHead {
            vm: 7,
            written: Timestamp(8),
            ring: 9,
        };
        for mut garbage in [vec![], vec![1; HEAD_BYTES - 1], vec![0xff; HEAD_BYTES + 5]] {
            let before = garbage.clone();
            assert!(!head.receive(&mut garbage));
            assert_eq!(garbage, before);
        }
    }
}
