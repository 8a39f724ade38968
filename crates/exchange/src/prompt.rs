//! Hashes the prompt of a body while it is read.

use scheduler::prefix::{OpaquePiece, SectionSums, block_hashes, blocks_of};
use scheduler::{PrefixSettings, TokenSettings};

use crate::body::{ParsedRequest, PromptSection, PromptSink};
use pool_state::ManagedPool;

/// The settings on which the sums of a prompt depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashSettings {
    secret: u128,
    block_bytes: usize,
    blocks_max: usize,
}

/// The sums of a prompt's text, from which its block hashes are made. They do not depend on the
/// model, because a body may name its model last.
#[derive(Clone, Debug)]
pub struct PromptSums {
    settings: HashSettings,
    sections: [SectionSums; 3],
    media: OpaquePiece,
}

// === impl HashSettings ===

impl HashSettings {
    /// The settings of a pool; `None` before its first state.
    #[must_use]
    pub fn from_pool(pool: &ManagedPool) -> Option<Self> {
        let (prefix, _) = pool.prompt_settings()?;
        Some(Self {
            secret: pool.hash_secret(),
            block_bytes: prefix.block_bytes(),
            blocks_max: prefix.blocks_max,
        })
    }
}

// === impl PromptSums ===

impl PromptSums {
    /// The sums of a prompt without text. Without settings, the text is not summed.
    #[must_use]
    pub fn new(settings: Option<HashSettings>) -> Self {
        let settings = settings.unwrap_or(HashSettings {
            secret: 0,
            block_bytes: 0,
            blocks_max: 0,
        });
        let section = SectionSums::new(settings.secret, settings.block_bytes, settings.blocks_max);
        Self {
            settings,
            sections: [section.clone(), section.clone(), section],
            media: OpaquePiece::default(),
        }
    }

    /// The settings with which the text was summed.
    pub(crate) fn settings(&self) -> HashSettings {
        self.settings
    }

    /// The memory of the sums, in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.sections.iter().map(SectionSums::memory).sum()
    }

    /// Returns the hashes of the prompt's blocks, first block first. Each hash covers all blocks
    /// before it and the `model`, and is keyed by the deployment's secret.
    pub(crate) fn blocks(&self, model: &str, cache_salt: &[u8]) -> Vec<u64> {
        block_hashes(
            self.settings.secret,
            model.as_bytes(),
            cache_salt,
            &self.sections,
        )
    }

    fn section(&mut self, section: PromptSection) -> &mut SectionSums {
        let [tools, system, turns] = &mut self.sections;
        match section {
            PromptSection::Tools => tools,
            PromptSection::System => system,
            PromptSection::Turns => turns,
        }
    }
}

impl PromptSink for PromptSums {
    fn text(&mut self, section: PromptSection, bytes: &[u8]) {
        self.section(section).update(bytes);
    }

    fn text_end(&mut self, section: PromptSection) {
        self.section(section).separator();
    }

    fn media(&mut self, _: PromptSection, bytes: &[u8]) {
        self.media.update(bytes);
    }

    fn media_end(&mut self, section: PromptSection) {
        let media = std::mem::take(&mut self.media);
        let section = self.section(section);
        section.opaque(&media);
        section.separator();
    }

    fn clear(&mut self, section: PromptSection) {
        self.section(section).clear();
    }
}

/// Returns the bytes of a prompt that has only text; 0 for other prompts.
pub(crate) fn text_bytes(parsed: &ParsedRequest<PromptSums>) -> u32 {
    let mixed = parsed.prompt_token_ids > 0 || parsed.media_items > 0;
    u32::try_from(parsed.prompt_bytes)
        .ok()
        .filter(|_| !mixed)
        .unwrap_or(0)
}

/// Returns the number of blocks with these hashes, if the prompt's tokens are spread evenly over
/// them.
pub(crate) fn even_blocks(
    parsed: &ParsedRequest<PromptSums>,
    hashes: &[u64],
    settings: PrefixSettings,
) -> Option<u32> {
    let blocks = blocks_of(hashes, hashes.len());
    let whole = usize::try_from(blocks).is_ok_and(|blocks| blocks < settings.blocks_max);
    (whole && parsed.media_items == 0).then_some(blocks)
}

/// Estimates the tokens of the prompt: `text` estimates its text, token ids count if the client
/// sent them, and images have a fixed count.
pub(crate) fn tokens(
    parsed: &ParsedRequest<PromptSums>,
    settings: TokenSettings,
    text: impl Fn(usize) -> u32,
) -> u32 {
    text(parsed.prompt_bytes)
        .saturating_add(parsed.prompt_token_ids)
        .saturating_add(parsed.media_items.saturating_mul(settings.media_tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::RequestApi;
    use crate::body;

    fn four() -> ParsedRequest<PromptSums> {
        let body = br#"{"model": "m", "prompt": "four"}"#;
        body::parse(
            RequestApi::for_request(b"POST", b"/v1/completions"),
            body,
            PromptSums::new(None),
        )
        .unwrap()
    }

    #[test]
    fn only_a_prompt_of_text_alone_says_how_many_tokens_a_byte_is() {
        let with = |prompt_token_ids, media_items| {
            let mut prompt = four();
            prompt.prompt_token_ids = prompt_token_ids;
            prompt.media_items = media_items;
            text_bytes(&prompt)
        };
        assert_eq!(
            [with(0, 0), with(1, 0), with(0, 1), with(1, 1)],
            [4, 0, 0, 0]
        );
    }

    #[test]
    fn only_of_a_whole_prompt_without_images_a_part_of_its_tokens_is_that_part_of_its_blocks() {
        let blocks = |media_items, blocks_max| {
            let mut prompt = four();
            prompt.media_items = media_items;
            let settings = PrefixSettings {
                block_tokens: 64,
                blocks_max,
                blocks_per_endpoint: 100,
                auto_tune: false,
            };
            even_blocks(&prompt, &[2, 4, 6, 8], settings)
        };
        assert_eq!(
            [blocks(0, 5), blocks(0, 4), blocks(1, 5)],
            [Some(4), None, None]
        );
    }
}
