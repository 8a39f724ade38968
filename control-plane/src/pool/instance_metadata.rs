//! The parts of an instance's metadata that picking needs: its models, and its capacity.

use std::collections::BTreeSet;
use std::sync::Arc;

use discovery::{Instance, Metadata};
use scheduler::EndpointMetrics;

use crate::scrape::BASE_MODELS_MAX;

/// The maximum number of bytes of model names in one pool. Equal sets of names are counted once.
/// The limit is a quarter of the largest message to a proxy, as for objects.
pub const MODEL_NAMES_BYTES_MAX: usize = 1 << 20;

/// The attribute with the maximum number of requests that an engine runs at the same time
/// (`max_num_seqs` of its runtime config).
const SEQUENCES_MAX: &str = scheduler::SEQUENCES_MAX_ATTRIBUTE;

/// The attribute with the maximum number of tokens in one batch.
const BATCHED_TOKENS_MAX: &str = "max_num_batched_tokens";

/// The metadata of an instance that picking uses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct InstanceMetadata {
    /// The models that the instance serves, sorted. The list is empty if the instance names no
    /// model.
    pub models: Arc<[Box<str>]>,
    kv_blocks: Option<u32>,
    kv_block_tokens: Option<u32>,
    attributes: Vec<(&'static str, f32)>,
}

/// The bytes used for model names in one pool.
#[derive(Debug, Default)]
pub(super) struct ModelNameBudget {
    sets: BTreeSet<Arc<[Box<str>]>>,
    bytes: usize,
}

// === impl InstanceMetadata ===

impl InstanceMetadata {
    pub(super) fn from_instance(instance: &Instance) -> Self {
        let Some(metadata) = &instance.metadata else {
            return Self::default();
        };
        let served = metadata.models();
        let models: BTreeSet<Box<str>> = served
            .iter()
            .map(|model| model.name.as_str().into())
            .collect();
        let most = |of: fn(&discovery::metadata::RuntimeConfig) -> Option<u64>| {
            served.iter().filter_map(|m| of(&m.runtime)).max()
        };
        let count = |number: Option<u64>| {
            number
                .and_then(|n| u32::try_from(n).ok())
                .filter(|&n| n > 0)
        };
        #[allow(
            clippy::cast_precision_loss,
            reason = "counts of requests and tokens stay below 2^24"
        )]
        let attribute = |key, number| Some((key, count(number)? as f32));
        let attributes = [
            attribute(BATCHED_TOKENS_MAX, most(|c| c.max_num_batched_tokens)),
            attribute(SEQUENCES_MAX, most(|c| c.max_num_seqs)),
        ];
        Self {
            models: models.into_iter().collect(),
            kv_blocks: count(most(|c| c.total_kv_blocks)),
            kv_block_tokens: count(
                most(|c| c.kv_block_tokens).or_else(|| card_block_tokens(metadata)),
            ),
            attributes: attributes.into_iter().flatten().collect(),
        }
    }

    /// Returns the models that the instance serves, and the adapters that its engine is known to
    /// have.
    pub(super) fn served(&self, adapters: &Arc<[Box<str>]>) -> Arc<[Box<str>]> {
        // An instance that names no model serves any model.
        if self.models.is_empty() || adapters.iter().all(|adapter| self.models.contains(adapter)) {
            return Arc::clone(&self.models);
        }
        self.models
            .iter()
            .chain(&**adapters)
            .cloned()
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect()
    }

    /// Returns `metrics` with missing values filled in from the metadata. For an engine that serves
    /// `adapters`, any other model in the metadata is a base model.
    pub(super) fn fill_in(
        &self,
        metrics: &EndpointMetrics,
        adapters: &[Box<str>],
    ) -> EndpointMetrics {
        let mut all = metrics.clone();
        if let Some(lora) = &mut all.lora {
            let lists = [adapters, &lora.running, &lora.waiting];
            let is_adapter = |name: &str| {
                lists
                    .iter()
                    .any(|list| list.iter().any(|adapter| **adapter == *name))
            };
            let named = self
                .models
                .iter()
                .filter(|name| !is_adapter(name) && !lora.base_models.contains(name));
            let named: Vec<Box<str>> = named.take(BASE_MODELS_MAX).cloned().collect();
            if !named.is_empty() {
                lora.base_models = std::mem::take(&mut lora.base_models)
                    .into_iter()
                    .chain(named)
                    .collect();
            }
        }
        all.kv_blocks = all.kv_blocks.or(self.kv_blocks);
        all.kv_block_tokens = all.kv_block_tokens.or(self.kv_block_tokens);
        let missing: Vec<_> = self
            .attributes
            .iter()
            .filter(|(key, _)| metrics.attribute(key).is_none())
            .collect();
        if !missing.is_empty() {
            let mut attributes = all.attributes.into_vec();
            attributes.extend(missing.into_iter().map(|&(key, value)| (key.into(), value)));
            attributes.sort_by(|(a, _), (b, _)| a.cmp(b));
            all.attributes = attributes.into();
        }
        all
    }
}

/// Returns the block size in Dynamo's model deployment card, in tokens.
fn card_block_tokens(metadata: &Metadata) -> Option<u64> {
    metadata
        .get("MDC")
        .or_else(|| metadata.get("mdc"))?
        .get("kv_cache_block_size")?
        .as_u64()
}

// === impl ModelNameBudget ===

impl ModelNameBudget {
    /// Reserves room for these names. Returns whether there was enough room.
    pub(super) fn reserve(&mut self, models: &Arc<[Box<str>]>) -> bool {
        if models.is_empty() || self.sets.contains(models) {
            return true;
        }
        let bytes = self.bytes + models.iter().map(|name| name.len()).sum::<usize>();
        let fits = bytes <= MODEL_NAMES_BYTES_MAX;
        if fits {
            self.bytes = bytes;
            self.sets.insert(Arc::clone(models));
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(metadata: &str) -> Instance {
        let metadata = Metadata::parse(metadata.as_bytes()).unwrap();
        Instance::new("a", ([10, 0, 0, 1], 1).into()).with_metadata(Some(Arc::new(metadata)))
    }

    fn numbers(metrics: &EndpointMetrics) -> (Option<u32>, Option<u32>, Vec<(String, f32)>) {
        let attributes = metrics
            .attributes
            .iter()
            .map(|(key, value)| (key.to_string(), *value))
            .collect();
        (metrics.kv_blocks, metrics.kv_block_tokens, attributes)
    }

    #[test]
    fn the_metadata_of_the_proposal_in_either_spelling() {
        let text = r#"{"Model": {"name": "Qwen3-32B", "type": "Completions", "runtime_config":
            {"total_kv_blocks": 24064, "max_num_seqs": 256, "max_num_batched_tokens": 2048}}, "Transport": {}, "MDC": {"kv_cache_block_size": 16}}"#;
        for text in [
            text.to_owned(),
            text.replace("Model", "model").replace("MDC", "mdc"),
        ] {
            let said = InstanceMetadata::from_instance(&instance(&text));
            assert_eq!(*said.models, ["Qwen3-32B".into()]);
            let attributes = vec![
                ("max_num_batched_tokens".to_owned(), 2048.0),
                ("max_num_seqs".to_owned(), 256.0),
            ];
            assert_eq!(
                numbers(&said.fill_in(&EndpointMetrics::default(), &[])),
                (Some(24064), Some(16), attributes)
            );
        }
        assert_eq!(
            InstanceMetadata::from_instance(&Instance::new("a", ([10, 0, 0, 1], 1).into())),
            InstanceMetadata::default()
        );
    }

    #[test]
    fn what_the_engine_itself_reports_goes_before() {
        let said = InstanceMetadata::from_instance(&instance(
            r#"{"models": ["b", "a", "b", {"name": "c", "runtime_config": {"total_kv_blocks": 9, "max_num_seqs": 0}}]}"#,
        ));
        assert_eq!(*said.models, ["a".into(), "b".into(), "c".into()]);
        let own = EndpointMetrics {
            kv_blocks: Some(7),
            attributes: [("z".into(), 1.0)].into(),
            ..EndpointMetrics::default()
        };
        assert_eq!(
            numbers(&said.fill_in(&own, &[])),
            (Some(7), None, vec![("z".to_owned(), 1.0)])
        );
    }

    #[test]
    fn adapters_are_served_too_and_other_names_are_base_models() {
        let names = |names: &[&str]| {
            names
                .iter()
                .map(|name| Box::from(*name))
                .collect::<Arc<[Box<str>]>>()
        };
        let said = InstanceMetadata::from_instance(&instance(
            r#"{"models": ["llama", "alias", "sql", "busy"]}"#,
        ));
        assert_eq!(
            said.served(&names(&["poems", "sql"])),
            names(&["alias", "busy", "llama", "poems", "sql"])
        );
        assert!(
            Arc::ptr_eq(&said.served(&names(&["sql"])), &said.models),
            "nothing new"
        );
        assert!(
            InstanceMetadata::default()
                .served(&names(&["sql"]))
                .is_empty(),
            "an instance that names none serves any"
        );
        let lora = scheduler::LoraMetrics {
            base_models: [Box::from("llama")].into(),
            running: [Box::from("busy")].into(),
            ..scheduler::LoraMetrics::default()
        };
        let filled = said.fill_in(
            &EndpointMetrics {
                lora: Some(lora),
                ..EndpointMetrics::default()
            },
            &names(&["poems", "sql"]),
        );
        assert_eq!(filled.lora.unwrap().base_models.join(" "), "llama alias");
    }

    #[test]
    fn names_have_a_limit_and_the_same_set_counts_once() {
        let set = |from: usize| -> Arc<[Box<str>]> {
            (from..from + 512)
                .map(|i| format!("{i:0>250}").into())
                .collect()
        };
        let mut room = ModelNameBudget::default();
        let fitting = (0..).take_while(|&at| room.reserve(&set(at * 512))).count();
        assert_eq!(fitting, MODEL_NAMES_BYTES_MAX / (512 * 250));
        assert!(
            room.reserve(&set(0)) && room.reserve(&Arc::default()),
            "a known set takes no room"
        );
    }
}
