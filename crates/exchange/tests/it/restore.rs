//! Responses whose model name is restored: goldens, and the property that it does not matter where
//! the bytes are cut.

use exchange::api::RequestApi;
use exchange::restore::{ModelNameRestorer, ModelNames};
use proptest::prelude::*;

use crate::golden;

fn names(sent: &str, asked: &str) -> ModelNames {
    ModelNames {
        sent: sent.into(),
        requested: asked.as_bytes().into(),
    }
}

/// Returns what the client gets.
fn restore<'b>(
    api: RequestApi,
    streamed: bool,
    names: &ModelNames,
    chunks: impl IntoIterator<Item = &'b [u8]>,
) -> Vec<u8> {
    let mut restorer = ModelNameRestorer::new(names.clone(), api, streamed);
    let mut out = Vec::new();
    for chunk in chunks {
        out.extend_from_slice(restorer.chunk(chunk, false));
    }
    out.extend_from_slice(restorer.chunk(b"", true));
    out
}

/// Reads a head such as `/v1/completions streamed, "asked" was sent as name`.
fn parse_head(head: &str) -> (RequestApi, bool, ModelNames) {
    let (path, rest) = head.split_once(' ').unwrap();
    let (how, rest) = rest.split_once(", ").unwrap();
    let (asked, sent) = rest.split_once(" was sent as ").unwrap();
    assert!(["streamed", "unstreamed"].contains(&how), "{head}");
    (
        RequestApi::for_request(b"POST", path.as_bytes()),
        how == "streamed",
        names(sent, asked),
    )
}

#[test]
fn names_are_put_back_as_the_goldens_say() {
    golden::check("restored", |head, body| {
        let (api, streamed, names) = parse_head(head);
        String::from_utf8(restore(api, streamed, &names, [body])).unwrap()
    });
}

#[test]
fn cuts_and_line_ends_change_nothing() {
    golden::for_each_case("restored", |head, body| {
        let (api, streamed, names) = parse_head(head);
        for line_end in if streamed {
            &["\n", "\r\n", "\r"][..]
        } else {
            &["\n"]
        } {
            let ends = |text: &[u8]| {
                String::from_utf8_lossy(text)
                    .replace('\n', line_end)
                    .into_bytes()
            };
            let expected = ends(&restore(api, streamed, &names, [body]));
            let body = ends(body);
            for cut in 0..=body.len() {
                let got = restore(api, streamed, &names, [&body[..cut], &body[cut..]]);
                assert_eq!(
                    String::from_utf8_lossy(&got),
                    String::from_utf8_lossy(&expected),
                    "cut at {cut} in {head}"
                );
            }
            for size in 1..20 {
                assert_eq!(
                    restore(api, streamed, &names, body.chunks(size)),
                    expected,
                    "chunks of {size} in {head}"
                );
            }
        }
    });
}

/// Checks that the proxy holds back no event, because a client waits for events. The proxy may hold
/// back only a name, while this can still become the name that was sent.
#[test]
fn no_more_than_the_name_is_ever_held_back() {
    let names = names("llama", "\"gpt\"");
    for model in [
        "llama",
        r"\u006clama",
        "another name that is much longer than any spelling of the one that was sent",
        "",
    ] {
        let event = format!(
            "data: {{\"id\":\"a long enough id\",\"model\":\"{model}\",\"choices\":[]}}\n\n"
        );
        let mut restorer = ModelNameRestorer::new(names.clone(), RequestApi::ChatCompletions, true);
        let mut taken = 0;
        let mut given = 0;
        for byte in event.as_bytes().chunks(1) {
            taken += 1;
            given += restorer.chunk(byte, false).len();
            let lost = if model.ends_with("lama") && taken > event.len() - 16 {
                model.len() - "gpt".len()
            } else {
                0
            };
            assert!(
                taken - given - lost <= 2 + names.sent.len() * 6,
                "{model}: {taken} in, {given} out"
            );
        }
        assert_eq!(restorer.chunk(b"", true), b"", "{model}");
    }
}

/// Returns the restored reply, made with `serde_json`.
fn expected(mut reply: serde_json::Value, names: &ModelNames) -> serde_json::Value {
    if reply
        .get("model")
        .is_some_and(|model| *model == *names.sent)
    {
        reply["model"] = serde_json::from_slice(&names.requested).unwrap();
    }
    reply
}

fn json() -> impl Strategy<Value = String> {
    let text = || {
        prop_oneof![
            Just("llama".to_owned()),
            Just("model".to_owned()),
            Just("ll\"ama\\".to_owned()),
            any::<String>()
        ]
    };
    let scalar = prop_oneof![
        Just("null".to_owned()),
        any::<i64>().prop_map(|n| n.to_string()),
        text().prop_map(|text| serde_json::Value::from(text).to_string()),
    ];
    let key = prop_oneof![
        Just("model".to_owned()),
        Just("response".to_owned()),
        Just("message".to_owned()),
        text()
    ];
    scalar.prop_recursive(4, 48, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5)
                .prop_map(|values| format!("[{}]", values.join(", "))),
            prop::collection::btree_map(key.clone(), inner, 0..5).prop_map(|members| {
                let members: Vec<_> = members
                    .iter()
                    .map(|(key, value)| format!("{}:{value}", serde_json::Value::from(&**key)))
                    .collect();
                format!("{{{}}}", members.join(",\n"))
            }),
        ]
    })
}

fn soup() -> impl Strategy<Value = Vec<u8>> {
    let fragment = proptest::sample::select(vec![
        &b"data:"[..],
        b"data: ",
        b"dat",
        b"\n",
        b"\r",
        b"\r\n",
        b"\n\n",
        b"[DONE]",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"\"model\"",
        b"\"mod\\u0065l\"",
        b"\"response\"",
        b"\"llama\"",
        b"\"lla\\u006da\"",
        b"\"llam",
        b"\"",
        b"\\",
        b"\\\"",
        b"{\"model\":\"llama\"}",
        b"{\"response\":{\"model\":\"llama\"}}",
        b"\xff",
    ]);
    prop::collection::vec(fragment, 0..40).prop_map(|fragments| fragments.concat())
}

proptest! {
    #[test]
    fn any_bytes_are_restored_the_same_however_they_are_cut(
        bytes in prop_oneof![4 => soup(), 1 => prop::collection::vec(any::<u8>(), 0..200)],
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        streamed in any::<bool>(),
        path in proptest::sample::select(vec!["/v1/chat/completions", "/v1/responses", "/v1/messages"]),
    ) {
        let api = RequestApi::for_request(b"POST", path.as_bytes());
        let names = names("llama", "\"gpt\"");
        let whole = restore(api, streamed, &names, [&bytes[..]]);
        let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        prop_assert_eq!(&restore(api, streamed, &names, cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]])), &whole);
        prop_assert_eq!(&restore(api, streamed, &names, bytes.chunks(1)), &whole);
    }

    #[test]
    fn putting_back_what_was_asked_undoes_it(bytes in soup(), streamed in any::<bool>()) {
        let to = names("llama", "\"gpt\"");
        let from = names("gpt", "\"llama\"");
        let there = restore(RequestApi::ChatCompletions, streamed, &to, [&bytes[..]]);
        let back = restore(RequestApi::ChatCompletions, streamed, &from, [&there[..]]);
        let plain = |bytes: &[u8]| String::from_utf8_lossy(bytes).replace("lla\\u006da", "llama");
        prop_assert_eq!(plain(&back), plain(&bytes));
    }

    #[test]
    fn json_stays_what_it_was_but_for_the_name(reply in json(), sent in prop_oneof![Just("llama".to_owned()), any::<String>()], asked in any::<String>()) {
        let names = names(&sent, &serde_json::Value::from(asked).to_string());
        let value: serde_json::Value = serde_json::from_str(&reply).unwrap();
        let got = restore(RequestApi::ChatCompletions, false, &names, [reply.as_bytes()]);
        prop_assert_eq!(serde_json::from_slice::<serde_json::Value>(&got).unwrap(), expected(value, &names));
    }
}
