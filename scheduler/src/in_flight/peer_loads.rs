//! What others have outstanding, as they told: the workers beside this one, and other proxies.
//!
//! Others tell absolute rows, each of a moment. Where one row takes the place of another, what the old one said is taken out exactly as it was
//! put in, so the table is always the sum of the rows as they are: nothing is counted twice, and what is lost is mended by the next row. It
//! counts only lives that are present. A minimum cannot be taken out, so the SLOs are put together anew when any of them changes.
//!
//! What other proxies have done in the last moments is not told yet. Meanwhile they see the same pool and do about the same, so each pick made
//! here stands for one of each of them until it is so old that theirs of that moment are heard. In simulation this wins back a part of what load
//! that is 100 ms old loses, and costs nothing at 10 ms.

use std::collections::VecDeque;

use super::EndpointLoad;
use crate::endpoint::{ENDPOINTS_MAX, EndpointRef, Generation};

/// Picks that may stand for others' at once: 20 ms of 50,000 picks a second. Beyond it the oldest cease to.
const YOUNG_MAX: usize = 1_024;

/// The table. One writer; reads are array look-ups.
#[derive(Debug, Default)]
pub struct PeerLoads {
    /// By slot, up to the highest one present.
    rows: Vec<Option<(Generation, EndpointLoad)>>,
    /// For how many picks of others one made here stands, and for how long, µs.
    stands_for: u32,
    delay_us: u64,
    /// When each that does was made, and what it adds; the oldest first.
    young: VecDeque<(u64, EndpointRef, EndpointLoad)>,
}

// === impl PeerLoads ===

impl PeerLoads {
    /// Starts afresh: nothing is outstanding, and only these lives of endpoints will count.
    pub fn start(&mut self, present: &[EndpointRef]) {
        self.rows.clear();
        self.young.clear();
        for endpoint in present {
            let slot = usize::from(endpoint.slot.0);
            if slot >= ENDPOINTS_MAX {
                continue;
            }
            if self.rows.len() <= slot {
                self.rows.resize(slot + 1, None);
            }
            if let Some(row) = self.rows.get_mut(slot) {
                *row = Some((endpoint.generation, EndpointLoad::default()));
            }
        }
    }

    /// Somebody has `load` outstanding at `endpoint`. Nothing, if that life is not present.
    pub fn add(&mut self, endpoint: EndpointRef, load: EndpointLoad) {
        if let Some(Some((generation, sum))) = self.rows.get_mut(usize::from(endpoint.slot.0))
            && *generation == endpoint.generation
        {
            *sum = sum.with(load);
        }
    }

    /// Takes out what [`Self::add`] put in; the SLOs stay.
    pub fn subtract(&mut self, endpoint: EndpointRef, load: EndpointLoad) {
        if let Some(Some((generation, sum))) = self.rows.get_mut(usize::from(endpoint.slot.0))
            && *generation == endpoint.generation
        {
            sum.requests = sum.requests.saturating_sub(load.requests);
            sum.prefill_tokens = sum.prefill_tokens.saturating_sub(load.prefill_tokens);
            sum.decode_tokens = sum.decode_tokens.saturating_sub(load.decode_tokens);
            sum.prefills = sum.prefills.without(load.prefills);
        }
    }

    /// [`Self::subtract`] of `was` and [`Self::add`] of `is` in one look, but for SLOs: most of what a look at others' rows has to do.
    pub fn replace(&mut self, endpoint: EndpointRef, was: &EndpointLoad, is: &EndpointLoad) {
        if let Some(Some((generation, sum))) = self.rows.get_mut(usize::from(endpoint.slot.0))
            && *generation == endpoint.generation
        {
            let of = |sum: u64, was: u64, is: u64| sum.saturating_add(is).saturating_sub(was);
            let short = |sum: u32, was: u32, is: u32| sum.saturating_add(is).saturating_sub(was);
            sum.requests = short(sum.requests, was.requests, is.requests);
            sum.prefill_tokens = of(sum.prefill_tokens, was.prefill_tokens, is.prefill_tokens);
            sum.decode_tokens = of(sum.decode_tokens, was.decode_tokens, is.decode_tokens);
            let (sum, was, is) = (&mut sum.prefills, &was.prefills, &is.prefills);
            sum.prompts = short(sum.prompts, was.prompts, is.prompts);
            sum.prompt_tokens = of(sum.prompt_tokens, was.prompt_tokens, is.prompt_tokens);
            sum.uncached_tokens = of(sum.uncached_tokens, was.uncached_tokens, is.uncached_tokens);
            sum.attention = of(sum.attention, was.attention, is.attention);
        }
    }

    /// Nobody has an SLO until it is added again.
    pub fn forget_slos(&mut self) {
        for (_, load) in self.rows.iter_mut().flatten() {
            (load.ttft_slo_us, load.tpot_slo_us) = (None, None);
        }
    }

    /// From now on a pick made here stands for one of each of so many other proxies, until it is `delay_us` old. What is older by `now_us`, on the
    /// clock of [`Self::picked`], ceases to.
    pub fn stand_for(&mut self, proxies: u32, delay_us: u64, now_us: u64) {
        (self.stands_for, self.delay_us) = (proxies, delay_us);
        while let Some(&(at, endpoint, load)) = self.young.front()
            && (proxies == 0 || now_us.saturating_sub(at) >= delay_us || self.young.len() > YOUNG_MAX)
        {
            self.young.pop_front();
            self.subtract(endpoint, load);
        }
    }

    /// Is there another proxy that a pick made here stands for?
    #[must_use]
    pub fn picks_stand(&self) -> bool {
        self.stands_for > 0
    }

    /// Somebody here picked `endpoint` for a request of `load`.
    pub fn picked(&mut self, endpoint: EndpointRef, load: EndpointLoad, now_us: u64) {
        if self.picks_stand() {
            let load = EndpointLoad { ttft_slo_us: None, tpot_slo_us: None, ..load.times(self.stands_for) };
            self.add(endpoint, load);
            self.young.push_back((now_us, endpoint, load));
            self.stand_for(self.stands_for, self.delay_us, now_us);
        }
    }

    /// What all others together have outstanding at `endpoint`.
    #[must_use]
    pub fn load(&self, endpoint: EndpointRef) -> EndpointLoad {
        self.row(endpoint).copied().unwrap_or_default()
    }

    /// How many requests that is.
    #[must_use]
    pub fn requests(&self, endpoint: EndpointRef) -> u32 {
        self.row(endpoint).map_or(0, |load| load.requests)
    }

    fn row(&self, endpoint: EndpointRef) -> Option<&EndpointLoad> {
        match self.rows.get(usize::from(endpoint.slot.0)) {
            Some(Some((generation, load))) if *generation == endpoint.generation => Some(load),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::Slot;

    fn endpoint(slot: u16, generation: u32) -> EndpointRef {
        EndpointRef { slot: Slot(slot), generation: Generation(generation) }
    }

    fn load(requests: u32, prefill_tokens: u64) -> EndpointLoad {
        EndpointLoad { requests, prefill_tokens, ..EndpointLoad::default() }
    }

    #[test]
    fn rows_of_many_add_up_and_only_of_lives_present() {
        let (a, b, mut others) = (endpoint(3, 1), endpoint(9, 2), PeerLoads::default());
        others.add(a, load(1, 1));
        assert_eq!(others.load(a), EndpointLoad::default(), "nobody is present yet");
        others.start(&[a, b, endpoint(u16::MAX, 1)]);
        others.add(a, load(2, 50));
        others.add(a, load(1, 7));
        others.add(endpoint(9, 1), load(5, 5));
        others.add(endpoint(u16::MAX, 1), load(5, 5));
        assert_eq!((others.load(a), others.load(b), others.load(endpoint(9, 1))), (load(3, 57), load(0, 0), load(0, 0)));
        others.subtract(a, load(2, 50));
        others.subtract(endpoint(3, 2), load(1, 7));
        assert_eq!(others.load(a), load(1, 7));
        others.replace(a, &load(1, 7), &load(3, 9));
        others.replace(endpoint(3, 2), &load(3, 9), &load(0, 0));
        assert_eq!(others.load(a), load(3, 9));
        others.start(&[a]);
        assert_eq!(others.load(a), EndpointLoad::default(), "made anew");
    }

    #[test]
    fn a_young_pick_stands_for_one_of_each_other_proxy_until_theirs_are_heard() {
        let (a, b, mut others) = (endpoint(3, 1), endpoint(4, 1), PeerLoads::default());
        others.start(&[a, b]);
        others.picked(a, load(1, 50), 1_000);
        assert_eq!(others.load(a), EndpointLoad::default(), "there is no other proxy");
        assert!(!others.picks_stand());
        others.stand_for(3, 10_000, 1_000);
        assert!(others.picks_stand());
        others.picked(a, EndpointLoad { ttft_slo_us: Some(5), tpot_slo_us: Some(6), ..load(1, 50) }, 2_000);
        others.picked(b, load(1, 7), 8_000);
        others.add(a, load(2, 20));
        assert_eq!((others.load(a), others.load(b)), (load(5, 170), load(3, 21)), "SLOs are not multiplied by guessing");
        others.stand_for(3, 10_000, 11_999);
        assert_eq!(others.load(a), load(5, 170));
        others.stand_for(3, 10_000, 12_000);
        assert_eq!((others.load(a), others.load(b)), (load(2, 20), load(3, 21)));
        others.stand_for(0, 0, 12_001);
        assert_eq!((others.load(a), others.load(b)), (load(2, 20), EndpointLoad::default()), "nobody else is there any more");
        others.stand_for(1, u64::MAX, 0);
        (0..2 * YOUNG_MAX).for_each(|_| others.picked(b, load(1, 1), 0));
        assert_eq!(others.load(b).requests as usize, YOUNG_MAX, "bounded");
        others.start(&[b]);
        others.stand_for(0, 0, 0);
        assert_eq!(others.load(b), EndpointLoad::default());
    }

    #[test]
    fn the_strictest_slo_of_all_is_the_one_to_keep() {
        let slo = |ttft, tpot| EndpointLoad { requests: 1, ttft_slo_us: ttft, tpot_slo_us: tpot, ..EndpointLoad::default() };
        let (a, mut others) = (endpoint(0, 1), PeerLoads::default());
        others.start(&[a]);
        others.add(a, slo(Some(5_000), None));
        others.add(a, slo(Some(9_000), Some(20)));
        assert_eq!(others.load(a), EndpointLoad { requests: 2, ..slo(Some(5_000), Some(20)) });
        others.forget_slos();
        others.add(a, EndpointLoad { requests: 0, ..slo(None, Some(30)) });
        assert_eq!(others.load(a), EndpointLoad { requests: 2, ..slo(None, Some(30)) });
    }
}
