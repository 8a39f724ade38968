//! Recognises text that is not YAML because it was copied from a web page or a terminal.

/// Characters without width, and characters that look like a plain space.
const ODD_SPACES: [char; 8] = [
    '\u{a0}', '\u{2003}', '\u{2007}', '\u{2009}', '\u{200b}', '\u{202f}', '\u{2060}', '\u{3000}',
];

/// Returns the first reason why a text is not YAML, as a sentence that follows the error.
#[must_use]
pub fn hint(text: &str) -> Option<String> {
    let text = text.trim_start_matches('\u{feff}');
    let first = |is: fn(&str) -> bool| text.lines().position(is).map(|at| at + 1);
    if let Some(line) = first(|line| {
        ["```", "~~~"]
            .iter()
            .any(|fence| line.trim_start().starts_with(fence))
    }) {
        return Some(format!(
            "line {line} is a fence of Markdown: leave out the fences and what stands around them"
        ));
    }
    if let Some(line) = first(|line| line[..line.len() - line.trim_start().len()].contains('\t')) {
        return Some(format!(
            "line {line} is indented with a tab: YAML takes spaces only"
        ));
    }
    if let Some(line) = first(|line| line.contains(ODD_SPACES)) {
        return Some(format!(
            "line {line} has a space that is no plain one, as text copied from a page has: write it again"
        ));
    }
    if let Some(line) = first(|line| line.contains("{{")) {
        return Some(format!(
            "line {line} is a template: give the text that `helm template` makes of it"
        ));
    }
    if is_indented_after_its_first_line(text) {
        let why = "all lines after the first are indented deeper than it, as in text copied from a page: indent them alike";
        return Some(why.to_owned());
    }
    let line = first(|line| {
        !line.starts_with([' ', '-', '#', '%', '.', '{', '[', '}', ']'])
            && !line.trim().is_empty()
            && !line.contains(':')
    })?;
    Some(format!(
        "line {line} is no `key: value`: leave out what is not part of the file"
    ))
}

/// Returns whether all further lines are indented deeper than the first line, although the first
/// line is complete (`key: value`).
fn is_indented_after_its_first_line(text: &str) -> bool {
    let has_content = |line: &&str| {
        !line.trim().is_empty() && !line.trim_start().starts_with('#') && line.trim_end() != "---"
    };
    let mut lines = text.lines().filter(has_content);
    let Some(first) = lines
        .next()
        .filter(|first| first.contains(": ") && !first.trim_end().ends_with(':'))
    else {
        return false;
    };
    let indent = |line: &str| line.len() - line.trim_start().len();
    let least = lines.map(indent).min();
    least.is_some_and(|least| least > indent(first))
}

#[cfg(test)]
mod tests {
    use crate::config::yaml::parse;

    const GOOD: &str = "apiVersion: a\nkind: b\nplugins:\n- type: c\n  parameters:\n    d: 1\n";

    fn parse_error(text: &str) -> String {
        parse(text).unwrap_err().1
    }

    #[test]
    fn copied_text_that_lost_the_indent_of_its_first_line_is_recognised() {
        let hint = |text: &str| parse_error(text).contains("indent them alike");
        assert!(hint(
            "# A comment.\napiVersion: a\n  kind: b\n  plugins:\n  - type: c\n"
        ));
        assert!(hint(
            "\u{feff}apiVersion: a\r\n  kind: b\r\n  plugins:\r\n  - type: c\r\n"
        ));
        assert!(
            !hint("apiVersion: a\n  kind: b\nplugins: []\n"),
            "only one line is indented"
        );
        assert!(
            !hint("plugins:\n  - type: a\n   b: c\n"),
            "the first line is no complete entry"
        );
    }

    #[test]
    fn what_came_along_with_copied_text_is_named_with_its_line() {
        for (text, hint) in [
            (
                format!("```yaml\n{GOOD}```\n"),
                "line 1 is a fence of Markdown",
            ),
            (format!("{GOOD}```\n"), "line 7 is a fence"),
            (format!("~~~\n{GOOD}~~~\n"), "line 1 is a fence"),
            (
                format!("Take this:\n\n```\n{GOOD}```\nThen restart.\n"),
                "line 3 is a fence",
            ),
            (
                format!("apiVersion: a\n  {}```\n", GOOD.replace('\n', "\n  ")),
                "line 8 is a fence",
            ),
            (
                GOOD.replace("    d", "\td"),
                "line 6 is indented with a tab",
            ),
            (
                GOOD.replace("    d", "\td").replace('\n', "\r\n"),
                "line 6 is indented with a tab",
            ),
            (
                GOOD.replace("kind: b", "kind:\u{a0}b"),
                "line 2 has a space that is no plain one",
            ),
            (
                GOOD.replace("d: 1", "d: {{ .Values.d }}"),
                "line 6 is a template",
            ),
            (
                format!("$ cat config.yaml\n{GOOD}"),
                "line 1 is no `key: value`",
            ),
            (
                format!("cat <<EOF > config.yaml\n{GOOD}EOF\n"),
                "line 1 is no `key: value`",
            ),
            (format!("{GOOD}That is all.\n"), "line 7 is no `key: value`"),
        ] {
            assert!(
                parse_error(&text).contains(&format!("; {hint}")),
                "{text}: {}",
                parse_error(&text)
            );
        }
    }

    #[test]
    fn what_is_no_fault_of_copying_is_read() {
        for text in [
            GOOD.replace('\n', "\r\n"),
            format!("\u{feff}{GOOD}"),
            format!("{GOOD}...\n"),
            GOOD.replace("c\n", "c\t\n"),
            format!("  {}", GOOD.replace('\n', "\n  ")),
        ] {
            assert_eq!(
                parse(&text).map(|root| root.value.to_json()),
                parse(GOOD).map(|root| root.value.to_json()),
                "{text:?}"
            );
        }
    }
}
