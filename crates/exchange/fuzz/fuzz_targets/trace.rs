//! Reads any bytes as a `traceparent`. An accepted text begins with the text of the result.
#![no_main]

use exchange::trace::{TRACEPARENT, TraceContext, is_sampled};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let read = TraceContext::parse(bytes);
    let headers = [(TRACEPARENT.as_bytes(), bytes)];
    assert_eq!(TraceContext::in_headers(headers.into_iter()), read);
    let traced = (
        &b"x-request-id"[..],
        &b"f3f2a7b0-3f2a-9c1d-8f00-0123456789ab"[..],
    );
    assert_eq!(
        is_sampled([traced, headers[0]].into_iter()),
        read.is_some_and(|context| context.sampled)
    );
    is_sampled([(traced.0, bytes)].into_iter());
    let Some(TraceContext {
        trace_id,
        parent,
        sampled,
    }) = read
    else {
        return;
    };
    let start = std::str::from_utf8(&bytes[..55]).unwrap();
    let version = &bytes[..2];
    assert_eq!(start[2..53], format!("-{trace_id:032x}-{parent:016x}-"));
    assert_eq!(
        u8::from_str_radix(&start[53..], 16).unwrap() & 1 == 1,
        sampled
    );
    assert!(
        trace_id != 0
            && parent != 0
            && version != b"ff"
            && (bytes.len() == 55 || (version != b"00" && bytes[55] == b'-'))
    );
});
