//! Envoy's node id, by which the daemon knows the EDS streams of this proxy. The ABI does not tell
//! it, so it is read from Envoy's command line, and else from the configuration file that the
//! command line names.

/// The maximum number of bytes of a configuration file that are searched. The node is near the
/// beginning.
const SEARCHED_BYTES_MAX: usize = 1 << 20;

/// The distance in which the id follows the word `node`, in bytes.
const NODE_BYTES_MAX: usize = 1_024;

/// Returns the node id of this process; empty if it cannot be found. Then the daemon holds new
/// endpoints back for a fixed time, instead of until EDS has them.
pub(crate) fn read() -> String {
    let line = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    let arguments: Vec<String> = line
        .split(|byte| *byte == 0)
        .map(|argument| String::from_utf8_lossy(argument).into_owned())
        .collect();
    of_arguments(&arguments, |path| std::fs::read(path).ok()).unwrap_or_default()
}

fn of_arguments(arguments: &[String], file: impl Fn(&str) -> Option<Vec<u8>>) -> Option<String> {
    let value = |names: &[&str]| {
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let (name, value) = match argument.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (argument.as_str(), None),
            };
            if names.contains(&name) {
                return value.or_else(|| rest.next().cloned());
            }
        }
        None
    };
    value(&["--service-node"])
        .or_else(|| id_in(value(&["--config-yaml"])?.as_bytes()))
        .or_else(|| id_in(&file(&value(&["-c", "--config-path"])?)?))
}

/// Finds `id` in the object `node` of a configuration in YAML or JSON.
fn id_in(config: &[u8]) -> Option<String> {
    let searched = config.get(..SEARCHED_BYTES_MAX).unwrap_or(config);
    let text = String::from_utf8_lossy(searched);
    let key = |text: &str, name: &str| {
        // A key is a word before a colon, perhaps in quotes.
        text.match_indices(name).find_map(|(at, _)| {
            let before = text.get(..at)?.chars().next_back();
            let is_begin = before.is_none_or(|c| !c.is_alphanumeric() && c != '_' && c != '-');
            let rest = text.get(at..)?.strip_prefix(name)?;
            let rest = rest.strip_prefix('"').unwrap_or(rest);
            rest.strip_prefix(':')
                .filter(|_| is_begin)
                .map(str::to_owned)
        })
    };
    let node: String = key(&text, "node")?.chars().take(NODE_BYTES_MAX).collect();
    let id = key(&node, "id")?;
    let id = id.trim_start();
    let is_end = |c: char| c == ',' || c == '}' || c == '"' || c == '\'' || c.is_whitespace();
    let quoted = id.strip_prefix(['"', '\'']).unwrap_or(id);
    quoted
        .split(is_end)
        .next()
        .filter(|id| !id.is_empty())
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(arguments: &[&str], file: &str) -> Option<String> {
        let arguments: Vec<String> = arguments.iter().map(|text| (*text).to_owned()).collect();
        of_arguments(&arguments, |path| (path == "f").then(|| file.into()))
    }

    #[test]
    fn the_command_line_comes_before_the_file() {
        let yaml = "# node\nadmin: {}\nnode: {id: a-1, cluster: c}\n";
        assert_eq!(of(&["envoy", "-c", "f"], yaml).as_deref(), Some("a-1"));
        let json = r#"{"admin":{},"node":{"cluster":"id","id":"b-2"}}"#;
        assert_eq!(of(&["envoy", "-c", "f"], json).as_deref(), Some("b-2"));
        let lines = "node:\n  cluster: c\n  id: 'c-3'\n";
        assert_eq!(of(&["--config-path=f"], lines).as_deref(), Some("c-3"));
        let both = ["envoy", "-c", "f", "--service-node", "d-4"];
        assert_eq!(of(&both, yaml).as_deref(), Some("d-4"));
        assert_eq!(of(&["envoy", "-c", "g"], yaml), None);
        assert_eq!(of(&["envoy", "-c", "f"], "no: thing"), None);
    }
}
