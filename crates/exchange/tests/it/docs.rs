//! The documentation of paths equals the table in the code.

use std::path::Path;

const HEAD: &str = "# Inference APIs

The picker reads the bodies of these requests for model and prompt. It compares the end of the path of a `POST`; the
longest ending wins. A prefix, a query, a trailing slash and percent-escapes do not matter. Of requests whose prompt is
`not read`, and of every `POST` below `/responses/` and `/conversations/`, the picker reads the outermost `model`, from
a JSON object or from a form (`multipart/form-data`); such a request may also have no body. Other paths go unread to a
good endpoint, if a [route](../how-to/envoy.md#which-paths-are-served) allows them.

A body that is neither JSON nor a form where one may be, or that lacks a required `model`, is answered 400 in the error
shape of the API.
A body that cannot be read because it is encoded (`content-encoding`, after the gzip and zstd that Envoy decodes in the
shipped files) is answered 415, which names the encoding.

";

const TAIL: &str = "
If a field occurs twice, the last one counts, as in engines.

## Forms

The field `model` may stand before or after a file: the whole form is read, at most `body_limit_bytes` (24 MiB), and a
longer one is answered 413. The picker keeps nothing of a file. It refuses (400) what parsers read in different ways: a
text before the first boundary, lines that end with a line feed alone, a part without one plain `name`, a missing last
boundary, a `model` of more than 1,024 bytes.

## Answers that an engine keeps

An engine keeps responses and conversations in its own memory. So a request that names one goes to the endpoint that
answered with that id, whichever proxy and worker it comes to: by `previous_response_id`, by `conversation`, or by a
path below `/responses/ID` or `/conversations/ID` (any method). Each worker remembers the last 16,384 ids or so. If the
id is forgotten, or the endpoint is gone, ejected or not allowed, any endpoint gets the request, which can then answer
404.

## Renamed models

An `InferenceModel`, an `InferenceModelRewrite` or a header can rename the model. Then `model` and `content-length`
change in the request, nothing else (in a form, the field `model`). In a successful reply the picker restores the name:
in the outermost object of a JSON reply or of each event's data, in `response.model` of OpenAI responses, and in
`message.model` of Anthropic's `message_start`. It replaces only the name that the engine was sent, and does not delay
events.

- An unstreamed reply of at most 32,768 bytes is held until complete and has a correct `content-length`; a longer one is
  chunked.
- The request asks for an uncompressed reply (`accept-encoding: identity`); a compressed one passes unchanged.
- Without renaming, request and reply pass unchanged.
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
