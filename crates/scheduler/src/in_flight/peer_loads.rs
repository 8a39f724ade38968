//! The load of other workers of this process and of other proxies, as these workers and proxies
//! reported it.
//!
//! Other VMs and proxies report rows with absolute numbers, each of one point in time. When a row
//! replaces an older row, the table subtracts exactly the numbers of the older row. So the table is
//! always the sum of the current rows: it counts nothing twice, and the next report corrects a lost
//! report. Only rows of current generations count. An SLO in the sum is a minimum, which cannot be
//! subtracted, so all SLOs are recomputed when one of them changes.
//!
//! The newest picks of other proxies are not reported yet. These proxies see the same pool, and
//! pick in much the same way. So each pick of this VM also counts once for each other proxy, until
//! the reports that those proxies sent at the time of the pick must have arrived. In the
//! simulation, load reports that are 100 ms old make latency worse, and these counts undo a part of
//! the harm. With reports that are 10 ms old, these counts do no harm.
//!
//! The load that other proxies report counts only as far as scrapes confirm this load: see
//! [`super::outside_claim`].

use std::collections::VecDeque;

use super::EndpointLoad;
use super::outside_claim::{OutsideClaim, ShownLoad};
use crate::endpoint::{ENDPOINTS_MAX, EndpointRef, Generation, Slot};
use crate::slo::Slo;

/// The maximum number of recent picks that count for other proxies: the picks of 20 ms at 50,000
/// picks per second. If more picks are recent, the oldest no longer count.
const YOUNG_MAX: usize = 1_024;

/// The load of the other workers and proxies, by endpoint. The table has one writer, and a read is
/// an array look-up.
#[derive(Debug, Default)]
pub struct PeerLoads {
    /// The sum of the loads at each endpoint, by slot, up to the highest slot in use.
    rows: Vec<Option<(Generation, EndpointLoad)>>,
    /// The loads that other proxies claim, by slot. `rows` includes the part of each claim that
    /// counts. The list is empty if other proxies have claimed nothing.
    claims: Vec<(Generation, OutsideClaim)>,
    /// The number of other proxies for which each pick of this VM also counts. `delay_us` says for
    /// how long, in µs.
    proxies_per_pick: u32,
    delay_us: u64,
    /// The recent picks, oldest first: the time of the pick, its endpoint, and the load that the
    /// pick added.
    young: VecDeque<(u64, EndpointRef, EndpointLoad)>,
}

// === impl PeerLoads ===

impl PeerLoads {
    /// Removes all loads. From now on, only the loads of these generations are added up.
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
        // The results of comparing earlier claims with scrapes stay.
        for (_, claim) in &mut self.claims {
            claim.clear();
        }
    }

    /// Adds `load` at `endpoint`. Does nothing if the generation of `endpoint` is not current.
    pub fn add(&mut self, endpoint: EndpointRef, load: EndpointLoad) {
        if let Some(Some((generation, sum))) = self.rows.get_mut(usize::from(endpoint.slot.0))
            && *generation == endpoint.generation
        {
            *sum = sum.with(load);
        }
    }

    /// Subtracts a load that [`Self::add`] added, except its SLOs.
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

    /// Does [`Self::subtract`] of `was` and [`Self::add`] of `is` in one look-up, except for SLOs.
    /// This function takes most of the time of reading other workers' rows.
    pub fn replace(&mut self, endpoint: EndpointRef, was: &EndpointLoad, is: &EndpointLoad) {
        if let Some(Some((generation, sum))) = self.rows.get_mut(usize::from(endpoint.slot.0))
            && *generation == endpoint.generation
        {
            exchange(sum, was, is);
        }
    }

    /// Replaces the load `was` that other proxies claim to have at `endpoint` by `is`.
    pub fn claim(
        &mut self,
        endpoint: EndpointRef,
        was: &EndpointLoad,
        is: &EndpointLoad,
        now_us: u64,
    ) {
        let slot = usize::from(endpoint.slot.0);
        let Some(Some((generation, sum))) = self.rows.get_mut(slot) else {
            return;
        };
        if *generation != endpoint.generation {
            return;
        }
        if self.claims.len() <= slot {
            let nothing = || (Generation(0), OutsideClaim::default());
            self.claims.resize_with(slot + 1, nothing);
        }
        if let Some((of, claim)) = self.claims.get_mut(slot) {
            if *of != endpoint.generation {
                *of = endpoint.generation;
                *claim = OutsideClaim::default();
            }
            let before = *claim.counted();
            claim.update(|claim| exchange(claim, was, is), now_us);
            exchange(sum, &before, claim.counted());
        }
    }

    /// Compares the claims from other proxies about `endpoint` with the new scrape of `endpoint`,
    /// which shows this load. This VM has `own` requests at the endpoint. See
    /// [`OutsideClaim::judge`].
    pub(super) fn judge(
        &mut self,
        endpoint: EndpointRef,
        shown: Option<ShownLoad>,
        own: u32,
        patience_us: u64,
        now_us: u64,
    ) {
        let slot = usize::from(endpoint.slot.0);
        if let Some((of, claim)) = self.claims.get_mut(slot)
            && *of == endpoint.generation
            && let Some(Some((generation, sum))) = self.rows.get_mut(slot)
            && *generation == *of
        {
            let before = *claim.counted();
            let of_process = own + sum.requests.saturating_sub(before.requests);
            claim.judge(shown, of_process, patience_us, now_us);
            exchange(sum, &before, claim.counted());
        }
    }

    /// Whether other proxies have claimed a load at an endpoint.
    pub(super) fn has_claims(&self) -> bool {
        !self.claims.is_empty()
    }

    /// Adds SLOs that other proxies claim. These SLOs are used while requests from other proxies
    /// are counted at `endpoint`.
    pub fn add_peer_slos(&mut self, endpoint: EndpointRef, slos: EndpointLoad) {
        if let Some((of, claim)) = self.claims.get_mut(usize::from(endpoint.slot.0))
            && *of == endpoint.generation
        {
            claim.slo = claim.slo.strictest(slos.slo());
        }
    }

    /// Replaces each SLO that other proxies claim by the SLO that `possible` returns for its
    /// endpoint.
    pub fn retain_peer_slos(&mut self, possible: impl Fn(EndpointRef, Slo) -> Slo) {
        for ((of, claim), slot) in self.claims.iter_mut().zip(0..) {
            if claim.slo.any() {
                let endpoint = EndpointRef {
                    slot: Slot(slot),
                    generation: *of,
                };
                claim.slo = possible(endpoint, claim.slo);
            }
        }
    }

    /// Returns the number of requests that count for other proxies, summed over all endpoints.
    pub fn outside_requests(&self) -> u64 {
        let counted = self.claims.iter().map(|(_, claim)| claim.counted());
        counted.map(|load| u64::from(load.requests)).sum()
    }

    /// Clears all SLOs, before they are added again.
    pub fn forget_slos(&mut self) {
        for (_, load) in self.rows.iter_mut().flatten() {
            load.ttft_slo_us = None;
            load.tpot_slo_us = None;
        }
        for (_, claim) in &mut self.claims {
            claim.slo = Slo::default();
        }
    }

    /// Makes each pick of this VM also count for each of `proxies` other proxies, until it is
    /// `delay_us` old. Stops counting picks that are older at `now_us`. [`Self::picked`] must use
    /// the same clock.
    pub fn estimate_picks(&mut self, proxies: u32, delay_us: u64, now_us: u64) {
        self.proxies_per_pick = proxies;
        self.delay_us = delay_us;
        while let Some(&(at, endpoint, load)) = self.young.front()
            && (proxies == 0
                || now_us.saturating_sub(at) >= delay_us
                || self.young.len() > YOUNG_MAX)
        {
            self.young.pop_front();
            self.subtract(endpoint, load);
        }
    }

    /// Whether picks of this VM also count for other proxies.
    pub fn estimates_picks(&self) -> bool {
        self.proxies_per_pick > 0
    }

    /// Records that this VM picked `endpoint` for a request of `load`.
    pub fn picked(&mut self, endpoint: EndpointRef, load: EndpointLoad, now_us: u64) {
        if self.estimates_picks() {
            let load = EndpointLoad {
                ttft_slo_us: None,
                tpot_slo_us: None,
                ..load.times(self.proxies_per_pick)
            };
            self.add(endpoint, load);
            self.young.push_back((now_us, endpoint, load));
            self.estimate_picks(self.proxies_per_pick, self.delay_us, now_us);
        }
    }

    /// Returns the load of all other workers and proxies together at `endpoint`.
    #[inline(never)] // several callers, and the wasm module should be small
    pub fn load(&self, endpoint: EndpointRef) -> EndpointLoad {
        let mut load = self.row(endpoint).copied().unwrap_or_default();
        if let Some((of, claim)) = self.claims.get(usize::from(endpoint.slot.0))
            && *of == endpoint.generation
            && claim.slo.any()
            && claim.counted().requests > 0
        {
            load.set_slo(load.slo().strictest(claim.slo));
        }
        load
    }

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

/// Subtracts `was` from a sum and adds `is`, except for SLOs.
fn exchange(sum: &mut EndpointLoad, was: &EndpointLoad, is: &EndpointLoad) {
    let of = |sum: u64, was: u64, is: u64| sum.saturating_add(is).saturating_sub(was);
    let short = |sum: u32, was: u32, is: u32| sum.saturating_add(is).saturating_sub(was);
    sum.requests = short(sum.requests, was.requests, is.requests);
    sum.prefill_tokens = of(sum.prefill_tokens, was.prefill_tokens, is.prefill_tokens);
    sum.decode_tokens = of(sum.decode_tokens, was.decode_tokens, is.decode_tokens);
    let sum = &mut sum.prefills;
    let was = &was.prefills;
    let is = &is.prefills;
    sum.prompts = short(sum.prompts, was.prompts, is.prompts);
    sum.prompt_tokens = of(sum.prompt_tokens, was.prompt_tokens, is.prompt_tokens);
    sum.uncached_tokens = of(sum.uncached_tokens, was.uncached_tokens, is.uncached_tokens);
    sum.attention = of(sum.attention, was.attention, is.attention);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(slot: u16, generation: u32) -> EndpointRef {
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(generation),
        }
    }

    fn load(requests: u32, prefill_tokens: u64) -> EndpointLoad {
        EndpointLoad {
            requests,
            prefill_tokens,
            ..EndpointLoad::default()
        }
    }

    #[test]
    fn rows_add_up_for_current_generations_only() {
        let a = endpoint(3, 1);
        let b = endpoint(9, 2);
        let mut others = PeerLoads::default();
        others.add(a, load(1, 1));
        assert_eq!(
            others.load(a),
            EndpointLoad::default(),
            "no endpoint is current yet"
        );
        others.start(&[a, b, endpoint(u16::MAX, 1)]);
        others.add(a, load(2, 50));
        others.add(a, load(1, 7));
        others.add(endpoint(9, 1), load(5, 5));
        others.add(endpoint(u16::MAX, 1), load(5, 5));
        assert_eq!(
            (others.load(a), others.load(b), others.load(endpoint(9, 1))),
            (load(3, 57), load(0, 0), load(0, 0))
        );
        others.subtract(a, load(2, 50));
        others.subtract(endpoint(3, 2), load(1, 7));
        assert_eq!(others.load(a), load(1, 7));
        others.replace(a, &load(1, 7), &load(3, 9));
        others.replace(endpoint(3, 2), &load(3, 9), &load(0, 0));
        assert_eq!(others.load(a), load(3, 9));
        others.start(&[a]);
        assert_eq!(others.load(a), EndpointLoad::default(), "started again");
    }

    #[test]
    fn a_young_pick_stands_for_one_of_each_other_proxy_until_their_reports_arrive() {
        let a = endpoint(3, 1);
        let b = endpoint(4, 1);
        let mut others = PeerLoads::default();
        others.start(&[a, b]);
        others.picked(a, load(1, 50), 1_000);
        assert_eq!(
            others.load(a),
            EndpointLoad::default(),
            "there is no other proxy"
        );
        assert!(!others.estimates_picks());
        others.estimate_picks(3, 10_000, 1_000);
        assert!(others.estimates_picks());
        others.picked(
            a,
            EndpointLoad {
                ttft_slo_us: Some(5),
                tpot_slo_us: Some(6),
                ..load(1, 50)
            },
            2_000,
        );
        others.picked(b, load(1, 7), 8_000);
        others.add(a, load(2, 20));
        assert_eq!(
            (others.load(a), others.load(b)),
            (load(5, 170), load(3, 21)),
            "SLOs are not multiplied"
        );
        others.estimate_picks(3, 10_000, 11_999);
        assert_eq!(others.load(a), load(5, 170));
        others.estimate_picks(3, 10_000, 12_000);
        assert_eq!((others.load(a), others.load(b)), (load(2, 20), load(3, 21)));
        others.estimate_picks(0, 0, 12_001);
        assert_eq!(
            (others.load(a), others.load(b)),
            (load(2, 20), EndpointLoad::default()),
            "no other proxy is left"
        );
        others.estimate_picks(1, u64::MAX, 0);
        (0..2 * YOUNG_MAX).for_each(|_| others.picked(b, load(1, 1), 0));
        assert_eq!(others.load(b).requests as usize, YOUNG_MAX, "bounded");
        others.start(&[b]);
        others.estimate_picks(0, 0, 0);
        assert_eq!(others.load(b), EndpointLoad::default());
    }

    #[test]
    fn the_strictest_slo_of_all_is_the_one_to_keep() {
        let slo = |ttft, tpot| EndpointLoad {
            requests: 1,
            ttft_slo_us: ttft,
            tpot_slo_us: tpot,
            ..EndpointLoad::default()
        };
        let a = endpoint(0, 1);
        let mut others = PeerLoads::default();
        others.start(&[a]);
        others.add(a, slo(Some(5_000), None));
        others.add(a, slo(Some(9_000), Some(20)));
        assert_eq!(
            others.load(a),
            EndpointLoad {
                requests: 2,
                ..slo(Some(5_000), Some(20))
            }
        );
        others.forget_slos();
        others.add(
            a,
            EndpointLoad {
                requests: 0,
                ..slo(None, Some(30))
            },
        );
        assert_eq!(
            others.load(a),
            EndpointLoad {
                requests: 2,
                ..slo(None, Some(30))
            }
        );
    }
}
