//! Adapter slots: which LoRA adapters sit in GPU memory, least recently used first.

/// Position of the adapter in the list of those served.
pub(super) type AdapterIndex = usize;

#[derive(Debug)]
pub(super) struct LoraSlots {
    slots: usize,
    resident: Vec<AdapterIndex>,
}

impl LoraSlots {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots, resident: Vec::new() }
    }

    /// Makes `adapter` the most recently used; true if it had to be loaded. Those in `active` are never evicted, and the caller sees to it
    /// that they leave a slot.
    pub(super) fn load(&mut self, adapter: AdapterIndex, active: &[AdapterIndex]) -> bool {
        if let Some(position) = self.resident.iter().position(|&other| other == adapter) {
            self.resident.remove(position);
            self.resident.push(adapter);
            return false;
        }
        if self.resident.len() >= self.slots
            && let Some(position) = self.resident.iter().position(|other| !active.contains(other))
        {
            self.resident.remove(position);
        }
        self.resident.push(adapter);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_idle_adapter_makes_room() {
        let mut slots = LoraSlots::new(2);
        assert!(slots.load(0, &[]));
        assert!(slots.load(1, &[]));
        assert!(!slots.load(0, &[]));
        assert!(slots.load(2, &[]), "evicts 1");
        assert!(!slots.load(0, &[]));
        assert!(slots.load(1, &[0]), "2 goes, 0 is active");
        assert!(!slots.load(0, &[]));
    }
}
