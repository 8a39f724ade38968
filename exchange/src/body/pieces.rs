//! The prompt of a body, as pieces to hash.
//!
//! Every API nests the same things in a different way: text, media, and objects (messages, parts,
//! items, tool calls) that contain more of these. So one walk reads all APIs: a string is text, an
//! array is walked, the fields of an object are handled by their names ([`FieldContent`]).

use crate::json::{JsonError, JsonKind, JsonReader};
use std::ops::Range;

/// The most pieces kept of each section. Agents send thousands of messages at most; this limit
/// bounds the memory for one request to about 1.6 MB. Beyond it, the last piece extends over
/// everything that follows, so that the whole prompt is hashed.
pub const PIECES_MAX: usize = 65_536;

/// Levels of nested objects (message, part, tool result, its part) that are distinguished; anything
/// deeper is one piece of text.
const LEVELS_MAX: u32 = 4;

/// A run of the body that belongs to the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptPiece<'b> {
    /// Text, tool definitions or token ids.
    Text(&'b [u8]),
    /// One image, video, audio clip or file: its URL, data URI or description. Its bytes do not say
    /// how many tokens it becomes.
    Media(&'b [u8]),
}

/// The parts of a prompt in the order of templates, for any order of fields in the body.
#[derive(Clone, Copy, Debug)]
pub(super) enum PromptSection {
    Tools,
    System,
    Turns,
}

/// All pieces found so far.
#[derive(Clone, Debug)]
pub(super) struct PromptPieces<'b> {
    body: &'b [u8],
    tools: SectionPieces,
    system: SectionPieces,
    turns: SectionPieces,
}

/// The pieces of one section, in the order of the body.
#[derive(Clone, Debug, Default)]
struct SectionPieces {
    pieces: Vec<PieceSpan>,
    media_items: u32,
    text_bytes: usize,
    token_ids: u32,
}

#[derive(Clone, Debug)]
struct PieceSpan {
    range: Range<usize>,
    media: bool,
}

/// The content of a field of a message, part or item.
enum FieldContent {
    /// Text or more objects.
    Content,
    /// Text that the template prints unchanged.
    Text,
    /// An image, video, audio clip or file.
    Media,
    /// Nothing of the prompt.
    Nothing,
}

type Result<T> = std::result::Result<T, JsonError>;

// === impl PromptPieces ===

impl<'b> PromptPieces<'b> {
    pub(super) fn new(body: &'b [u8]) -> Self {
        Self { body, tools: SectionPieces::default(), system: SectionPieces::default(), turns: SectionPieces::default() }
    }

    /// Replaces the section by the next value, as one piece.
    pub(super) fn raw(&mut self, section: PromptSection, reader: &mut JsonReader<'b>) -> Result<()> {
        self.restart(section).text(reader)
    }

    /// Replaces the section by the pieces of the next value.
    pub(super) fn content(&mut self, section: PromptSection, reader: &mut JsonReader<'b>) -> Result<()> {
        self.restart(section).content(reader, 0)
    }

    /// Adds the next value as one more item of the section.
    pub(super) fn media(&mut self, section: PromptSection, reader: &mut JsonReader<'b>) -> Result<()> {
        self.found(section).media(reader)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = PromptPiece<'b>> + '_ {
        let spans = self.sections().into_iter().flat_map(|found| &found.pieces);
        spans.filter_map(|PieceSpan { range, media }| {
            let bytes = self.body.get(range.clone())?;
            Some(if *media { PromptPiece::Media(bytes) } else { PromptPiece::Text(bytes) })
        })
    }

    pub(super) fn media_items(&self) -> u32 {
        self.sections().into_iter().map(|found| found.media_items).sum()
    }

    pub(super) fn text_bytes(&self) -> usize {
        self.sections().into_iter().map(|found| found.text_bytes).sum()
    }

    pub(super) fn token_ids(&self) -> u32 {
        self.sections().into_iter().map(|found| found.token_ids).sum()
    }

    fn sections(&self) -> [&SectionPieces; 3] {
        [&self.tools, &self.system, &self.turns]
    }

    fn found(&mut self, section: PromptSection) -> &mut SectionPieces {
        match section {
            PromptSection::Tools => &mut self.tools,
            PromptSection::System => &mut self.system,
            PromptSection::Turns => &mut self.turns,
        }
    }

    fn restart(&mut self, section: PromptSection) -> &mut SectionPieces {
        let found = self.found(section);
        found.pieces.clear();
        (found.media_items, found.text_bytes, found.token_ids) = (0, 0, 0);
        found
    }
}

// === impl SectionPieces ===

impl SectionPieces {
    /// Reads a string, or an array of strings, objects and token ids in any mix. Any other value is
    /// no prompt.
    fn content(&mut self, reader: &mut JsonReader<'_>, level: u32) -> Result<()> {
        if level >= LEVELS_MAX {
            return self.text(reader);
        }
        match reader.peek()? {
            JsonKind::String => self.text(reader),
            JsonKind::Object => self.object(reader, level + 1),
            JsonKind::Array => self.array(reader, level),
            JsonKind::Number | JsonKind::Boolean | JsonKind::Null => reader.skip().map(drop),
        }
    }

    fn array(&mut self, reader: &mut JsonReader<'_>, level: u32) -> Result<()> {
        let start = reader.offset();
        let (before, text_bytes, media_items) = (self.pieces.len(), self.text_bytes, self.media_items);
        let mut numbers = 0;
        reader.elements(|reader| match reader.peek()? {
            JsonKind::Number => {
                numbers += 1;
                reader.skip().map(drop)
            }
            JsonKind::Array => self.array_inside(reader, level),
            _ => self.content(reader, level),
        })?;
        if numbers > 0 {
            self.token_ids = self.token_ids.saturating_add(numbers);
            // No API mixes ids and text, and pieces must not overlap.
            self.pieces.truncate(before);
            (self.text_bytes, self.media_items) = (text_bytes, media_items);
            self.push(start..reader.offset(), false);
        }
        Ok(())
    }

    /// Reads an array inside an array: one prompt of several, or a list where no API has one. It
    /// counts as a level, so that brackets alone nest no deeper than objects.
    fn array_inside(&mut self, reader: &mut JsonReader<'_>, level: u32) -> Result<()> {
        self.content(reader, level + 1)
    }

    fn object(&mut self, reader: &mut JsonReader<'_>, level: u32) -> Result<()> {
        reader.members(|reader, key| match FieldContent::of(&key.name()) {
            FieldContent::Content => self.content(reader, level),
            FieldContent::Text => self.text(reader),
            FieldContent::Media => self.media(reader),
            FieldContent::Nothing => reader.skip().map(drop),
        })
    }

    fn text(&mut self, reader: &mut JsonReader<'_>) -> Result<()> {
        if let Some(range) = value(reader)? {
            self.text_bytes += range.len();
            self.push(range, false);
        }
        Ok(())
    }

    fn media(&mut self, reader: &mut JsonReader<'_>) -> Result<()> {
        if let Some(range) = value(reader)? {
            self.media_items = self.media_items.saturating_add(1);
            self.push(range, true);
        }
        Ok(())
    }

    fn push(&mut self, range: Range<usize>, media: bool) {
        if self.pieces.len() < PIECES_MAX {
            self.pieces.push(PieceSpan { range, media });
        } else if let Some(last) = self.pieces.last_mut() {
            *last = PieceSpan { range: last.range.start..range.end, media: false };
        }
    }
}

/// Returns the position of the next value, without the quotes of a string. `null` counts as no
/// value: clients write it for fields they leave out.
fn value(reader: &mut JsonReader<'_>) -> Result<Option<Range<usize>>> {
    let kind = reader.peek()?;
    let range = reader.skip()?;
    Ok(match kind {
        JsonKind::Null => None,
        JsonKind::String => Some(range.start + 1..range.end - 1),
        _ => Some(range),
    })
}

// === impl FieldContent ===

impl FieldContent {
    /// Returns the content of a field of a message, part or item of any API. Left out on purpose:
    /// ids, `type`, `status`, `cache_control`, `signature`, `detail`.
    fn of(name: &[u8]) -> Self {
        match name {
            b"content" | b"output" | b"summary" => Self::Content,
            b"role" | b"name" | b"text" | b"refusal" | b"reasoning" | b"reasoning_content" | b"thinking" | b"tool_calls"
            | b"function_call" | b"arguments" | b"input" => Self::Text,
            b"image_url" | b"input_image" | b"image" | b"video_url" | b"video" | b"audio_url" | b"input_audio" | b"audio" | b"file"
            | b"file_data" | b"file_url" | b"file_id" | b"image_embeds" | b"source" => Self::Media,
            _ => Self::Nothing,
        }
    }
}
