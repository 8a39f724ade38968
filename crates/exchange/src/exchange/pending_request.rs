//! A request after its bytes are read, and before the pick.
//!
//! Nearly all the work of a decision is to read a large body and to hash its prompt. Reading and
//! hashing need only the pool's [`HashSettings`]. So a host that shares a pool between threads
//! reads and hashes without the lock of the pool. The order is
//! [`Exchange::read`](super::Exchange::read), or a [`BodyReader`](crate::body::BodyReader) while
//! the body arrives; then `resolve` under the lock, [`PendingRequest::with_hashes`], and `pick`
//! under the lock.

use scheduler::{PrefixSettings, Request, SubsetHint, TokenSettings};

use super::queued_request::QueuedRequest;
use super::{Exchange, slo};
use crate::body::{BodyError, ParsedRequest};
use crate::prompt::{self, HashSettings, PromptSums};
use crate::reply::Refusal;
use crate::restore::ModelNames;
use crate::rewrite::BodyEdit;
use pool_state::{ManagedPool, PromptSuspicion};

/// A request's body, read or refused.
#[derive(Debug)]
pub struct ParsedBody {
    pub(super) parsed: Result<Option<ParsedRequest<PromptSums>>, Refusal>,
    pub(super) body_bytes: usize,
}

/// A request with the pool's objects applied. The fields are the inputs of the pick.
#[derive(Debug)]
pub struct PendingRequest {
    pub(super) parsed: Option<ParsedRequest<PromptSums>>,
    pub(super) body_bytes: usize,
    /// The model the client named.
    pub(super) model: String,
    /// The model that the engine gets instead.
    pub(super) target: Option<Box<str>>,
    pub(super) splice: Option<BodyEdit>,
    pub(super) names: Option<ModelNames>,
    pub(super) priority: i32,
    pub(super) latency: slo::RequestedSlo,
    pub(super) prefix: PrefixSettings,
    pub(super) prompt_tokens: u32,
    pub(super) blocks: Vec<u64>,
    pub(super) facts: PromptFacts,
    /// The hash of the id of the stored answer that the request names; 0 if there is none.
    pub(super) stored_id: u64,
    /// The client, as a hash.
    pub(super) client: u64,
}

/// The properties of a parsed body that are needed after its prompt is hashed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PromptFacts {
    pub(super) max_tokens: Option<u32>,
    /// Maximum number of tokens of the whole reply, if the client sets a limit.
    pub(super) reply_tokens_max: Option<u32>,
    pub(super) media_items: u32,
    pub(super) stream: bool,
    /// Whether the body names an object that an engine may have stored.
    pub(super) names_id: bool,
    /// Whether its prompt crashed engines.
    pub(super) suspicion: PromptSuspicion,
    /// Bytes of the text; 0 if the prompt has other parts.
    pub(super) text_bytes: u32,
    /// Number of blocks, if tokens are spread evenly over them.
    pub(super) even_blocks: Option<u32>,
}

// === impl ParsedBody ===

impl ParsedBody {
    /// Creates the body from a reader that has read all of it, with this length.
    #[must_use]
    pub fn from_read(
        read: Result<ParsedRequest<PromptSums>, BodyError>,
        body_bytes: usize,
    ) -> Self {
        Self {
            parsed: read.map(Some).map_err(Refusal::Body),
            body_bytes,
        }
    }

    /// Whether its prompt was summed with the settings that the pool has now. If not, the body must
    /// be read again.
    #[must_use]
    pub fn fits(&self, pool: &ManagedPool) -> bool {
        let Ok(Some(parsed)) = &self.parsed else {
            return true;
        };
        HashSettings::from_pool(pool).is_none_or(|settings| settings == parsed.prompt.settings())
    }
}

// === impl PendingRequest ===

impl PendingRequest {
    /// Adds the hashes of the prompt blocks.
    #[must_use]
    pub fn with_hashes(mut self) -> Self {
        if let Some(parsed) = &self.parsed {
            self.blocks = parsed
                .prompt
                .blocks(self.target_model(), &parsed.cache_salt);
            self.facts = PromptFacts {
                max_tokens: parsed.max_tokens,
                reply_tokens_max: parsed.max_tokens.filter(|_| !parsed.several_outputs),
                media_items: parsed.media_items,
                stream: parsed.stream,
                names_id: parsed.names_id,
                suspicion: PromptSuspicion::None,
                text_bytes: prompt::text_bytes(parsed),
                even_blocks: prompt::even_blocks(parsed, &self.blocks, self.prefix),
            };
        }
        self
    }

    /// The memory of the request if it is held, without its body, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        size_of::<Exchange>()
            + size_of::<QueuedRequest>()
            + size_of_val(self.blocks.as_slice())
            + self.model.len()
    }

    /// The request without its body, for a request that is held.
    pub(super) fn without_body(self) -> Self {
        Self {
            parsed: None,
            ..self
        }
    }

    /// The request in the form that the scheduler uses.
    pub(super) fn request<'r>(
        &'r self,
        subset: Option<&'r SubsetHint>,
        headers: &'r [(&'r str, &'r str)],
        pool: &ManagedPool,
    ) -> Request<'r> {
        Request {
            model: self.target_model(),
            subset,
            priority: self.priority,
            prompt_tokens: self.prompt_tokens,
            prefix_blocks: &self.blocks,
            prefix_block_tokens: pool.block_tokens(self.prefix),
            max_tokens: self.facts.max_tokens,
            media_items: self.facts.media_items,
            headers,
            slo: self.latency.slo,
            prediction_based: self.latency.prediction_based,
            stored_id: self.stored_id,
            client: self.client,
        }
    }

    /// The model that the engine gets.
    pub(super) fn target_model(&self) -> &str {
        self.target.as_deref().unwrap_or(&self.model)
    }
}

/// Returns the tokens of a prompt. For a prompt that was not seen, returns the maximum number of
/// tokens that a body of `unseen_bytes` can have.
pub(super) fn tokens(
    parsed: Option<&ParsedRequest<PromptSums>>,
    unseen_bytes: usize,
    settings: TokenSettings,
    pool: &ManagedPool,
) -> u32 {
    let text = |bytes| pool.text_tokens(bytes);
    parsed.map_or_else(
        || text(unseen_bytes),
        |parsed| prompt::tokens(parsed, settings, text),
    )
}
