//! A JSON reader that validates everything it passes, copies nothing and never recurses.
//!
//! Chat bodies are mostly a few long strings, so the reader spends nearly all the time on finding
//! the ends of strings ([`scan`]). All else is read byte by byte. The caller reads the parts that
//! it knows with [`JsonReader::members`] and [`JsonReader::elements`], and the reader skips the
//! rest. A field of an unexpected type is treated as absent, because the engine checks its own
//! fields. Skipping is a loop with one bit for each open container, so no input can exhaust the
//! stack.
//!
//! The reader accepts RFC 8259 and no more (no byte order mark, no `NaN`). As in Python, a string
//! may contain an escaped surrogate without its other half; the RFC leaves readers free to accept
//! or refuse that. Numbers are checked for form and converted only on request, so `1e999999` costs
//! nothing.

use crate::number;
use std::borrow::Cow;
use std::ops::Range;

pub(crate) mod push;
pub mod scan;
mod utf8;
pub(crate) mod visitor;
pub mod write;

/// The maximum number of containers (objects and arrays) that may be open at once. A `u128` has as
/// many bits. Real bodies (tool schemas are the deepest part) stay below 30. `serde_json` and
/// pydantic stop between 128 and 200, so engines would hardly accept a body that is refused here.
pub const DEPTH_MAX: u32 = u128::BITS;

/// The reason why the bytes are not accepted as JSON. The sender caused the error. Sending the same
/// bytes again does not help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonError {
    /// Not JSON.
    Invalid {
        /// The first invalid byte, in bytes from the start of the input. If the input ended too
        /// early, this is its length.
        offset: usize,
    },
    /// More than [`DEPTH_MAX`] nested containers.
    TooDeep,
}

/// The kind of the next value, by its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonKind {
    /// `{`
    Object,
    /// `[`
    Array,
    /// `"`
    String,
    /// `-` or a digit
    Number,
    /// `true` or `false`
    Boolean,
    Null,
}

/// A valid string of the input, still escaped.
#[derive(Clone, Copy, Debug)]
pub struct JsonStr<'b> {
    raw: &'b [u8],
    start: usize,
    escaped: bool,
}

/// A cursor over JSON text. Each reading method fails with [`JsonError`] at the position where the
/// text is no longer JSON.
#[derive(Clone, Debug)]
pub struct JsonReader<'b> {
    bytes: &'b [u8],
    at: usize,
    depth: u32,
}

type Result<T> = std::result::Result<T, JsonError>;

// === impl JsonReader ===

impl<'b> JsonReader<'b> {
    /// Starts at the first byte.
    #[must_use]
    pub fn new(bytes: &'b [u8]) -> Self {
        Self {
            bytes,
            at: 0,
            depth: 0,
        }
    }

    /// The kind of the next value. Only white space is consumed.
    pub fn peek(&mut self) -> Result<JsonKind> {
        self.next_byte()
            .and_then(JsonKind::from_byte)
            .ok_or(JsonError::Invalid { offset: self.at })
    }

    /// Walks an object: calls `member` with each key, and `member` must consume the value. Skips a
    /// value that is not an object.
    pub fn members(
        &mut self,
        mut member: impl FnMut(&mut Self, JsonStr<'b>) -> Result<()>,
    ) -> Result<()> {
        self.walk_members(&mut member)
    }

    #[inline(never)] // many callers, and the wasm module should be small
    fn walk_members(
        &mut self,
        member: &mut dyn FnMut(&mut Self, JsonStr<'b>) -> Result<()>,
    ) -> Result<()> {
        if self.peek()? != JsonKind::Object {
            return self.skip().map(drop);
        }
        self.open()?;
        let mut more = !self.close(b'}');
        while more {
            let key = self.key()?;
            member(self, key)?;
            more = self.more(b'}')?;
        }
        Ok(())
    }

    /// Passes the remaining members of an object and the closing brace, starting after a member.
    /// Use this for input that starts inside an object.
    pub fn rest_of_object(&mut self) -> Result<()> {
        while self.more(b'}')? {
            self.key()?;
            self.skip()?;
        }
        Ok(())
    }

    /// Walks an array: `element` must consume one value each time. Skips a value that is not an
    /// array.
    pub fn elements(&mut self, mut element: impl FnMut(&mut Self) -> Result<()>) -> Result<()> {
        self.walk_elements(&mut element)
    }

    #[inline(never)] // many callers, and the wasm module should be small
    fn walk_elements(&mut self, element: &mut dyn FnMut(&mut Self) -> Result<()>) -> Result<()> {
        if self.peek()? != JsonKind::Array {
            return self.skip().map(drop);
        }
        self.open()?;
        let mut more = !self.close(b']');
        while more {
            element(self)?;
            more = self.more(b']')?;
        }
        Ok(())
    }

    /// Reads a string; `None` if the value has another type.
    pub fn string(&mut self) -> Result<Option<JsonStr<'b>>> {
        if self.peek()? == JsonKind::String {
            self.read_string().map(Some)
        } else {
            self.skip().map(|_| None)
        }
    }

    /// Reads `true` or `false`; `None` if the value has another type.
    pub fn boolean(&mut self) -> Result<Option<bool>> {
        let kind = self.peek()?;
        let span = self.skip()?;
        Ok((kind == JsonKind::Boolean).then(|| self.bytes.get(span) == Some(b"true")))
    }

    /// Reads a count: the integer part of a number, clamped to `u32`. `None` if the value is not a
    /// number, or is negative.
    pub fn count(&mut self) -> Result<Option<u32>> {
        let kind = self.peek()?;
        let span = self.skip()?;
        let value = self
            .bytes
            .get(span)
            .filter(|_| kind == JsonKind::Number)
            .and_then(number::parse)
            .filter(|v| !v.is_sign_negative());
        // `as` saturates, which is the intended clamp; an exponent beyond f64 reads as infinity.
        Ok(value.map(|v| v as u32))
    }

    /// Skips one value of any kind and returns its position, without the white space around it.
    pub fn skip(&mut self) -> Result<Range<usize>> {
        self.peek()?;
        let start = self.at;
        let depth = self.depth;
        let mut objects: u128 = 0; // one bit for each container opened here, the innermost lowest: 1 for an object
        loop {
            match self.peek()? {
                JsonKind::Object => {
                    self.open()?;
                    if !self.close(b'}') {
                        objects = objects << 1 | 1;
                        self.key()?;
                        continue;
                    }
                }
                JsonKind::Array => {
                    self.open()?;
                    if !self.close(b']') {
                        objects <<= 1;
                        continue;
                    }
                }
                JsonKind::String => self.read_string().map(drop)?,
                JsonKind::Number => self.number()?,
                JsonKind::Boolean | JsonKind::Null => self.literal()?,
            }
            // A value has ended. Close all containers that end directly after it.
            loop {
                if self.depth <= depth {
                    return Ok(start..self.at);
                }
                let object = objects & 1 == 1;
                if self.more(if object { b'}' } else { b']' })? {
                    if object {
                        self.key()?;
                    }
                    break;
                }
                objects >>= 1;
            }
        }
    }

    /// Checks that only white space follows.
    pub fn end(&mut self) -> Result<()> {
        if self.next_byte().is_none() {
            Ok(())
        } else {
            self.invalid()
        }
    }

    /// The offset of the cursor, in bytes.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.at
    }

    fn open(&mut self) -> Result<()> {
        if self.depth >= DEPTH_MAX {
            return Err(JsonError::TooDeep);
        }
        self.depth += 1;
        self.at += 1;
        Ok(())
    }

    /// Reads a key and the colon after it.
    pub fn key(&mut self) -> Result<JsonStr<'b>> {
        if self.next_byte() != Some(b'"') {
            return self.invalid();
        }
        let key = self.read_string()?;
        if self.next_byte() != Some(b':') {
            return self.invalid();
        }
        self.at += 1;
        Ok(key)
    }

    /// Reads a string. The cursor is on the opening quote.
    fn read_string(&mut self) -> Result<JsonStr<'b>> {
        let start = self.at + 1;
        let found = scan::string(self.bytes, start).map_err(|stop| JsonError::Invalid {
            offset: stop.offset,
        })?;
        let raw = self.bytes.get(start..found.end).unwrap_or_default();
        if !found.ascii && simdutf8::basic::from_utf8(raw).is_err() {
            let valid = std::str::from_utf8(raw)
                .err()
                .map_or(0, |error| error.valid_up_to());
            return Err(JsonError::Invalid {
                offset: start + valid,
            });
        }
        self.at = found.end + 1;
        Ok(JsonStr {
            raw,
            start,
            escaped: found.escaped,
        })
    }

    fn number(&mut self) -> Result<()> {
        self.at += usize::from(self.bytes.get(self.at) == Some(&b'-'));
        if self.bytes.get(self.at) == Some(&b'0') {
            self.at += 1;
        } else {
            self.digits()?;
        }
        if self.bytes.get(self.at) == Some(&b'.') {
            self.at += 1;
            self.digits()?;
        }
        if let Some(b'e' | b'E') = self.bytes.get(self.at) {
            self.at += 1;
            if let Some(b'+' | b'-') = self.bytes.get(self.at) {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Result<()> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let digits = rest
            .iter()
            .position(|byte| !byte.is_ascii_digit())
            .unwrap_or(rest.len());
        self.at += digits;
        if digits == 0 { self.invalid() } else { Ok(()) }
    }

    fn literal(&mut self) -> Result<()> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        match [&b"true"[..], b"false", b"null"]
            .into_iter()
            .find(|word| rest.starts_with(word))
        {
            Some(word) => {
                self.at += word.len();
                Ok(())
            }
            None => self.invalid(),
        }
    }

    fn next_byte(&mut self) -> Option<u8> {
        loop {
            #[cfg(test)]
            steps::add();
            match self.bytes.get(self.at) {
                Some(b' ' | b'\n' | b'\r' | b'\t') => self.at += 1,
                byte => return byte.copied(),
            }
        }
    }

    /// Closes the container if it is empty. The cursor is after the opening bracket.
    fn close(&mut self, bracket: u8) -> bool {
        let closes = self.next_byte() == Some(bracket);
        self.at += usize::from(closes);
        self.depth -= u32::from(closes);
        closes
    }

    /// Passes the comma and returns true, or passes the closing bracket and returns false. The
    /// cursor is after a value in a container.
    fn more(&mut self, bracket: u8) -> Result<bool> {
        let comma = match self.next_byte() {
            Some(b',') => true,
            Some(byte) if byte == bracket => false,
            _ => return self.invalid(),
        };
        self.at += 1;
        self.depth = self.depth.saturating_sub(u32::from(!comma)); // below 0 in `rest_of_object`, which opened nothing
        Ok(comma)
    }

    fn invalid<T>(&self) -> Result<T> {
        Err(JsonError::Invalid { offset: self.at })
    }
}

// === impl JsonKind ===

impl JsonKind {
    /// The kind of a value that begins with `byte`.
    fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            b'{' => Some(Self::Object),
            b'[' => Some(Self::Array),
            b'"' => Some(Self::String),
            b'-' | b'0'..=b'9' => Some(Self::Number),
            b't' | b'f' => Some(Self::Boolean),
            b'n' => Some(Self::Null),
            _ => None,
        }
    }
}

// === impl JsonStr ===

impl<'b> JsonStr<'b> {
    /// The bytes between the quotes, still escaped.
    #[must_use]
    pub fn raw(&self) -> &'b [u8] {
        self.raw
    }

    /// The position of the literal in the input, quotes included.
    #[must_use]
    pub fn literal_span(&self) -> Range<usize> {
        self.start - 1..self.start + self.raw.len() + 1
    }

    /// The unescaped text. An escaped surrogate without its other half, which no Rust string can
    /// hold, becomes U+FFFD.
    #[must_use]
    pub fn text(&self) -> Cow<'b, str> {
        if self.escaped {
            String::from_utf8_lossy(&unescape(self.raw))
                .into_owned()
                .into()
        } else {
            String::from_utf8_lossy(self.raw)
        }
    }

    /// The bytes of the unescaped text, for comparing names. The text is borrowed unless it has
    /// escapes.
    #[must_use]
    pub fn name(&self) -> Cow<'b, [u8]> {
        if self.escaped {
            Cow::Owned(unescape(self.raw))
        } else {
            Cow::Borrowed(self.raw)
        }
    }
}

/// Resolves the escapes in `raw`. The reader has accepted `raw`, so every escape is well formed.
fn unescape(raw: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(raw.len());
    let mut rest = raw;
    while let Some(at) = memchr::memchr(b'\\', rest) {
        let (plain, escape) = rest.split_at_checked(at).unwrap_or((rest, &[]));
        text.extend_from_slice(plain);
        let (decoded, len) = decode_escape(escape);
        text.extend_from_slice(decoded.encode_utf8(&mut [0; 4]).as_bytes());
        rest = escape.get(len..).unwrap_or_default();
    }
    text.extend_from_slice(rest);
    text
}

/// The character of an escape, and the escape's length in bytes.
fn decode_escape(escape: &[u8]) -> (char, usize) {
    match escape.get(1) {
        Some(b'b') => ('\u{8}', 2),
        Some(b'f') => ('\u{c}', 2),
        Some(b'n') => ('\n', 2),
        Some(b'r') => ('\r', 2),
        Some(b't') => ('\t', 2),
        Some(b'u') => match (code_unit(escape, 0), code_unit(escape, 6)) {
            (high @ 0xd800..0xdc00, low @ 0xdc00..0xe000) => {
                let code = 0x1_0000 + ((high - 0xd800) << 10) + (low - 0xdc00);
                (
                    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER),
                    12,
                )
            }
            (unit, _) => (
                char::from_u32(unit).unwrap_or(char::REPLACEMENT_CHARACTER),
                6,
            ),
        },
        Some(byte) => (char::from(*byte), 2),
        None => (char::REPLACEMENT_CHARACTER, 1),
    }
}

/// The four hexadecimal digits of the `\uXXXX` at `at`. 0 if there is no escape.
fn code_unit(bytes: &[u8], at: usize) -> u32 {
    let digits = bytes
        .get(at..at + 6)
        .and_then(|escape| escape.strip_prefix(b"\\u"));
    let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
    digits
        .and_then(|digits| u32::from_str_radix(digits, 16).ok())
        .unwrap_or(0)
}

/// Counts the steps of this thread: examined bytes outside strings, and blocks of strings. Tests
/// use these counts instead of times to show that reading is linear.
#[cfg(test)]
pub(crate) mod steps {
    use std::cell::Cell;

    thread_local! {
        static STEPS: Cell<u64> = const { Cell::new(0) };
    }

    pub(crate) fn add() {
        STEPS.set(STEPS.get() + 1);
    }

    pub(crate) fn count<T>(work: impl FnOnce() -> T) -> (T, u64) {
        let before = STEPS.get();
        let result = work();
        (result, STEPS.get() - before)
    }
}
