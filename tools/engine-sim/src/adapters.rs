//! The LoRA adapters that an engine has in GPU memory. If memory is full, the engine evicts the
//! least recently used adapter.
//!
//! An adapter that a running sequence uses is never evicted.

/// The loaded adapters of one engine. Adapter 0 is the base model, which needs no memory.
#[derive(Clone, Debug)]
pub(crate) struct LoadedAdapters {
    places: usize,
    /// The loaded adapters, starting with the least recently used adapter.
    loaded: Vec<u16>,
}

// === impl LoadedAdapters ===

impl LoadedAdapters {
    /// Creates memory for `places` adapters. With 0, adapters cost nothing, as if they were part of
    /// the base model.
    pub(crate) fn new(places: usize) -> Self {
        Self {
            places,
            loaded: Vec::with_capacity(places),
        }
    }

    /// Whether the adapter is loaded, or the engine has free memory for it, or can free memory by
    /// an eviction.
    pub(crate) fn fits(&self, adapter: u16, in_use: impl Fn(u16) -> bool) -> bool {
        let there =
            adapter == 0 || self.loaded.len() < self.places || self.loaded.contains(&adapter);
        self.places == 0 || there || self.loaded.iter().any(|&other| !in_use(other))
    }

    /// Loads the adapter if necessary, and marks the adapter as the most recently used. Returns
    /// true if it had to be loaded.
    ///
    /// The adapter must fit (see [`Self::fits`]).
    pub(crate) fn load(&mut self, adapter: u16, in_use: impl Fn(u16) -> bool) -> bool {
        if adapter == 0 || self.places == 0 {
            return false;
        }
        let there = self.loaded.iter().position(|&other| other == adapter);
        let removed = there.or_else(|| {
            if self.loaded.len() < self.places {
                None
            } else {
                self.loaded.iter().position(|&other| !in_use(other))
            }
        });
        if let Some(at) = removed {
            self.loaded.remove(at);
        }
        self.loaded.push(adapter);
        there.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_idle_adapter_is_evicted() {
        let mut adapters = LoadedAdapters::new(2);
        let idle = |_| false;
        assert!(!adapters.load(0, idle), "the base model needs no place");
        assert!(adapters.load(1, idle) && adapters.load(2, idle) && !adapters.load(1, idle));
        assert!(
            adapters.fits(3, |other| other == 1)
                && !adapters.fits(3, |_| true)
                && adapters.fits(2, |_| true)
        );
        assert!(
            adapters.load(3, |other| other == 2),
            "1 is idle, though used later than 2"
        );
        assert_eq!(adapters.loaded, [2, 3]);
        assert!(LoadedAdapters::new(0).fits(9, |_| true));
    }
}
