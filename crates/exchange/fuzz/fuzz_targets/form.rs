//! Reads any bytes as a form, whole and in three pieces, with the same result, and as a
//! `content-type`. The first two bytes choose the cuts. The boundary is `x`.
#![no_main]

use exchange::api::RequestApi;
use exchange::body::BodyReader;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((&[first, second], body)) = bytes.split_first_chunk() else {
        return;
    };
    let read = BodyReader::new(RequestApi::Task, ())
        .with_boundary(b"x")
        .finish(body);
    let (head, rest) = body.split_at(usize::from(first) * body.len() / 255);
    let (middle, tail) = rest.split_at(usize::from(second) * rest.len() / 255);
    let mut reader = BodyReader::new(RequestApi::Task, ()).with_boundary(b"x");
    reader.read(head);
    reader.read(middle);
    assert!(reader.bytes_kept() <= 16_384);
    assert_eq!(format!("{:?}", reader.finish(tail)), format!("{read:?}"));
    if let Ok(parsed) = read {
        let found = parsed.model_span.map_or(&[][..], |span| &body[span]);
        assert_eq!(found, parsed.model.as_bytes());
    }
});
