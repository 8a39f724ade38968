//! The documentation of paths equals the table in the code.

use std::path::Path;

const HEAD: &str = "# Inference APIs

The picker reads model and prompt from the bodies of these requests. The picker recognises a `POST` by the longest
matching end of its percent-decoded path; query and trailing slash do not matter. If the prompt is `not read`, and in
every `POST` below `/responses/` and `/conversations/`, the picker reads only the outermost `model` and
[ids](#stored-answers), from a form (`multipart/form-data`) or a JSON object; such a request may have no body. If a
[route](../how-to/envoy.md#paths) allows other paths, the picker sends their requests unread to a good endpoint.

A body that is neither JSON nor an allowed form, or that lacks a required `model`, gets 400 in the error shape of the
API. An encoded body (`content-encoding`, other than the gzip that Envoy decodes in the shipped files) gets 415.

";

const TAIL: &str = "
If a field occurs twice, the last one counts.

## Forms

The picker reads the whole form, so `model` may come after a file; it keeps nothing of the file. A form longer than
`body_limit_bytes` (24 MiB) gets 413. A form that parsers could read in different ways gets 400: with text before the
first boundary, a line that ends with a line feed alone, a part without one plain `name`, no last boundary, or a `model`
of more than 1,024 bytes.

## Stored answers

An engine keeps responses and conversations in its memory. A request names one by `previous_response_id`, by
`conversation`, or by a path that contains `/responses/ID` or `/conversations/ID` (any method). Every proxy and worker
sends such a request to the endpoint that answered with that id. Each worker remembers about 16,384 ids, at most half
from other proxies; one client can displace at most half of the other clients' ids. If the worker has forgotten the id,
or the endpoint has left, is ejected or may not serve the request, any endpoint gets it, and can answer 404.

## Renamed models

An `InferenceModel`, an `InferenceModelRewrite` or a header can rename the model. The new name changes only `model` (in
a form, the field `model`) in the body, and `content-length`. In a reply with status 200 the picker restores the name:
in the outermost object of a JSON reply or of each event's data, in `response.model` of OpenAI's events, and in
`message.model` of Anthropic's `message_start`. Events are not delayed.

- The picker holds an unstreamed reply of at most 32,768 bytes (`content-length`) until it is complete, and corrects its
  length. A longer reply becomes chunked.
- The picker requests an uncompressed reply (`accept-encoding: identity`); a compressed reply passes unchanged.
- Models in Vertex AI's gRPC messages are never renamed.
";

#[test]
fn the_documentation_of_paths_is_current() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/apis.md");
    let now = format!("{HEAD}{}{TAIL}", exchange::api::reference());
    if std::env::var_os("UPDATE_GOLDENS").is_some() {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, &now).unwrap();
    }
    assert_eq!(
        std::fs::read_to_string(&file).unwrap_or_default(),
        now,
        "run the test with UPDATE_GOLDENS=1"
    );
}

const POOL: &str = "../pool-state/src/pool";
const FORWARD: &str = "src/exchange/forward.rs";

/// The numbers of `engine-answers.md`: the file and the code that set the number, and the words of
/// the page that name it.
#[rustfmt::skip] // The list is a table.
const NUMBERS: &[(&str, &str, &[&str])] = &[
    ("health.rs", "const STREAK: f32 = 5.0;", &["counted over all workers of the proxy | five witnesses |", "predicts, by at least five, either"]),
    ("health.rs", "const FRESH_MS: u64 = 1_000;", &["one if the endpoint answered nothing within the last second |"]),
    ("health/comparison.rs", "own.failure_rate() >= 0.5)", &["within ten seconds | half of all answers |"]),
    ("answer_window.rs", "const WINDOW_MS: u64 = 10_000;", &["| failed answers within ten seconds |", "Within ten seconds, at most two failures"]),
    ("answer_window.rs", "const TIMES_OTHERS: f32 = 2.0;", &["must also exceed twice the number"]),
    ("witnesses.rs", "const WITNESSES_MAX: usize = 8;", &["counts again only after eight other witnesses"]),
    ("witnesses.rs", "const OF_ONE_CLIENT_MAX: [usize; 4] = [usize::MAX, usize::MAX, 3, 2];", &["at most two failures of one [client]", "three if only two clients were seen", "and all of a single client"]),
    ("witnesses.rs", "const SEEN_MS: u64 = 60_000;", &["two clients were seen within a minute"]),
    ("accepted_kinds.rs", "const LATELY_MS: u64 = 60_000;", &["another endpoint accepted the same API and model within a minute", "| succeeded with the same API and model within a minute,"]),
    ("connection_losses.rs", "const LOST_STREAK: u32 = 2;", &["not all by one of several clients | two; one if"]),
    ("connection_losses.rs", "const AVOIDED_MS: u64 = 5_000;", &["requests avoid the endpoint for five seconds."]),
    ("ejection.rs", "const BASE_MS: u64 = 1_000;", &["The first ejection lasts one second,"]),
    ("ejection.rs", "const MAX_MS: u64 = 5_000;", &["each further one twice as long, up to five seconds,", "another proxy reports lasts at most five seconds,"]),
    ("ejection.rs", "const QUIET_MAX_MS: u64 = 20_000;", &["for bad answers up to twenty seconds"]),
    ("health/comparison.rs", "const QUIET_ANSWERS: f32 = 16.0;", &["fewer than 16 answers of other endpoints in ten seconds"]),
    ("ejection.rs", "const JITTER: f32 = 0.2;", &["shortened at random by up to a fifth."]),
    ("ejection.rs", "const PROBE_MS: u64 = 5_000;", &["while it runs, at most five seconds,"]),
    ("ejection.rs", "const OUTSIDE_REST_MS: u64 = 10_000;", &["cannot be repeated for ten seconds afterwards."]),
    ("ejection.rs", "ejected.truncate(ready / 2);", &["At most half of the ready endpoints are ejected"]),
    ("crash_correlation.rs", "const ENGINES: usize = 2;", &["broke the connections of two engines"]),
    ("crash_correlation.rs", "const CLIENTS: usize = 2;", &["to all clients if two [clients]"]),
    ("crash_correlation.rs", "const REMEMBERED_MS: u64 = 60_000;", &["of two engines within a minute,"]),
    ("crash_correlation.rs", "const PROBE_MS: u64 = 5_000;", &["Every 5 s, one request with this prompt"]),
    (FORWARD, "const REPEATED_MS_MAX: f32 = 10_000.0;", &["expected to take more than ten seconds"]),
    (FORWARD, "const LOST_RETRIES_MAX: usize = 1;", &["once if the connection was lost", "has two attempts"]),
    ("../verdict.rs", "const RETRIED_STATUS: &str = \"503\";", &["if no connection was made; on 503;"]),
    ("src/driver/decide.rs", "const SHORT_BODY_BYTES_MAX: usize = 64 << 10;", &["a request of more than 64 KiB has one attempt"]),
];

#[test]
fn the_numbers_of_engine_answers_are_those_of_the_code() {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &Path| {
        std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let page = read(&crate_folder.join("../../docs/reference/engine-answers.md"));
    let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
    for (file, code, phrases) in NUMBERS {
        let folder = if file.starts_with("src/") { "" } else { POOL };
        let source = read(&crate_folder.join(folder).join(file));
        assert!(
            source.contains(code),
            "{file} has no `{code}` now: correct {phrases:?} in engine-answers.md, and this test"
        );
        for phrase in *phrases {
            assert!(
                page.contains(phrase),
                "engine-answers.md has no {phrase:?}, which `{code}` says"
            );
        }
    }
}
