//! What a model server last reported of itself.

/// The most attributes an endpoint may have: each is a metric that an operator named in a configuration file, and travels with every
/// refresh of every endpoint.
pub const ATTRIBUTES_MAX: usize = 32;

/// The attribute that says how many requests an engine runs at once at most, where its metadata says so: what is beyond that queues.
pub const SEQUENCES_MAX_ATTRIBUTE: &str = "max_num_seqs";

/// What a model server last said of itself. `None` is unknown, which is neither idle nor full.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EndpointMetrics {
    /// Requests waiting to be scheduled by the engine.
    pub queue_depth: Option<f32>,
    /// Requests the engine is running.
    pub running_requests: Option<f32>,
    /// Share of KV-cache blocks in use, 0 to 1.
    pub kv_cache_utilization: Option<f32>,
    /// Tokens a KV-cache block holds.
    pub kv_block_tokens: Option<u32>,
    /// KV-cache blocks the engine has.
    pub kv_blocks: Option<u32>,
    /// LoRA adapters, when the engine serves any.
    pub lora: Option<LoraMetrics>,
    /// Numbers read besides, by the keys that configuration gave them (`customMetrics`), sorted by key.
    pub attributes: Box<[(Box<str>, f32)]>,
}

/// The newest `lora_requests_info` series of an engine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoraMetrics {
    /// Adapters loaded and in use.
    pub running: Box<[Box<str>]>,
    /// Adapters with requests waiting for a place.
    pub waiting: Box<[Box<str>]>,
    /// Adapters that fit at once.
    pub max: u32,
}

// === impl EndpointMetrics ===

impl EndpointMetrics {
    /// The attribute of that key.
    #[must_use]
    pub fn attribute(&self, key: &str) -> Option<f32> {
        let at = self.attributes.binary_search_by(|(attribute, _)| (**attribute).cmp(key)).ok()?;
        self.attributes.get(at).map(|(_, value)| *value)
    }
}

// === impl LoraMetrics ===

impl LoraMetrics {
    pub(crate) fn reports(&self, adapter: &str) -> bool {
        self.running.iter().chain(&self.waiting).any(|reported| **reported == *adapter)
    }
}
