//! Restores the model name in any response, cut anywhere. The text that the client gets must not
//! depend on the cuts, and must be the same JSON except for the name. The first byte chooses API
//! and kind of response. The second byte is the seed of the cuts.
#![no_main]

use exchange::api::RequestApi;
use exchange::restore::{ModelNameRestorer, ModelNames};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

const APIS: [RequestApi; 3] = [
    RequestApi::ChatCompletions,
    RequestApi::Responses,
    RequestApi::Messages,
];

fuzz_target!(|bytes: &[u8]| {
    let [choice, seed, response @ ..] = bytes else {
        return;
    };
    let api = APIS[usize::from(*choice) % APIS.len()];
    let streamed = *choice >= 64;
    let whole = restore(api, streamed, &mut std::iter::once(response));
    let mut rest = response;
    let mut state = u32::from(*seed);
    let mut cuts = std::iter::from_fn(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let size = ((state >> 24) as usize % 32).min(rest.len());
        let (chunk, left) = rest.split_at(size);
        let ended = rest.is_empty();
        rest = left;
        (!ended).then_some(chunk)
    });
    assert_eq!(restore(api, streamed, &mut cuts), whole);
    assert_eq!(restore(api, streamed, &mut response.chunks(1)), whole);
    if let (false, Ok(mut reply)) = (streamed, serde_json::from_slice::<Value>(response)) {
        if reply.get("model").is_some_and(|model| model == "m") {
            reply["model"] = "gpt".into();
        }
        assert_eq!(serde_json::from_slice::<Value>(&whole).ok(), Some(reply));
    }
});

fn restore<'b>(
    api: RequestApi,
    streamed: bool,
    chunks: &mut dyn Iterator<Item = &'b [u8]>,
) -> Vec<u8> {
    let names = ModelNames {
        sent: "m".into(),
        requested: (*b"\"gpt\"").into(),
    };
    let mut restorer = ModelNameRestorer::new(names, api, streamed);
    let mut out = Vec::new();
    for chunk in chunks {
        out.extend_from_slice(restorer.chunk(chunk, false));
    }
    out.extend_from_slice(restorer.chunk(b"", true));
    out
}
