//! Request bodies that are read while they arrive.

use super::*;
use crate::fake::{FakeCall, RecordedCall};

const PIECE: usize = 40_000;

/// Returns a chat request with the model after the messages, as many clients write it.
fn chat(model: &str, bytes: usize) -> String {
    let text = "The quick brown fox \\n jumps over the \u{e9} dog. ".repeat(bytes / 46);
    format!(
        r#"{{"messages":[{{"role":"user","content":"{text}"}}],"model":"{model}","stream":true}}"#
    )
}

/// Delivers a body in pieces, as Envoy buffers it. Returns how much of it the filter read.
fn deliver(
    world: &HttpWorld,
    stream: &mut HttpStreamContext<FakeHost>,
    body: &str,
    piece: usize,
) -> Vec<usize> {
    world.host.record_calls();
    for end in (piece..body.len()).step_by(piece) {
        world.host.http.buffers.borrow_mut().insert(
            BodyBuffer::RequestBody as u32,
            body.as_bytes()[..end].into(),
        );
        assert_eq!(stream.on_http_request_body(end, false), Action::Pause);
    }
    world
        .host
        .http
        .buffers
        .borrow_mut()
        .insert(BodyBuffer::RequestBody as u32, body.into());
    assert_eq!(
        stream.on_http_request_body(body.len(), true),
        Action::Continue
    );
    let read = |call: RecordedCall| (call.call == FakeCall::Buffer).then_some(call.received);
    world
        .host
        .take_calls()
        .into_iter()
        .filter_map(read)
        .collect()
}

fn entries(world: &HttpWorld) -> usize {
    let replica = world.vm.borrow().replica("default").unwrap();
    let replica = replica.borrow();
    replica.pool.prefixes().stats().entries
}

#[test]
fn each_byte_is_read_once_and_the_pick_is_that_of_the_whole_body() {
    let body = chat("m", 200_000);
    for piece in [PIECE, 20_000, 70_000] {
        let world = HttpWorld::ready();
        let (mut stream, _) = world.post("/v1/chat/completions");
        let read = deliver(&world, &mut stream, &body, piece);
        assert_eq!(read.iter().sum::<usize>(), body.len(), "{read:?}");
        let least = read.iter().rev().skip(1).min().unwrap();
        assert!((32_768..80_000).contains(least), "{read:?}");
        let picked = world.request_header(DESTINATION).unwrap();
        let known = entries(&world);
        let (mut again, _) = world.post("/v1/chat/completions");
        assert_eq!(deliver(&world, &mut again, &body, body.len()), [body.len()]);
        assert_eq!(
            world.request_header(DESTINATION).unwrap().split(',').next(),
            picked.split(',').next()
        );
        assert_eq!(
            (entries(&world), known > 100),
            (known, true),
            "the prompt has the same blocks"
        );
    }
}

/// A decompressor may turn a few bytes into a piece of any length.
#[test]
fn a_very_long_piece_is_read_in_parts() {
    let world = HttpWorld::ready();
    let body = chat("m", 1_000_000);
    let (mut stream, _) = world.post("/v1/chat/completions");
    let read = deliver(&world, &mut stream, &body, 900_000);
    assert_eq!(
        (read.iter().sum::<usize>(), read.iter().max()),
        (body.len(), Some(&262_144)),
        "{read:?}"
    );
    assert!(world.request_header(DESTINATION).is_some());
}

/// The model's name comes with the first piece or with the last.
#[test]
fn a_body_with_a_very_long_name_is_read_when_it_is_whole() {
    let world = HttpWorld::ready();
    for (before, piece, parts) in [
        (0, 100_000, vec![100_000]),
        (500_000, 500_100, vec![262_144, 237_956, 262_144]),
    ] {
        let (mut stream, _) = world.post("/v1/chat/completions");
        let text = "y".repeat(before);
        let name = "k".repeat(900_000 - before);
        let body = format!(r#"{{"model":"m","x":"{text}","{name}":1}}"#);
        let read = deliver(&world, &mut stream, &body, piece);
        assert_eq!(read, [&parts[..], &[body.len()]].concat());
        assert!(world.request_header(DESTINATION).is_some());
    }
}

#[test]
fn of_a_renamed_model_only_the_beginning_is_read_again() {
    let world = HttpWorld::ready();
    let early = format!(r#"{{"model":"alias","prompt":"{}"}}"#, "x".repeat(100_000));
    let late = chat("alias", 100_000);
    for (path, body, again) in [
        ("/v1/completions", &early, 16),
        (
            "/v1/chat/completions",
            &late,
            late.len() - r#","stream":true}"#.len(),
        ),
    ] {
        let length = body.len().to_string();
        let (mut stream, _) = world.headers(
            &[
                (":method", "POST"),
                (":path", path),
                ("content-length", &length),
            ],
            false,
        );
        let read = deliver(&world, &mut stream, body, PIECE);
        assert_eq!(
            (read.iter().sum::<usize>(), read.last()),
            (body.len() + again, Some(&again)),
            "{read:?}"
        );
        let sent = body.replacen("\"alias\"", "\"served\"", 1);
        assert!(world.buffer(BodyBuffer::RequestBody) == sent);
        assert_eq!(
            world.request_header("content-length"),
            Some(sent.len().to_string())
        );
    }
}

#[test]
fn an_invalid_body_is_refused_at_its_end() {
    let world = HttpWorld::ready();
    let (mut stream, _) = world.post("/v1/chat/completions");
    let body = format!("{{]{}", " ".repeat(100_000));
    for end in [50_000, 100_000] {
        world.host.http.buffers.borrow_mut().insert(
            BodyBuffer::RequestBody as u32,
            body.as_bytes()[..end].into(),
        );
        assert_eq!(stream.on_http_request_body(end, false), Action::Pause);
        assert_eq!(world.host.take_log(), [""; 0]);
    }
    world
        .host
        .http
        .buffers
        .borrow_mut()
        .insert(BodyBuffer::RequestBody as u32, body.clone().into());
    assert_eq!(stream.on_http_request_body(body.len(), true), Action::Pause);
    assert!(
        world
            .host
            .take_log()
            .iter()
            .any(|line| line.contains("400") && line.contains("(at byte 1)"))
    );
}

#[test]
fn state_that_comes_after_the_first_pieces_counts() {
    let world = HttpWorld::new(r#"{"pools": [{"name": "default"}]}"#);
    let body = chat("m", 100_000);
    let (mut stream, _) = world.post("/v1/chat/completions");
    world
        .host
        .http
        .buffers
        .borrow_mut()
        .insert(BodyBuffer::RequestBody as u32, body.clone().into());
    assert_eq!(stream.on_http_request_body(PIECE, false), Action::Pause);
    world.state("default");
    assert_eq!(
        stream.on_http_request_body(body.len(), true),
        Action::Continue
    );
    let known = entries(&world);
    let (mut again, _) = world.post("/v1/chat/completions");
    deliver(&world, &mut again, &body, body.len());
    assert_eq!(
        (entries(&world), known > 100),
        (known, true),
        "the prompt has the same blocks"
    );
}
