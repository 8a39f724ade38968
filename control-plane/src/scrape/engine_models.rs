//! The models of an engine that serves LoRA adapters: the names of its base model, and its
//! adapters. Names and adapters come from the engine's list of models. This module does no I/O.
//!
//! vLLM and SGLang list one card for each name of the base model, and one for each adapter. The
//! card of an adapter names the base model as its `parent`. The `root` of a card is the location of
//! the weights, so it is the same for all names of a base model.
//!
//! The metrics name only the adapters that requests use at that moment. So if the list cannot be
//! read, an adapter that was used once stays known until the engine restarts.

use std::sync::Arc;
use std::time::Duration;

use discovery::metadata::MODELS_MAX;
use scheduler::LoraMetrics;
use serde::Deserialize;
use tokio::time::Instant;

/// The maximum number of bytes of a list. A card has about 600 bytes, so a list can have more than
/// 1,500 adapters.
pub(super) const MODELS_BYTES_MAX: usize = 1024 * 1024;

/// The time limit for reading a list. The metrics of the same scrape wait for the list, once in
/// [`READ_AFTER`].
pub(super) const MODELS_DEADLINE: Duration = Duration::from_millis(300);

/// The time for which a list counts as current. Adapters come and go without a restart. Until the
/// list is read again, a new adapter is served only where requests use it.
const READ_AFTER: Duration = Duration::from_secs(10);

/// The time after which a list is read again if it lacks an adapter in use. Without this time, a
/// list that never contains all adapters would be read with every scrape.
const READ_SOON: Duration = Duration::from_secs(1);

/// The maximum number of names of a base model, and the maximum length of a name in bytes. The
/// names of base models are sent to every proxy with the metrics.
pub(crate) const BASE_MODELS_MAX: usize = 16;
const NAME_BYTES_MAX: usize = 256;

/// The models of an engine, and the time when its list was read.
#[derive(Clone, Debug, Default)]
pub(super) struct EngineModels {
    /// The names of the base model in the list.
    base: Arc<[Box<str>]>,
    /// The adapters, sorted; at most [`MODELS_MAX`].
    adapters: Arc<[Box<str>]>,
    /// Whether the engine lists its adapters. If the engine does not list them, `adapters` has the
    /// adapters that were in use.
    is_listed: bool,
    read_at: Option<Instant>,
}

/// An answer of `/v1/models`.
#[derive(Debug, Deserialize)]
struct ModelList {
    data: Vec<ListedModel>,
}

#[derive(Debug, Deserialize)]
struct ListedModel {
    id: Box<str>,
    parent: Option<Box<str>>,
    root: Option<Box<str>>,
}

// === impl EngineModels ===

impl EngineModels {
    /// Applies a list of models. `labelled` is the model that the metrics name. An engine that does
    /// not fill in `parent` may list adapters like base models. So if `labelled` is in the list, a
    /// name with other weights than `labelled` is an adapter. Without a valid list, the known
    /// models stay.
    pub(super) fn read(&mut self, list: Option<&[u8]>, labelled: &[Box<str>]) {
        self.read_at = Some(Instant::now());
        let list = list.and_then(|list| serde_json::from_slice::<ModelList>(list).ok());
        let Some(ModelList { data: mut cards }) = list else {
            return;
        };
        cards.retain(|card| (1..=NAME_BYTES_MAX).contains(&card.id.len()));
        let label = cards
            .iter()
            .find(|card| card.parent.is_none() && labelled.contains(&card.id));
        let root = label.map(|card| card.root.clone());
        let is_base = |card: &ListedModel| {
            card.parent.is_none() && root.as_ref().is_none_or(|root| card.root == *root)
        };
        let (mut base, adapters): (Vec<ListedModel>, Vec<ListedModel>) =
            cards.into_iter().partition(is_base);
        base.truncate(BASE_MODELS_MAX);
        self.base = base.into_iter().map(|card| card.id).collect();
        self.adapters = sorted(
            adapters
                .into_iter()
                .map(|card| card.id)
                .take(MODELS_MAX)
                .collect(),
        );
        self.is_listed = true;
    }

    /// Returns whether the list has to be read, for the first time or again.
    pub(super) fn is_due(&self, lora: &LoraMetrics) -> bool {
        let is_short = self.is_listed && in_use(lora).any(|name| !self.knows(name));
        self.read_at
            .is_none_or(|at| at.elapsed() >= if is_short { READ_SOON } else { READ_AFTER })
    }

    /// Adds the names of the base model to the names in the metrics, and remembers the adapters in
    /// use if no list contains them.
    pub(super) fn add_to(&mut self, lora: &mut LoraMetrics) {
        let new: Vec<Box<str>> = in_use(lora)
            .filter(|name| !self.is_listed && !self.knows(name))
            .cloned()
            .collect();
        if !new.is_empty() && self.adapters.len() + new.len() <= MODELS_MAX {
            self.adapters = sorted(self.adapters.iter().cloned().chain(new).collect());
        }
        let labelled = &mut lora.base_models;
        let more: Vec<Box<str>> = self
            .base
            .iter()
            .filter(|name| !labelled.contains(name))
            .cloned()
            .collect();
        if !more.is_empty() {
            *labelled = labelled.iter().cloned().chain(more).collect();
        }
    }

    /// Returns the adapters that the engine is known to have.
    pub(super) fn adapters(&self) -> Arc<[Box<str>]> {
        Arc::clone(&self.adapters)
    }

    fn knows(&self, adapter: &str) -> bool {
        self.adapters
            .binary_search_by(|known| (**known).cmp(adapter))
            .is_ok()
    }
}

/// Returns the adapters that requests use now.
fn in_use(lora: &LoraMetrics) -> impl Iterator<Item = &Box<str>> {
    lora.running
        .iter()
        .chain(&*lora.waiting)
        .filter(|name| !name.is_empty() && name.len() <= NAME_BYTES_MAX)
}

fn sorted(mut names: Vec<Box<str>>) -> Arc<[Box<str>]> {
    names.sort_unstable();
    names.dedup();
    names.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lora(labelled: &str, running: &[&str]) -> LoraMetrics {
        let names = |names: &[&str]| {
            names
                .iter()
                .map(|name| Box::from(*name))
                .collect::<Box<[Box<str>]>>()
        };
        let base_models = if labelled.is_empty() {
            names(&[])
        } else {
            names(&[labelled])
        };
        LoraMetrics {
            base_models,
            running: names(running),
            ..LoraMetrics::default()
        }
    }

    fn read(labelled: &str, list: &str) -> (String, String) {
        let mut models = EngineModels::default();
        let mut lora = lora(labelled, &[]);
        models.read(Some(list.as_bytes()), &lora.base_models);
        models.add_to(&mut lora);
        (lora.base_models.join(" "), models.adapters().join(" "))
    }

    fn pair(base: &str, adapters: &str) -> (String, String) {
        (base.to_owned(), adapters.to_owned())
    }

    #[test]
    fn names_without_a_parent_are_of_the_base_model_and_others_are_adapters() {
        // The list has the cards of vLLM 0.32, shortened.
        let list = r#"{"object":"list","data":[
            {"id":"llama","object":"model","owned_by":"vllm","root":"/models/llama","parent":null,"max_model_len":8192},
            {"id":"chat","object":"model","root":"/models/llama","parent":null},
            {"id":"sql","object":"model","root":"/adapters/sql","parent":"llama"},
            {"id":"poems","object":"model","root":"/adapters/poems","parent":"llama"}]}"#;
        assert_eq!(read("llama", list), pair("llama chat", "poems sql"));
        assert_eq!(read("", list), pair("llama chat", "poems sql"));
        assert_eq!(read("served", list), pair("served llama chat", "poems sql"));
    }

    #[test]
    fn without_parents_the_weights_decide() {
        let list = r#"{"data":[{"id":"llama","root":"/m"},{"id":"sql","root":"/a"},{"id":"chat","root":"/m"}]}"#;
        assert_eq!(read("llama", list), pair("llama chat", "sql"));
    }

    #[test]
    fn what_is_no_list_says_nothing_and_takes_nothing_back() {
        for list in [
            "",
            "null",
            "[]",
            "{}",
            r#"{"data":{}}"#,
            r#"{"data":[{"id":7}]}"#,
            r#"{"data":[{"id":""}]}"#,
        ] {
            assert_eq!(read("llama", list), pair("llama", ""), "{list}");
        }
        let long = "x".repeat(NAME_BYTES_MAX + 1);
        assert_eq!(
            read("", &format!(r#"{{"data":[{{"id":"{long}"}}]}}"#)),
            pair("", "")
        );
        let many: Vec<String> = (0..999)
            .map(|n| format!(r#"{{"id":"m{n}"}},{{"id":"a{n}","parent":"m0"}}"#))
            .collect();
        let (base, adapters) = read("", &format!(r#"{{"data":[{}]}}"#, many.join(",")));
        assert_eq!(
            (base.split(' ').count(), adapters.split(' ').count()),
            (BASE_MODELS_MAX, MODELS_MAX)
        );
        let mut models = EngineModels::default();
        models.read(Some(br#"{"data":[{"id":"sql","parent":"m"}]}"#), &[]);
        models.read(None, &[]);
        models.read(Some(b"{"), &[]);
        assert_eq!(models.adapters().join(" "), "sql");
        models.read(Some(br#"{"data":[{"id":"m"}]}"#), &[]);
        assert_eq!(models.adapters().join(" "), "", "it was unloaded");
    }

    #[test]
    fn an_adapter_in_use_stays_known_where_there_is_no_list() {
        let mut models = EngineModels::default();
        models.read(None, &[]);
        for running in [&["sql"][..], &[], &["poems", ""], &[]] {
            models.add_to(&mut lora("m", running));
        }
        assert_eq!(models.adapters().join(" "), "poems sql");
        for n in 0..2 * MODELS_MAX {
            models.add_to(&mut lora("m", &[&format!("a{n}")]));
        }
        assert_eq!(models.adapters().len(), MODELS_MAX);
        models.read(
            Some(br#"{"data":[{"id":"m"},{"id":"sql","parent":"m"}]}"#),
            &[],
        );
        models.add_to(&mut lora("m", &["poems"]));
        assert_eq!(models.adapters().join(" "), "sql", "a list is more exact");
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_is_read_again_sooner_if_it_lacks_an_adapter_in_use() {
        let mut models = EngineModels::default();
        let idle = lora("m", &[]);
        let busy = lora("m", &["sql"]);
        assert!(models.is_due(&idle));
        models.read(Some(br#"{"data":[{"id":"m"}]}"#), &[]);
        assert!(!models.is_due(&idle) && !models.is_due(&busy));
        tokio::time::advance(READ_SOON).await;
        assert!(!models.is_due(&idle) && models.is_due(&busy));
        tokio::time::advance(READ_AFTER).await;
        assert!(models.is_due(&idle));
    }
}
