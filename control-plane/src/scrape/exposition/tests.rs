use proptest::prelude::*;

use super::*;

/// Takes everything except the given families, and stops at a given name.
#[derive(Default)]
struct SampleNotes {
    ignore: &'static [u8],
    stop: &'static [u8],
    lines: Vec<String>,
}

impl SampleVisitor for SampleNotes {
    fn interest(&mut self, name: &[u8]) -> LineInterest {
        match name {
            name if !self.stop.is_empty() && name == self.stop => LineInterest::Stop,
            name if !self.ignore.is_empty() && name.starts_with(self.ignore) => {
                LineInterest::Ignore
            }
            _ => LineInterest::Take,
        }
    }

    fn sample(&mut self, sample: &MetricSample<'_>) {
        let text = |bytes: &[u8]| bytes.escape_ascii().to_string();
        let labels: Vec<String> = sample
            .labels()
            .map(|(name, value)| format!("{}={}", text(&name), text(&value)))
            .collect();
        let time = sample
            .timestamp
            .map(|time| format!(" @{time}"))
            .unwrap_or_default();
        self.lines.push(format!(
            "{} [{}] {}{time}",
            text(&sample.name),
            labels.join(" "),
            sample.value
        ));
    }
}

fn read(chunks: &[&[u8]], mut notes: SampleNotes) -> (Vec<String>, LineCounts) {
    let mut parser = ExpositionParser::default();
    for chunk in chunks {
        parser.feed(chunk, &mut notes);
    }
    let counts = parser.finish(&mut notes);
    (notes.lines, counts)
}

#[track_caller]
fn check(page: &str, expected: &[&str], skipped: u64) {
    let (lines, counts) = read(&[page.as_bytes()], SampleNotes::default());
    assert_eq!(lines, expected, "{page:?}");
    assert_eq!(counts.skipped, skipped, "{page:?}");
}

#[test]
fn a_page_as_an_engine_writes_it() {
    check(
        "# HELP vllm:num_requests_waiting Number of requests waiting to be processed.\n\
         # TYPE vllm:num_requests_waiting gauge\n\
         vllm:num_requests_waiting{engine=\"0\",model_name=\"meta-llama/Llama-3.1-8B\"} 3.0\n\
         process_start_time_seconds 1.76e+09\n",
        &[
            "vllm:num_requests_waiting [engine=0 model_name=meta-llama/Llama-3.1-8B] 3",
            "process_start_time_seconds [] 1760000000",
        ],
        0,
    );
}

#[test]
fn everything_the_format_allows() {
    check("a 1", &["a [] 1"], 0); // The page has no newline at the end.
    check("a 1\r\nb 2\r\n", &["a [] 1", "b [] 2"], 0);
    check(
        "\n  \n\t a\t \t1  1700000000000 \n",
        &["a [] 1 @1700000000000"],
        0,
    );
    check(
        "a NaN\nb +Inf\nc -Inf\nd .5e-3\ne -0\n",
        &[
            "a [] NaN",
            "b [] inf",
            "c [] -inf",
            "d [] 0.0005",
            "e [] -0",
        ],
        0,
    );
    check(
        "a{} 1\na {x=\"1\",} 2\na{ x = \"1\" , y=\"2\" }3\n",
        &["a [] 1", "a [x=1] 2", "a [x=1 y=2] 3"],
        0,
    );
    check(
        r#"a{x="\\ \" \n \t }{,="} 1"#,
        &[r#"a [x=\\ \" \n \\t }{,=] 1"#],
        0,
    );
    check(
        r#"a{x="ends in a backslash\\"} 1"#,
        &[r"a [x=ends in a backslash\\] 1"],
        0,
    );
    check(
        "{\"a.b\",\"c.d\"=\"1\",e=\"2\"} 1\n{\"only\"} 2\n",
        &["a.b [c.d=1 e=2] 1", "only [] 2"],
        0,
    );
    check("{__name__=\"a\",x=\"1\"} 1\n", &["a [x=1] 1"], 0);
    check("# EOF\n# just a comment\n#\n", &[], 0);
}

#[test]
fn exemplars_of_openmetrics_are_dropped() {
    check(
        "a_bucket{le=\"1\"} 3 # {trace_id=\"x # y\"} 0.5 1700000000.1\n",
        &["a_bucket [le=1] 3"],
        0,
    );
    check(
        "a_total 3 1700000000.5 # {} 0.5\n# EOF\n",
        &["a_total [] 3 @1700000000.5"],
        0,
    );
}

#[test]
fn a_bad_line_costs_only_itself() {
    let bad = [
        "a",
        "a ",
        "a one",
        "a 1 2 3",
        "a 1_0",
        "a 0x10",
        "a-b 1",
        "1a 2",
        "a{x=\"1\" 2",
        "a{x=1} 2",
        "a{x} 2",
        "a{x=\"1\"y=\"2\"} 3",
        "a{x=\"1\",,} 2",
        "a{x=\"1\",x=\"2\"} 3",
        "a{__name__=\"b\"} 2",
        "{x=\"1\"} 2",
        "a{\"b\"} 1",
        "{\"a\",\"b\"} 1",
        "{\"\"} 1",
        "a{=\"\"} 1",
        "a{x=\"1\"}",
        "a} 1",
        "= 1",
        "a{x=\"1\"}} 2",
        "\u{feff}a 1",
        "a{\"x\"=\"1\",x=\"2\"} 3",
    ];
    for line in bad {
        check(
            &format!("before 1\n{line}\nafter 2\n"),
            &["before [] 1", "after [] 2"],
            1,
        );
    }
}

#[test]
fn bytes_that_are_not_utf8_are_handed_on() {
    let (lines, counts) = read(
        &[b"a{x=\"\xff\xfe\"} 1\n\xff 2\nb 3\n"],
        SampleNotes::default(),
    );
    assert_eq!(lines, [r"a [x=\xff\xfe] 1", "b [] 3"]);
    assert_eq!(
        counts,
        LineCounts {
            read: 3,
            skipped: 1
        }
    );
}

#[test]
fn unwanted_lines_are_not_even_checked() {
    let page = b"a_bucket nonsense\nb 1\na_bucket{ 2\n";
    let (lines, counts) = read(
        &[page],
        SampleNotes {
            ignore: b"a_",
            ..SampleNotes::default()
        },
    );
    assert_eq!(lines, ["b [] 1"]);
    assert_eq!(
        counts,
        LineCounts {
            read: 3,
            skipped: 0
        }
    );
}

#[test]
fn nothing_is_read_after_stop() {
    let mut notes = SampleNotes {
        stop: b"b",
        ..SampleNotes::default()
    };
    let mut parser = ExpositionParser::default();
    assert_eq!(parser.feed(b"a 1\nb", &mut notes), ParseProgress::More);
    assert_eq!(parser.feed(b" 2\nc 3\n", &mut notes), ParseProgress::Done);
    assert_eq!(parser.feed(b"d 4\n", &mut notes), ParseProgress::Done);
    assert_eq!(
        parser.finish(&mut notes),
        LineCounts {
            read: 2,
            skipped: 0
        }
    );
    assert_eq!(notes.lines, ["a [] 1"]);
}

#[test]
fn a_line_may_be_as_long_as_the_limit_and_no_longer() {
    for (length, skipped) in [(LINE_BYTES_MAX, 0), (LINE_BYTES_MAX + 1, 1)] {
        let line = format!("{:1$} 1", "a{x=\"1\"}", length - 2);
        let page = format!("{line}\nb 2\n");
        for chunk in [1000, LINE_BYTES_MAX, 2 * LINE_BYTES_MAX] {
            let chunks: Vec<&[u8]> = page.as_bytes().chunks(chunk).collect();
            let (lines, counts) = read(&chunks, SampleNotes::default());
            assert_eq!(
                (lines.len() as u64, counts.skipped),
                (2 - skipped, skipped),
                "{length} in chunks of {chunk}"
            );
        }
    }
}

#[test]
fn labels_have_a_limit() {
    for (count, skipped) in [(LABELS_MAX, 0), (LABELS_MAX + 1, 1)] {
        let labels: Vec<String> = (0..count).map(|n| format!("l{n}=\"\"")).collect();
        let (_, counts) = read(
            &[format!("a{{{}}} 1\n", labels.join(",")).as_bytes()],
            SampleNotes::default(),
        );
        assert_eq!(counts.skipped, skipped, "{count}");
    }
}

/// A sample, and one way to write it.
#[derive(Clone, Debug)]
struct WrittenSample {
    line: String,
    reads: String,
}

fn escape(text: &str) -> String {
    text.replace('\\', r"\\")
        .replace('"', "\\\"")
        .replace('\n', r"\n")
}

fn written() -> impl Strategy<Value = WrittenSample> {
    let name = prop_oneof![4 => ("[a-zA-Z_:][a-zA-Z0-9_:]{0,12}", Just(false)), 1 => ("[^\\x00]{1,8}", Just(true))];
    let label_value = prop_oneof![
        "[ -~]{0,12}",
        "(\\\\|\"|\n|,|=|\\{|\\}|#| ){0,8}",
        "\\PC{0,6}"
    ];
    let labels = prop::collection::btree_map("[a-zA-Z_][a-zA-Z0-9_]{0,8}", label_value, 0..5);
    let value = prop_oneof![
        any::<f64>(),
        Just(0.0),
        Just(f64::INFINITY),
        (0u32..100).prop_map(f64::from)
    ];
    let tail = (
        prop::option::of(0i64..2_000_000_000_000),
        prop::bool::ANY,
        prop_oneof![Just(""), Just("\r"), Just(" \t")],
    );
    (name, labels, value, tail, "[ \t]{0,2}", "[ \t]{1,2}").prop_map(
        |((name, quoted), labels, value, tail, pad, gap)| {
            let (time, exemplar, end) = tail;
            let mut terms: Vec<String> = labels
                .iter()
                .map(|(key, value)| format!("{pad}{key}{pad}={pad}\"{}\"{pad}", escape(value)))
                .collect();
            if quoted {
                terms.insert(0, format!("\"{}\"", escape(&name)));
            }
            let braces = if terms.is_empty() {
                String::new()
            } else {
                format!("{{{}}}", terms.join(","))
            };
            let time_text = time.map(|time| format!("{gap}{time}")).unwrap_or_default();
            let exemplar = if exemplar { " # {id=\"a b\"} 1 2" } else { "" };
            let bare = if quoted { "" } else { &name };
            let shown = |text: &str| text.as_bytes().escape_ascii().to_string();
            let labels: Vec<String> = labels
                .iter()
                .map(|(key, value)| format!("{key}={}", shown(value)))
                .collect();
            let time = time.map(|time| format!(" @{time}")).unwrap_or_default();
            WrittenSample {
                line: format!("{pad}{bare}{braces}{gap}{value}{time_text}{exemplar}{end}\n"),
                reads: format!("{} [{}] {value}{time}", shown(&name), labels.join(" ")),
            }
        },
    )
}

fn cut<'a>(bytes: &'a [u8], cuts: &[prop::sample::Index]) -> Vec<&'a [u8]> {
    let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
    at.sort_unstable();
    at.push(bytes.len());
    let mut start = 0;
    at.into_iter()
        .map(|end| &bytes[std::mem::replace(&mut start, end)..end])
        .collect()
}

/// Bytes that resemble a page enough to get far into the parser.
fn nearly_a_page() -> impl Strategy<Value = Vec<u8>> {
    let token = prop_oneof![
        Just(b"a".to_vec()),
        Just(b"{".to_vec()),
        Just(b"}".to_vec()),
        Just(b"\"".to_vec()),
        Just(b"\\".to_vec()),
        Just(b",".to_vec()),
        Just(b"=".to_vec()),
        Just(b" ".to_vec()),
        Just(b"1".to_vec()),
        Just(b"\n".to_vec()),
        Just(b"\r\n".to_vec()),
        Just(b"#".to_vec()),
        Just(b"x=\"1\"".to_vec()),
        Just(b"name{l=\"v\"} 1\n".to_vec()),
        prop::collection::vec(any::<u8>(), 0..4),
    ];
    prop::collection::vec(token, 0..60).prop_map(|tokens| tokens.concat())
}

proptest! {
    #[test]
    fn what_is_written_is_read(page in prop::collection::vec(written(), 0..20)) {
        let text: String = page.iter().map(|sample| sample.line.as_str()).collect();
        let (lines, counts) = read(&[text.as_bytes()], SampleNotes::default());
        prop_assert_eq!(lines, page.iter().map(|sample| sample.reads.clone()).collect::<Vec<_>>(), "{}", text);
        prop_assert_eq!(counts.skipped, 0);
    }

    #[test]
    fn chunks_change_nothing(page in nearly_a_page(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8)) {
        prop_assert_eq!(read(&cut(&page, &cuts), SampleNotes::default()), read(&[&page], SampleNotes::default()));
        let stop = || SampleNotes { stop: b"name", ignore: b"a", ..SampleNotes::default() };
        prop_assert_eq!(read(&cut(&page, &cuts), stop()), read(&[&page], stop()));
    }

    #[test]
    fn arbitrary_bytes_are_survived(page in prop::collection::vec(any::<u8>(), 0..512), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4)) {
        let (lines, counts) = read(&cut(&page, &cuts), SampleNotes::default());
        prop_assert!(lines.len() as u64 + counts.skipped <= counts.read);
    }
}
