//! An attacker who reads what leaves a proxy (frames of the state stream, decision logs), knows
//! every possible prompt, and does not know the deployment's secret.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use http::Request;
use serde_json::json;
use testbed::stack::Stack;
use testbed::{Result, client};

use super::outsider::{LIMIT, SimulatedPeer};

/// A prompt that the attacker sent. So the attacker knows that the hash of this prompt is among the
/// hashes.
const KNOWN: &str = "hi";

/// A prompt that another client sent.
const SECRET: &str = "zq";

/// The primes with which xxh64 mixes in single bytes and the end of the text.
const PRIMES: [u64; 4] = [
    0x9E37_79B1_85EB_CA87,
    0xC2B2_AE3D_27D4_EB4F,
    0x1656_67B1_9E37_79F9,
    0x27D4_EB2F_1656_67C5,
];

/// Returns all prompts of two letters.
fn dictionary() -> Vec<String> {
    ('a'..='z')
        .flat_map(|first| ('a'..='z').map(move |second| format!("{first}{second}")))
        .collect()
}

/// Returns the bytes that are hashed for a prompt of the dictionary.
fn text(prompt: &str) -> Vec<u8> {
    [prompt.as_bytes(), b"\xFF"].concat()
}

/// Returns the xxh64 of fewer than four bytes.
fn sum_of(seed: u64, text: &[u8]) -> u64 {
    let mut sum = seed.wrapping_add(PRIMES[3]).wrapping_add(text.len() as u64);
    for &byte in text {
        sum = (sum ^ u64::from(byte).wrapping_mul(PRIMES[3]))
            .rotate_left(11)
            .wrapping_mul(PRIMES[0]);
    }
    sum = (sum ^ sum >> 33).wrapping_mul(PRIMES[1]);
    sum = (sum ^ sum >> 29).wrapping_mul(PRIMES[2]);
    sum ^ sum >> 32
}

/// Returns the seed of an xxh64 of fewer than four bytes. Each step of the hash can be inverted.
fn seed_of(sum: u64, text: &[u8]) -> u64 {
    let inverse = |prime: u64| {
        (0..6).fold(prime, |x, _| {
            x.wrapping_mul(2_u64.wrapping_sub(prime.wrapping_mul(x)))
        })
    };
    let unshift = |x: u64, by: u32| (0..64 / by).fold(x, |y, _| x ^ y >> by);
    let mut seed = unshift(sum, 32).wrapping_mul(inverse(PRIMES[2]));
    seed = unshift(seed, 29).wrapping_mul(inverse(PRIMES[1]));
    seed = unshift(seed, 33);
    for &byte in text.iter().rev() {
        seed = seed.wrapping_mul(inverse(PRIMES[0])).rotate_right(11)
            ^ u64::from(byte).wrapping_mul(PRIMES[3]);
    }
    seed.wrapping_sub(text.len() as u64).wrapping_sub(PRIMES[3])
}

/// Returns the prompts of the dictionary that the attacker finds among `hashes`. For each hash, the
/// attacker assumes that the hash belongs to the known prompt, computes the seed, and hashes all
/// other prompts with that seed.
fn learned(hashes: &BTreeSet<u64>) -> Vec<String> {
    let seeds = hashes
        .iter()
        .flat_map(|&hash| [hash, hash | 1])
        .map(|sum| seed_of(sum, &text(KNOWN)));
    // The attacker also tries obvious seeds.
    let seeds: Vec<u64> = seeds.chain(0..4).collect();
    let is_there = |prompt: &String| {
        seeds
            .iter()
            .any(|&seed| hashes.contains(&(sum_of(seed, &text(prompt)) & !1)))
    };
    dictionary()
        .into_iter()
        .filter(|prompt| prompt != KNOWN)
        .filter(is_there)
        .collect()
}

#[test]
fn the_reader_would_learn_what_bare_hashes_say() {
    let bare = BTreeSet::from([KNOWN, SECRET].map(|prompt| sum_of(0x5eed, &text(prompt)) & !1));
    assert_eq!(learned(&bare), [SECRET]);
}

/// Sends a prompt and credentials. Returns everything that is logged and explained about the
/// decision.
async fn send_explained(stack: &Stack, prompt: &str, id: &str) -> Result<String> {
    let body = json!({"model": "demo", "max_tokens": 2, "prompt": prompt}).to_string();
    let request = Request::post("/v1/completions")
        .header("content-type", "application/json")
        .header("x-request-id", id);
    let request = request
        .header("authorization", "Bearer s3cret")
        .header("cookie", "s3cret")
        .header("x-switchpoint-explain", "1");
    let reply = stack.send(request.body(client::full(body))?).await?;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let line = stack.envoy.access_log_of(id, LIMIT).await?;
    Ok([
        line["decision"].as_str().ok_or("no decision is logged")?,
        reply.header("x-switchpoint-decision"),
    ]
    .concat())
}

#[tokio::test]
async fn a_reader_with_a_dictionary_learns_nothing_of_frames_or_logs() -> Result<()> {
    let picker = json!({"decision_log_one_in": 1, "explain": true});
    let mut stack = Stack::builder()
        .servers(2)
        .picker(picker)
        .shared_envoy()
        .start()
        .await?;
    let mut outsider = SimulatedPeer::join(&mut stack).await?;
    outsider.hear_until(0).await?;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let began = Instant::now();
    let mut said = String::new();
    while outsider.placed().len() < 2 {
        assert!(
            began.elapsed() < LIMIT,
            "the placements did not arrive: {:?}",
            outsider.placed()
        );
        // The test repeats the prompts for longer than load takes to reach the other proxy.
        for prompt in [KNOWN, SECRET].repeat(10) {
            said += &send_explained(&stack, prompt, &format!("{:?}", began.elapsed())).await?;
        }
        outsider.hear_until(0).await?;
    }
    let hashes: BTreeSet<u64> = outsider.placed().into_iter().flatten().collect();
    assert!(
        hashes.len() >= 2,
        "both prompts' hashes arrived: {hashes:?}"
    );
    assert_eq!(learned(&hashes), Vec::<String>::new(), "from frames");
    assert!(!said.contains("s3cret"), "no header is logged: {said}");
    let logged: BTreeSet<u64> = said
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|number| number.parse().ok())
        .collect();
    assert_eq!(learned(&logged), Vec::<String>::new(), "from logs");
    assert_eq!(
        logged.intersection(&hashes).count(),
        0,
        "no hash is in a log"
    );
    Ok(())
}
