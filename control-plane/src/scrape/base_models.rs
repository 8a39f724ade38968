//! The names of the base model of an engine that serves LoRA adapters, from its list of models. It
//! does no I/O.
//!
//! vLLM and SGLang list a card for each name of the base model and for each adapter. The card of an
//! adapter names the base model as its `parent`. `root` is where the weights are, so it is the same
//! for all names of a base model.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tokio::time::Instant;

/// The most bytes of a list. A card has some 600 bytes, so this is more than 1,500 adapters.
pub(super) const MODELS_BYTES_MAX: usize = 1024 * 1024;

/// Time for reading a list. Metrics of the same scrape wait for it, once in [`READ_AFTER`].
pub(super) const MODELS_DEADLINE: Duration = Duration::from_millis(300);

/// How long a list is believed. Names of a base model do not change without a restart, which is
/// seen; this is for an engine that did not answer at first.
const READ_AFTER: Duration = Duration::from_secs(60);

/// The most names of an engine, and the longest, in bytes. They are sent to every proxy.
const NAMES_MAX: usize = 16;
const NAME_BYTES_MAX: usize = 256;

/// The names of an engine's base model, and when they were read.
#[derive(Clone, Debug, Default)]
pub(super) struct BaseModelNames {
    names: Arc<[Box<str>]>,
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

// === impl BaseModelNames ===

impl BaseModelNames {
    /// The names in a list of models. An engine that does not fill in `parent` may list adapters
    /// like base models; so only names with the same weights as `labelled`, the model of the
    /// metrics, count where that is listed. Empty if there is no list, or if it is invalid.
    pub(super) fn of_list(list: Option<&[u8]>, labelled: &[Box<str>]) -> Self {
        let list = list.and_then(|list| serde_json::from_slice::<ModelList>(list).ok());
        let mut cards = list.map(|list| list.data).unwrap_or_default();
        cards.retain(|card| card.parent.is_none() && (1..=NAME_BYTES_MAX).contains(&card.id.len()));
        if let Some(at) = cards.iter().position(|card| labelled.contains(&card.id)) {
            let root = cards.get(at).and_then(|card| card.root.clone());
            cards.retain(|card| card.root == root);
        }
        cards.truncate(NAMES_MAX);
        Self { names: cards.into_iter().map(|card| card.id).collect(), read_at: Some(Instant::now()) }
    }

    /// Whether the list has to be read, for the first time or again.
    pub(super) fn is_due(&self) -> bool {
        self.read_at.is_none_or(|at| at.elapsed() >= READ_AFTER)
    }

    /// Adds the names to those of the metrics.
    pub(super) fn add_to(&self, labelled: &mut Box<[Box<str>]>) {
        let more: Vec<Box<str>> = self.names.iter().filter(|name| !labelled.contains(name)).cloned().collect();
        if !more.is_empty() {
            *labelled = labelled.iter().cloned().chain(more).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(labelled: &str, list: &str) -> String {
        let mut labelled: Box<[Box<str>]> = if labelled.is_empty() { [].into() } else { [labelled.into()].into() };
        BaseModelNames::of_list(Some(list.as_bytes()), &labelled).add_to(&mut labelled);
        labelled.join(" ")
    }

    #[test]
    fn names_without_a_parent_are_of_the_base_model() {
        // The cards of vLLM 0.32, shortened.
        let list = r#"{"object":"list","data":[
            {"id":"llama","object":"model","owned_by":"vllm","root":"/models/llama","parent":null,"max_model_len":8192},
            {"id":"chat","object":"model","root":"/models/llama","parent":null},
            {"id":"sql","object":"model","root":"/adapters/sql","parent":"llama"}]}"#;
        assert_eq!(names("llama", list), "llama chat");
        assert_eq!(names("", list), "llama chat");
        assert_eq!(names("served", list), "served llama chat");
    }

    #[test]
    fn without_parents_the_weights_decide() {
        let list = r#"{"data":[{"id":"llama","root":"/m"},{"id":"sql","root":"/a"},{"id":"chat","root":"/m"}]}"#;
        assert_eq!(names("llama", list), "llama chat");
    }

    #[test]
    fn what_is_no_list_says_nothing() {
        for list in ["", "null", "[]", "{}", r#"{"data":{}}"#, r#"{"data":[{"id":7}]}"#, r#"{"data":[{"id":""}]}"#] {
            assert_eq!(names("llama", list), "llama", "{list}");
        }
        let long = "x".repeat(NAME_BYTES_MAX + 1);
        assert_eq!(names("", &format!(r#"{{"data":[{{"id":"{long}"}}]}}"#)), "");
        let many: Vec<String> = (0..99).map(|n| format!(r#"{{"id":"m{n}"}}"#)).collect();
        let names = names("", &format!(r#"{{"data":[{}]}}"#, many.join(",")));
        assert_eq!(names.split(' ').count(), NAMES_MAX);
    }
}
