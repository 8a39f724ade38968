//! The bytes that a proxy sends to the daemon contain no word of a prompt or of a reply, in any
//! encoding, and the hashes in them are useless without the secret.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use memchr::memmem;
use serde_json::{Value, json};
use testbed::cuttable_link::CuttableLink;
use testbed::stack::Stack;
use testbed::{Result, wait_for};

use super::outsider::{LIMIT, SimulatedPeer};
use crate::echo;

/// A text that occurs nowhere else.
const SECRET: &str = "Zanzibar-Quixote-Ocelot";

/// The number of consecutive bytes of the secret that cannot occur by chance.
const WINDOW: usize = 7;

/// Returns one request of each API with the secret in every text field. The requests are long
/// enough to be placed, and different in each round.
fn requests(round: u64) -> Vec<(&'static str, String)> {
    let long = |number: u64| {
        format!(
            "{} {}",
            10 * round + number,
            format!("{SECRET}. ").repeat(60)
        )
    };
    let tool = json!({"type": "function", "function": {"name": "f", "description": SECRET, "parameters": {}}});
    let messages = |number| json!([{"role": "user", "content": long(number)}, {"role": "assistant", "content": SECRET}]);
    let said = |body: Value| body.to_string();
    let escaped: String = SECRET
        .bytes()
        .map(|byte| format!("\\u{byte:04x}"))
        .collect();
    vec![
        (
            "/v1/chat/completions",
            said(
                json!({"model": "demo", "max_tokens": 2, "messages": messages(1), "tools": [tool], "user": SECRET}),
            ),
        ),
        (
            "/v1/chat/completions",
            said(
                json!({"model": "demo", "max_tokens": 2, "stream": true, "messages": messages(2)}),
            ),
        ),
        (
            "/v1/chat/completions",
            said(json!({"model": "demo", "max_tokens": 2, "messages": messages(3)}))
                .replace(SECRET, &escaped),
        ),
        (
            "/v1/completions",
            said(json!({"model": "demo", "max_tokens": 2, "prompt": long(4)})),
        ),
        (
            "/v1/responses",
            said(json!({"model": "demo", "input": long(5), "instructions": SECRET})),
        ),
        (
            "/v1/messages",
            said(
                json!({"model": "demo", "max_tokens": 2, "system": SECRET, "messages": [{"role": "user", "content": long(6)}]}),
            ),
        ),
        (
            "/v1/embeddings",
            said(json!({"model": "demo", "input": [long(7), SECRET]})),
        ),
    ]
}

/// Returns the secret in every encoding that a message might use.
fn forms() -> Vec<Vec<u8>> {
    let hex: String = SECRET.bytes().map(|byte| format!("{byte:02x}")).collect();
    let escaped: String = SECRET
        .bytes()
        .map(|byte| format!("\\u{byte:04x}"))
        .collect();
    let wide = SECRET.bytes().flat_map(|byte| [byte, 0]).collect();
    // Base64 depends on the number of bytes before the secret, modulo 3.
    let encoded = (0..3).map(|begin| base64(&SECRET.as_bytes()[begin..]).into_bytes());
    let mut forms = vec![
        SECRET.into(),
        hex.to_uppercase().into(),
        hex.into(),
        escaped.into(),
        wide,
    ];
    forms.extend(encoded);
    forms
}

/// Returns the base64 of all complete groups of three bytes.
fn base64(bytes: &[u8]) -> String {
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let word = |three: &[u8; 3]| u32::from_be_bytes([0, three[0], three[1], three[2]]);
    let digit = |word: u32, at: u32| char::from(digits[(word >> (18 - 6 * at) & 63) as usize]);
    bytes
        .as_chunks()
        .0
        .iter()
        .flat_map(|three| (0..4).map(move |at| digit(word(three), at)))
        .collect()
}

/// Returns the pieces of the secret that `bytes` contains.
fn found(bytes: &[u8]) -> Vec<String> {
    let forms = forms();
    let windows = forms.iter().flat_map(|form| form.windows(WINDOW));
    windows
        .filter(|window| memmem::find(bytes, window).is_some())
        .map(|window| String::from_utf8_lossy(window).into_owned())
        .collect()
}

/// Returns the bytes that a proxy sent to its daemon while it served all requests, and the hashes
/// that another proxy received.
async fn overheard_on(transport: &str) -> Result<(Vec<u8>, BTreeSet<u64>)> {
    let cable = CuttableLink::lay().await?;
    let state = json!({"cluster": "switchpoint-state", "transport": transport});
    let mut stack = Stack::builder()
        .servers(2)
        .concurrency(2)
        .picker(json!({"state": state}))
        .cable(&cable)
        .start()
        .await?;
    cable.connect_to(stack.daemon()?.settings().state.address());
    stack.wait_until_ready().await?;
    let mut outsider = SimulatedPeer::join(&mut stack).await?;
    // From now on the proxy knows that it has a peer. The proxy does not send earlier placements.
    outsider.hear_until(0).await?;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let began = Instant::now();
    let mut round = 0;
    while outsider.placed().len() < requests(0).len() {
        assert!(
            began.elapsed() < LIMIT,
            "not all placements arrived: {:?}",
            outsider.placed()
        );
        round += 1;
        for (path, body) in requests(round) {
            // The reply echoes the request.
            assert_eq!(
                stack.send(echo::post(path, &[], body)?).await?.status,
                200,
                "{path}"
            );
        }
        outsider.hear_until(0).await?;
    }
    let served = round * requests(0).len() as u64;
    let reported = || async {
        let rows = stack.daemon.as_ref()?.endpoints().await.ok()?;
        (rows
            .iter()
            .filter_map(|row| row["served"].as_u64())
            .sum::<u64>()
            >= served)
            .then_some(())
    };
    wait_for(LIMIT, "all served requests to be reported", reported).await?;
    Ok((
        cable.sent_bytes(),
        outsider.placed().into_iter().flatten().collect(),
    ))
}

#[tokio::test]
async fn the_daemon_gets_hashes_of_its_deployment_and_no_word_of_a_prompt() -> Result<()> {
    for (path, body) in requests(1) {
        assert!(
            !found(body.as_bytes()).is_empty(),
            "the search must find the secret in the request: {path}"
        );
    }
    let mut deployments = Vec::new();
    for transport in ["grpc", "http"] {
        let (said, hashes) = overheard_on(transport).await?;
        let tapped = hashes
            .iter()
            .filter(|hash| memmem::find(&said, &hash.to_le_bytes()).is_some())
            .count();
        // A hash may be split over two frames.
        assert!(
            tapped > hashes.len() / 2,
            "{transport}: the tapped bytes do not contain the received hashes"
        );
        assert_eq!(found(&said), Vec::<String>::new(), "{transport}");
        deployments.push(hashes);
    }
    // Each stack has a different secret, and the prompts were the same.
    assert_eq!(
        deployments[0].intersection(&deployments[1]).count(),
        0,
        "the same hash in two deployments"
    );
    Ok(())
}
