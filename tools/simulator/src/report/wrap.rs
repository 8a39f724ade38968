//! Wraps the prose of a Markdown page.

/// The widest line, in characters: the limit of all Markdown here.
const COLUMNS_MAX: usize = 120;

/// Breaks prose and list items at spaces, so that lines have at most [`COLUMNS_MAX`] characters.
/// Tables, headings and code blocks stay as they are.
pub(super) fn wrap(page: &str) -> String {
    let mut out = String::new();
    let mut fenced = false;
    for line in page.lines() {
        fenced ^= line.starts_with("```");
        if fenced || line.starts_with(['|', '#', '`', '!']) {
            out.push_str(line);
            out.push('\n');
        } else {
            wrap_line(line, &mut out);
        }
    }
    out
}

fn wrap_line(line: &str, out: &mut String) {
    let text = line.trim_start();
    let leading = line.len() - text.len();
    let indent = if text.starts_with("- ") {
        leading + 2
    } else {
        leading
    };
    out.push_str(&" ".repeat(leading));
    let mut column = leading;
    for word in text.split(' ') {
        let width = word.chars().count();
        if column > indent && column + 1 + width > COLUMNS_MAX {
            out.push('\n');
            out.push_str(&" ".repeat(indent));
            column = indent;
        } else if column > leading {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += width;
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_prose_and_list_items_are_wrapped() {
        let words = "word ".repeat(40);
        let page = format!(
            "# {words}\n\n{words}end\n- {words}end\n  indented {words}\n| {words} |\n```\n{words}\n```\nshort\n"
        );
        let wrapped = wrap(&page);
        assert_eq!(
            wrapped.split_whitespace().collect::<Vec<_>>(),
            page.split_whitespace().collect::<Vec<_>>()
        );
        let wide: Vec<&str> = wrapped
            .lines()
            .filter(|line| line.chars().count() > COLUMNS_MAX)
            .collect();
        assert!(
            wide.len() == 3 && wide.iter().all(|line| line.starts_with(['#', '|', 'w'])),
            "heading, table and code: {wide:?}"
        );
        assert!(wrapped.contains("\n  word"), "a list item goes on indented");
        assert_eq!(wrap("short\n\n  indented\n"), "short\n\n  indented\n");
    }
}
