//! Reads the `model` of a form (`multipart/form-data`) that arrives in pieces. Uploads of audio and
//! images name their model in a field before or after a large file.
//!
//! The reader accepts what clients' libraries write, and no more: parts between boundary lines,
//! each with one `content-disposition` that has one `name`, quoted or not. Where parsers differ
//! (text before the first boundary, bare line feeds, folded headers, `name*`), the form is refused:
//! an engine could otherwise read another model than the picker. If a field is duplicated, the last
//! one is used, as in engines.
//!
//! Of a file, only the bytes that may begin a boundary are kept.

use std::ops::Range;

use memchr::memmem;

/// The longest boundary, in bytes, as in RFC 2046.
const BOUNDARY_BYTES_MAX: usize = 70;

/// The maximum number of bytes of the headers of one part. The maximum is enough for a disposition
/// with a long file name, and a type. Engines' parsers accept about as much.
const HEAD_BYTES_MAX: usize = 8_192;

/// The longest value of `model`, in bytes. The limit is four times the longest name that an object
/// may give a model, and short enough for an error message or a table.
const MODEL_BYTES_MAX: usize = 1_024;

/// The reason why a form is not accepted. The sender caused the error. Sending the same bytes again
/// does not help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidForm {
    /// The part of the body that is not accepted, in bytes from its start.
    pub offset: usize,
    /// What is expected there.
    pub expected: &'static str,
}

/// Finds the model in one form.
#[derive(Debug)]
pub(super) struct FormReader {
    /// A line end, two hyphens and the boundary.
    delimiter: Box<[u8]>,
    state: FormState,
    /// The bytes that were pushed but not read yet.
    kept: Vec<u8>,
    /// The position of the first kept byte in the body.
    at: usize,
    model: Option<(String, Range<usize>)>,
}

/// The meaning of the next bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FormState {
    /// The first line of the boundary.
    Start,
    /// The end of a boundary, where another part or the end follows.
    Boundary,
    /// The headers of a part.
    Head,
    /// The contents of a part; `true` if they are the model.
    Content(bool),
    /// The last boundary has arrived. The bytes after it have no meaning.
    End,
}

/// The boundary in a `content-type`, if that is the type of forms. The boundary is empty if the
/// type names no readable boundary.
pub(crate) fn boundary(content_type: &[u8]) -> Option<&[u8]> {
    let kind = content_type
        .split(|&byte| byte == b';')
        .next()?
        .trim_ascii();
    if !kind.eq_ignore_ascii_case(b"multipart/form-data") {
        return None;
    }
    let named = one_parameter(content_type, b"boundary").unwrap_or_default();
    Some(if named.len() > BOUNDARY_BYTES_MAX {
        &[]
    } else {
        named
    })
}

// === impl FormReader ===

impl FormReader {
    pub(super) fn new(boundary: &[u8]) -> Self {
        Self {
            delimiter: [b"\r\n--", boundary].concat().into(),
            state: FormState::Start,
            kept: Vec::new(),
            at: 0,
            model: None,
        }
    }

    /// The bytes that are kept between two pieces.
    pub(super) fn bytes_kept(&self) -> usize {
        self.kept.len()
    }

    /// The model and its position in the body.
    pub(super) fn into_model(self) -> Option<(String, Range<usize>)> {
        self.model
    }

    /// Reads the next piece. With `last`, the form ends after it.
    pub(super) fn push(&mut self, piece: &[u8], last: bool) -> Result<(), InvalidForm> {
        if self.state == FormState::End {
            return Ok(());
        }
        let joined;
        let bytes = if self.kept.is_empty() {
            piece
        } else {
            joined = [std::mem::take(&mut self.kept).as_slice(), piece].concat();
            &joined
        };
        let mut rest = bytes;
        while let Some(used) = self.step(rest)? {
            self.at += used;
            rest = rest.get(used..).unwrap_or_default();
        }
        match self.state {
            FormState::End => Ok(()),
            _ if last => self.invalid("a closing boundary"),
            // Contents are read up to the bytes that may begin a boundary. Anything else waits for
            // its end.
            _ => {
                self.kept = rest.to_vec();
                Ok(())
            }
        }
    }

    /// Reads one element of the form. Returns the element's length in bytes; `None` if its end has
    /// not arrived.
    fn step(&mut self, bytes: &[u8]) -> Result<Option<usize>, InvalidForm> {
        let length = self.delimiter.len();
        let used = match self.state {
            FormState::Start => {
                let line = self.delimiter.get(2..).unwrap_or_default();
                match bytes.get(..line.len()) {
                    Some(start) if start == line && line.len() > 2 => line.len(),
                    Some(_) => return self.invalid("the boundary that `content-type` names"),
                    None => return Ok(None),
                }
            }
            FormState::Boundary => match bytes.get(..2) {
                Some(b"\r\n") => 2,
                Some(b"--") => {
                    self.state = FormState::End;
                    return Ok(None);
                }
                Some(_) => return self.invalid("a line end or two hyphens after the boundary"),
                None => return Ok(None),
            },
            FormState::Head => {
                match memmem::find(bytes.get(..HEAD_BYTES_MAX).unwrap_or(bytes), b"\r\n\r\n") {
                    Some(end) => end + 4,
                    None if bytes.len() > HEAD_BYTES_MAX => {
                        return self.invalid("a part with short headers");
                    }
                    None => return Ok(None),
                }
            }
            FormState::Content(is_model) => match memmem::find(bytes, &self.delimiter) {
                Some(end) => {
                    if is_model {
                        self.set_model(bytes.get(..end).unwrap_or_default())?;
                    }
                    end + length
                }
                None if is_model && bytes.len() > MODEL_BYTES_MAX + length => {
                    return self.invalid("a shorter `model`");
                }
                None if is_model => return Ok(None),
                None => {
                    let used = (bytes.len() + 1).saturating_sub(length);
                    return Ok(Some(used).filter(|&used| used > 0));
                }
            },
            FormState::End => return Ok(None),
        };
        self.state = match self.state {
            FormState::Start | FormState::Content(_) => FormState::Boundary,
            FormState::Head => match is_model(bytes.get(..used).unwrap_or_default()) {
                Some(is_model) => FormState::Content(is_model),
                None => {
                    return self
                        .invalid("a part with one plain `name` in its `content-disposition`");
                }
            },
            _ => FormState::Head,
        };
        Ok(Some(used))
    }

    fn set_model(&mut self, name: &[u8]) -> Result<(), InvalidForm> {
        let Some(text) = std::str::from_utf8(name)
            .ok()
            .filter(|name| name.len() <= MODEL_BYTES_MAX)
        else {
            return self.invalid("a `model` of a few bytes of UTF-8");
        };
        self.model = Some((text.to_owned(), self.at..self.at + name.len()));
        Ok(())
    }

    fn invalid<T>(&self, expected: &'static str) -> Result<T, InvalidForm> {
        Err(InvalidForm {
            offset: self.at,
            expected,
        })
    }
}

/// Whether a part with these headers is the field `model`; `None` if that is not clear.
#[inline(never)]
fn is_model(head: &[u8]) -> Option<bool> {
    let mut name = None;
    for line in head
        .split(|&byte| byte == b'\n')
        .filter(|line| !line.is_empty())
    {
        // Parsers disagree on a bare line end and on a folded line.
        let line = line
            .strip_suffix(b"\r")
            .filter(|line| !line.contains(&b'\r'))?;
        if line.is_empty() {
            continue;
        }
        let (header, value) = line.split_at_checked(line.iter().position(|&byte| byte == b':')?)?;
        if !header.iter().all(u8::is_ascii_graphic) {
            return None;
        }
        if header.eq_ignore_ascii_case(b"content-disposition")
            && name.replace(one_parameter(value, b"name")?).is_some()
        {
            return None;
        }
    }
    name.map(|name| name == b"model")
}

/// The value of a parameter that occurs once: `name="value"` or `name=value`, between semicolons.
/// Also `None` if parsers may disagree on the value, because it is encoded or in several pieces
/// (`name*`), or contains a backslash or a quote.
#[inline(never)]
fn one_parameter<'t>(text: &'t [u8], wanted: &[u8]) -> Option<&'t [u8]> {
    let mut found = None;
    let mut rest = text;
    loop {
        let end = end_of_parameter(rest)?;
        let parameter = rest.get(..end)?.trim_ascii();
        let (key, value) = match parameter.iter().position(|&byte| byte == b'=') {
            Some(equals) => (
                parameter.get(..equals)?.trim_ascii(),
                parameter.get(equals + 1..)?.trim_ascii(),
            ),
            None => (parameter, &[][..]),
        };
        if key
            .split(|&byte| byte == b'*')
            .next()?
            .eq_ignore_ascii_case(wanted)
        {
            let value = value
                .strip_prefix(b"\"")
                .map_or(Some(value), |quoted| quoted.strip_suffix(b"\""))?;
            if key.len() > wanted.len()
                || value.contains(&b'\\')
                || value.contains(&b'"')
                || found.replace(value).is_some()
            {
                return None;
            }
        }
        match rest.get(end + 1..) {
            Some(more) => rest = more,
            None => return found,
        }
    }
}

/// The position of the semicolon that ends the first parameter, or of the end. `None` if a quoted
/// string is still open there.
fn end_of_parameter(text: &[u8]) -> Option<usize> {
    let mut is_quoted = false;
    let mut is_escaped = false;
    for (at, &byte) in text.iter().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = is_quoted,
            b'"' => is_quoted = !is_quoted,
            b';' if !is_quoted => return Some(at),
            _ => {}
        }
    }
    if is_quoted { None } else { Some(text.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::RequestApi;
    use crate::body::{BodyError, BodyReader};
    use proptest::prelude::*;

    const BOUNDARY: &str = "xYz";

    /// A form of these parts: the text behind `form-data`, and the contents.
    fn form(parts: &[(&str, &[u8])]) -> Vec<u8> {
        let mut body = Vec::new();
        for (parameters, contents) in parts {
            body.extend_from_slice(
                format!("--{BOUNDARY}\r\nContent-Disposition: form-data{parameters}\r\n\r\n")
                    .as_bytes(),
            );
            body.extend_from_slice(contents);
            body.extend_from_slice(b"\r\n");
        }
        body.extend_from_slice(format!("--{BOUNDARY}--\r\n").as_bytes());
        body
    }

    fn read(body: &[u8], cuts: &[usize]) -> Result<(String, Option<Range<usize>>), BodyError> {
        let mut reader = BodyReader::new(RequestApi::Task, ()).with_boundary(BOUNDARY.as_bytes());
        let mut from = 0;
        for &cut in cuts {
            let to = cut.clamp(from, body.len());
            reader.read(&body[from..to]);
            assert!(reader.bytes_kept() <= HEAD_BYTES_MAX + MODEL_BYTES_MAX);
            from = to;
        }
        reader
            .finish(&body[from..])
            .map(|parsed| (parsed.model, parsed.model_span))
    }

    fn model(body: &[u8]) -> Result<String, &'static str> {
        match read(body, &[]) {
            Ok((model, span)) => {
                assert_eq!(
                    span.map_or("", |span| std::str::from_utf8(&body[span]).unwrap()),
                    model
                );
                Ok(model)
            }
            Err(BodyError::InvalidForm(invalid)) => Err(invalid.expected),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn the_model_is_found_before_and_after_a_file_quoted_or_not() {
        let file = (
            r#"; name="file"; filename="a;b=\"c\".wav""#,
            &b"\r\n--xYnot it\r\n\r\nmodel\r\n--xY"[..],
        );
        for field in [
            r#"; name="model""#,
            "; name=model",
            r#";name="model";"#,
            "; NAME = model ; x=y",
            r#"; x="a;b"; name="model""#,
        ] {
            assert_eq!(
                model(&form(&[file, (field, b"m")])).as_deref(),
                Ok("m"),
                "{field}"
            );
            assert_eq!(
                model(&form(&[(field, b"m"), file])).as_deref(),
                Ok("m"),
                "{field}"
            );
        }
        for other in [
            r#"; name="Model""#,
            r#"; name="my model""#,
            "; name=models",
            r#"; name="file"; filename="model""#,
        ] {
            assert_eq!(
                model(&form(&[file, (other, b"m")])).as_deref(),
                Ok(""),
                "{other}"
            );
        }
        let names = [("; name=model", &b"first"[..]), ("; name=model", b"last")];
        assert_eq!(model(&form(&names)).as_deref(), Ok("last"), "as engines do");
        assert_eq!(model(&form(&[])).as_deref(), Ok(""), "a form without parts");
        assert_eq!(
            model(&form(&[("; name=model", b"")])).as_deref(),
            Ok(""),
            "an empty name is none"
        );
    }

    #[test]
    fn what_parsers_read_differently_is_refused() {
        let boundary = "the boundary that `content-type` names";
        let after = "a line end or two hyphens after the boundary";
        let name = "a part with one plain `name` in its `content-disposition`";
        let whole = String::from_utf8(form(&[("; name=model", b"m")])).unwrap();
        for (body, expected) in [
            (format!("preamble\r\n{whole}"), boundary),
            (whole.replace("xYz", "xyz"), boundary),
            (whole.replacen("xYz\r\n", "xYz \r\n", 1), after),
            (whole.replace("\r\n", "\n"), after),
            (whole.replace("Content-Disposition", "Content-Type"), name),
            (whole.replace(" name=model", " name*=utf-8''model"), name),
            (whole.replace(" name=model", " name*0=mo; name*1=del"), name),
            (whole.replace(" name=model", " name=file; name=model"), name),
            (whole.replace(" name=model", "\r\n name=model"), name),
            (whole.replace(" name=model", r#" name="mod\el""#), name),
            (whole.replace(" name=model", r#" name=model"x""#), name),
            (whole.replace(" name=model", " name=model; name"), name),
            (whole.replace(" name=model", r#" name="model"#), name),
            (whole.replace(" name=model", ""), name),
            (
                whole.replace(
                    "Content",
                    "Content-Disposition: form-data; name=x\r\nContent",
                ),
                name,
            ),
            (whole.replace("--xYz--", ""), "a closing boundary"),
            (whole.replace("--xYz--", "--xYz"), "a closing boundary"),
            (String::new(), "a closing boundary"),
            (
                whole.replace(
                    "\r\nm\r\n",
                    &format!("\r\n{}\r\n", "m".repeat(MODEL_BYTES_MAX + 1)),
                ),
                "a `model` of a few bytes of UTF-8",
            ),
            (
                whole.replace("\r\nm\r\n", &format!("\r\n{}\r\n", "m".repeat(9_999))),
                "a `model` of a few bytes of UTF-8",
            ),
            (
                whole.replace(
                    "name=model",
                    &format!("x={}; name=model", "y".repeat(HEAD_BYTES_MAX)),
                ),
                "a part with short headers",
            ),
        ] {
            let refused = model(body.as_bytes());
            let also = expected.starts_with("a `model`") && refused == Err("a shorter `model`");
            assert!(
                refused == Err(expected) || also,
                "{refused:?}, not {expected}: {body}"
            );
        }
        let mut invalid = form(&[("; name=model", b"\xff")]);
        assert_eq!(model(&invalid), Err("a `model` of a few bytes of UTF-8"));
        invalid.truncate(10);
        assert_eq!(model(&invalid), Err("a closing boundary"));
    }

    #[test]
    fn the_boundary_of_a_content_type() {
        let of = |text: &'static str| {
            boundary(text.as_bytes()).map(|found| String::from_utf8_lossy(found).into_owned())
        };
        let x = Some("x".to_owned());
        assert_eq!(of("multipart/form-data; boundary=x"), x);
        assert_eq!(of("Multipart/Form-Data;charset=utf-8; Boundary=\"x\""), x);
        assert_eq!(of("multipart/form-data;boundary=x;"), x);
        assert_eq!(of("application/json"), None);
        assert_eq!(of("multipart/form-data-2; boundary=x"), None);
        for none in [
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "multipart/form-data; boundary=x; boundary=y",
        ] {
            assert_eq!(of(none), Some(String::new()), "{none}");
        }
        let long = format!(
            "multipart/form-data; boundary={}",
            "x".repeat(BOUNDARY_BYTES_MAX + 1)
        );
        assert_eq!(boundary(long.as_bytes()), Some(&b""[..]));
        assert!(
            BodyReader::new(RequestApi::Task, ())
                .with_boundary(b"")
                .finish(b"--\r\n")
                .is_err(),
            "no form has an empty boundary"
        );
    }

    #[test]
    fn any_cut_of_a_form_reads_alike() {
        let body = form(&[
            ("; name=file; filename=f", b"\r\n--xY\r\r\n--x"),
            ("; name=model", b"m-1"),
            ("; name=x", b""),
        ]);
        let whole = read(&body, &[]);
        assert_eq!(whole.as_ref().map(|(model, _)| model.as_str()), Ok("m-1"));
        for first in 0..=body.len() {
            for second in first..=body.len() {
                assert_eq!(read(&body, &[first, second]), whole, "{first} {second}");
            }
        }
    }

    #[test]
    fn a_long_file_is_read_once_and_not_kept() {
        let file = vec![b'\r'; 4 << 20];
        let body = form(&[("; name=file; filename=f", &file), ("; name=model", b"m")]);
        let cuts: Vec<usize> = (0..body.len()).step_by(262_144).collect();
        assert_eq!(
            read(&body, &cuts).map(|(model, _)| model),
            Ok("m".to_owned())
        );
    }

    #[test]
    fn only_a_task_is_a_form() {
        assert_eq!(
            BodyReader::new(RequestApi::Task, ())
                .with_boundary(b"x")
                .finish(b"--x--")
                .map(|parsed| parsed.model),
            Ok(String::new())
        );
        assert!(!RequestApi::Task.needs_model() && RequestApi::Task.reads_body());
    }

    fn contents() -> impl Strategy<Value = Vec<u8>> {
        let byte = prop_oneof![
            Just(b'\r'),
            Just(b'\n'),
            Just(b'-'),
            Just(b'x'),
            Just(b'Y'),
            any::<u8>()
        ];
        prop::collection::vec(byte, 0..60)
    }

    proptest! {
        #[test]
        fn any_bytes_read_alike_however_they_are_cut(bytes in contents(), head in any::<bool>(), cuts in prop::collection::vec(0..200_usize, 0..4)) {
            let body = if head { form(&[("; name=model", &bytes), ("; name=f", &bytes)]) } else { bytes };
            let mut cuts = cuts;
            cuts.sort_unstable();
            prop_assert_eq!(read(&body, &cuts), read(&body, &[]));
        }

        #[test]
        fn contents_without_the_boundary_are_found_as_they_are(file in contents(), name in "[a-z/.:\"\\\\é-]{1,20}") {
            prop_assume!(memmem::find(&file, b"xYz").is_none());
            let body = form(&[("; name=file; filename=f", &file), ("; name=model", name.as_bytes())]);
            prop_assert_eq!(model(&body), Ok(name));
        }

        #[test]
        fn any_disposition_is_survived(text in "[ ;=\"*\\\\a-e\r\nmodel-]{0,40}") {
            let _ = is_model(format!("content-disposition: {text}\r\n\r\n").as_bytes());
            let _ = boundary(format!("multipart/form-data;{text}").as_bytes());
        }
    }
}
