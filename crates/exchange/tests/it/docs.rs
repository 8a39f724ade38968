//! The documentation of paths equals the table in the code.

use std::path::Path;

const HEAD: &str = "# Inference APIs

The picker reads model and prompt from the bodies of these requests. It recognises a `POST` by the end of its path; the
longest match wins. It ignores a prefix, a query, a trailing slash and percent-escapes. Where the prompt is `not read`,
and for every `POST` below `/responses/` and `/conversations/`, it reads only the outermost `model`, from a JSON object
or from a form (`multipart/form-data`); such a request may have no body. Requests to other paths go unread to a good
endpoint, if a [route](../how-to/envoy.md#which-paths-are-served) allows them.

A body that is neither JSON nor an allowed form, or that lacks a required `model`, is answered 400 in the error shape of
the API. An encoded body (`content-encoding`, other than the gzip that Envoy decodes in the shipped files) is
answered 415, which names the encoding.

";

const TAIL: &str = "
If a field occurs twice, the last one counts, as in engines.

## Forms

The picker reads the whole form, so `model` may come before or after a file; it keeps nothing of the file. A form longer
than `body_limit_bytes` (24 MiB) is answered 413. A form that parsers could read in different ways is answered 400. Such
forms have text before the first boundary, a line that ends with a line feed alone, a part without one plain `name`, no
last boundary, or a `model` of more than 1,024 bytes.

## Answers that an engine keeps

An engine keeps responses and conversations in its own memory. A request names one by `previous_response_id`, by
`conversation`, or by a path below `/responses/ID` or `/conversations/ID` (any method). Every proxy and worker sends
such a request to the endpoint that answered with that id. Each worker remembers about 16,384 ids, at most half of them
from other proxies; one client displaces at most half of those of others. If the worker has forgotten the id, or the
endpoint has left, is ejected or is not allowed, any endpoint gets the request, and can answer 404.

## Renamed models

An `InferenceModel`, an `InferenceModelRewrite` or a header can rename the model. Then only `model` (in a form, the
field `model`) and `content-length` change in the request. In a successful reply the picker restores the name: in the
outermost object of a JSON reply or of each event's data, in `response.model` of OpenAI responses, and in
`message.model` of Anthropic's `message_start`. It replaces only the name that was sent to the engine, and does not
delay events.

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
