//! Parser of the Prometheus text format: bytes in, samples out. The parser does no I/O.
//!
//! No library has all that a scraper of model servers needs. This parser takes chunks as they
//! arrive, and borrows data from the chunks. The parser reads only the name of an unwanted sample,
//! because nine in ten lines of an engine's page are histogram buckets. The parser stops at the
//! line after the last wanted family. A bad line is skipped and counted; the rest of the page is
//! still read.
//!
//! The parser reads the text format 0.0.4, UTF-8 names in quotes (`{"name",label="x"} 1`), and the
//! sample lines of OpenMetrics (exemplars are dropped, `# EOF` is a comment). Bytes that are not
//! UTF-8 are passed on unchanged. Comments, HELP and TYPE are skipped, because [`super::engine`]
//! decides the meaning of a family.
//!
//! Invariant: the division of the bytes into chunks changes neither the samples nor the counts.

use std::borrow::Cow;
use std::ops::Range;

use memchr::memchr;

/// The maximum number of bytes of one line. A longer line is skipped. The longest real lines have
/// some KB: `vllm:lora_requests_info` with hundreds of adapter names, and `vllm:cache_config_info`
/// with all settings as labels. The maximum limits the memory kept between two chunks.
pub const LINE_BYTES_MAX: usize = 64 * 1024;

/// The maximum number of labels of one sample; `vllm:cache_config_info` has about forty. The
/// maximum limits the cost of the quadratic search for duplicates.
pub const LABELS_MAX: usize = 256;

/// A visitor's decision about a sample. The visitor decides by the name of the sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineInterest {
    /// The parser must parse the sample and pass it to the visitor.
    Take,
    /// The parser must skip the line, which is neither checked nor counted as bad.
    Ignore,
    /// The parser must stop reading, because all wanted samples have been seen.
    Stop,
}

/// Receives the samples of a page.
pub trait SampleVisitor {
    /// Returns whether a sample with this name is wanted. The parser calls this function once for
    /// each sample line, in order.
    fn interest(&mut self, name: &[u8]) -> LineInterest;
    /// Receives a well-formed sample with a wanted name.
    fn sample(&mut self, sample: &MetricSample<'_>);
}

/// Whether the rest of the page is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseProgress {
    /// The parser needs more bytes.
    More,
    /// The visitor returned [`LineInterest::Stop`].
    Done,
}

/// Counts of the lines of a page that are not blank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LineCounts {
    /// The number of all lines, including comments.
    pub read: u64,
    /// The number of skipped lines: malformed, or longer than [`LINE_BYTES_MAX`].
    pub skipped: u64,
}

/// One sample. A sample borrows all its data from its line.
#[derive(Debug)]
pub struct MetricSample<'a> {
    /// The name of the series, unescaped.
    pub name: Cow<'a, [u8]>,
    /// The value, which may be NaN or infinite.
    pub value: f64,
    /// The timestamp as written: milliseconds in the text format, seconds in OpenMetrics.
    pub timestamp: Option<f64>,
    line: &'a [u8],
    spans: &'a [LabelSpan],
}

/// An incremental parser of one page.
#[derive(Debug, Default)]
pub struct ExpositionParser {
    /// The start of a line whose end has not arrived yet.
    carry: Vec<u8>,
    /// Whether the unfinished line is too long, so that it is dropped up to its end.
    overlong: bool,
    done: bool,
    counts: LineCounts,
    /// The positions of a line's labels. The memory is reused for each line.
    spans: Vec<LabelSpan>,
}

/// The position of a label in its line, quotes excluded.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LabelSpan {
    name: Range<usize>,
    value: Range<usize>,
}

/// A line that is not a sample.
struct MalformedLine;

/// The parts of a sample line that are not labels.
struct SampleHead {
    name: Range<usize>,
    value: f64,
    timestamp: Option<f64>,
}

impl<'a> MetricSample<'a> {
    /// Returns the labels in order, unescaped; names are unique.
    pub fn labels(&self) -> impl Iterator<Item = (Cow<'a, [u8]>, Cow<'a, [u8]>)> {
        let line = self.line;
        self.spans.iter().map(move |span| {
            (
                unescape(slice(line, &span.name)),
                unescape(slice(line, &span.value)),
            )
        })
    }

    /// Returns the value of a label; `None` if there is no such label.
    #[must_use]
    pub fn label(&self, name: &[u8]) -> Option<Cow<'a, [u8]>> {
        self.labels()
            .find(|(key, _)| &**key == name)
            .map(|(_, value)| value)
    }
}

impl ExpositionParser {
    /// Reads the next bytes of the page. After [`ParseProgress::Done`] further bytes are ignored.
    pub fn feed(&mut self, mut chunk: &[u8], visitor: &mut impl SampleVisitor) -> ParseProgress {
        while !self.done {
            let Some(end) = memchr(b'\n', chunk) else {
                self.carry(chunk);
                break;
            };
            let (line, rest) = chunk.split_at(end);
            chunk = rest.get(1..).unwrap_or_default();
            self.end_line(line, visitor);
        }
        self.progress()
    }

    /// Reads the last line, which may lack its newline, and returns the counts. After that the
    /// parser is ready for the next page.
    pub fn finish(&mut self, visitor: &mut impl SampleVisitor) -> LineCounts {
        if !self.done {
            self.end_line(&[], visitor);
        }
        self.carry.clear();
        self.done = false;
        self.overlong = false;
        std::mem::take(&mut self.counts)
    }

    fn progress(&self) -> ParseProgress {
        if self.done {
            ParseProgress::Done
        } else {
            ParseProgress::More
        }
    }

    fn carry(&mut self, part: &[u8]) {
        if self.overlong || self.carry.len() + part.len() > LINE_BYTES_MAX {
            self.overlong = true;
            self.carry.clear();
        } else {
            self.carry.extend_from_slice(part);
        }
    }

    fn end_line(&mut self, tail: &[u8], visitor: &mut impl SampleVisitor) {
        if self.overlong || self.carry.len() + tail.len() > LINE_BYTES_MAX {
            self.counts.read += 1;
            self.counts.skipped += 1;
            self.overlong = false;
            self.carry.clear();
        } else if self.carry.is_empty() {
            self.line(tail, visitor);
        } else {
            let mut line = std::mem::take(&mut self.carry);
            line.extend_from_slice(tail);
            self.line(&line, visitor);
            line.clear();
            self.carry = line;
        }
    }

    fn line(&mut self, line: &[u8], visitor: &mut impl SampleVisitor) {
        let line = trim(line);
        let Some(&first) = line.first() else { return };
        self.counts.read += 1;
        if first == b'#' {
            return;
        }
        let bare = name_len(line);
        let bounded = matches!(line.get(bare), Some(b' ' | b'\t' | b'{'));
        if bare > 0 && bounded {
            match visitor.interest(slice(line, &(0..bare))) {
                LineInterest::Take => {}
                LineInterest::Ignore => return,
                LineInterest::Stop => return self.done = true,
            }
        }
        let Ok(head) = parse_sample(line, bare, &mut self.spans) else {
            self.counts.skipped += 1;
            return;
        };
        let name = unescape(slice(line, &head.name));
        if bare == 0 {
            match visitor.interest(&name) {
                LineInterest::Take => {}
                LineInterest::Ignore => return,
                LineInterest::Stop => return self.done = true,
            }
        }
        visitor.sample(&MetricSample {
            name,
            value: head.value,
            timestamp: head.timestamp,
            line,
            spans: &self.spans,
        });
    }
}

/// Parses a sample line. `bare` is the length of the unquoted name at the start. `bare` is 0 if the
/// name is quoted and in the braces.
fn parse_sample(
    line: &[u8],
    bare: usize,
    spans: &mut Vec<LabelSpan>,
) -> Result<SampleHead, MalformedLine> {
    spans.clear();
    let mut at = skip_blanks(line, bare);
    let mut name = (bare > 0).then_some(0..bare);
    if line.get(at) == Some(&b'{') {
        let (end, quoted) = parse_labels(line, at + 1, spans)?;
        at = end;
        name = match (name, quoted) {
            (Some(only), None) | (None, Some(only)) => Some(only),
            _ => return Err(MalformedLine),
        };
    } else if at == bare {
        return Err(MalformedLine); // neither a blank nor a brace follows the name
    }
    let (value, timestamp) = parse_value(line.get(at..).unwrap_or_default())?;
    Ok(SampleHead {
        name: name.ok_or(MalformedLine)?,
        value,
        timestamp,
    })
}

/// Parses the text between `{` and `}`. Also returns the span of a quoted metric name among the
/// labels.
fn parse_labels(
    line: &[u8],
    mut at: usize,
    spans: &mut Vec<LabelSpan>,
) -> Result<(usize, Option<Range<usize>>), MalformedLine> {
    let mut metric = None;
    at = skip_comma(line, at); // prometheus_client accepts one leading and one trailing comma
    while line.get(at) != Some(&b'}') {
        let quoted = line.get(at) == Some(&b'"');
        let name = if quoted {
            quoted_span(line, at)?
        } else {
            at..at + name_len(line.get(at..).unwrap_or_default())
        };
        at = skip_blanks(line, name.end + usize::from(quoted));
        if line.get(at) == Some(&b'=') {
            let value = quoted_span(line, skip_blanks(line, at + 1))?;
            at = skip_blanks(line, value.end + 1);
            match slice(line, &name) {
                b"" => return Err(MalformedLine),
                b"__name__" => named(&mut metric, value)?,
                _ => push_label(line, spans, LabelSpan { name, value })?,
            }
        } else {
            named(&mut metric, if quoted { name } else { 0..0 })?;
        }
        match line.get(at) {
            Some(b',') => at = skip_comma(line, at),
            Some(b'}') => {}
            _ => return Err(MalformedLine),
        }
    }
    Ok((at + 1, metric))
}

/// Sets the metric's name. A metric has exactly one name, which is not empty.
fn named(metric: &mut Option<Range<usize>>, name: Range<usize>) -> Result<(), MalformedLine> {
    if name.is_empty() || metric.is_some() {
        return Err(MalformedLine);
    }
    *metric = Some(name);
    Ok(())
}

fn push_label(
    line: &[u8],
    spans: &mut Vec<LabelSpan>,
    label: LabelSpan,
) -> Result<(), MalformedLine> {
    let name = unescape(slice(line, &label.name));
    if spans.len() == LABELS_MAX
        || spans
            .iter()
            .any(|other| unescape(slice(line, &other.name)) == name)
    {
        return Err(MalformedLine);
    }
    spans.push(label);
    Ok(())
}

/// Returns the text inside the quoted string that starts at `at`.
fn quoted_span(line: &[u8], at: usize) -> Result<Range<usize>, MalformedLine> {
    if line.get(at) != Some(&b'"') {
        return Err(MalformedLine);
    }
    let start = at + 1;
    let mut from = start;
    loop {
        let end = from + memchr(b'"', line.get(from..).unwrap_or_default()).ok_or(MalformedLine)?;
        let inside = slice(line, &(start..end));
        let backslashes = inside.iter().rev().take_while(|&&b| b == b'\\').count();
        if backslashes % 2 == 0 {
            return Ok(start..end);
        }
        from = end + 1;
    }
}

/// Parses value, optional timestamp and optional exemplar (` # {..} 1 2`); drops the exemplar.
fn parse_value(rest: &[u8]) -> Result<(f64, Option<f64>), MalformedLine> {
    let mut tokens = rest
        .split(|&b| is_blank(b))
        .filter(|token| !token.is_empty());
    let value = number(tokens.next().ok_or(MalformedLine)?)?;
    let timestamp = match tokens.next() {
        None | Some(b"#") => return Ok((value, None)),
        Some(token) => number(token)?,
    };
    match tokens.next() {
        None | Some(b"#") => Ok((value, Some(timestamp))),
        Some(_) => Err(MalformedLine),
    }
}

/// Parses a number. Rust accepts the same numbers as Go and Python here: decimal with exponent,
/// `NaN`, `Inf`, `Infinity`, in any case, with a sign.
fn number(token: &[u8]) -> Result<f64, MalformedLine> {
    std::str::from_utf8(token)
        .ok()
        .and_then(|text| text.parse().ok())
        .ok_or(MalformedLine)
}

/// Returns the length of `[a-zA-Z_:][a-zA-Z0-9_:]*` at the start.
fn name_len(text: &[u8]) -> usize {
    if text.first().is_none_or(u8::is_ascii_digit) {
        return 0;
    }
    text.iter()
        .position(|&b| !(b.is_ascii_alphanumeric() || b == b'_' || b == b':'))
        .unwrap_or(text.len())
}

/// Resolves `\\`, `\n` and `\"`. Any other backslash is kept, as in `prometheus_client`.
fn unescape(text: &[u8]) -> Cow<'_, [u8]> {
    if memchr(b'\\', text).is_none() {
        return Cow::Borrowed(text);
    }
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        let escaped = match (byte, bytes.peek()) {
            (b'\\', Some(b'n')) => Some(b'\n'),
            (b'\\', Some(&next @ (b'\\' | b'"'))) => Some(next),
            _ => None,
        };
        out.push(escaped.unwrap_or(byte));
        if escaped.is_some() {
            bytes.next();
        }
    }
    Cow::Owned(out)
}

fn is_blank(byte: u8) -> bool {
    byte == b' ' || byte == b'\t'
}

/// Skips blanks, one comma if there is one, and blanks after it.
fn skip_comma(line: &[u8], from: usize) -> usize {
    let at = skip_blanks(line, from);
    if line.get(at) == Some(&b',') {
        skip_blanks(line, at + 1)
    } else {
        at
    }
}

fn skip_blanks(line: &[u8], from: usize) -> usize {
    line.iter()
        .skip(from)
        .position(|&b| !is_blank(b))
        .map_or(line.len().max(from), |blanks| from + blanks)
}

fn trim(line: &[u8]) -> &[u8] {
    let blank = |&b: &u8| is_blank(b) || b == b'\r';
    let start = line.iter().position(|b| !blank(b)).unwrap_or(line.len());
    let end = line
        .iter()
        .rposition(|b| !blank(b))
        .map_or(start, |last| last + 1);
    slice(line, &(start..end))
}

fn slice<'a>(line: &'a [u8], span: &Range<usize>) -> &'a [u8] {
    line.get(span.clone()).unwrap_or_default()
}

#[cfg(test)]
mod tests;
