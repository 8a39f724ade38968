//! `switchpointd check` on the file of a gateway that calls the ext_proc server. The command finds
//! out whether the gateway waits for requests that flow control holds.

use super::schema::SchemaShape;
use super::yaml::{self, YamlNode, YamlValue};
use super::{ConfigReport, ItemStatus};

/// The type of Envoy's ext_proc filter, and the kind of Envoy Gateway's object for it.
const FILTER: &str = "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor";
const POLICY: &str = "EnvoyExtensionPolicy";

/// Envoy's default time to wait for an answer, in ms.
const MESSAGE_TIMEOUT_MS: f64 = 200.0;

/// The default limit for the time that a request is held, plus the margin that the server adds, in
/// ms.
const WAIT_MS: f64 = 65_000.0;

#[must_use]
pub fn is_gateway_file(text: &str) -> bool {
    text.contains(FILTER) || text.contains(POLICY)
}

/// Returns the report of `check` on the file of a gateway.
#[must_use]
pub fn report(text: &str) -> ConfigReport {
    let mut report = ConfigReport::default();
    match yaml::parse_all(text) {
        Ok(documents) => documents
            .iter()
            .for_each(|document| look(document, &mut report)),
        Err((line, message)) => report.problem("", line, message),
    }
    report
}

/// Looks for ext_proc filters and policies at any depth of the file.
fn look(node: &YamlNode, report: &mut ConfigReport) {
    match &node.value {
        YamlValue::List(items) => items.iter().for_each(|item| look(item, report)),
        YamlValue::Map(_) if text(node, &["kind"]) == Some(POLICY) => {
            if let Some(YamlValue::List(processors)) =
                node.at(&["spec", "extProc"]).map(|node| &node.value)
            {
                processors
                    .iter()
                    .for_each(|processor| look_at_policy(processor, report));
            }
        }
        YamlValue::Map(entries) => {
            if text(node, &["@type"]).is_some_and(|name| name.ends_with(FILTER)) {
                look_at_filter(node, report);
            }
            entries.iter().for_each(|(_, value)| look(value, report));
        }
        _ => {}
    }
}

/// Checks an ext_proc filter. In full duplex mode, Envoy has no time limit for an answer.
fn look_at_filter(filter: &YamlNode, report: &mut ConfigReport) {
    if text(filter, &["processing_mode", "request_body_mode"]) == Some("FULL_DUPLEX_STREAMED") {
        return;
    }
    let ms = |name: &str| filter.get(name).and_then(duration_ms);
    let wait_ms = ms("message_timeout").unwrap_or(MESSAGE_TIMEOUT_MS);
    let max_ms = ms("max_message_timeout");
    let path = "max_message_timeout";
    let reason = match max_ms {
        _ if wait_ms >= WAIT_MS => return,
        None => format!(
            "not given: Envoy answers 503 to a request that flow control holds for longer than message_timeout, {} s; give as long as \
             stream_idle_timeout",
            wait_ms / 1_000.0
        ),
        Some(max_ms) if max_ms < WAIT_MS => format!(
            "{} s: the server asks for 5 s more than the longest defaultRequestTTL, and Envoy ignores what is longer than this; then it \
             answers 503 after message_timeout, {} s",
            max_ms / 1_000.0,
            wait_ms / 1_000.0
        ),
        Some(_) => return,
    };
    let line = filter.get(path).unwrap_or(filter).line;
    report.item(path, line, ItemStatus::Warning, reason);
}

/// Checks a policy of Envoy Gateway, which has no field for the longest wait that a server may ask
/// for.
fn look_at_policy(processor: &YamlNode, report: &mut ConfigReport) {
    if text(processor, &["processingMode", "request", "body"]) == Some("FullDuplexStreamed") {
        return;
    }
    let given = processor.get("messageTimeout");
    let wait_ms = given.and_then(duration_ms).unwrap_or(MESSAGE_TIMEOUT_MS);
    if wait_ms < WAIT_MS {
        let reason = format!(
            "{} s: a request that flow control holds for longer goes on without a pick; with flow control, give 5 s more than the longest \
             defaultRequestTTL",
            wait_ms / 1_000.0
        );
        let line = given.unwrap_or(processor).line;
        report.item("messageTimeout", line, ItemStatus::Warning, reason);
    }
}

fn text<'n>(node: &'n YamlNode, way: &[&str]) -> Option<&'n str> {
    node.at(way)?.text()
}

fn duration_ms(node: &YamlNode) -> Option<f64> {
    SchemaShape::duration_ms(node.text()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(text: &str) -> Vec<String> {
        assert!(is_gateway_file(text));
        let report = report(text);
        assert_eq!(report.errors, [], "{text}");
        report
            .items
            .into_iter()
            .map(|item| format!("{}: {}", item.line, item.path))
            .collect()
    }

    #[test]
    fn a_filter_that_waits_too_short_is_named_with_its_line() {
        let filter = |fields: &str| {
            format!(
                "http_filters:\n- typed_config:\n    \"@type\": type.googleapis.com/{FILTER}\n{fields}"
            )
        };
        for (fields, expected) in [
            ("", vec!["3: max_message_timeout"]),
            ("    message_timeout: 5s\n", vec!["3: max_message_timeout"]),
            (
                "    message_timeout: 5s\n    max_message_timeout: 60s\n",
                vec!["5: max_message_timeout"],
            ),
            (
                "    message_timeout: 5s\n    max_message_timeout: 3600s\n",
                vec![],
            ),
            ("    message_timeout: 120s\n", vec![]),
            (
                "    processing_mode: {request_body_mode: FULL_DUPLEX_STREAMED}\n",
                vec![],
            ),
        ] {
            assert_eq!(notes(&filter(fields)), expected, "{fields}");
        }
    }

    #[test]
    fn the_shipped_files_say_where_flow_control_needs_more() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../envoy-config");
        let read = |name: &str| std::fs::read_to_string(format!("{folder}/{name}")).unwrap();
        assert_eq!(notes(&read("ext_proc.yaml")), [""; 0]);
        let [note] = &notes(&read("envoy-gateway/ext-proc.yaml"))[..] else {
            panic!("one note")
        };
        assert!(note.ends_with(": messageTimeout"), "{note}");
    }

    #[test]
    fn a_file_that_is_no_yaml_is_an_error() {
        assert_eq!(report(&format!("a: [\n# {FILTER}")).errors.len(), 1);
    }
}
