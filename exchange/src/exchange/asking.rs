//! What a request asks for, between its bytes and the pick.
//!
//! Reading a large body and hashing its prompt are nearly all the work of a decision, and need no pool. A host that shares a pool between
//! threads does both without its lock: [`Exchange::read`](super::Exchange::read), then `resolve` under the lock, [`Asking::hashed`], then `pick`
//! under the lock.

use std::borrow::Cow;

use scheduler::{PrefixSettings, TokenSettings};

use super::slo;
use crate::body::Parsed;
use crate::prompt;
use crate::reply::Refusal;
use crate::restore::Names;
use crate::rewrite::Splice;
use pool_state::Pool;

/// A request's body, read or refused.
#[derive(Debug)]
pub struct Read<'b> {
    pub(super) parsed: Result<Option<Parsed<'b>>, Refusal>,
    pub(super) body: &'b [u8],
}

/// What is asked for, as the pool's objects have it.
#[derive(Debug)]
pub struct Asking<'b> {
    pub(super) parsed: Option<Parsed<'b>>,
    pub(super) body_bytes: usize,
    /// The model the client named.
    pub(super) model: Cow<'b, str>,
    /// The one the engine is asked for in its place.
    pub(super) target: Option<Box<str>>,
    pub(super) splice: Option<Splice>,
    pub(super) names: Option<Names>,
    pub(super) priority: i32,
    pub(super) latency: slo::Asked,
    pub(super) prefix: PrefixSettings,
    pub(super) prompt_tokens: u32,
    pub(super) secret: u128,
    pub(super) blocks: Vec<u64>,
}

// === impl Asking ===

impl Asking<'_> {
    /// With the hashes of its prompt's blocks.
    #[must_use]
    pub fn hashed(mut self) -> Self {
        if let Some(parsed) = &self.parsed {
            self.blocks = prompt::blocks(parsed, self.asked_for(), self.secret, self.prefix);
        }
        self
    }

    /// The model that the engine is asked for.
    pub(super) fn asked_for(&self) -> &str {
        self.target.as_deref().unwrap_or(&self.model)
    }
}

/// Tokens of a prompt; where it is not seen, as many as a body of `unseen_bytes` may have.
pub(super) fn tokens(parsed: Option<&Parsed<'_>>, unseen_bytes: usize, settings: TokenSettings, pool: &Pool) -> u32 {
    let text = |bytes| pool.text_tokens(bytes);
    parsed.map_or_else(|| text(unseen_bytes), |parsed| prompt::tokens(parsed, settings, text))
}
