//! Reads JSON that arrives in pieces, with the same rules and errors as [`JsonReader`].
//!
//! The text is pushed in, and a [`JsonVisitor`] gets the values that it wants. The reader keeps
//! only a token that a piece cuts in two, and of most strings not even that. So its memory is the
//! longest key, number or string that the visitor wants as a whole, and never the whole text.

use super::scan::{ScannedString, StringStop};
use super::utf8::Utf8Check;
use super::visitor::{JsonVisitor, Wanted};
use super::{DEPTH_MAX, JsonError, JsonKind, JsonReader, JsonStr, scan};

/// The state between two pieces.
#[derive(Debug)]
pub(crate) struct JsonPush {
    /// The number of bytes that were read, which is the offset of the first byte of `rest`.
    read: usize,
    /// The beginning of a token whose end has not arrived.
    rest: Vec<u8>,
    expected: Expected,
    depth: u32,
    /// One bit for each open container, the innermost lowest: 1 for an object.
    objects: u128,
    /// The depth outside of the container that is read without the visitor.
    unseen: Option<u32>,
    /// Whether that container, or the open string, is wanted raw.
    is_raw: bool,
    /// Elements of that container that are numbers.
    numbers: u32,
    /// A string that has begun but not ended.
    string: Option<OpenString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Value,
    /// A key, or the end of the object.
    FirstKey,
    Key,
    Colon,
    /// A value, or the end of the array.
    FirstElement,
    /// A comma, or the end of the container.
    More,
    End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StringUse {
    Key,
    Whole,
    Raw,
    /// The string is part of another value, or is skipped.
    Passed,
}

#[derive(Debug)]
struct OpenString {
    /// The offset of the string's first byte, after the quote.
    start: usize,
    /// The offset after the bytes that were scanned.
    scanned: usize,
    usage: StringUse,
    escaped: bool,
    utf8: Utf8Check,
}

/// A piece that is being read, after the rest of the previous piece.
struct Piece<'p> {
    bytes: &'p [u8],
    at: usize,
    /// The start of the raw bytes that the visitor has not received yet.
    raw_from: usize,
    /// Whether no piece follows.
    last: bool,
}

type Result<T> = std::result::Result<T, JsonError>;

// === impl JsonPush ===

impl JsonPush {
    pub(crate) fn new() -> Self {
        Self {
            read: 0,
            rest: Vec::new(),
            expected: Expected::Value,
            depth: 0,
            objects: 0,
            unseen: None,
            is_raw: false,
            numbers: 0,
            string: None,
        }
    }

    /// Reads the next piece. `last` means that no other piece follows.
    pub(crate) fn push(
        &mut self,
        visitor: &mut impl JsonVisitor,
        bytes: &[u8],
        last: bool,
    ) -> Result<()> {
        if self.rest.is_empty() {
            let read = self.read_piece(visitor, bytes, last)?;
            self.rest
                .extend_from_slice(bytes.get(read..).unwrap_or_default());
        } else {
            let mut joined = std::mem::take(&mut self.rest);
            joined.extend_from_slice(bytes);
            let read = self.read_piece(visitor, &joined, last)?;
            self.rest = joined.get(read..).unwrap_or_default().to_vec();
        }
        Ok(())
    }

    /// Bytes that are kept until the end of a token arrives.
    pub(crate) fn kept_bytes(&self) -> usize {
        self.rest.len()
    }

    /// Reads all complete tokens of the piece. Returns the number of bytes that are no longer
    /// needed.
    #[inline(never)] // several callers, and the wasm module should be small
    fn read_piece(
        &mut self,
        visitor: &mut impl JsonVisitor,
        bytes: &[u8],
        last: bool,
    ) -> Result<usize> {
        let mut piece = Piece {
            bytes,
            at: 0,
            raw_from: 0,
            last,
        };
        let mut open = true;
        if let Some(string) = self.string.take() {
            let scanned = scan::string(bytes, string.scanned - self.read);
            open = self.string(visitor, &mut piece, string, scanned)?;
        }
        while open {
            let Some(byte) = piece.next_byte() else {
                if last && self.expected != Expected::End {
                    return Err(self.invalid(piece.at));
                }
                break;
            };
            open = self.token(visitor, &mut piece, byte)?;
        }
        let read = match &self.string {
            // The scan continues where it ended. Only strings that are wanted whole are kept.
            Some(string) if string.is_kept() => string.start - self.read,
            Some(string) => string.scanned - self.read,
            None => piece.at,
        };
        if self.is_raw {
            visitor.raw(bytes.get(piece.raw_from..read).unwrap_or_default());
        }
        self.read += read;
        Ok(read)
    }

    /// Reads the token that begins with `byte`. Returns false if its end has not arrived.
    fn token(
        &mut self,
        visitor: &mut impl JsonVisitor,
        piece: &mut Piece<'_>,
        byte: u8,
    ) -> Result<bool> {
        match (self.expected, byte) {
            (Expected::FirstKey, b'}') | (Expected::FirstElement, b']') => {
                self.close(visitor, piece);
            }
            (Expected::FirstKey | Expected::Key, b'"') => {
                let usage = if self.unseen.is_some() {
                    StringUse::Passed
                } else {
                    StringUse::Key
                };
                self.expected = Expected::Colon;
                return self.begin_string(visitor, piece, usage);
            }
            (Expected::Colon, b':') => {
                piece.at += 1;
                self.expected = Expected::Value;
            }
            (Expected::More, b',') => {
                piece.at += 1;
                self.expected = if self.in_object() {
                    Expected::Key
                } else {
                    Expected::Value
                };
            }
            (Expected::More, bracket) if bracket == if self.in_object() { b'}' } else { b']' } => {
                self.close(visitor, piece);
            }
            (Expected::Value | Expected::FirstElement, byte) => {
                return self.value(visitor, piece, byte);
            }
            _ => return Err(self.invalid(piece.at)),
        }
        Ok(true)
    }

    #[inline(never)] // several callers, and the wasm module should be small
    fn value(
        &mut self,
        visitor: &mut impl JsonVisitor,
        piece: &mut Piece<'_>,
        byte: u8,
    ) -> Result<bool> {
        let kind = JsonKind::from_byte(byte).ok_or_else(|| self.invalid(piece.at))?;
        match kind {
            JsonKind::Object | JsonKind::Array => return self.open(visitor, piece, kind),
            JsonKind::String => {
                let wanted = if self.unseen.is_some() {
                    Wanted::Nothing
                } else {
                    visitor.begin(kind, None)
                };
                self.expected = self.after_value();
                let usage = match wanted {
                    Wanted::Whole => StringUse::Whole,
                    Wanted::Raw => StringUse::Raw,
                    Wanted::Nothing | Wanted::Inside => StringUse::Passed,
                };
                return self.begin_string(visitor, piece, usage);
            }
            JsonKind::Number | JsonKind::Boolean | JsonKind::Null => {}
        }
        let Some(end) = self.scalar_end(piece, kind)? else {
            return Ok(false);
        };
        let start = self.read + piece.at;
        let text = piece.bytes.get(piece.at..end).unwrap_or_default();
        piece.at = end;
        self.expected = self.after_value();
        match self.unseen {
            Some(outside) => {
                self.numbers += u32::from(kind == JsonKind::Number && self.depth == outside + 1);
            }
            None => match visitor.begin(kind, None) {
                Wanted::Whole => visitor.scalar(text, start),
                Wanted::Raw => {
                    visitor.raw(text);
                    visitor.raw_end(0);
                }
                Wanted::Nothing | Wanted::Inside => {}
            },
        }
        Ok(true)
    }

    /// Returns the end of the number or literal at the cursor; `None` if it may not have arrived.
    fn scalar_end(&self, piece: &Piece<'_>, kind: JsonKind) -> Result<Option<usize>> {
        let mut reader = JsonReader {
            bytes: piece.bytes,
            at: piece.at,
            depth: 0,
        };
        let read = if kind == JsonKind::Number {
            reader.number()
        } else {
            reader.literal()
        };
        let stop = match read {
            Ok(()) => reader.at,
            Err(JsonError::Invalid { offset }) if kind == JsonKind::Number => offset,
            Err(_) => piece.at,
        };
        // The longest literal has five bytes. A number may continue.
        let cut_off = if kind == JsonKind::Number {
            stop == piece.bytes.len()
        } else {
            read.is_err() && piece.bytes.len() < piece.at + 5
        };
        match read {
            _ if cut_off && !piece.last => Ok(None),
            Ok(()) => Ok(Some(stop)),
            Err(_) => Err(self.invalid(stop)),
        }
    }

    fn open(
        &mut self,
        visitor: &mut impl JsonVisitor,
        piece: &mut Piece<'_>,
        kind: JsonKind,
    ) -> Result<bool> {
        if self.depth >= DEPTH_MAX {
            return Err(JsonError::TooDeep);
        }
        let start = piece.at;
        piece.at += 1;
        let is_object = kind == JsonKind::Object;
        if self.unseen.is_none() {
            let first = if is_object { None } else { piece.next_byte() };
            if !is_object && first.is_none() && !piece.last {
                piece.at = start; // the visitor chooses by the first element
                return Ok(false);
            }
            let wanted = visitor.begin(kind, first);
            if wanted != Wanted::Inside {
                self.unseen = Some(self.depth);
                self.numbers = 0;
                if wanted == Wanted::Raw {
                    self.is_raw = true;
                    piece.raw_from = start;
                }
            }
        }
        self.depth += 1;
        self.objects = self.objects << 1 | u128::from(is_object);
        self.expected = if is_object {
            Expected::FirstKey
        } else {
            Expected::FirstElement
        };
        Ok(true)
    }

    /// Passes the bracket at the cursor.
    #[inline(never)] // several callers, and the wasm module should be small
    fn close(&mut self, visitor: &mut impl JsonVisitor, piece: &mut Piece<'_>) {
        piece.at += 1;
        self.depth -= 1;
        self.objects >>= 1;
        self.expected = self.after_value();
        match self.unseen {
            None => visitor.close(),
            Some(outside) if outside == self.depth => {
                self.unseen = None;
                if std::mem::take(&mut self.is_raw) {
                    visitor.raw(
                        piece
                            .bytes
                            .get(piece.raw_from..piece.at)
                            .unwrap_or_default(),
                    );
                    visitor.raw_end(self.numbers);
                }
            }
            Some(_) => {}
        }
    }

    fn begin_string(
        &mut self,
        visitor: &mut impl JsonVisitor,
        piece: &mut Piece<'_>,
        usage: StringUse,
    ) -> Result<bool> {
        piece.at += 1;
        let at = piece.at;
        let start = self.read + piece.at;
        let scanned = scan::string(piece.bytes, at);
        if let Ok(found) = scanned {
            let raw = piece.bytes.get(at..found.end).unwrap_or_default();
            if !found.ascii {
                let mut utf8 = Utf8Check::default();
                utf8.add(raw, start);
                utf8.end().map_err(|offset| JsonError::Invalid { offset })?;
            }
            piece.at = found.end + 1;
            Self::string_ended(
                visitor,
                usage,
                &JsonStr {
                    raw,
                    start,
                    escaped: found.escaped,
                },
            );
            return Ok(true);
        }
        if usage == StringUse::Raw {
            self.is_raw = true;
            piece.raw_from = at;
        }
        let string = OpenString {
            start,
            scanned: start,
            usage,
            escaped: false,
            utf8: Utf8Check::default(),
        };
        self.string(visitor, piece, string, scanned)
    }

    /// Reads a string that began in an earlier piece, or ends in a later one. Returns false if its
    /// end has not arrived.
    #[inline(never)] // several callers, and the wasm module should be small
    fn string(
        &mut self,
        visitor: &mut impl JsonVisitor,
        piece: &mut Piece<'_>,
        mut string: OpenString,
        scanned: std::result::Result<ScannedString, StringStop>,
    ) -> Result<bool> {
        let from = string.scanned - self.read;
        let (end, escaped, ascii, ended) = match scanned {
            Ok(found) => (found.end, found.escaped, found.ascii, true),
            Err(stop) if stop.offset == piece.bytes.len() && !piece.last => {
                (stop.scanned, stop.escaped, stop.ascii, false)
            }
            Err(stop) => return Err(self.invalid(stop.offset)),
        };
        string.escaped |= escaped;
        if !ascii || string.utf8.is_cut() {
            string.utf8.add(
                piece.bytes.get(from..end).unwrap_or_default(),
                string.scanned,
            );
        }
        string.scanned = self.read + end;
        if !ended {
            self.string = Some(string);
            return Ok(false);
        }
        string
            .utf8
            .end()
            .map_err(|offset| JsonError::Invalid { offset })?;
        piece.at = end + 1;
        let from = if string.is_kept() {
            string.start - self.read
        } else {
            piece.raw_from
        };
        let raw = piece.bytes.get(from..end).unwrap_or_default();
        self.is_raw &= string.usage != StringUse::Raw;
        Self::string_ended(
            visitor,
            string.usage,
            &JsonStr {
                raw,
                start: string.start,
                escaped: string.escaped,
            },
        );
        Ok(true)
    }

    /// Gives the visitor a string, or the rest of a string that is wanted raw.
    #[inline(never)]
    fn string_ended(visitor: &mut impl JsonVisitor, usage: StringUse, string: &JsonStr<'_>) {
        match usage {
            StringUse::Key => visitor.key(string),
            StringUse::Whole => visitor.string(string),
            StringUse::Raw => {
                visitor.raw(string.raw);
                visitor.raw_end(0);
            }
            StringUse::Passed => {}
        }
    }

    fn in_object(&self) -> bool {
        self.objects & 1 == 1
    }

    fn after_value(&self) -> Expected {
        if self.depth == 0 {
            Expected::End
        } else {
            Expected::More
        }
    }

    fn invalid(&self, at: usize) -> JsonError {
        JsonError::Invalid {
            offset: self.read + at,
        }
    }
}

// === impl OpenString ===

impl OpenString {
    fn is_kept(&self) -> bool {
        matches!(self.usage, StringUse::Key | StringUse::Whole)
    }
}

// === impl Piece ===

impl Piece<'_> {
    /// Skips white space. Returns the next byte.
    fn next_byte(&mut self) -> Option<u8> {
        loop {
            #[cfg(test)]
            super::steps::add();
            match self.bytes.get(self.at) {
                Some(b' ' | b'\n' | b'\r' | b'\t') => self.at += 1,
                byte => return byte.copied(),
            }
        }
    }
}
