//! Reads the values of parameters.

use scheduler::plugin::ParameterValue;

/// Returns the parameters among these words.
pub fn parameters(words: &[&str]) -> Vec<(String, ParameterValue)> {
    let mut parameters = Vec::new();
    for (name, value) in words.iter().filter_map(|word| word.split_once('=')) {
        set(&mut parameters, name, parsed(value));
    }
    parameters
}

/// Reads a value in the one-line form of the configuration: `5`, `true`, `text`, `[a,b]`,
/// `{key:value,other:[{key:value}]}`, without spaces.
fn parsed(text: &str) -> ParameterValue {
    let inside = |open, close| {
        text.strip_prefix(open)
            .and_then(|rest: &str| rest.strip_suffix(close))
            .map(items)
    };
    if let Some(items) = inside('[', ']') {
        return ParameterValue::List(items.into_iter().map(parsed).collect());
    }
    if let Some(items) = inside('{', '}') {
        let entries = items.into_iter().filter_map(|item| item.split_once(':'));
        return ParameterValue::Map(
            entries
                .map(|(key, value)| (key.to_owned(), parsed(value)))
                .collect(),
        );
    }
    match text {
        "true" | "false" => ParameterValue::Flag(text == "true"),
        _ => text.parse().map_or_else(
            |_| ParameterValue::Text(text.to_owned()),
            ParameterValue::Number,
        ),
    }
}

/// Splits the text at the commas that are outside of brackets.
fn items(text: &str) -> Vec<&str> {
    let mut depth = 0;
    let outside = move |c: char| {
        depth += i32::from(c == '[' || c == '{') - i32::from(c == ']' || c == '}');
        c == ',' && depth == 0
    };
    text.split(outside)
        .filter(|item| !item.is_empty())
        .collect()
}

/// Sets `a.b.c` as a map of maps.
fn set(into: &mut Vec<(String, ParameterValue)>, path: &str, value: ParameterValue) {
    let Some((first, rest)) = path.split_once('.') else {
        into.push((path.to_owned(), value));
        return;
    };
    if !into.iter().any(|(name, _)| name == first) {
        into.push((first.to_owned(), ParameterValue::Map(Vec::new())));
    }
    if let Some((_, ParameterValue::Map(inner))) = into.iter_mut().find(|(name, _)| name == first) {
        set(inner, rest, value);
    }
}
