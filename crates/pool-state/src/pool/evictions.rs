//! Measures how scarce the memory of prompt caches is, by the recent cost of evictions.

use super::cache_places::CachePlaces;

/// With each newer prompt, the weight of a prompt falls by one part in this many. An eviction is
/// noticed when its prefix is requested again, so the window covers as many prompts as a small
/// cache holds. Values from 64 to 1,024 give the same results in the simulator's race.
const PROMPTS: f32 = 256.0;

/// The share of computed prompt tokens that an endpoint had cached before and had evicted. In a
/// full cache, each computed token takes the place of another. So this is also the probability that
/// an evicted token will be computed again.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EvictionShare {
    /// The number of evicted blocks, with decay; `computed` counts the blocks that were not cached.
    evicted: f32,
    computed: f32,
}

// === impl EvictionShare ===

impl EvictionShare {
    /// Records a prompt of `blocks` blocks. `places` says where the prompt is cached.
    #[expect(clippy::cast_precision_loss, reason = "blocks of one prompt")]
    pub(super) fn record(&mut self, places: &CachePlaces, blocks: u32) {
        let keep = 1.0 - 1.0 / PROMPTS;
        self.evicted = keep * self.evicted + places.given.saturating_sub(places.elsewhere) as f32;
        self.computed = keep * self.computed + blocks.saturating_sub(places.cached) as f32;
    }

    /// The share, 0 to 1; 0 before any prompt.
    pub(super) fn share(&self) -> f32 {
        if self.computed > 0.0 {
            (self.evicted / self.computed).min(1.0)
        } else {
            0.0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_what_was_evicted_of_what_is_computed() {
        let mut evictions = EvictionShare::default();
        assert_eq!(evictions.share(), 0.0, "nothing is known");
        let prompt = |cached, elsewhere, given| CachePlaces {
            cached,
            elsewhere,
            given,
            lost: given,
        };
        evictions.record(&prompt(0, 0, 0), 100);
        assert_eq!(evictions.share(), 0.0, "a new prompt");
        evictions.record(&prompt(0, 60, 60), 100);
        assert_eq!(evictions.share(), 0.0, "another endpoint has it");
        evictions = EvictionShare::default();
        evictions.record(&prompt(20, 30, 70), 100);
        assert!(
            (evictions.share() - 0.5).abs() < 1e-6,
            "40 of 80 blocks had been evicted"
        );
        (0..1_000).for_each(|_| evictions.record(&prompt(0, 0, 0), 100));
        assert!(evictions.share() < 0.02, "scarcity is forgotten");
    }
}
