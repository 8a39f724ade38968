//! A request inside the engine, and the progress of its sequence.

use crate::blocks::BlockCache;
use crate::step_time::StepBatch;

/// The data of a request that the engine needs.
pub trait EngineRequest {
    /// Returns the number of prompt tokens, at least 1.
    fn prompt_tokens(&self) -> u32;

    /// Returns the number of tokens to generate. With 0 (embeddings), the sequence ends with its
    /// prefill.
    fn output_tokens(&self) -> u32;

    /// Returns the chained hashes of the full blocks of the prompt, or of prompt and output. A hash
    /// identifies the whole prefix up to the end of its block. A block with hash 0 is never found.
    fn block_hashes(&self) -> &[u64];

    /// Returns the number of the LoRA adapter, or 0 for the base model.
    fn adapter(&self) -> u16 {
        0
    }

    /// Whether another engine computed the prompt, and transferred its KV (without the last token)
    /// to this engine.
    fn is_prefilled(&self) -> bool {
        false
    }
}

/// A request that waits or runs.
#[derive(Clone, Debug)]
pub struct EngineSequence<R> {
    pub(crate) request: R,
    /// The number of tokens in KV memory at the end of the last step.
    pub(crate) computed: usize,
    /// The number of tokens that must be in KV memory before the sequence generates its next token.
    pub(crate) target: usize,
    pub(crate) generated: u32,
    pub(crate) scheduled: usize,
    pub(crate) blocks: Vec<u32>,
    /// Whether the engine has admitted the sequence before.
    pub(crate) admitted: bool,
}

// === impl EngineSequence ===

impl<R: EngineRequest> EngineSequence<R> {
    pub(crate) fn new(request: R) -> Self {
        let target = request.prompt_tokens() as usize;
        Self {
            request,
            computed: 0,
            target,
            generated: 0,
            scheduled: 0,
            blocks: Vec::new(),
            admitted: false,
        }
    }

    pub fn request(&self) -> &R {
        &self.request
    }

    pub fn generated(&self) -> u32 {
        self.generated
    }

    /// Returns the number of tokens in KV memory after the step in flight.
    pub fn computed(&self) -> usize {
        self.computed + self.scheduled
    }

    /// Returns the number of tokens that must be in KV memory before the sequence generates its
    /// next token.
    pub fn target(&self) -> usize {
        self.target
    }

    /// Returns the number of blocks that the sequence must take before its next `tokens` tokens can
    /// be computed.
    pub(crate) fn blocks_missing(&self, tokens: usize, block_tokens: usize) -> usize {
        let missing = (self.computed + tokens).saturating_sub(self.blocks.len() * block_tokens);
        if missing == 0 {
            0
        } else {
            missing.div_ceil(block_tokens)
        }
    }

    /// Adds the next `tokens` tokens to the step. Later sequences of the same step already find the
    /// blocks that these tokens fill, as in vLLM.
    pub(crate) fn schedule(
        &mut self,
        tokens: usize,
        batch: &mut StepBatch,
        blocks: &mut BlockCache,
        block_tokens: usize,
    ) {
        let from = self.computed;
        let to = self.computed + tokens;
        self.scheduled = tokens;
        if self.generated > 0 && tokens == 1 {
            batch.add_decode(to);
        } else {
            batch.add_prefill(from, to);
        }
        self.publish(from, to, blocks, block_tokens);
    }

    /// Lets later sequences find the blocks that the tokens `from..to` fill.
    pub(crate) fn publish(
        &self,
        from: usize,
        to: usize,
        blocks: &mut BlockCache,
        block_tokens: usize,
    ) {
        let hashes = self.request.block_hashes();
        let first = from / block_tokens;
        let end = (to / block_tokens).min(hashes.len());
        for (block, hash) in self.blocks.iter().zip(hashes).take(end).skip(first) {
            blocks.publish(*block, *hash);
        }
    }
}
