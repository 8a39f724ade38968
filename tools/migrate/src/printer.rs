//! Prints a tree as YAML in block style. YAML 1.1, which Helm reads, and YAML 1.2 read the same
//! values.

use std::fmt::Write;

use control_plane::config::yaml::{YamlKey, YamlNode, YamlValue};

/// Words that some version of YAML does not read as text.
const WORDS: [&str; 16] = [
    "null", "true", "false", "yes", "no", "on", "off", "y", "n", "nan", "inf", "infinity", "~",
    "t", "f", "none",
];

/// Prints a value, each line indented by `indent` spaces.
#[must_use]
pub fn print(value: &YamlValue, indent: usize) -> String {
    let mut text = String::new();
    match value {
        YamlValue::Map(entries) if !entries.is_empty() => map(&mut text, entries, indent),
        YamlValue::List(items) if !items.is_empty() => list(&mut text, items, indent),
        scalar => {
            let _ = writeln!(text, "{}{}", " ".repeat(indent), short(scalar)); // writing to a String cannot fail
        }
    }
    text
}

/// Returns a value on one line, for reports.
#[must_use]
pub fn short(value: &YamlValue) -> String {
    match value {
        YamlValue::Null => "null".to_owned(),
        YamlValue::Flag(flag) => flag.to_string(),
        YamlValue::Number(number) => self::number(*number),
        YamlValue::Text(text) => self::text(text),
        YamlValue::List(items) => format!(
            "[{}]",
            items
                .iter()
                .map(|item| short(&item.value))
                .collect::<Vec<_>>()
                .join(", ")
        ),
        YamlValue::Map(entries) => {
            let entries = entries
                .iter()
                .map(|(key, node)| format!("{}: {}", text(&key.name), short(&node.value)));
            format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
        }
    }
}

fn map(out: &mut String, entries: &[(YamlKey, YamlNode)], indent: usize) {
    for (key, node) in entries {
        let _ = write!(out, "{}{}:", " ".repeat(indent), text(&key.name));
        after_key(out, &node.value, indent);
    }
}

/// Prints the part after `key:` or `-`.
fn after_key(out: &mut String, value: &YamlValue, indent: usize) {
    match value {
        YamlValue::Map(entries) if !entries.is_empty() => {
            out.push('\n');
            map(out, entries, indent + 2);
        }
        YamlValue::List(items) if !items.is_empty() => {
            out.push('\n');
            list(out, items, indent);
        }
        scalar => {
            let _ = writeln!(out, " {}", short(scalar));
        }
    }
}

fn list(out: &mut String, items: &[YamlNode], indent: usize) {
    for item in items {
        let start = out.len();
        match &item.value {
            YamlValue::Map(entries) if !entries.is_empty() => map(out, entries, indent + 2),
            YamlValue::List(inner) if !inner.is_empty() => list(out, inner, indent + 2),
            scalar => {
                let _ = writeln!(out, "{}{}", " ".repeat(indent + 2), short(scalar));
            }
        }
        out.replace_range(start + indent..=start + indent, "-");
    }
}

fn number(number: f64) -> String {
    if number.is_nan() {
        ".nan".to_owned()
    } else if number.is_infinite() {
        if number > 0.0 {
            ".inf".to_owned()
        } else {
            "-.inf".to_owned()
        }
    } else if number != 0.0 && !(1e-6..1e16).contains(&number.abs()) {
        format!("{number:e}")
    } else {
        number.to_string()
    }
}

/// Whether the text is a quantity or a time such as `8Gi` or `10s`, which no YAML reader takes for
/// a number.
fn is_quantity(text: &str) -> bool {
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    number.starts_with(|c: char| c.is_ascii_digit())
        && number.chars().all(|c| c.is_ascii_digit())
        && ["Ki", "Mi", "Gi", "Ti", "ms", "s", "m", "h"].contains(&&text[number.len()..])
}

/// Formats text as a plain word where every reader takes it for text, otherwise in double quotes.
fn text(text: &str) -> String {
    let inside = |c: char| c.is_ascii_alphanumeric() || "_-./@%+=".contains(c);
    let starts = text.starts_with(|c: char| c.is_ascii_alphabetic() || "_/".contains(c));
    if is_quantity(text)
        || starts
            && text.chars().all(inside)
            && !WORDS.contains(&text.to_ascii_lowercase().as_str())
    {
        return text.to_owned();
    }
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            '\r' => quoted.push_str("\\r"),
            c if c.is_control()
                || matches!(
                    c,
                    '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}'
                ) =>
            {
                let _ = write!(quoted, "\\U{:08x}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use control_plane::config::yaml;

    fn same(a: &YamlValue, b: &YamlValue) -> bool {
        match (a, b) {
            (YamlValue::Number(a), YamlValue::Number(b)) => a == b || (a.is_nan() && b.is_nan()),
            (YamlValue::List(a), YamlValue::List(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(&a.value, &b.value))
            }
            (YamlValue::Map(a), YamlValue::Map(b)) => {
                a.len() == b.len()
                    && a.iter()
                        .zip(b)
                        .all(|((k, a), (l, b))| k.name == l.name && same(&a.value, &b.value))
            }
            _ => a == b,
        }
    }

    fn values() -> impl Strategy<Value = YamlValue> {
        let word = prop_oneof![
            Just("on".to_owned()),
            Just("8".to_owned()),
            Just("1e3".to_owned()),
            Just(String::new()),
            any::<String>()
        ];
        let scalar = prop_oneof![
            Just(YamlValue::Null),
            any::<bool>().prop_map(YamlValue::Flag),
            any::<f64>().prop_map(YamlValue::Number),
            (0_u32..100_000).prop_map(|n| YamlValue::Number(n.into())),
            word.prop_map(YamlValue::Text),
        ];
        scalar.prop_recursive(4, 40, 5, |inner| {
            let node = inner.prop_map(|value| YamlNode { line: 0, value });
            prop_oneof![
                prop::collection::vec(node.clone(), 0..5).prop_map(YamlValue::List),
                prop::collection::btree_map(any::<String>(), node, 0..5).prop_map(|entries| {
                    YamlValue::Map(
                        entries
                            .into_iter()
                            .map(|(name, node)| (YamlKey { line: 0, name }, node))
                            .collect(),
                    )
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_printed_reads_back_as_the_same(value in values(), indent in 0_usize..4) {
            for text in [print(&value, indent), short(&value)] {
                let read = yaml::parse(&text).map_err(|e| TestCaseError::fail(format!("{e:?} in\n{text}")))?;
                prop_assert!(same(&read.value, &value), "{value:?} became {:?} by\n{text}", read.value);
            }
        }
    }

    #[test]
    fn words_that_helm_would_read_as_flags_are_quoted() {
        for (given, printed) in [
            ("on", "\"on\""),
            ("Yes", "\"Yes\""),
            ("8", "\"8\""),
            ("0x1f", "\"0x1f\""),
            ("llm-d.ai/v1", "llm-d.ai/v1"),
            ("8Gi", "8Gi"),
            ("1e3", "\"1e3\""),
        ] {
            assert_eq!(text(given), printed);
        }
        assert_eq!(
            (number(8000.0), number(0.8), number(1e20)),
            ("8000".to_owned(), "0.8".to_owned(), "1e20".to_owned())
        );
    }
}
