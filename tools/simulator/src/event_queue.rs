//! The planned events, in the order of virtual time. Events with the same time are in the order in
//! which they were planned.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use pool_state::Timestamp;

#[derive(Clone, Debug)]
pub(crate) struct EventQueue<T> {
    items: BinaryHeap<QueuedEvent<T>>,
    planned: u64,
}

/// An event: its time in ms, its number in the order of planning, and its data.
#[derive(Clone, Debug)]
struct QueuedEvent<T>(f64, u64, T);

/// Returns a moment of virtual time, given in ms, on the clock of the pool state.
pub(crate) fn virtual_time(ms: f64) -> Timestamp {
    Timestamp((ms * 1e6) as u64)
}

// === impl QueuedEvent ===

impl<T> PartialEq for QueuedEvent<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<T> Eq for QueuedEvent<T> {}

impl<T> PartialOrd for QueuedEvent<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for QueuedEvent<T> {
    /// Compares in reverse, because the heap returns its greatest item first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.0.total_cmp(&self.0).then(other.1.cmp(&self.1))
    }
}

// === impl EventQueue ===

impl<T> Default for EventQueue<T> {
    fn default() -> Self {
        Self {
            items: BinaryHeap::new(),
            planned: 0,
        }
    }
}

impl<T> EventQueue<T> {
    pub(crate) fn plan(&mut self, at: f64, what: T) {
        self.planned += 1;
        self.items.push(QueuedEvent(at, self.planned, what));
    }

    /// Returns the time of the next event in ms, or infinity if no event is planned.
    pub(crate) fn next_at(&self) -> f64 {
        self.items.peek().map_or(f64::INFINITY, |item| item.0)
    }

    /// Removes the next event. Returns its time in ms and the event.
    ///
    /// # Errors
    /// Fails when no event is planned, though the run has not ended.
    pub(crate) fn next(&mut self) -> Result<(f64, T), String> {
        self.items
            .pop()
            .map(|QueuedEvent(at, _, what)| (at, what))
            .ok_or_else(|| "nothing is left to happen".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soonest_comes_first_and_of_one_time_the_first_planned() {
        let mut agenda = EventQueue::default();
        [(2.0, 'c'), (1.0, 'a'), (2.0, 'd'), (1.0, 'b')]
            .into_iter()
            .for_each(|(at, what)| agenda.plan(at, what));
        let order: String = (0..4).map(|_| agenda.next().unwrap().1).collect();
        assert_eq!(order, "abcd");
        assert!(agenda.next().is_err() && agenda.next_at().is_infinite());
    }
}
