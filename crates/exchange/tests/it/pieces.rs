//! A body that is read in pieces gives the same result as the whole body, for any cuts, and for
//! valid and invalid bodies.

use exchange::api::RequestApi;
use exchange::body::{self, BodyError, BodyReader, PromptPieces};
use exchange::json::{JsonError, JsonReader};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::bodies::{APIS, json};
use crate::golden;

/// Bodies with a token of each kind at which a piece may end, and with errors in and after them.
#[rustfmt::skip]
const BODIES: &[&[u8]] = &[
    br#"{"model":"m\u0041\ud83d\ude00\ud800","messages":[{"role":"user","content":[{"type":"text","text":"a\n\\\"b"},{"image_url":{"url":"u"}}]}],"n":-1.5e+3,"x":[true,null,false]}"#,
    "{\r\n\t\"messages\" : [ {\r\n\"content\" : \"é一😀 \\r\\n\"} ] ,\r\n\"mod\\u0065l\" : \"一😀\" , \"cache_salt\":\"é\" }\r\n".as_bytes(),
    br#"{"messages":"a","model":"m","messages":["b"],"stream":true,"stream":false,"max_tokens":12,"max_tokens":34,"tools":[{"a":[1]}],"tools":"t","stream_options":{"include_usage":true}}"#,
    br#"{"model":"m","prompt":[  12 , -3,4.5, "x" ],"input":[[1,2],[ 3 ]],"messages":[[[[[[1,"deep"]]]]]],"text":[],"input_ids":[ ]}"#,
    br#"{"sampling_params":{"max_tokens":1,"max_new_tokens":2},"image_data":["a",{"b":"c"}],"features":"f","token_ids":[1,2],"text":"t","system":["s",null,{"text":"u","source":{}}],"instructions":"i","items":["v"]}"#,
    br#"{"model":"m","messages":"\ud83d"}x"#, br#"{"model":"m","messages":"\x"}"#, br#"{"model":"m","messages":"\u12g4"}"#, br#"{"model":"m","n":01}"#, br#"{"model":"m","n":1.}"#,
    br#"{"model":"m","n":tru}"#, br#"{"model":"m","n":truth}"#, br#"{"model":"m","n":nul"#, br#"{"model":"m","n":-"#, br#"{"model":"m","n":"#, br#"{"model":"m","messages":"ab\"#, br#"{"model":"#,
    b"{\"model\":\"m\",\"messages\":\"\xe4\xb8\"}", b"{\"model\":\"m\",\"messages\":\"\xe4\xb8x\xff\"}", b"{\"model\":\"m\",\"messages\":\"\xed\xa0\x80\"}", b"{\"model\":\"m\",\"x\":\"\xff\x01\"}",
    b"{\"mod\xc3\":1}", b"{\"model\":\"\xc3\x28\"}", b"{\"model\":\"m\",\"messages\":\"\xf0\x9f\x98\"}", b"{\"model\":\"m\",\"messages\":\"\xff", b"\xef\xbb\xbf{}", b"[1,[\"2\"]] ", b" 12 ", b"12e", b"\"s\"", b"", b" ",
    br#"{"model":{"a":[1]}}"#, br#"{"model":""}"#, br#"{"messages":[],"n":1}"#, br#"{"model":"m","messages":[}"#, br#"{"model":"m",}"#, br#"{"model":"m"]"#,
];

fn in_one_piece(path: &str, body: &[u8]) -> Result<String, BodyError> {
    body::parse(
        RequestApi::for_request(b"POST", path.as_bytes()),
        body,
        PromptPieces::default(),
    )
    .map(|parsed| format!("{parsed:?}"))
}

fn in_pieces(path: &str, body: &[u8], cuts: &[usize]) -> Result<String, BodyError> {
    let mut reader = BodyReader::new(
        RequestApi::for_request(b"POST", path.as_bytes()),
        PromptPieces::default(),
    );
    let mut from = 0;
    for &cut in cuts {
        reader.read(&body[from..cut]);
        from = cut;
        assert_eq!(reader.bytes_read(), cut);
    }
    reader
        .finish(&body[from..])
        .map(|parsed| format!("{parsed:?}"))
}

/// Checks that the other reader of JSON in this crate finds the same error.
fn agrees(body: &[u8], read: &Result<String, BodyError>) {
    let mut reader = JsonReader::new(body);
    match (reader.skip().and_then(|_| reader.end()), read) {
        (Err(JsonError::Invalid { offset }), read) => {
            assert_eq!(*read, Err(BodyError::InvalidJson { offset }));
        }
        (Err(JsonError::TooDeep), read) => assert!(matches!(read, Err(BodyError::TooDeep { .. }))),
        (Ok(()), read) => assert!(
            !matches!(
                read,
                Err(BodyError::InvalidJson { .. } | BodyError::TooDeep { .. })
            ),
            "{read:?}"
        ),
    }
}

#[test]
fn a_body_may_be_cut_anywhere() {
    for body in BODIES {
        for path in APIS {
            let read = in_one_piece(path, body);
            agrees(body, &read);
            let every_byte: Vec<usize> = (1..body.len()).collect();
            let shown = String::from_utf8_lossy(body);
            assert_eq!(in_pieces(path, body, &every_byte), read, "{path} {shown}");
            for cut in 0..=body.len() {
                assert_eq!(
                    in_pieces(path, body, &[cut]),
                    read,
                    "{path} {shown} at {cut}"
                );
            }
        }
    }
}

#[test]
fn the_goldens_read_alike_in_pieces() {
    golden::for_each_case("bodies", |path, body| {
        let read = in_one_piece(path, body);
        for step in [1, 2, 3, 7, 64, 65] {
            let cuts: Vec<usize> = (1..body.len()).step_by(step).collect();
            assert_eq!(
                in_pieces(path, body, &cuts),
                read,
                "{path} {}",
                String::from_utf8_lossy(body)
            );
        }
    });
}

#[test]
fn nesting_has_the_same_limit() {
    for levels in [126, 127, 128, 129, 1000] {
        for (open, close) in [("[", "]"), (r#"{"a":"#, "}")] {
            for field in ["x", "messages", "tools", "model"] {
                let body = format!(
                    r#"{{"model":"m","{field}":{}1{}}}"#,
                    open.repeat(levels),
                    close.repeat(levels)
                );
                let read = in_one_piece(APIS[0], body.as_bytes());
                agrees(body.as_bytes(), &read);
                let cuts: Vec<usize> = (1..body.len()).step_by(5).collect();
                assert_eq!(in_pieces(APIS[0], body.as_bytes(), &cuts), read);
            }
        }
    }
}

/// Checks that a reader keeps the part of a name or number that has arrived, and no part of a
/// prompt.
#[test]
fn only_a_long_name_is_kept() {
    let keeps = |before: &str, filler: &str| {
        let mut reader = BodyReader::new(RequestApi::ChatCompletions, ());
        reader.read(before.as_bytes());
        (0..100).for_each(|_| reader.read(filler.repeat(1_000).as_bytes()));
        reader.keeps_too_much()
    };
    for (before, filler) in [
        ("{\"", "k"),
        ("{\"model\":\"", "m"),
        ("{\"n\":", "1"),
        ("{\"messages\":[", " "),
    ] {
        assert!(keeps(before, filler), "{before}");
    }
    for (before, filler) in [
        ("", " "),
        ("{\"messages\":\"", "a"),
        ("{\"messages\":\"", "一"),
        ("{\"messages\":\"", r"\u1234"),
        ("{\"x\":\"", "a"),
        ("{\"x\":[\"", "\",\""),
        ("{\"messages\":[{\"content\":\"", "\"},{\"content\":\""),
        ("{\"messages\":[1", ",1"),
        ("{\"messages\":[1,", " "),
        ("{\"x\":{\"a", "a"),
        ("{\"model\":1 x", "a"),
    ] {
        assert!(!keeps(before, filler), "{before} {filler}");
    }
}

fn sorted(cuts: &[Index], bytes: usize) -> Vec<usize> {
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes + 1)).collect();
    cuts.sort_unstable();
    cuts
}

fn fields() -> impl Strategy<Value = String> {
    let names = vec![
        "model",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "cache_salt",
        "tools",
        "messages",
        "prompt",
        "input",
        "system",
        "instructions",
        "sampling_params",
        "token_ids",
        "features",
        "text",
        "image_data",
        "items",
        "other",
    ];
    let member = (proptest::sample::select(names), json())
        .prop_map(|(name, value)| format!("\"{name}\" :{value}"));
    prop::collection::vec(member, 0..8).prop_map(|members| {
        format!(
            "{{\"model\":\"m\",{}\"n\":[]}}",
            members.iter().map(|m| format!("{m}, ")).collect::<String>()
        )
    })
}

proptest! {
    #[test]
    fn cuts_do_not_matter(body in fields(), path in proptest::sample::select(APIS.to_vec()), cuts in prop::collection::vec(any::<Index>(), 0..12)) {
        let body = body.as_bytes();
        let read = in_one_piece(path, body);
        agrees(body, &read);
        prop_assert_eq!(in_pieces(path, body, &sorted(&cuts, body.len())), read);
    }

    #[test]
    fn nor_where_the_body_is_damaged(
        body in fields(), path in proptest::sample::select(APIS.to_vec()), cuts in prop::collection::vec(any::<Index>(), 0..12),
        (place, bytes, end) in (any::<Index>(), prop::collection::vec(any::<u8>(), 0..3), any::<Index>()),
    ) {
        let mut body = body.into_bytes();
        let at = place.index(body.len() + 1);
        body.splice(at..(at + 1).min(body.len()), bytes);
        body.truncate(end.index(3 * body.len() + 1));
        let read = in_one_piece(path, &body);
        agrees(&body, &read);
        prop_assert_eq!(in_pieces(path, &body, &sorted(&cuts, body.len())), read);
    }

    #[test]
    fn nor_in_any_bytes(body in prop::collection::vec(any::<u8>(), 0..200), cuts in prop::collection::vec(any::<Index>(), 0..12)) {
        let read = in_one_piece(APIS[0], &body);
        agrees(&body, &read);
        prop_assert_eq!(in_pieces(APIS[0], &body, &sorted(&cuts, body.len())), read);
    }
}
