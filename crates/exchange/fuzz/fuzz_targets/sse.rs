//! Reads any response, cut anywhere. The result must not depend on the cuts. The first byte chooses
//! API and kind of response. The second byte is the seed of the cuts.
#![no_main]

use exchange::api::{ApiFamily, RequestApi};
use exchange::sse::{ResponseReader, TokenUsage};
use libfuzzer_sys::fuzz_target;

const APIS: [RequestApi; 6] = [
    RequestApi::ChatCompletions,
    RequestApi::Completions,
    RequestApi::Responses,
    RequestApi::Embeddings,
    RequestApi::Messages,
    RequestApi::Other {
        family: ApiFamily::OpenAi,
    },
];

fuzz_target!(|bytes: &[u8]| {
    let [choice, seed, response @ ..] = bytes else {
        return;
    };
    let api = APIS[usize::from(*choice) % APIS.len()];
    let streamed = *choice >= 64;
    let whole = read(api, streamed, &mut std::iter::once(response));
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
    assert_eq!(read(api, streamed, &mut cuts), whole);
    assert_eq!(read(api, streamed, &mut response.chunks(1)), whole);
});

fn read<'b>(
    api: RequestApi,
    streamed: bool,
    chunks: &mut dyn Iterator<Item = &'b [u8]>,
) -> (u32, bool, TokenUsage) {
    let mut reader = ResponseReader::new(api, streamed);
    let mut events = 0;
    let mut first = false;
    for chunk in chunks {
        let progress = reader.chunk(chunk);
        events += progress.events;
        assert!(!(first && progress.first_token), "there is one first token");
        first |= progress.first_token;
    }
    (events, first, reader.finish())
}
