//! Receives a prompt's text, to hash it or to keep it for examination.

/// The parts of a prompt in the order of templates. The fields of a body may have any order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptSection {
    /// Definitions of tools.
    Tools,
    /// System prompts, and media that the turns refer to.
    System,
    /// The turns of the conversation.
    Turns,
}

/// Receives the pieces of a prompt. A piece arrives in any number of parts. The parts of one
/// section arrive in order. The sections alternate as the fields of the body do.
pub trait PromptSink {
    /// Receives bytes of text, tool definitions or token ids.
    fn text(&mut self, section: PromptSection, bytes: &[u8]);
    /// Ends a piece of text, which may be empty.
    fn text_end(&mut self, section: PromptSection);
    /// Receives bytes of one image, video, audio clip or file: its URL, data URI or description.
    /// The bytes do not show how many tokens the item becomes.
    fn media(&mut self, section: PromptSection, bytes: &[u8]);
    fn media_end(&mut self, section: PromptSection);
    /// Forgets the pieces of a section, because its field occurs again.
    fn clear(&mut self, section: PromptSection);
}

/// A run of the body that belongs to the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptPiece {
    /// Text, tool definitions or token ids.
    Text(Vec<u8>),
    /// One image, video, audio clip or file.
    Media(Vec<u8>),
}

/// The pieces of a prompt as they are. Only tests and tools use this sink, because a proxy keeps no
/// prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptPieces {
    sections: [Vec<PromptPiece>; 3],
    part: Vec<u8>,
}

// === impl PromptPieces ===

impl PromptPieces {
    /// The pieces, in the order the engine sees them.
    pub fn iter(&self) -> impl Iterator<Item = &PromptPiece> {
        self.sections.iter().flatten()
    }

    fn push(&mut self, section: PromptSection, piece: fn(Vec<u8>) -> PromptPiece) {
        let part = std::mem::take(&mut self.part);
        self.sections
            .iter_mut()
            .skip(section as usize)
            .take(1)
            .for_each(|pieces| pieces.push(piece(part.clone())));
    }
}

impl PromptSink for PromptPieces {
    fn text(&mut self, _: PromptSection, bytes: &[u8]) {
        self.part.extend_from_slice(bytes);
    }

    fn text_end(&mut self, section: PromptSection) {
        self.push(section, PromptPiece::Text);
    }

    fn media(&mut self, _: PromptSection, bytes: &[u8]) {
        self.part.extend_from_slice(bytes);
    }

    fn media_end(&mut self, section: PromptSection) {
        self.push(section, PromptPiece::Media);
    }

    fn clear(&mut self, section: PromptSection) {
        self.sections
            .iter_mut()
            .skip(section as usize)
            .take(1)
            .for_each(Vec::clear);
    }
}

/// Drops the prompt.
impl PromptSink for () {
    fn text(&mut self, _: PromptSection, _: &[u8]) {}

    fn text_end(&mut self, _: PromptSection) {}

    fn media(&mut self, _: PromptSection, _: &[u8]) {}

    fn media_end(&mut self, _: PromptSection) {}

    fn clear(&mut self, _: PromptSection) {}
}
