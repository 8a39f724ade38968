//! Server-sent events: the data of each event of a stream that arrives cut anywhere.
//!
//! Only `data` matters to us: the JSON in it names its own type. Lines end with LF, CR or CRLF; several data lines of one event are one text
//! with line feeds between; comments (`: ping`) and other fields are passed over. An event ends with an empty line, or (leniently) with the
//! stream.

use super::held::Held;

/// State between chunks.
#[derive(Clone, Debug, Default)]
pub(super) struct Events {
    line: Line,
    data: Held,
    /// The last byte was a CR, so a LF that follows belongs to it.
    after_cr: bool,
}

/// How much is known of the line that is being read.
#[derive(Clone, Copy, Debug)]
enum Line {
    /// So far it is this many bytes of [`FIELD`].
    Matching(usize),
    /// It is a data line.
    Data,
    /// It is none.
    Other,
}

const FIELD: &[u8] = b"data:";

// === impl Events ===

impl Events {
    /// Takes the next bytes; `event` is given the data of each event that ends in them.
    pub(super) fn feed(&mut self, mut bytes: &[u8], mut event: impl FnMut(&Held)) {
        if self.after_cr && !bytes.is_empty() {
            self.after_cr = false;
            bytes = bytes.strip_prefix(b"\n").unwrap_or(bytes);
        }
        while let Some((line, rest)) = memchr::memchr2(b'\n', b'\r', bytes).and_then(|end| bytes.split_at_checked(end)) {
            self.part(line);
            self.end_of_line(&mut event);
            self.after_cr = rest == b"\r";
            bytes = rest.strip_prefix(b"\r\n").or(rest.get(1..)).unwrap_or_default();
        }
        self.part(bytes);
    }

    /// The stream has ended.
    pub(super) fn finish(&mut self, mut event: impl FnMut(&Held)) {
        self.end_of_event(&mut event);
    }

    /// Some bytes of a line.
    fn part(&mut self, mut bytes: &[u8]) {
        if let Line::Matching(matched) = self.line
            && !bytes.is_empty()
        {
            let wanted = FIELD.get(matched..).unwrap_or_default();
            let (start, rest) = bytes.split_at_checked(wanted.len()).unwrap_or((bytes, &[]));
            self.line = match wanted.strip_prefix(start) {
                Some([]) => Line::Data,
                Some(_) => Line::Matching(matched + start.len()),
                None => Line::Other,
            };
            bytes = rest;
        }
        if matches!(self.line, Line::Data) {
            self.data.push(bytes);
        }
    }

    fn end_of_line(&mut self, event: &mut impl FnMut(&Held)) {
        match std::mem::take(&mut self.line) {
            Line::Matching(0) => self.end_of_event(event),
            Line::Data => self.data.push(b"\n"),
            Line::Matching(_) | Line::Other => {}
        }
    }

    fn end_of_event(&mut self, event: &mut impl FnMut(&Held)) {
        if !self.data.bytes().is_empty() {
            event(&self.data);
            self.data.clear();
        }
    }
}

// === impl Line ===

impl Default for Line {
    fn default() -> Self {
        Self::Matching(0)
    }
}
