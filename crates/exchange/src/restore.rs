//! Restores the client's model name in a response, if the request was sent with another name.
//!
//! The name is the value of `model` in the outermost object of an unstreamed reply or of an event's
//! data, or in the object that wraps it in events of some APIs (`response.model`, `message.model`).
//! The value is replaced only if it is the name that was sent, in any JSON spelling. Other text
//! that contains the name stays. All other bytes pass unchanged, even if they are not JSON.
//!
//! **Only the value of `model` is held back**, and only while it can still become the name that was
//! sent. Events pass as they arrive, and may be cut anywhere.

use crate::api::RequestApi;
use crate::json::JsonReader;
use crate::sse::{LineSplitter, StreamPiece};

/// The longest spelling of a field name that is examined: each letter of `response` as `\u0072`,
/// and quotes.
const KEY_BYTES_MAX: usize = "response".len() * ESCAPED_BYTES_MAX + 2;

/// The maximum number of bytes that JSON uses for one byte.
const ESCAPED_BYTES_MAX: usize = "\\u0000".len();

/// The two names of a model in one exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelNames {
    /// The name that the engine got.
    pub sent: Box<str>,
    /// The client's JSON string, quotes included.
    pub requested: Box<[u8]>,
}

/// Restores the model name in one response.
#[derive(Clone, Debug)]
pub struct ModelNameRestorer {
    names: ModelNames,
    lines: Option<LineSplitter>,
    scanner: ModelNameScanner,
    out: Vec<u8>,
}

/// The position in a JSON text, byte by byte, as far as needed to find a model's name.
#[derive(Clone, Debug, Default)]
struct ModelNameScanner {
    /// The field whose object is treated like the outermost object; empty if there is none.
    wrapper: &'static [u8],
    /// The number of open objects and arrays.
    depth: u32,
    /// The number of open objects whose fields count: 0, 1 (the outermost), or 2 (also the wrapper
    /// in it).
    counted: u32,
    /// Whether the next string of the innermost counted object is a field name, and not a value.
    before_key: bool,
    field: ModelNameField,
    text: Option<StringState>,
    /// Whether the position is in a string, after a backslash.
    escaped: bool,
    /// The string so far, with the opening quote; empty in [`StringState::Plain`].
    literal: Vec<u8>,
}

/// The field of a counted object whose value is next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ModelNameField {
    Model,
    Wrapper,
    #[default]
    Other,
}

/// The kind of the current string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StringState {
    /// The name of a field.
    Key,
    /// The value of `model`, which is held back.
    Model,
    /// Any other string.
    Plain,
}

// === impl ModelNameRestorer ===

impl ModelNameRestorer {
    /// Creates a restorer for a response of `api`. `streamed` means that its content type is
    /// `text/event-stream`.
    #[must_use]
    pub fn new(names: ModelNames, api: RequestApi, streamed: bool) -> Self {
        let wrapper: &[u8] = match api {
            RequestApi::Responses if streamed => b"response",
            RequestApi::Messages if streamed => b"message",
            _ => b"",
        };
        Self {
            names,
            lines: streamed.then(LineSplitter::default),
            scanner: ModelNameScanner {
                wrapper,
                ..ModelNameScanner::default()
            },
            out: Vec::new(),
        }
    }

    /// Takes the next bytes, cut anywhere, and returns the bytes that replace them. The last call
    /// holds nothing back.
    pub fn chunk(&mut self, bytes: &[u8], last: bool) -> &[u8] {
        let Self {
            names,
            lines,
            scanner,
            out,
        } = self;
        out.clear();
        match lines {
            None => scanner.feed(bytes, names, out),
            Some(lines) => lines.feed(bytes, |part| match part {
                StreamPiece::Data(bytes) => scanner.feed(bytes, names, out),
                StreamPiece::Other(bytes) => out.extend_from_slice(bytes),
                StreamPiece::EndOfLine => scanner.end_of_line(out),
                StreamPiece::EndOfEvent => scanner.restart(),
            }),
        }
        if last {
            scanner.end_of_line(out);
        }
        out
    }
}

// === impl ModelNames ===

impl ModelNames {
    fn is_sent(&self, literal: &[u8]) -> bool {
        let text = JsonReader::new(literal).string().ok().flatten();
        text.is_some_and(|text| text.text() == *self.sent)
    }

    /// The length of the longest spelling of the name.
    fn literal_max(&self) -> usize {
        self.sent.len() * ESCAPED_BYTES_MAX + 2
    }
}

// === impl ModelNameScanner ===

impl ModelNameScanner {
    fn feed(&mut self, mut bytes: &[u8], names: &ModelNames, out: &mut Vec<u8>) {
        while !bytes.is_empty() {
            let end = match self.text {
                None => bytes
                    .iter()
                    .position(|byte| self.structure(*byte))
                    .map(|quote| quote + 1),
                Some(_) => self.end_of_string(bytes),
            };
            let (part, rest) = bytes
                .split_at_checked(end.unwrap_or(bytes.len()))
                .unwrap_or((bytes, &[]));
            bytes = rest;
            match self.text {
                None => {
                    let quote = end.and(part.split_last());
                    out.extend_from_slice(quote.map_or(part, |(_, before)| before));
                    if quote.is_some() {
                        self.open_string(out);
                    }
                }
                Some(text) => self.string(text, part, end.is_some(), names, out),
            }
        }
    }

    /// Handles the end of a data line or of the response. If a string is still open, the rest of
    /// the event is not JSON.
    fn end_of_line(&mut self, out: &mut Vec<u8>) {
        if let Some(text) = self.text.take() {
            if text == StringState::Model {
                out.append(&mut self.literal);
            }
            self.depth = u32::MAX;
            self.counted = 0;
            self.escaped = false;
        }
    }

    /// Begins the next event.
    fn restart(&mut self) {
        self.depth = 0;
        self.counted = 0;
        self.field = ModelNameField::Other;
    }

    /// Takes a byte outside of strings. Returns true if it opens a string.
    fn structure(&mut self, byte: u8) -> bool {
        let counts = self.depth == self.counted;
        match byte {
            b'"' => return true,
            b'{' => {
                self.depth = self.depth.saturating_add(1);
                if counts && (self.depth == 1 || self.field == ModelNameField::Wrapper) {
                    self.counted = self.depth;
                    self.before_key = true;
                }
                self.field = ModelNameField::Other;
            }
            b'[' => self.depth = self.depth.saturating_add(1),
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                self.counted = self.counted.min(self.depth);
            }
            // Strings in deeper containers are not examined, so these fields may change there.
            b',' => (self.before_key, self.field) = (true, ModelNameField::Other),
            b':' => self.before_key = false,
            _ => {}
        }
        false
    }

    fn open_string(&mut self, out: &mut Vec<u8>) {
        let text = match self.field {
            _ if self.depth != self.counted || self.depth == 0 => StringState::Plain,
            _ if self.before_key => StringState::Key,
            ModelNameField::Model => StringState::Model,
            ModelNameField::Wrapper | ModelNameField::Other => StringState::Plain,
        };
        self.text = Some(text);
        self.literal.clear();
        self.literal.push(b'"');
        if text != StringState::Model {
            out.push(b'"');
        }
    }

    /// Returns the position after the quote that closes the current string, if it is in `bytes`.
    fn end_of_string(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = usize::from(std::mem::take(&mut self.escaped));
        loop {
            let rest = bytes.get(at..).unwrap_or_default();
            let found = memchr::memchr2(b'"', b'\\', rest)?;
            if rest.get(found) == Some(&b'"') {
                return Some(at + found + 1);
            }
            at += found + 2;
            self.escaped = at > bytes.len();
        }
    }

    /// Continues the current string with `part`. `ends` means that the string ends there.
    fn string(
        &mut self,
        text: StringState,
        part: &[u8],
        ends: bool,
        names: &ModelNames,
        out: &mut Vec<u8>,
    ) {
        let max = if text == StringState::Model {
            names.literal_max()
        } else {
            KEY_BYTES_MAX
        };
        let fits = text != StringState::Plain && self.literal.len() + part.len() <= max;
        if fits {
            self.literal.extend_from_slice(part);
        } else if text == StringState::Model {
            out.append(&mut self.literal);
        }
        if !fits || text == StringState::Key {
            out.extend_from_slice(part);
        }
        self.text = if ends {
            None
        } else {
            Some(if fits { text } else { StringState::Plain })
        };
        match text {
            StringState::Key => self.field = self.field_named(), // no known field until the whole literal has come
            StringState::Model if ends && fits => {
                let restored: &[u8] = if names.is_sent(&self.literal) {
                    &names.requested
                } else {
                    &self.literal
                };
                out.extend_from_slice(restored);
            }
            _ => {}
        }
    }

    /// Returns the field that the current key names.
    fn field_named(&self) -> ModelNameField {
        let key = JsonReader::new(&self.literal).string().ok().flatten();
        match key.map(|key| key.name()).as_deref() {
            Some(b"model") => ModelNameField::Model,
            Some(name) if name == self.wrapper && !name.is_empty() && self.counted == 1 => {
                ModelNameField::Wrapper
            }
            _ => ModelNameField::Other,
        }
    }
}
