//! Compares our exposition parser with that of `prometheus_client`, the library that most engines
//! write their pages with.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use control_plane::scrape::exposition::{
    ExpositionParser, LineInterest, MetricSample, SampleVisitor,
};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use serde::Deserialize;
use serde_json::json;

/// The name, labels, value and timestamp of a sample as prometheus_client read them. Numbers are
/// text.
type ReferenceSample = (String, BTreeMap<String, String>, String, Option<String>);

#[derive(Debug, Clone, PartialEq)]
struct SampleReading {
    name: String,
    labels: BTreeMap<String, String>,
    value: SampleValue,
    timestamp: Option<f64>,
}

/// A number that equals itself even if it is NaN.
#[derive(Debug, Clone, Copy)]
struct SampleValue(f64);

impl PartialEq for SampleValue {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0 || self.0.is_nan() && other.0.is_nan()
    }
}

#[derive(Deserialize)]
struct PageResponse {
    lines: Vec<Option<Vec<ReferenceSample>>>,
    pages: Vec<TestPage>,
}

#[derive(Deserialize)]
struct TestPage {
    text: String,
    text_samples: Vec<ReferenceSample>,
    openmetrics: String,
    openmetrics_samples: Vec<ReferenceSample>,
}

#[derive(Default)]
struct SampleReadings(Vec<SampleReading>);

impl SampleVisitor for SampleReadings {
    fn interest(&mut self, _: &[u8]) -> LineInterest {
        LineInterest::Take
    }

    fn sample(&mut self, sample: &MetricSample<'_>) {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let labels = sample
            .labels()
            .map(|(name, value)| (text(&name), text(&value)))
            .collect();
        self.0.push(SampleReading {
            name: text(&sample.name),
            labels,
            value: SampleValue(sample.value),
            timestamp: sample.timestamp,
        });
    }
}

fn ours(page: &str) -> Vec<SampleReading> {
    let mut all = SampleReadings::default();
    let mut parser = ExpositionParser::default();
    parser.feed(page.as_bytes(), &mut all);
    parser.finish(&mut all);
    all.0
}

fn theirs(sample: &ReferenceSample) -> SampleReading {
    let (name, labels, value, timestamp) = sample;
    let number = |text: &String| text.parse::<f64>().unwrap();
    SampleReading {
        name: name.clone(),
        labels: labels.clone(),
        value: SampleValue(number(value)),
        timestamp: timestamp.as_ref().map(number),
    }
}

fn ask(lines: &[String], seeds: &[u64]) -> PageResponse {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let python = root.join(".venv/bin/python");
    assert!(
        python.exists(),
        "{} is missing: run `make setup` first",
        python.display()
    );
    let mut child = Command::new(python)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/prometheus_client_parse.py"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let question = json!({ "lines": lines, "seeds": seeds }).to_string();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(question.as_bytes()));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(
        output.status.success(),
        "prometheus_client failed: is .venv complete? run `make setup`"
    );
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn pages_of_the_real_client_library_read_the_same() {
    let answer = ask(&[], &(0..200).collect::<Vec<_>>());
    assert_eq!(answer.pages.len(), 200);
    for page in &answer.pages {
        let expected: Vec<SampleReading> = page.text_samples.iter().map(theirs).collect();
        assert_eq!(ours(&page.text), expected, "{}", page.text);
        let expected: Vec<SampleReading> = page.openmetrics_samples.iter().map(theirs).collect();
        assert_eq!(ours(&page.openmetrics), expected, "{}", page.openmetrics);
    }
}

/// Returns a line of meaningful tokens in an order that is often wrong.
fn adversarial_line(rng: &mut StdRng) -> String {
    const NAMES: &[&str] = &[
        "a", "vllm:x", "_", "1a", "a-b", "a.b", "", "a b", "\"q\"", "nan", "inf",
    ];
    const KEYS: &[&str] = &[
        "x", "y", "x", "\"z z\"", "x:y", "1", "", "__name__", "é", "\"\\\\\"",
    ];
    const VALUES: &[&str] = &[
        "\"1\"",
        "\"\"",
        "\"a, b\"",
        "\"\\\"\"",
        "\"\\\\\"",
        "\"\\n\\t\"",
        "\"}\"",
        "\"{=#\"",
        "1",
        "\"",
        "\"é\"",
        "",
        "\"\\\"",
    ];
    const NUMBERS: &[&str] = &[
        "1",
        "0",
        "-0",
        "+1",
        "1.5e3",
        ".5",
        "5.",
        "NaN",
        "nan",
        "+Inf",
        "-inf",
        "Infinity",
        "1e400",
        "1_0",
        "0x1",
        "one",
        "",
        "1e",
        "--1",
        "99999999999999999999999",
    ];
    const BLANKS: &[&str] = &["", " ", "  ", "\t"];
    const COMMAS: &[&str] = &[",", ",", ",", ", ", " ,", "", ",,"];
    let mut pick = |from: &[&str]| (*from.choose(rng).unwrap()).to_owned();
    let mut line = pick(BLANKS) + &pick(NAMES) + &pick(BLANKS);
    let labels = pick(&["", "0", "1", "1", "2", "3"]);
    if let Ok(count) = labels.parse::<usize>() {
        line += &pick(&["{", "{", "{", "{,", "{ "]);
        for at in 0..count {
            line += &(pick(KEYS)
                + &pick(BLANKS)
                + &pick(&["=", "=", "=", "=", ""])
                + &pick(BLANKS)
                + &pick(VALUES)
                + &pick(BLANKS));
            line += &if at + 1 < count {
                pick(COMMAS)
            } else {
                pick(&["", "", "", ",", ",,"])
            };
        }
        line += &pick(&["}", "}", "}", "}", "", "}}"]);
    }
    line += &(pick(&[" ", " ", " ", "\t", ""])
        + &pick(NUMBERS)
        + &pick(&["", "", "", " 1700000000000", " -1", "  2", "\t3", " x"])
        + &pick(&["", "", " ", "\r"]));
    line
}

fn is_bare_name(name: &str) -> bool {
    let legal = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    name.starts_with(|c: char| legal(c) && !c.is_ascii_digit()) && name.chars().all(legal)
}

/// Returns the reason why our parser may refuse a line that `prometheus_client` accepts. The
/// library is more lenient: its documentation says that "successful parsing does not imply that the
/// parsed text meets the specification". Each reason is a rule of the format that the library does
/// not check.
fn known_laxity(line: &str, read: &SampleReading) -> Option<&'static str> {
    let named_in_braces = line.contains("{\"q\"") || line.contains("__name__");
    if !is_bare_name(&read.name) && !named_in_braces {
        return Some("accepts any text before the braces as a name");
    }
    if !line.trim().contains([' ', '\t', '{']) {
        return Some(
            "reads a lone NaN or Infinity as a value, and its letters but the last as a name",
        );
    }
    if read.labels.keys().any(|key| key.contains('"')) {
        return Some("accepts a run of quoted strings as one");
    }
    let equals = line.matches('=').count();
    (equals > read.labels.len()).then_some("drops a label without a value")
}

#[test]
fn adversarial_lines_read_the_same_or_are_refused_for_a_reason() {
    let mut rng = StdRng::seed_from_u64(7);
    let lines: Vec<String> = (0..30_000).map(|_| adversarial_line(&mut rng)).collect();
    let answer = ask(&lines, &[]);
    let mut taken = 0;
    let mut failures = Vec::new();
    for (line, theirs_read) in lines.iter().zip(&answer.lines) {
        let mine = ours(line);
        // The text format has milliseconds; prometheus_client returns seconds.
        let expected: Option<Vec<SampleReading>> = theirs_read
            .as_ref()
            .map(|samples| samples.iter().map(theirs).collect());
        let mine_s: Vec<SampleReading> = mine
            .iter()
            .map(|read| SampleReading {
                timestamp: read.timestamp.map(|ms| ms / 1000.0),
                ..read.clone()
            })
            .collect();
        match expected {
            Some(expected) if expected == mine_s => taken += usize::from(!mine.is_empty()),
            None if mine.is_empty() => {}
            Some(expected)
                if mine.is_empty()
                    && expected
                        .iter()
                        .all(|read| known_laxity(line, read).is_some()) => {}
            expected => failures.push(format!("{line:?}: ours {mine_s:?}, theirs {expected:?}")),
        }
    }
    assert!(
        failures.is_empty(),
        "{} of {} differ, {taken} accepted by both; the first:\n{}",
        failures.len(),
        lines.len(),
        failures[..failures.len().min(20)].join("\n")
    );
    assert!(
        taken > 1000,
        "only {taken} lines were valid: the generator makes too few valid lines"
    );
}
