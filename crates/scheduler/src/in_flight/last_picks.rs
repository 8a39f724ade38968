//! The last pick of each endpoint, as a number that grows with every pick. Among endpoints with
//! equal costs, the endpoint that was picked least recently is best.

use crate::endpoint::{ENDPOINTS_MAX, EndpointRef, Generation};

/// The numbers of the last picks by slot, up to the highest slot that was picked.
#[derive(Debug, Default)]
pub(super) struct LastPicks {
    rows: Vec<(Generation, u64)>,
    /// The number of the last pick of all endpoints.
    picks: u64,
}

impl LastPicks {
    pub(super) fn note(&mut self, endpoint: EndpointRef) {
        self.set(endpoint, self.picks + 1);
    }

    pub(super) fn set(&mut self, endpoint: EndpointRef, pick: u64) {
        self.picks = self.picks.max(pick);
        let slot = usize::from(endpoint.slot.0);
        if slot >= ENDPOINTS_MAX {
            return;
        }
        if self.rows.len() <= slot {
            self.rows.resize(slot + 1, (Generation(0), 0));
        }
        if let Some(row) = self.rows.get_mut(slot) {
            *row = (endpoint.generation, pick);
        }
    }

    pub(super) fn last_pick(&self, endpoint: EndpointRef) -> u64 {
        match self.rows.get(usize::from(endpoint.slot.0)) {
            Some(&(generation, pick)) if generation == endpoint.generation => pick,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::Slot;

    fn endpoint(slot: u16, generation: u32) -> EndpointRef {
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(generation),
        }
    }

    #[test]
    fn later_picks_have_greater_numbers_and_another_generation_has_none() {
        let mut last = LastPicks::default();
        for slot in [3, 1, 3] {
            last.note(endpoint(slot, 7));
        }
        assert_eq!(
            [0, 1, 3, 9].map(|slot| last.last_pick(endpoint(slot, 7))),
            [0, 2, 3, 0]
        );
        assert_eq!(last.last_pick(endpoint(3, 8)), 0);
        last.set(endpoint(5, 7), 40);
        last.note(endpoint(1, 7));
        assert_eq!(
            (
                last.last_pick(endpoint(5, 7)),
                last.last_pick(endpoint(1, 7))
            ),
            (40, 41)
        );
        last.note(endpoint(u16::MAX, 7));
        assert_eq!(
            last.last_pick(endpoint(u16::MAX, 7)),
            0,
            "no snapshot has such a slot"
        );
    }
}
