//! Estimates which LoRA adapters each endpoint has in GPU memory, from the models of its past
//! requests.
//!
//! An engine reports the adapters in use, not those that it keeps loaded. Like an engine, a row
//! keeps the most recently used models, and an adapter that no longer fits counts as evicted.
//! Requests for the base model, where the engine names it, need no adapter and take no place.
//!
//! Other workers and proxies learn the model of a request from a placement whose only block is a
//! *model mark*: the constant [`MODEL_MARK`] in the upper 32 bits and 32 bits of the model name's
//! hash below. So models travel the same way as prompts and need no message of their own. The
//! constant distinguishes a mark from the hash of a prompt block: one hash in 4 billion has the
//! same upper half. A prompt of a single block with such a hash counts as a model; then the prefix
//! index does not get that block, and the row has one useless entry.

use scheduler::{AdapterRoom, EndpointMetrics, name_hash};

/// The most adapters remembered for an endpoint. Engines have far fewer places.
const ADAPTERS_MAX: usize = 64;

/// The upper half of a model mark: "LoRA" in ASCII.
const MODEL_MARK: u64 = 0x4c6f_5241_0000_0000;
const MARK_MASK: u64 = 0xffff_ffff_0000_0000;

/// The models of past requests, by position of the endpoint in the snapshot.
#[derive(Debug, Default)]
pub(super) struct AdapterTable {
    rows: Vec<EndpointAdapters>,
    /// Requests recorded so far, at all endpoints.
    requests: u64,
    rooms: Vec<AdapterRoom>,
}

/// The models of an endpoint's requests, least recently used first: the mark of each, and the
/// number of its last request.
#[derive(Debug, Default)]
struct EndpointAdapters(Vec<(u64, u64)>);

/// The mark of a model.
pub(super) fn model_mark(model: &str) -> u64 {
    MODEL_MARK | (name_hash(model) & !MARK_MASK)
}

/// Whether a block of a placement is the mark of a model, not the hash of a prompt block.
pub(super) fn is_model_mark(block: u64) -> bool {
    block & MARK_MASK == MODEL_MARK
}

// === impl AdapterTable ===

impl AdapterTable {
    /// Moves the rows to the endpoints of a new snapshot. `from` has the position of each endpoint
    /// in the snapshot before.
    pub(super) fn remap(&mut self, from: &[Option<usize>]) {
        let mut before = std::mem::take(&mut self.rows);
        self.rows = from.iter().map(|at| at.and_then(|at| before.get_mut(at)).map(std::mem::take).unwrap_or_default()).collect();
        self.rooms.clear();
    }

    /// Records a request for the model of this mark at the endpoint at position `at`.
    pub(super) fn record_model(&mut self, at: usize, mark: u64) {
        let Some(EndpointAdapters(row)) = self.rows.get_mut(at) else { return };
        self.requests += 1;
        match row.iter().position(|(other, _)| *other == mark) {
            Some(place) => drop(row.remove(place)),
            None if row.len() >= ADAPTERS_MAX => drop(row.remove(0)),
            None => {}
        }
        row.push((mark, self.requests));
    }

    /// Finds which endpoints have room for the adapter; [`Self::rooms`] returns the result.
    pub(super) fn find_rooms(&mut self, metrics: &[EndpointMetrics], model: &str) {
        self.rooms.clear();
        if model.is_empty() || !metrics.iter().any(|metrics| metrics.lora.is_some()) {
            return;
        }
        let mark = model_mark(model);
        let is_base = |metrics: &EndpointMetrics| metrics.lora.as_ref().is_some_and(|lora| *lora.base_model == *model);
        let places = |metrics: &EndpointMetrics| metrics.lora.as_ref().and_then(|lora| usize::try_from(lora.max).ok()).unwrap_or(0);
        let room = |(row, metrics): (&EndpointAdapters, &EndpointMetrics)| match is_base(metrics) {
            true => AdapterRoom::Unknown,
            false => row.room(mark, places(metrics)),
        };
        self.rooms.extend(self.rows.iter().zip(metrics).map(room));
    }

    pub(super) fn rooms(&self) -> &[AdapterRoom] {
        &self.rooms
    }
}

// === impl EndpointAdapters ===

impl EndpointAdapters {
    /// Whether the endpoint has room for the model of this mark. `places` is the number of adapters
    /// that fit into its memory; 0 is unknown.
    fn room(&self, mark: u64, places: usize) -> AdapterRoom {
        if places == 0 {
            return AdapterRoom::Unknown;
        }
        let last = self.0.len().saturating_sub(places);
        let kept = self.0.get(last..).unwrap_or(&[]);
        match kept.first() {
            _ if kept.iter().any(|(other, _)| *other == mark) => AdapterRoom::Loaded,
            Some(&(_, displaced_used)) if kept.len() >= places => AdapterRoom::Full { displaced_used },
            _ => AdapterRoom::Free,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler::LoraMetrics;

    /// A pool. `places` has the number of adapters that fit at each endpoint, 0 where none are
    /// served.
    fn pool(places: &[u32]) -> (AdapterTable, Vec<EndpointMetrics>) {
        let lora = |max: u32| (max > 0).then(|| LoraMetrics { max, ..LoraMetrics::default() });
        let metrics = places.iter().map(|&max| EndpointMetrics { lora: lora(max), ..EndpointMetrics::default() }).collect();
        let mut adapters = AdapterTable::default();
        adapters.remap(&vec![None; places.len()]);
        (adapters, metrics)
    }

    #[test]
    fn the_least_recently_used_makes_room() {
        let (mut adapters, metrics) = pool(&[2]);
        let mut room = |used: &[&str], model: &str| {
            used.iter().for_each(|used| adapters.record_model(0, model_mark(used)));
            adapters.find_rooms(&metrics, model);
            adapters.rooms().to_vec()
        };
        assert_eq!(room(&[], "a"), [AdapterRoom::Free]);
        assert_eq!(room(&["a"], "a"), [AdapterRoom::Loaded]);
        assert_eq!(room(&[], "b"), [AdapterRoom::Free]);
        assert_eq!(room(&["b", "a"], "c"), [AdapterRoom::Full { displaced_used: 2 }], "b would go: its last request was the second");
        assert_eq!(room(&["c"], "b"), [AdapterRoom::Full { displaced_used: 3 }], "b went, and a would be next");
        assert_eq!(room(&[], "a"), [AdapterRoom::Loaded]);
    }

    #[test]
    fn an_endpoint_without_adapters_is_unknown_and_a_pool_of_such_has_no_rooms() {
        let (mut adapters, metrics) = pool(&[0, 1]);
        adapters.find_rooms(&metrics, "a");
        assert_eq!(adapters.rooms(), [AdapterRoom::Unknown, AdapterRoom::Free]);
        adapters.find_rooms(&metrics, "");
        assert!(adapters.rooms().is_empty(), "a request without a model needs no adapter");
        let (mut adapters, metrics) = pool(&[0, 0]);
        adapters.find_rooms(&metrics, "a");
        assert!(adapters.rooms().is_empty());
    }

    #[test]
    fn the_base_model_needs_no_adapter() {
        let (mut adapters, mut metrics) = pool(&[1, 1]);
        metrics[1].lora.as_mut().unwrap().base_model = "llama".into();
        adapters.record_model(1, model_mark("sql"));
        adapters.find_rooms(&metrics, "llama");
        assert_eq!(adapters.rooms(), [AdapterRoom::Free, AdapterRoom::Unknown], "the first engine names no base model");
    }

    #[test]
    fn rows_follow_their_endpoints() {
        let (mut adapters, metrics) = pool(&[1, 1]);
        adapters.record_model(1, model_mark("a"));
        adapters.remap(&[Some(1), None]);
        adapters.find_rooms(&metrics, "a");
        assert_eq!(adapters.rooms(), [AdapterRoom::Loaded, AdapterRoom::Free]);
        adapters.record_model(7, model_mark("a"));
        adapters.remap(&[]);
        adapters.record_model(0, model_mark("a"));
        adapters.find_rooms(&metrics, "a");
        assert!(adapters.rooms().is_empty());
    }

    #[test]
    fn a_row_is_bounded_and_marks_are_known() {
        let (mut adapters, metrics) = pool(&[200]);
        (0..200).for_each(|n| adapters.record_model(0, model_mark(&n.to_string())));
        assert_eq!(adapters.rows[0].0.len(), ADAPTERS_MAX);
        adapters.find_rooms(&metrics, "199");
        assert_eq!(adapters.rooms(), [AdapterRoom::Loaded]);
        adapters.find_rooms(&metrics, "0");
        assert_eq!(adapters.rooms(), [AdapterRoom::Free]);
        assert!(is_model_mark(model_mark("a")) && !is_model_mark(0) && !is_model_mark(name_hash("a")));
    }
}
