//! Checks the observations of proxies before anything is learned from them.
//!
//! A wasm VM numbers its observations, one for each request. Observations that are sent twice (by a
//! new leader, or after a stream was opened again) are recognised by their numbers. Missing
//! observations are counted as lost. An invalid observation is refused alone: the other
//! observations of its message stay valid.

use std::collections::BTreeMap;
use std::time::Duration;

use proto::observation::{EncodedObservation, OBSERVATION_BYTES, OBSERVATIONS_MAX};
use proto::state;
use scheduler::latency::RequestEnd;
use tokio::time::Instant;

use crate::state::peer::Origin;

/// The maximum number of VMs whose last number is remembered: the workers of a few hundred proxies.
/// Beyond that number, the VM that was silent for the longest time is forgotten.
const VMS_MAX: usize = 4_096;

/// The time for which an origin without messages is remembered. The time is twice as long as the
/// origin's votes on observations count.
const ORIGIN_MAX_AGE: Duration = Duration::from_secs(60);

/// The maximum number of owners, and of origins, that are distinguished. All further owners or
/// origins count as one witness, with one vote.
const ORIGINS_MAX: usize = 256;

/// Counts of observations by result, since the daemon started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ObservationCounts {
    /// The number of observations of successful requests from which the learner learned.
    pub learned: u64,
    /// The number of observations of requests that the client aborted, so their full time is
    /// unknown.
    pub censored: u64,
    /// The number of observations of requests that the endpoint failed.
    pub failed: u64,
    /// The number of invalid observations. An invalid message counts as one observation.
    pub refused: u64,
    /// The number of observations that other origins contradict.
    pub outvoted: u64,
    /// The number of observations of a generation of an endpoint that is not in the pool.
    pub unknown: u64,
    /// The number of observations that were received before.
    pub again: u64,
    /// The number of observations that were overwritten in the VM before they were read, or dropped
    /// because the queue was full.
    pub lost: u64,
}

/// The number of the next observation that is expected from each VM.
#[derive(Debug, Default)]
pub struct ObservationIntake {
    vms: BTreeMap<(u64, u64), IntakePosition>,
    messages: u64,
    /// The owners and the origins, each with its number and the time of its last message.
    levels: [BTreeMap<Origin, OriginEntry>; 2],
    origins_seen: u64,
    /// Counts by result.
    pub counts: ObservationCounts,
}

#[derive(Clone, Copy, Debug, Default)]
struct IntakePosition {
    /// The number of the next observation.
    next: u64,
    /// The number of the last message of this VM, for [`ObservationIntake::forget`].
    at: u64,
}

#[derive(Clone, Copy, Debug)]
struct OriginEntry {
    number: u64,
    at: Instant,
}

// === impl ObservationCounts ===

impl ObservationCounts {
    /// Returns the counts by name, for pages and metrics.
    #[must_use]
    pub fn rows(self) -> [(&'static str, u64); 8] {
        let Self {
            learned,
            censored,
            failed,
            refused,
            outvoted,
            unknown,
            again,
            lost,
        } = self;
        [
            ("learned", learned),
            ("censored", censored),
            ("failed", failed),
            ("refused", refused),
            ("outvoted", outvoted),
            ("unknown", unknown),
            ("again", again),
            ("lost", lost),
        ]
    }
}

// === impl ObservationIntake ===

impl ObservationIntake {
    /// Returns the witness of a message's observations, which has one vote. The witness is the
    /// owner. If all proxies have the same owner, it is the origin, and if they have the same
    /// origin, the process. Beside another owner, many pods have one vote, because an owner may
    /// start any number of pods and outvote the owner of a few.
    pub fn witness(&mut self, process_id: u64, origin: &Origin, now: Instant) -> u64 {
        let mut witness = None;
        for (rows, of) in self.levels.iter_mut().zip(origin.levels()) {
            rows.retain(|_, known| now.saturating_duration_since(known.at) < ORIGIN_MAX_AGE);
            if !rows.contains_key(&of) && rows.len() < ORIGINS_MAX {
                self.origins_seen += 1;
                let number = self.origins_seen;
                rows.insert(of.clone(), OriginEntry { number, at: now });
            }
            let number = rows.get_mut(&of).map_or(0, |known| {
                known.at = now;
                known.number
            });
            let differ = rows.len() > 1;
            witness = witness.or(differ.then_some(number));
        }
        witness.unwrap_or(process_id)
    }

    /// Returns the new and valid observations of a message.
    pub fn take(
        &mut self,
        process_id: u64,
        message: &state::Observations,
    ) -> Vec<EncodedObservation> {
        let (rows, rest) = message.rows.as_chunks::<OBSERVATION_BYTES>();
        if !rest.is_empty() || rows.len() > OBSERVATIONS_MAX {
            self.refuse(process_id, 1);
            return Vec::new();
        }
        self.messages += 1;
        let known = self
            .vms
            .entry((process_id, message.vm_id))
            .or_insert(IntakePosition {
                next: message.first,
                at: 0,
            });
        let again = known.next.saturating_sub(message.first);
        self.counts.lost = self
            .counts
            .lost
            .saturating_add(message.first.saturating_sub(known.next));
        *known = IntakePosition {
            next: known
                .next
                .max(message.first.saturating_add(rows.len() as u64)),
            at: self.messages,
        };
        let again = usize::try_from(again).unwrap_or(usize::MAX).min(rows.len());
        self.counts.again += again as u64;
        self.forget();
        let new = rows.get(again..).unwrap_or_default();
        let sound: Vec<EncodedObservation> = new
            .iter()
            .filter_map(EncodedObservation::from_bytes)
            .collect();
        self.refuse(process_id, (new.len() - sound.len()) as u64);
        sound
    }

    /// Counts unreadable observations. Logs the first such observation of a pool, because the
    /// daemon may learn nothing from a filter of another version.
    fn refuse(&mut self, process_id: u64, count: u64) {
        if count > 0 && self.counts.refused == 0 {
            let process = format_args!("{process_id:016x}");
            tracing::warn!(%process, "cannot read a proxy's observations, so nothing is learned from them; does its filter have the daemon's version?");
        }
        self.counts.refused += count;
    }

    /// Counts an observation by its result. Returns whether the learner should learn from it.
    pub fn count(&mut self, observed: &EncodedObservation, is_present: bool) -> bool {
        let counts = &mut self.counts;
        let count = match observed.observation.ended {
            _ if !is_present => &mut counts.unknown,
            RequestEnd::Done => &mut counts.learned,
            RequestEnd::Aborted => &mut counts.censored,
            RequestEnd::Failed => &mut counts.failed,
        };
        *count += 1;
        is_present && observed.observation.ended == RequestEnd::Done
    }

    fn forget(&mut self) {
        while self.vms.len() > VMS_MAX {
            let oldest = self
                .vms
                .iter()
                .min_by_key(|(_, state)| state.at)
                .map(|(vm, _)| *vm);
            oldest.and_then(|vm| self.vms.remove(&vm));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::observed;
    use super::*;

    fn message(vm_id: u64, first: u64, rows: &[[u8; OBSERVATION_BYTES]]) -> state::Observations {
        state::Observations {
            pool: "p".to_owned(),
            vm_id,
            first,
            rows: rows.concat(),
        }
    }

    #[test]
    fn each_row_is_taken_once_from_any_sender_and_missing_rows_are_counted() {
        let rows: Vec<_> = (0..10_u8)
            .map(|at| observed(1, f32::from(at)).to_bytes())
            .collect();
        let mut intake = ObservationIntake::default();
        let mut taken = |first: u64, until: u64| {
            let sent = &rows[usize::try_from(first).unwrap()..usize::try_from(until).unwrap()];
            intake
                .take(9, &message(1, first, sent))
                .iter()
                .map(|row| row.observation.ttft_ms.unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            taken(2, 4),
            [2.0, 3.0],
            "the first message of a VM sets its position"
        );
        assert_eq!(
            taken(0, 5),
            [4.0],
            "a new leader reads the ring from its beginning"
        );
        assert_eq!(taken(7, 9), [7.0, 8.0]);
        assert_eq!((intake.counts.again, intake.counts.lost), (4, 2));
        assert_eq!(
            intake.take(8, &message(1, 0, &rows)).len(),
            10,
            "of another process"
        );
    }

    #[test]
    fn who_observes_is_an_origin_and_a_process_where_there_is_one_origin() {
        let of = |name: &str| Origin {
            certificate: Some(name.into()),
            address: None,
        };
        let mut intake = ObservationIntake::default();
        let now = Instant::now();
        let first = [7, 8].map(|process| intake.witness(process, &of("a"), now));
        assert_ne!(first[0], first[1]);
        intake.witness(9, &of("b"), now);
        let both = [7, 8].map(|process| intake.witness(process, &of("a"), now));
        assert_eq!(both[0], both[1]);
        assert_ne!(both[0], intake.witness(9, &of("b"), now));
        let later = now + ORIGIN_MAX_AGE;
        assert_eq!(intake.witness(7, &of("a"), later), first[0], "b is silent");
    }

    #[test]
    fn pods_of_one_owner_vote_one_by_one_and_beside_another_owner_together() {
        let pod = |certificate: &str, last: u8| Origin {
            certificate: Some(certificate.into()),
            address: Some([10, 0, 0, last].into()),
        };
        let mut intake = ObservationIntake::default();
        let now = Instant::now();
        let mut votes = |pods: &[(&str, u8)]| {
            let witness = |(certificate, last): &(&str, u8)| {
                intake.witness((*last).into(), &pod(certificate, *last), now)
            };
            let witnesses: std::collections::BTreeSet<u64> = pods.iter().map(witness).collect();
            witnesses.len()
        };
        let fleet = [("a", 1), ("a", 2), ("a", 3)];
        votes(&fleet); // Until the second pod is known, the process is the witness.
        assert_eq!(votes(&fleet), 3);
        votes(&[("b", 4)]);
        assert_eq!(votes(&fleet), 1);
        assert_eq!(votes(&[("b", 4), ("b", 5), ("a", 1)]), 2);
    }

    #[test]
    fn a_bad_row_is_refused_alone_and_a_bad_message_whole() {
        let good = observed(1, 5.0).to_bytes();
        let mut bad = good;
        bad[2] = 0xff;
        let mut intake = ObservationIntake::default();
        assert_eq!(intake.take(1, &message(1, 0, &[good, bad, good])).len(), 2);
        let mut cut = message(1, 3, &[good]);
        cut.rows.pop();
        assert_eq!(intake.take(1, &cut).len(), 0);
        assert_eq!(
            intake
                .take(1, &message(1, 3, &vec![good; OBSERVATIONS_MAX + 1]))
                .len(),
            0
        );
        assert_eq!(intake.counts.refused, 3);
    }

    #[test]
    fn made_up_vms_do_not_grow_without_bound_and_numbers_cannot_overflow() {
        let row = observed(1, 5.0).to_bytes();
        let mut intake = ObservationIntake::default();
        for vm in 0..VMS_MAX as u64 + 100 {
            let _ = intake.take(1, &message(vm, u64::MAX, &[row, row]));
        }
        assert_eq!(intake.vms.len(), VMS_MAX);
    }
}
