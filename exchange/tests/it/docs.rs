//! What the documentation says of paths is what the table says.

use std::path::Path;

const HEAD: &str = "# Inference APIs

The picker reads the bodies of the requests below (`POST`; the longest ending counts; a prefix before it, a query and a slash behind it do not
matter, nor do percent-escapes), to know the model and to send prompts where their beginning is cached. Requests to any other path are sent to a good endpoint
unread, if a route lets them through: the [shipped files](../how-to/envoy.md#which-paths-are-served) list what they serve.

A body that is not JSON, or has no `model` where one is needed, is answered 400 in the API's error shape.

";

const TAIL: &str = "
Of duplicate fields the last counts, as engines read them, and names of fields may be spelled with escapes.

## Models under another name

Where an `InferenceModel`, an `InferenceModelRewrite` or a header gives a model another name, only the value of `model` changes in the request, and
`content-length` with it. In a successful reply the name is put back: in the outermost object of a JSON reply or of each event's data, in
`response.model` of events of OpenAI responses and in `message.model` of Anthropic's `message_start`. Only a value that is the name the engine was
sent is replaced; everything else passes as it is, and events are not held back.

- An unstreamed reply of at most 32,768 bytes is held until it is whole, and has its right `content-length`. A longer one has none: it is chunked.
- A rewritten request asks the engine for an uncompressed reply (`accept-encoding: identity`). One that is compressed all the same is not touched.
- Without another name nothing of this is done, to the request or to the reply.
- Inside of Vertex AI's gRPC messages models keep their names.
";

#[test]
fn the_documentation_of_paths_is_current() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/apis.md");
    let now = format!("{HEAD}{}{TAIL}", exchange::api::reference());
    if std::env::var_os("UPDATE_GOLDENS").is_some() {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, &now).unwrap();
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap_or_default(), now, "run the test with UPDATE_GOLDENS=1");
}
