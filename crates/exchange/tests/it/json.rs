//! Compares the JSON reader with `serde_json`: both accept the same bytes and read the same values.
//! `serde_json` builds strings and numbers, so it refuses three things that the reader accepts:
//! lone surrogates, numbers beyond `f64`, and more depth than its own limit.

use exchange::json::{DEPTH_MAX, JsonError, JsonKind, JsonReader};
use proptest::prelude::*;
use serde_json::Value;

fn skip(bytes: &[u8]) -> Result<(), JsonError> {
    let mut reader = JsonReader::new(bytes);
    reader.skip()?;
    reader.end()
}

/// Builds the value with the reader's walking functions.
fn build(bytes: &[u8]) -> Result<Value, JsonError> {
    let mut reader = JsonReader::new(bytes);
    let value = build_next(&mut reader, bytes)?;
    reader.end().map(|()| value)
}

fn build_next(reader: &mut JsonReader<'_>, bytes: &[u8]) -> Result<Value, JsonError> {
    Ok(match reader.peek()? {
        JsonKind::Object => {
            let mut members = serde_json::Map::new();
            reader.members(|reader, key| {
                members.insert(key.text().into_owned(), build_next(reader, bytes)?);
                Ok(())
            })?;
            members.into()
        }
        JsonKind::Array => {
            let mut elements = Vec::new();
            reader.elements(|reader| {
                elements.push(build_next(reader, bytes)?);
                Ok(())
            })?;
            elements.into()
        }
        JsonKind::String => reader.string()?.unwrap().text().into(),
        JsonKind::Number => serde_json::from_slice(&bytes[reader.skip()?]).unwrap_or(Value::Null),
        JsonKind::Boolean => reader.boolean()?.into(),
        JsonKind::Null => reader.skip().map(|_| Value::Null)?,
    })
}

fn agrees(bytes: &[u8]) {
    let ours = skip(bytes);
    let shown = String::from_utf8_lossy(bytes);
    match serde_json::from_slice::<Value>(bytes) {
        Ok(value) => {
            assert_eq!(ours, Ok(()), "{shown}");
            assert_eq!(build(bytes), Ok(value), "{shown}");
        }
        Err(error) => {
            let reason = error.to_string();
            let passed_over = [
                "surrogate",
                "unexpected end of hex escape",
                "number out of range",
                "recursion limit",
            ]
            .iter()
            .any(|r| reason.contains(r));
            // After an early error of `serde_json`, the rest may be anything.
            assert!(ours.is_err() || passed_over, "{shown}: {reason}");
            if let Err(JsonError::Invalid { offset }) = ours {
                assert!(offset <= bytes.len());
            }
        }
    }
    assert_eq!(
        ours,
        build(bytes).map(drop),
        "walking and skipping must agree: {shown}"
    );
}

#[rustfmt::skip] // one text on each line would not be clearer
const GOOD: &[&str] = &[
    "0", "-0", "12", "1.5", "1e5", "1E+5", "-1.25e-7", "true", "false", "null", r#""""#, "[]", "{}", " [ 1 , 2 ] ", "\t{\"a\"\r:\n1}",
    r#"{"":{}}"#, r#""\"\\\/\b\f\n\r\t\u00e9\uD83D\uDE00""#, "\"é一😀\"", "\"\u{7f}\"", "[[],{},[[]]]", r#"{"a":1,"a":2}"#,
];

#[rustfmt::skip]
const BAD: &[&str] = &[
    "", " ", "01", "-", "+1", ".5", "1.", "1e", "1e+", "0x1", "1_000", "NaN", "Infinity", "-Infinity", "tru", "nul", "True", "'a'", "\"", "\"\\",
    "\"\\\"", "\"\\x\"", "\"\\u12\"", "\"\\u12g4\"", "\"\\U0041\"", "\"a\tb\"", "\"\u{1f}\"", "[", "]", "[1", "[1,", "[1,]", "[,1]", "[1 2]", "[1}",
    "{", "}", "{]", "{1:2}", "{\"a\"}", "{\"a\":}", "{\"a\":1,}", "{,}", "{\"a\":1 \"b\":2}", "{a:1}", "{\"a\":1]", "1 1", "[] []", "\u{a0}1", "// c\n1",
    "\u{feff}1", "1\0",
];

#[test]
fn each_clause_of_the_grammar() {
    for text in GOOD {
        assert_eq!(skip(text.as_bytes()), Ok(()), "{text}");
        agrees(text.as_bytes());
    }
    for text in BAD {
        assert!(
            matches!(skip(text.as_bytes()), Err(JsonError::Invalid { .. })),
            "{text}"
        );
        agrees(text.as_bytes());
    }
}

#[test]
fn an_escape_is_whole_wherever_the_blocks_of_the_scan_divide_it() {
    for before in 0..140 {
        for escape in [r"\n", r#"\""#, r"\\", r"\u0041", r"\\\\\\\\", r#"\\\"\\"#] {
            agrees(format!("[\"{}{escape}{}\",1]", "a".repeat(before), "b".repeat(90)).as_bytes());
            agrees(format!("[\"{}{escape}\"]", "a".repeat(before)).as_bytes());
        }
        agrees(format!("[\"{}{}\",1]", "a".repeat(before), r"\\".repeat(64)).as_bytes());
        agrees(format!("[\"{}{}\",1]", "a".repeat(before), "\u{1}".repeat(128)).as_bytes());
        for broken in ["\\x", "\\u00g0", "\\", "\\u00", "\u{1}", "\\\\\\x"] {
            agrees(
                format!(
                    "[\"{}{broken}\",\"{}\"]",
                    "a".repeat(before),
                    "b".repeat(90)
                )
                .as_bytes(),
            );
            agrees(format!("[\"{}{broken}", "a".repeat(before)).as_bytes());
        }
    }
}

#[test]
fn a_broken_escape_is_told_where_it_breaks() {
    for (text, offset) in [
        (r#""ab\x""#, 4),
        (r#""ab\u00g0""#, 7),
        (r#""ab\u00"#, 7),
        (r#""ab\"#, 4),
    ] {
        assert_eq!(
            skip(text.as_bytes()),
            Err(JsonError::Invalid { offset }),
            "{text}"
        );
    }
}

#[test]
fn every_byte_value_in_every_place() {
    for byte in 0..=255_u8 {
        for (before, after) in [
            ("", ""),
            ("[", "]"),
            ("\"", "\""),
            ("\"\\", "\""),
            ("{\"a\"", "1}"),
            ("1", ""),
            ("1", "1"),
            ("[1", "2]"),
            ("\"\\u004", "\""),
        ] {
            agrees(&[before.as_bytes(), &[byte], after.as_bytes()].concat());
        }
        let mut block = [b'x'; 200];
        (block[0], block[199]) = (b'"', b'"');
        for at in 1..199 {
            agrees(&[&block[..at], &[byte], &block[at + 1..]].concat());
        }
    }
}

#[test]
fn what_python_allows_and_rust_cannot_hold_is_passed_over() {
    for (text, meant) in [
        (r#""\ud800""#, "\u{fffd}"),
        (r#""\udc00""#, "\u{fffd}"),
        (r#""\ud800\u0041""#, "\u{fffd}A"),
        (r#""\ud800\ud800\udc00""#, "\u{fffd}\u{10000}"),
        (r#""\ud83d\ude00 \ud83d""#, "😀 \u{fffd}"),
        (r#""\ud800x""#, "\u{fffd}x"),
    ] {
        assert_eq!(
            JsonReader::new(text.as_bytes())
                .string()
                .unwrap()
                .unwrap()
                .text(),
            meant
        );
    }
    for number in [
        "1e999999",
        "-1e999999",
        &"9".repeat(10_000),
        "1e-999999",
        &format!("0.{}", "0".repeat(10_000)),
    ] {
        assert_eq!(skip(number.as_bytes()), Ok(()));
    }
}

#[test]
fn a_count_is_clamped_and_never_negative() {
    for (text, count) in [
        ("0", Some(0)),
        ("17", Some(17)),
        ("4294967295", Some(u32::MAX)),
        ("4294967296", Some(u32::MAX)),
        ("1e999999", Some(u32::MAX)),
        ("1.9", Some(1)),
        ("1e3", Some(1000)),
        ("-1", None),
        ("-0", None),
        ("\"17\"", None),
        ("null", None),
        ("[17]", None),
    ] {
        assert_eq!(
            JsonReader::new(text.as_bytes()).count(),
            Ok(count),
            "{text}"
        );
    }
}

#[test]
fn depth_has_a_limit_for_walking_and_skipping_alike() {
    let nested = |levels: u32| {
        format!(
            "{}{}",
            "[".repeat(levels as usize),
            "]".repeat(levels as usize)
        )
    };
    assert_eq!(skip(nested(DEPTH_MAX).as_bytes()), Ok(()));
    assert_eq!(build(nested(DEPTH_MAX).as_bytes()).map(drop), Ok(()));
    assert_eq!(
        skip(nested(DEPTH_MAX + 1).as_bytes()),
        Err(JsonError::TooDeep)
    );
    assert_eq!(
        build(nested(DEPTH_MAX + 1).as_bytes()),
        Err(JsonError::TooDeep)
    );
    let wide = format!("[{}[]]", "[[]],{\"a\":[{}]},".repeat(1000));
    assert_eq!(skip(wide.as_bytes()), Ok(()), "breadth is no depth");
}

/// Generates texts that are nearly JSON, from fragments.
fn soup() -> impl Strategy<Value = Vec<u8>> {
    let fragment = proptest::sample::select(vec![
        &b"{"[..],
        b"}",
        b"[",
        b"]",
        b":",
        b",",
        b"\"",
        b"\"a\"",
        b"\"a\":",
        b"\\",
        b"\\\"",
        b"\\u00e9",
        b"\\ud83d",
        b"\\ude00",
        b"1",
        b"-",
        b"0",
        b".",
        b"e",
        b"E+",
        b" ",
        b"\n",
        b"true",
        b"false",
        b"null",
        b"x",
        b"\xc3\xa9",
        b"\xff",
        b"\xe4\xb8\x80",
        b"\0",
        b"\x1f",
        b"{\"k\":[1,",
        b"a long run of text that fills up more than a whole block of 64",
    ]);
    prop::collection::vec(fragment, 0..24).prop_map(|fragments| fragments.concat())
}

fn value() -> impl Strategy<Value = Value> {
    let scalar = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        "[ -~]{0,150}".prop_map(Value::from),
    ];
    scalar.prop_recursive(5, 64, 8, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
            prop::collection::vec((any::<String>(), inner), 0..8)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn near_json_agrees(text in soup()) {
        agrees(&text);
    }

    #[test]
    fn values_agree_compact_and_pretty(value in value()) {
        let compact = serde_json::to_vec(&value).unwrap();
        let pretty = serde_json::to_vec_pretty(&value).unwrap();
        prop_assert_eq!(skip(&compact), Ok(()));
        agrees(&compact);
        agrees(&pretty);
    }

    #[test]
    fn mutated_values_agree(value in value(), edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 1..4)) {
        let mut text = serde_json::to_vec(&value).unwrap();
        for (at, byte, kind) in edits {
            let at = at.index(text.len() + 1);
            match kind {
                0 => text.insert(at, byte),
                1 if at < text.len() => text[at] = byte,
                _ => text.truncate(at),
            }
        }
        agrees(&text);
    }

    #[test]
    fn a_span_is_the_value_and_nothing_around_it(value in value(), before in "[ \n\r\t]{0,3}", after in "[ \n\r\t]{0,3}") {
        let text = serde_json::to_string(&value).unwrap();
        let padded = format!("{before}{text}{after}");
        let span = JsonReader::new(padded.as_bytes()).skip().unwrap();
        prop_assert_eq!(&padded[span], text);
    }
}
