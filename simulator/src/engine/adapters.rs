//! Which LoRA adapters an engine has in GPU memory: those used last, as many as fit. One that a running sequence uses stays.

/// The adapters of one engine; 0 stands for none.
#[derive(Debug)]
pub(super) struct LoadedAdapters {
    places: usize,
    /// Least recently used first.
    loaded: Vec<u16>,
}

// === impl LoadedAdapters ===

impl LoadedAdapters {
    /// `places`: how many fit; where none does, adapters are as the base model.
    pub(super) fn new(places: usize) -> Self {
        Self { places, loaded: Vec::with_capacity(places) }
    }

    /// Is it there, or is there a place for it?
    pub(super) fn fits(&self, adapter: u16, in_use: impl Fn(u16) -> bool) -> bool {
        let there = adapter == 0 || self.loaded.len() < self.places || self.loaded.contains(&adapter);
        self.places == 0 || there || self.loaded.iter().any(|&other| !in_use(other))
    }

    /// Uses it; true when it had to be loaded. It must fit.
    pub(super) fn take(&mut self, adapter: u16, in_use: impl Fn(u16) -> bool) -> bool {
        if adapter == 0 || self.places == 0 {
            return false;
        }
        let there = self.loaded.iter().position(|&other| other == adapter);
        let goes =
            there.or_else(|| if self.loaded.len() < self.places { None } else { self.loaded.iter().position(|&other| !in_use(other)) });
        if let Some(at) = goes {
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
    fn the_least_recently_used_of_the_idle_goes() {
        let mut adapters = LoadedAdapters::new(2);
        let idle = |_| false;
        assert!(!adapters.take(0, idle) && adapters.take(1, idle) && adapters.take(2, idle) && !adapters.take(1, idle));
        assert!(adapters.fits(3, |other| other == 1) && !adapters.fits(3, |_| true) && adapters.fits(2, |_| true));
        assert!(adapters.take(3, |other| other == 2), "1 is idle, though used later than 2");
        assert_eq!(adapters.loaded, [2, 3]);
        assert!(LoadedAdapters::new(0).fits(9, |_| true));
    }
}
