//! Estimates which LoRA adapters each endpoint has in GPU memory, from the models of its past
//! requests.
//!
//! An engine reports the adapters in use, but not those that it keeps loaded. Like an engine, the
//! row of an endpoint keeps the most recently used models. An adapter that no longer fits counts as
//! evicted. If the engine names its base model, requests for that model need no adapter and take no
//! memory.
//!
//! Other workers and proxies learn the model of a request from a placement whose only block is a
//! *model mark*. A mark's upper 32 bits are the constant [`MODEL_MARK`], and its lower 32 bits are
//! a hash of the model name. So models are published like prompts, without a message of their own.
//! The constant distinguishes a mark from the hash of a prompt block. One hash in 4 billion has the
//! same upper half. A prompt of a single block with such a hash counts as a model. Then the prefix
//! index does not get that block, and the endpoint's row has one useless entry.

use scheduler::{AdapterRoom, EndpointIndex, EndpointTable, name_hash};

/// The maximum number of adapters remembered for an endpoint. Engines keep far fewer. At most half
/// of the remembered ones were reported only by other proxies, because such reports may be made up.
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
}

/// The models of one endpoint's requests, the least recently used first.
#[derive(Debug, Default)]
struct EndpointAdapters(Vec<UsedAdapter>);

#[derive(Clone, Copy, Debug)]
struct UsedAdapter {
    mark: u64,
    /// The number of the last request for this model.
    used: u64,
    /// Whether only other proxies reported requests for it.
    from_peer: bool,
}

pub(super) fn model_mark(model: &str) -> u64 {
    MODEL_MARK | (name_hash(model) & !MARK_MASK)
}

/// Whether a block of a placement is the mark of a model, not the hash of a prompt block.
pub(super) fn is_model_mark(block: u64) -> bool {
    block & MARK_MASK == MODEL_MARK
}

// === impl AdapterTable ===

impl AdapterTable {
    /// Moves the rows to the positions of the endpoints in a new snapshot. `from` has the position
    /// of each endpoint in the previous snapshot.
    pub(super) fn remap(&mut self, from: &[Option<usize>]) {
        let mut before = std::mem::take(&mut self.rows);
        self.rows = from
            .iter()
            .map(|at| {
                at.and_then(|at| before.get_mut(at))
                    .map(std::mem::take)
                    .unwrap_or_default()
            })
            .collect();
    }

    /// Records that the endpoint at position `at` got a request for the model with this mark. If
    /// `from_peer`, another proxy reported the request.
    pub(super) fn record_model(&mut self, at: usize, mark: u64, from_peer: bool) {
        let Some(row) = self.rows.get_mut(at) else {
            return;
        };
        self.requests += 1;
        let is_full = from_peer && row.of_peers() >= ADAPTERS_MAX / 2;
        let known = row.0.iter().position(|of| of.mark == mark);
        let place = match known {
            None if is_full => row.0.iter().position(|of| of.from_peer),
            None if row.0.len() >= ADAPTERS_MAX => Some(0),
            _ => known,
        };
        let before = place.map(|place| row.0.remove(place));
        let was_own = known.is_some() && before.is_some_and(|before| !before.from_peer);
        row.0.push(UsedAdapter {
            mark,
            used: self.requests,
            from_peer: from_peer && !was_own,
        });
    }

    /// Writes into `rooms` which endpoints have room for the request's adapter. Writes nothing if
    /// there are no adapters.
    pub(super) fn find_rooms(
        &self,
        endpoints: &EndpointTable,
        model: &str,
        rooms: &mut Vec<AdapterRoom>,
    ) {
        rooms.clear();
        if model.is_empty()
            || !endpoints
                .metrics()
                .iter()
                .any(|metrics| metrics.lora.is_some())
        {
            return;
        }
        let mark = model_mark(model);
        let room = |(row, index): (&EndpointAdapters, EndpointIndex)| {
            let places = endpoints.adapter_places(index, model);
            row.room(
                mark,
                places
                    .and_then(|places| usize::try_from(places).ok())
                    .unwrap_or(0),
            )
        };
        rooms.extend(self.rows.iter().zip(endpoints.indices()).map(room));
    }
}

// === impl EndpointAdapters ===

impl EndpointAdapters {
    /// The number of adapters that only other proxies reported.
    #[inline(never)] // several callers, and the wasm module should be small
    fn of_peers(&self) -> usize {
        self.0.iter().filter(|of| of.from_peer).count()
    }

    /// Whether the endpoint has room for the model with this mark. `places` is the number of
    /// adapters that fit into its memory; 0 means unknown.
    fn room(&self, mark: u64, places: usize) -> AdapterRoom {
        if places == 0 {
            return AdapterRoom::Unknown;
        }
        let own = self.0.len().saturating_sub(self.of_peers());
        let mut peers_left = (places / 2).max(places.saturating_sub(own));
        let mut left = places;
        for of in self.0.iter().rev() {
            if of.from_peer {
                if peers_left == 0 {
                    continue;
                }
                peers_left -= 1;
            }
            if of.mark == mark {
                return AdapterRoom::Loaded;
            }
            left -= 1;
            if left == 0 {
                let displaced_used = of.used;
                return AdapterRoom::Full { displaced_used };
            }
        }
        AdapterRoom::Free
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use scheduler::{
        Endpoint, EndpointMetrics, EndpointRef, Generation, LoraMetrics, Pipeline, PipelineSpec,
        Readiness, Slot, Snapshot, Version,
    };

    fn rooms(adapters: &AdapterTable, endpoints: &Snapshot, model: &str) -> Vec<AdapterRoom> {
        let mut rooms = Vec::new();
        adapters.find_rooms(endpoints, model, &mut rooms);
        rooms
    }

    /// A pool. `places` has the number of adapters that fit at each endpoint, or 0 where none are
    /// served.
    fn pool(places: &[u32]) -> (AdapterTable, Snapshot) {
        let lora = |max: u32| {
            (max > 0).then(|| LoraMetrics {
                max,
                ..LoraMetrics::default()
            })
        };
        pool_with(places.iter().map(|&max| (lora(max), [].into())).collect())
    }

    /// The engine's metrics of adapters, and the models in the endpoint's metadata.
    type AdapterRow = (Option<LoraMetrics>, Arc<[Box<str>]>);

    fn pool_with(rows: Vec<AdapterRow>) -> (AdapterTable, Snapshot) {
        let mut adapters = AdapterTable::default();
        adapters.remap(&vec![None; rows.len()]);
        let endpoint = |(slot, models): (u16, Arc<[Box<str>]>)| Endpoint {
            id: EndpointRef {
                slot: Slot(slot),
                generation: Generation(1),
            },
            name: format!("pod-{slot}").into(),
            address: format!("10.0.0.{slot}:8000").into(),
            readiness: Readiness::Ready,
            labels: [].into(),
            models,
            age_ms: 0,
        };
        let (lora, models): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
        let metrics = lora
            .into_iter()
            .map(|lora| EndpointMetrics {
                lora,
                ..EndpointMetrics::default()
            })
            .collect();
        let endpoints = (0..).zip(models).map(endpoint).collect();
        let pipeline = Pipeline::build(&PipelineSpec::default()).unwrap();
        (
            adapters,
            Snapshot::try_new(
                Version {
                    term: 1,
                    sequence: 1,
                },
                endpoints,
                metrics,
                pipeline,
            )
            .unwrap(),
        )
    }

    #[test]
    fn the_least_recently_used_makes_room() {
        let (mut adapters, endpoints) = pool(&[2]);
        let mut room = |used: &[&str], model: &str| {
            used.iter()
                .for_each(|used| adapters.record_model(0, model_mark(used), false));
            rooms(&adapters, &endpoints, model)
        };
        assert_eq!(room(&[], "a"), [AdapterRoom::Free]);
        assert_eq!(room(&["a"], "a"), [AdapterRoom::Loaded]);
        assert_eq!(room(&[], "b"), [AdapterRoom::Free]);
        assert_eq!(
            room(&["b", "a"], "c"),
            [AdapterRoom::Full { displaced_used: 2 }],
            "b would go: its last request was the second"
        );
        assert_eq!(
            room(&["c"], "b"),
            [AdapterRoom::Full { displaced_used: 3 }],
            "b went, and a would be next"
        );
        assert_eq!(room(&[], "a"), [AdapterRoom::Loaded]);
    }

    #[test]
    fn adapters_that_other_proxies_tell_take_half_of_the_places() {
        let (mut adapters, endpoints) = pool(&[4]);
        for own in ["a", "b", "c"] {
            adapters.record_model(0, model_mark(own), false);
        }
        (0..64).for_each(|n| adapters.record_model(0, model_mark(&n.to_string()), true));
        let is_loaded =
            |model: &&str| rooms(&adapters, &endpoints, model)[0] == AdapterRoom::Loaded;
        // Adapters that only other proxies reported do not displace all of a, b and c.
        assert_eq!(["a", "b", "c"].iter().filter(|of| is_loaded(of)).count(), 2);
        assert_eq!(["62", "63"].iter().filter(|of| is_loaded(of)).count(), 2);
        assert!(!is_loaded(&"61"));
        let (mut adapters, endpoints) = pool(&[4]);
        (0..64).for_each(|n| adapters.record_model(0, model_mark(&n.to_string()), true));
        assert_eq!(
            rooms(&adapters, &endpoints, "60"),
            [AdapterRoom::Loaded],
            "a proxy without requests of its own knows all places from the others"
        );
    }

    #[test]
    fn an_endpoint_without_adapters_is_unknown_and_a_pool_of_such_has_no_rooms() {
        let (adapters, endpoints) = pool(&[0, 1]);
        assert_eq!(
            rooms(&adapters, &endpoints, "a"),
            [AdapterRoom::Unknown, AdapterRoom::Free]
        );
        assert!(
            rooms(&adapters, &endpoints, "").is_empty(),
            "a request without a model needs no adapter"
        );
        let (adapters, endpoints) = pool(&[0, 0]);
        assert!(rooms(&adapters, &endpoints, "a").is_empty());
    }

    #[test]
    fn a_base_model_needs_no_adapter_by_whatever_name() {
        let names = |names: &[&str]| {
            names
                .iter()
                .map(|name| Box::from(*name))
                .collect::<Vec<Box<str>>>()
        };
        let lora = |base: &[&str], running: &[&str]| {
            Some(LoraMetrics {
                max: 1,
                base_models: names(base).into(),
                running: names(running).into(),
                ..LoraMetrics::default()
            })
        };
        let (adapters, endpoints) = pool_with(vec![
            (lora(&[], &[]), [].into()),
            (lora(&["llama", "llama-alias"], &[]), [].into()),
            (
                lora(&[], &["sql"]),
                names(&["llama", "llama-alias", "sql"]).into(),
            ),
            (
                lora(&["llama", "llama-alias"], &[]),
                names(&["llama", "sql"]).into(),
            ),
        ]);
        let rooms = |model| rooms(&adapters, &endpoints, model);
        for base in ["llama", "llama-alias"] {
            assert_eq!(
                rooms(base),
                [
                    AdapterRoom::Free,
                    AdapterRoom::Unknown,
                    AdapterRoom::Unknown,
                    AdapterRoom::Unknown
                ],
                "the first names none"
            );
        }
        assert_eq!(
            rooms("sql"),
            [AdapterRoom::Free; 4],
            "it is an adapter for the engine, whatever else metadata names"
        );
    }

    #[test]
    fn rows_follow_their_endpoints() {
        let (mut adapters, endpoints) = pool(&[1, 1]);
        adapters.record_model(1, model_mark("a"), false);
        adapters.remap(&[Some(1), None]);
        assert_eq!(
            rooms(&adapters, &endpoints, "a"),
            [AdapterRoom::Loaded, AdapterRoom::Free]
        );
        adapters.record_model(7, model_mark("a"), false);
        adapters.remap(&[]);
        adapters.record_model(0, model_mark("a"), false);
        assert!(rooms(&adapters, &endpoints, "a").is_empty());
    }

    #[test]
    fn a_row_is_bounded_and_marks_are_known() {
        let (mut adapters, endpoints) = pool(&[200]);
        (0..200).for_each(|n| adapters.record_model(0, model_mark(&n.to_string()), false));
        assert_eq!(adapters.rows[0].0.len(), ADAPTERS_MAX);
        assert_eq!(rooms(&adapters, &endpoints, "199"), [AdapterRoom::Loaded]);
        assert_eq!(rooms(&adapters, &endpoints, "0"), [AdapterRoom::Free]);
        assert!(
            is_model_mark(model_mark("a")) && !is_model_mark(0) && !is_model_mark(name_hash("a"))
        );
    }
}
