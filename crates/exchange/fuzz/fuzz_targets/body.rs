//! Reads any body as a request to any API, whole and in three pieces. Both ways must give one
//! result, and `model` and `stream` must equal the values that `serde_json` reads. The first byte
//! of the input chooses the API, the next two bytes the cuts.
#![no_main]

use exchange::api::RequestApi;
use exchange::body::{self, BodyError, BodyReader, PromptPiece, PromptPieces};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(|bytes: &[u8]| {
    let Some((&[choice, first, second], body)) = bytes.split_first_chunk() else {
        return;
    };
    let apis: Vec<RequestApi> = RequestApi::all().collect();
    let api = apis[usize::from(choice) % apis.len()];
    let read = body::parse(api, body, PromptPieces::default());
    if api.is_grpc() {
        return; // read only when whole, and nothing to compare with
    }
    let (head, rest) = body.split_at(usize::from(first) * body.len() / 255);
    let (middle, tail) = rest.split_at(usize::from(second) * rest.len() / 255);
    let mut reader = BodyReader::new(api, PromptPieces::default());
    reader.read(head);
    reader.read(middle);
    assert_eq!(format!("{:?}", reader.finish(tail)), format!("{read:?}"));
    let oracle = serde_json::from_slice::<Value>(body);
    match (&read, &oracle) {
        (Ok(parsed), oracle) => {
            assert!(parsed.model_span.is_some() || !api.needs_model() && parsed.model.is_empty());
            if let Some(span) = parsed.model_span.clone() {
                let literal = &body[span];
                assert!(
                    literal.len() > 2 && literal.starts_with(b"\"") && literal.ends_with(b"\"")
                );
            }
            let mut total = 0;
            for piece in parsed.prompt.iter() {
                let (PromptPiece::Text(piece) | PromptPiece::Media(piece)) = piece;
                assert!(std::str::from_utf8(piece).is_ok());
                total += piece.len();
            }
            assert!(total <= body.len() && parsed.prompt_bytes <= body.len());
            if let Ok(value) = oracle {
                assert_eq!(value["model"].as_str().unwrap_or_default(), parsed.model);
                assert_eq!(parsed.stream, value["stream"] == Value::Bool(true));
                assert_eq!(
                    parsed.include_usage,
                    value["stream_options"]["include_usage"] == Value::Bool(true)
                );
            }
        }
        (Err(BodyError::InvalidJson { offset }), Err(_)) => assert!(*offset <= body.len()),
        (Err(BodyError::NotAnObject), Ok(value)) => assert!(!value.is_object()),
        (Err(BodyError::MissingModel), Ok(value)) => assert!(value.get("model").is_none()),
        (Err(BodyError::ModelNotAString), Ok(value)) => assert!(!value["model"].is_string()),
        (Err(BodyError::EmptyModel), Ok(value)) => assert_eq!(value["model"], ""),
        (Err(BodyError::InvalidJson { .. }), Ok(value)) => panic!("{value} is refused"),
        (Err(_), _) => {}
    }
});
