//! Splits a stream of server-sent events into lines as they pass, and finds which bytes are data
//! and where an event ends.
//!
//! Only `data` matters here: its JSON names its own type. Lines end with LF, CR or CRLF. Comments
//! (`: ping`) and other fields are not data. An event ends with an empty line.

/// A piece of a stream. The pieces in order make up the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamPiece<'b> {
    /// Bytes of a data line, after its colon.
    Data(&'b [u8]),
    /// Any other bytes: field names, comments, line ends.
    Other(&'b [u8]),
    /// A data line ends here. If another data line follows in the event, a line feed between them
    /// belongs to the text.
    EndOfLine,
    /// An event ends here, whether it had data or not.
    EndOfEvent,
}

/// State between chunks.
#[derive(Clone, Debug)]
pub(crate) struct LineSplitter {
    line: LineState,
    /// Whether the last byte was a CR, so that a following LF belongs to it.
    after_cr: bool,
}

/// The state of the line that is being read.
#[derive(Clone, Copy, Debug)]
enum LineState {
    /// The stream so far equals this many bytes of [`MARK`], which is not part of its first line.
    Marking(usize),
    /// The line so far equals this many bytes of [`FIELD`].
    Matching(usize),
    Data,
    /// The line is another field.
    Other,
}

const FIELD: &[u8] = b"data:";

/// A byte order mark, which may be at the start of a stream.
const MARK: &[u8] = b"\xef\xbb\xbf";

// === impl LineSplitter ===

impl LineSplitter {
    /// Takes the next bytes, which may be cut anywhere.
    pub(crate) fn feed(&mut self, mut bytes: &[u8], mut part: impl FnMut(StreamPiece<'_>)) {
        if self.after_cr && !bytes.is_empty() {
            self.after_cr = false;
            if let Some(rest) = bytes.strip_prefix(b"\n") {
                part(StreamPiece::Other(b"\n"));
                bytes = rest;
            }
        }
        while let Some((line, rest)) =
            memchr::memchr2(b'\n', b'\r', bytes).and_then(|end| bytes.split_at_checked(end))
        {
            self.part_of_line(line, &mut part);
            match std::mem::take(&mut self.line) {
                LineState::Matching(0) | LineState::Marking(0) => part(StreamPiece::EndOfEvent),
                LineState::Data => part(StreamPiece::EndOfLine),
                LineState::Matching(_) | LineState::Marking(_) | LineState::Other => {}
            }
            self.after_cr = rest == b"\r";
            let end = if rest.starts_with(b"\r\n") { 2 } else { 1 };
            let (end, rest) = rest.split_at_checked(end).unwrap_or_default();
            part(StreamPiece::Other(end));
            bytes = rest;
        }
        self.part_of_line(bytes, &mut part);
    }

    fn part_of_line(&mut self, mut bytes: &[u8], part: &mut impl FnMut(StreamPiece<'_>)) {
        if bytes.is_empty() {
            return;
        }
        if let LineState::Marking(read) = self.line {
            let missing = MARK.get(read..).unwrap_or_default();
            let same = missing
                .iter()
                .zip(bytes)
                .take_while(|(mark, byte)| mark == byte)
                .count();
            let (mark, rest) = bytes.split_at_checked(same).unwrap_or_default();
            self.line = match read + same {
                0 | 3 => LineState::Matching(0),
                so_far if rest.is_empty() => LineState::Marking(so_far),
                _ => LineState::Other,
            };
            if !mark.is_empty() {
                part(StreamPiece::Other(mark));
            }
            if rest.is_empty() {
                return;
            }
            bytes = rest;
        }
        if let LineState::Matching(matched) = self.line {
            let wanted = FIELD.get(matched..).unwrap_or_default();
            let (start, rest) = bytes.split_at_checked(wanted.len()).unwrap_or((bytes, &[]));
            self.line = match wanted.strip_prefix(start) {
                Some([]) => LineState::Data,
                Some(_) => LineState::Matching(matched + start.len()),
                None => LineState::Other,
            };
            part(StreamPiece::Other(start));
            bytes = rest;
        }
        match self.line {
            LineState::Data => part(StreamPiece::Data(bytes)),
            LineState::Matching(_) | LineState::Marking(_) | LineState::Other => {
                part(StreamPiece::Other(bytes));
            }
        }
    }
}

impl Default for LineSplitter {
    fn default() -> Self {
        Self {
            line: LineState::Marking(0),
            after_cr: false,
        }
    }
}

// === impl LineState ===

impl Default for LineState {
    fn default() -> Self {
        Self::Matching(0)
    }
}
