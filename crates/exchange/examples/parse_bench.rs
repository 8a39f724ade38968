//! Measures the cost of reading a request body and a response event, natively and in wasm.
//!
//! ```text
//! cargo run --release -p exchange --example parse_bench
//! cargo build --release -p exchange --example parse_bench --target wasm32-wasip1
//! ```
//!
//! Run the built `.wasm` file with node or wasmtime. The filter's module is built with fat LTO and
//! one codegen unit; set `CARGO_PROFILE_RELEASE_LTO=fat CARGO_PROFILE_RELEASE_CODEGEN_UNITS=1` to
//! see its figures.
//!
//! Bodies are chats of 12 messages: `plain` has no escapes, `escaped` has a backslash every 50 to
//! 60 bytes as in code and quotes, and `chinese` is UTF-8 with three bytes for each character. Each
//! figure is the best of 15 batches, because other processes only add time. Absolute figures depend
//! on the machine and are not tested anywhere.
#![allow(clippy::print_stdout, clippy::disallowed_methods)] // it is a program that measures time and prints it

use std::hint::black_box;
use std::time::Instant;

use exchange::api::RequestApi;
use exchange::body;
use exchange::json::JsonReader;
use exchange::restore::{ModelNameRestorer, ModelNames};
use exchange::sse::ResponseReader;
use exchange::trace;

const BATCHES: usize = 15;
const BATCH_US: f64 = 4_000.0;
const MESSAGES: usize = 12;

fn main() {
    println!(
        "{:>8} {:>8} {:>10} {:>10} {:>6}",
        "bytes", "body", "parse us", "skip us", "GB/s"
    );
    for size in [1_000, 10_000, 100_000, 400_000, 1_000_000] {
        for (name, word) in [
            ("plain", "some words of a prompt "),
            ("escaped", ESCAPED),
            ("chinese", "一些提示词的文字，"),
        ] {
            let body = chat(size, word);
            assert!(body::parse(RequestApi::ChatCompletions, &body, ()).is_ok());
            let parse_us =
                measure(|| body::parse(RequestApi::ChatCompletions, black_box(&body), ()));
            let skip_us = measure(|| JsonReader::new(black_box(&body)).skip());
            println!(
                "{:>8} {name:>8} {parse_us:>10.2} {skip_us:>10.2} {:>6.1}",
                body.len(),
                body.len() as f64 / parse_us / 1000.0
            );
        }
    }
    // The body that delays a worker the longest: as long as the filter allows, and full of names.
    for (name, member) in [("plain", r#""a":0,"#), ("escaped", r#""\n":0,"#)] {
        let body = format!(
            r#"{{"model":"m",{}"messages":[]}}"#,
            member.repeat((24 << 20) / member.len() - 8)
        );
        let us =
            measure(|| body::parse(RequestApi::ChatCompletions, black_box(body.as_bytes()), ()));
        println!("24 MiB of {name} names: {:.0} ms", us / 1_000.0);
    }
    let tokens = format!(
        r#"{{"model":"m","prompt":[{}1]}}"#,
        "12345,".repeat(100_000)
    );
    let us = measure(|| body::parse(RequestApi::Completions, black_box(tokens.as_bytes()), ()));
    println!("100,000 token ids: {us:.1} us");
    let headers = || {
        black_box(&HEADERS)
            .iter()
            .map(|(name, value)| (name.as_bytes(), value.as_bytes()))
    };
    println!(
        "whether a request is traced: {:.3} us",
        measure(|| trace::is_sampled(headers()))
    );
    let mut reader = ResponseReader::new(RequestApi::ChatCompletions, true);
    let us = measure(|| reader.chunk(black_box(EVENT)));
    println!("one streamed event of {} bytes: {us:.3} us", EVENT.len());
    let names = || ModelNames {
        sent: "meta-llama/Llama-3.1-8B-Instruct".into(),
        requested: (*b"\"llama\"").into(),
    };
    let mut restorer = ModelNameRestorer::new(names(), RequestApi::ChatCompletions, true);
    let us = measure(|| restorer.chunk(black_box(EVENT), false).len());
    println!("  its model's name put back, after a rewrite: {us:.3} us more");
    let mut reader = ResponseReader::new(RequestApi::Embeddings, false);
    let floats = "0.0123456789,".repeat(16_384 / 13);
    let us = measure(|| reader.chunk(black_box(floats.as_bytes())));
    println!(
        "one chunk of {} bytes of an unstreamed body: {us:.3} us",
        floats.len()
    );
    let mut restorer = ModelNameRestorer::new(names(), RequestApi::Embeddings, false);
    restorer.chunk(b"{\"data\":[", false);
    let us = measure(|| restorer.chunk(black_box(floats.as_bytes()), false).len());
    println!("  searched for its model's name, after a rewrite: {us:.3} us more");
}

const ESCAPED: &str = r#"fn main() and a line that goes on for a while, then\n    print(\"more words of code here that go on\") "#;

const EVENT: &[u8] = br#"data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"meta-llama/Llama-3.1-8B-Instruct","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}

"#;

fn chat(size: usize, word: &str) -> Vec<u8> {
    let text = word.repeat(size / MESSAGES / word.len() + 1);
    let messages = vec![format!(r#"{{"role":"user","content":"{text}"}}"#); MESSAGES].join(",");
    format!(r#"{{"model":"meta-llama/Llama-3.1-8B-Instruct","stream":true,"max_tokens":256,"messages":[{messages}]}}"#).into_bytes()
}

/// The headers of a request whose client does not trace, as Envoy forwards them.
const HEADERS: [(&str, &str); 16] = [
    (":authority", "gateway.example.com"),
    (":path", "/v1/chat/completions"),
    (":method", "POST"),
    (":scheme", "https"),
    ("user-agent", "OpenAI/Python 2.1.0"),
    ("accept", "application/json"),
    ("accept-encoding", "gzip, deflate"),
    (
        "authorization",
        "Bearer sk-0123456789abcdef0123456789abcdef",
    ),
    ("content-type", "application/json"),
    ("content-length", "10000"),
    ("x-stainless-lang", "python"),
    ("x-stainless-os", "Linux"),
    ("x-stainless-arch", "x64"),
    ("x-forwarded-for", "10.0.0.1"),
    ("x-forwarded-proto", "https"),
    ("x-request-id", "0cdb6a0e-9b3d-4b8e-8a55-3f2a1c7d9e10"),
];

/// Returns the shortest time of one call, in microseconds.
fn measure<T>(mut call: impl FnMut() -> T) -> f64 {
    let mut calls = 1_u32;
    let mut batch = |calls: u32| {
        let start = Instant::now();
        (0..calls).for_each(|_| drop(black_box(call())));
        start.elapsed().as_secs_f64() * 1e6
    };
    while batch(calls) < BATCH_US {
        calls *= 2;
    }
    (0..BATCHES)
        .map(|_| batch(calls) / f64::from(calls))
        .fold(f64::INFINITY, f64::min)
}
