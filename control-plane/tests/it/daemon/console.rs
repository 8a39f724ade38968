//! The console: the page, and its data as the schema describes it.

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Bytes;
use futures::future::join_all;
use prost::Message;
use proto::state::{self, proxy_message};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;

use super::harness::{Daemon, FilterStream, daemon, get, get_json, until, write};
use crate::json_schema::JsonSchema;

const SECRET: &str = "heliotrope-armadillo";

fn schema() -> JsonSchema {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("console/api.schema.json");
    JsonSchema::new(serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap())
}

async fn post(daemon: &Daemon, question: &Value) -> (u16, Value) {
    let url = format!("http://{}/api/v1/explain", daemon.admin_address);
    let reply = reqwest::Client::new()
        .post(url)
        .json(question)
        .send()
        .await
        .unwrap();
    (reply.status().as_u16(), reply.json().await.unwrap())
}

/// Returns a record as the filter writes it, for a pool with one endpoint.
fn record(endpoint: &state::Endpoint) -> String {
    json!({
        "version": [1, 1], "rng": 5, "metrics_stale": false, "out_of_touch": false, "reuse_interval": 0, "evicted_share": 0,
        "request": {"model": "m", "priority": 0, "prompt_tokens": 64, "blocks": 4, "block_tokens": 16, "max_tokens": 8, "media_items": 0,
            "headers": {}, "subset": null},
        "endpoints": [{"endpoint": endpoint.address, "name": endpoint.name, "slot": endpoint.slot, "generation": endpoint.generation,
            "ready": true, "age_ms": 1, "requests": 1, "prefill_tokens": 10, "decode_tokens": 5, "prefill_prompts": 0,
            "prefill_prompt_tokens": 0, "prefill_uncached_tokens": 0, "prefill_attention": 0, "ttft_slo_us": null, "tpot_slo_us": null,
            "matched_blocks": 2, "cold_pick": 0, "last_pick": 0, "ejected": false, "last_answer": 0, "failing": 0,
            "adapter_room": null, "attributes": {}}],
        "picked": [endpoint.address],
    })
    .to_string()
}

#[tokio::test]
async fn the_page_is_served_with_a_strict_policy() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1"]).await;
    let (status, page) = get(daemon.admin_address, "/").await;
    assert_eq!(status, 200);
    assert!(
        page.contains("console.js") && !page.contains("://"),
        "it names no other site: {page}"
    );
    let client = reqwest::Client::new();
    for (path, media_type) in [
        ("/", "text/html"),
        ("/console.js", "text/javascript"),
        ("/console.css", "text/css"),
        ("/icon.svg", "image/svg"),
    ] {
        let url = format!("http://{}{path}", daemon.admin_address);
        let reply = client.get(&url).send().await.unwrap();
        let header = |name: &str| reply.headers()[name].to_str().unwrap().to_owned();
        assert!(header("content-type").starts_with(media_type), "{path}");
        assert!(
            header("content-security-policy")
                .starts_with("default-src 'none'; script-src 'self'; style-src 'self';"),
            "{path}"
        );
        assert_eq!(header("x-content-type-options"), "nosniff");
        let again = client
            .get(&url)
            .header("if-none-match", header("etag"))
            .send()
            .await
            .unwrap();
        assert_eq!(again.status(), 304, "{path}");
    }
    daemon.stop().await;
}

#[tokio::test]
async fn with_a_token_the_data_needs_it_and_the_page_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    write(&file, "0123456789abcdef0123456789abcdef\n");
    let daemon = daemon(&[
        "--endpoint",
        "127.0.0.1:1",
        "--admin-token-file",
        file.to_str().unwrap(),
    ])
    .await;
    for path in ["/", "/console.js", "/console.css", "/icon.svg"] {
        assert_eq!(get(daemon.admin_address, path).await.0, 200, "{path}");
    }
    for path in [
        "/api/v1/overview",
        "/api/v1/history",
        "/api/v1/decisions",
        "/debug/state",
        "/metrics",
        "/console.js/../api/v1/overview",
    ] {
        assert_eq!(get(daemon.admin_address, path).await.0, 401, "{path}");
    }
    let url = format!("http://{}/api/v1/explain", daemon.admin_address);
    assert_eq!(
        reqwest::Client::new()
            .post(url)
            .json(&json!({}))
            .send()
            .await
            .unwrap()
            .status(),
        401
    );
    daemon.stop().await;
}

#[tokio::test]
async fn every_answer_is_as_the_schema_says() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1", "--endpoint", "127.0.0.1:2"]).await;
    let (mut filter, _) =
        FilterStream::connect(daemon.state_address, "node-7", 1, &["default"]).await;
    let endpoint = filter.pool_update().await.endpoints[0].clone();
    let report = |requests: u64, decision: String| {
        let mut counts = vec![0; proto::HISTOGRAM_BOUNDS.len() + 1];
        counts[3] = requests;
        let model = state::ModelCounters {
            model: "m".to_owned(),
            requests,
            errors: vec![state::Count {
                key: "503".to_owned(),
                count: 1,
            }],
            ttft_ms: Some(state::Histogram { counts, sum: 1.0 }),
            prompt_tokens: 300,
            cached_tokens: 100,
            slo: vec![5, 6, 7],
            ..Default::default()
        };
        let row = state::EndpointCounters {
            slot: endpoint.slot,
            generation: endpoint.generation,
            picked: requests,
            ..Default::default()
        };
        let vm = state::VmCounters {
            pool: "default".to_owned(),
            vm_id: 1,
            endpoints: vec![row],
            models: vec![model],
            dropped: vec![state::Count {
                key: "saturated".to_owned(),
                count: 2,
            }],
            decision,
            ..Default::default()
        };
        proxy_message::Message::Report(state::Report {
            counters: vec![vm.encode_to_vec()],
        })
    };
    filter.say(report(1_000_000, String::new())).await;
    let counted = || async {
        !get_json(daemon.admin_address, "/api/v1/overview").await["pools"][0]["models"][0].is_null()
    };
    until("the first report is counted", counted).await;
    daemon.standby.traffic.sample(Instant::now());
    filter.say(report(1_000_007, record(&endpoint))).await;
    until("the decision is kept", || async {
        !get_json(daemon.admin_address, "/api/v1/decisions").await["decisions"][0].is_null()
    })
    .await;
    daemon.standby.traffic.sample(Instant::now());

    let schema = schema();
    let overview = get_json(daemon.admin_address, "/api/v1/overview").await;
    schema.check("Overview", &overview);
    assert_eq!(
        overview["pools"][0]["endpoints"].as_array().unwrap().len(),
        2
    );
    assert_eq!(
        overview["proxies"][0]["pools"][0]["acknowledged"],
        overview["pools"][0]["revision"]
    );
    let proxy = &overview["proxies"][0];
    assert_eq!(proxy["release"], "9.8.7");
    assert!(
        proxy["heard_ms"].is_u64() && proxy["pools"][0]["age_ms"].is_u64(),
        "{proxy}"
    );
    assert_eq!(
        (
            &overview["pools"][0]["flow_control"],
            &overview["pools"][0]["bands"]
        ),
        (&json!(false), &json!([]))
    );
    let history = get_json(daemon.admin_address, "/api/v1/history").await;
    schema.check("History", &history);
    let last = history["pools"][0]["samples"]
        .as_array()
        .unwrap()
        .last()
        .unwrap()
        .clone();
    assert_eq!(
        last["requests"], 7,
        "what the proxy counted before it was known is not the traffic of now: {last}"
    );
    assert_eq!(last["ttft_ms"]["p50"], 7.5, "{last}");
    let decisions = get_json(daemon.admin_address, "/api/v1/decisions").await;
    schema.check("Decisions", &decisions);
    let decision = &decisions["decisions"][0];
    assert_eq!(
        (&decision["source"], &decision["cached_tokens_max"]),
        (&json!("node-7"), &json!(32))
    );

    let question = json!({"decision": decision["id"]});
    schema.check("Question", &question);
    let (status, explained) = post(&daemon, &question).await;
    assert_eq!(status, 200, "{explained}");
    schema.check("Explanation", &explained);
    assert_eq!(explained["picked"][0], endpoint.address);
    assert!(
        explained["candidates"][0]["cost"]["prefill_ms"]
            .as_f64()
            .unwrap()
            > 0.0,
        "{explained}"
    );
    daemon.stop().await;
}

#[tokio::test]
async fn a_pasted_request_is_explained_and_its_text_is_nowhere() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1", "--endpoint", "127.0.0.1:2"]).await;
    let schema = schema();
    let request =
        json!({"model": "m", "messages": [{"role": "user", "content": SECRET}]}).to_string();
    let ask = |without: Value| json!({"request": request, "path": "/v1/chat/completions", "without": without});
    until("the endpoints are known", || async {
        post(&daemon, &ask(json!([]))).await.0 == 200
    })
    .await;
    let (_, both) = post(&daemon, &ask(json!([]))).await;
    let (_, one) = post(&daemon, &ask(json!([both["picked"][0]]))).await;
    for explained in [&both, &one] {
        schema.check("Explanation", explained);
        assert!(!explained.to_string().contains(SECRET));
    }
    assert_ne!(one["picked"][0], both["picked"][0]);
    let (_, invalid) = post(&daemon, &json!({"request": "{"})).await;
    schema.check("Explanation", &invalid);
    assert_eq!(
        (&invalid["reply"]["status"], &invalid["picked"]),
        (&json!(400), &json!([]))
    );
    for path in [
        "/api/v1/overview",
        "/api/v1/history",
        "/api/v1/decisions",
        "/debug/state",
        "/metrics",
    ] {
        assert!(
            !get(daemon.admin_address, path).await.1.contains(SECRET),
            "{path}"
        );
    }
    for (question, expected, why) in [
        (json!({"decision": 99}), 404, "no longer kept"),
        (json!({}), 400, "name a decision"),
        (
            json!({"request": "{}", "pool": "other"}),
            400,
            "no pool other",
        ),
        (
            json!({"request": request, "without": ["127.0.0.1:3"]}),
            400,
            "no endpoint 127.0.0.1:3",
        ),
        (json!({"prompt": "x"}), 422, "unknown field"),
    ] {
        let (status, failure) = post(&daemon, &question).await;
        schema.check("Failure", &failure);
        assert_eq!(status, expected, "{question}");
        assert!(
            failure["error"].as_str().unwrap().contains(why),
            "{failure}"
        );
    }
    daemon.stop().await;
}

#[tokio::test]
async fn every_error_is_a_failure() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1"]).await;
    let schema = schema();
    let client = reqwest::Client::new();
    let url = |path: &str| format!("http://{}{path}", daemon.admin_address);
    for (method, path, status) in [
        ("GET", "/api/v1/explain", 405),
        ("DELETE", "/api/v1/overview", 405),
        ("GET", "/api/v1/bogus", 404),
        ("POST", "/api/v1/", 404),
        ("GET", "/api/v1/decisions/7", 404),
    ] {
        let reply = client
            .request(method.parse().unwrap(), url(path))
            .send()
            .await
            .unwrap();
        assert_eq!(reply.status(), status, "{method} {path}");
        assert_eq!(
            reply.headers().contains_key("allow"),
            status == 405,
            "{method} {path}"
        );
        schema.check("Failure", &reply.json().await.unwrap());
    }
    for (media_type, status) in [
        ("application/json", 400),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
    ] {
        let invalid = client
            .post(url("/api/v1/explain"))
            .header("content-type", media_type)
            .body("{")
            .send()
            .await
            .unwrap();
        assert_eq!(invalid.status(), status, "{media_type}");
        schema.check("Failure", &invalid.json().await.unwrap());
    }
    daemon.stop().await;
}

/// Sends the requests that a browser sends for a page of another site.
#[tokio::test]
async fn pages_of_other_sites_get_nothing() {
    let open = daemon(&["--endpoint", "127.0.0.1:1"]).await;
    let named = daemon(&[
        "--endpoint",
        "127.0.0.1:1",
        "--admin-host",
        "rebound.example",
    ])
    .await;
    let client = reqwest::Client::new();
    for path in [
        "/",
        "/metrics",
        "/livez",
        "/debug/state",
        "/debug/config",
        "/api/v1/overview",
        "/api/v1/bogus",
    ] {
        let status = async |daemon: &Daemon, header: &'static str, value: &'static str| {
            client
                .get(format!("http://{}{path}", daemon.admin_address))
                .header(header, value)
                .send()
                .await
                .unwrap()
                .status()
                .as_u16()
        };
        assert_eq!(
            status(&open, "host", "rebound.example:9090").await,
            421,
            "{path}"
        );
        assert_ne!(
            status(&named, "host", "rebound.example:9090").await,
            421,
            "{path}"
        );
        assert_eq!(
            status(&open, "origin", "https://page.example").await,
            403,
            "{path}"
        );
        assert_eq!(
            status(&open, "sec-fetch-site", "cross-site").await,
            403,
            "{path}"
        );
    }
    open.stop().await;
    named.stop().await;
}

/// Each endpoint of an answer repeats the names of all scorers.
#[tokio::test]
async fn an_answer_that_would_be_too_long_is_refused() {
    const ENDPOINTS: u32 = 100;
    const SCORERS: u32 = 60;
    // Quotes take two bytes in JSON.
    let long = "\"".repeat(1_000);
    let scorer =
        |number: u32| format!("- {{type: active-request-scorer, name: '{number}{long}'}}\n");
    let config: String = [
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n".to_owned(),
        (0..SCORERS).map(scorer).collect(),
    ]
    .concat();
    let addresses: Vec<String> = (1..=ENDPOINTS)
        .map(|port| format!("127.0.0.1:{port}"))
        .collect();
    let endpoints = addresses
        .iter()
        .flat_map(|address| ["--endpoint", address.as_str()]);
    let daemon = daemon(&endpoints.collect::<Vec<_>>()).await;
    let request = r#"{"model":"m","prompt":"x"}"#;
    until("the endpoints are known", || async {
        post(&daemon, &json!({"request": request})).await.0 == 200
    })
    .await;
    let (status, refused) = post(&daemon, &json!({"request": request, "config": config})).await;
    assert_eq!(status, 400, "{refused}");
    schema().check("Failure", &refused);
    let why = refused["error"].as_str().unwrap();
    assert!(why.contains("8 MiB") && why.contains("without"), "{why}");
    // An answer about few endpoints is short enough.
    let few = json!({"request": request, "config": config, "without": addresses[9..]});
    let (status, explained) = post(&daemon, &few).await;
    assert_eq!(status, 200);
    assert_eq!(explained["candidates"].as_array().unwrap().len(), 9);
    daemon.stop().await;
}

/// Checks that the daemon explains one question at a time. Questions that take long, or whose body
/// arrives slowly, delay only each other.
#[tokio::test]
async fn one_question_is_explained_at_a_time() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1"]).await;
    let question = json!({"request": r#"{"model":"m","prompt":"x"}"#});
    let body = question.to_string();
    let mut slow = tokio::net::TcpStream::connect(daemon.admin_address)
        .await
        .unwrap();
    let head = format!(
        "POST /debug/explain HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    slow.write_all(head.as_bytes()).await.unwrap();
    until("the turn is taken", || async {
        post(&daemon, &question).await.0 == 503
    })
    .await;
    assert_eq!(get(daemon.admin_address, "/livez").await.0, 200);
    slow.write_all(body.as_bytes()).await.unwrap();
    let mut reply = String::new();
    slow.read_to_string(&mut reply).await.unwrap();
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    assert_eq!(post(&daemon, &question).await.0, 200);
    daemon.stop().await;
}

/// The time that an explanation should take. This time is far longer than the pauses of a busy
/// machine.
const LONG: Duration = Duration::from_secs(1);

/// The maximum number of prompts in a request of [`long_question`], which then has 16 MiB.
const PROMPTS_MAX: usize = 1 << 22;

/// Starts an engine that counts its scrapes. Each scrape reports another load than the scrape
/// before.
async fn counting_engine() -> (String, Arc<AtomicU64>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let scrapes = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&scrapes);
    let page = move || {
        let waiting = 1 + counted.fetch_add(1, Ordering::Relaxed) % 7;
        async move { format!("vllm:num_requests_waiting{{model_name=\"m\"}} {waiting}\n") }
    };
    let router = axum::Router::new().route("/metrics", axum::routing::get(page));
    tokio::spawn(async move { axum::serve(listener, router).await });
    (address, scrapes)
}

/// Returns the time until the daemon has explained `question`.
async fn explanation_time(client: &reqwest::Client, url: &str, question: &Bytes) -> Duration {
    let began = Instant::now();
    let reply = client
        .post(url)
        .header("content-type", "application/json")
        .body(question.clone())
        .send()
        .await
        .unwrap();
    assert_eq!(reply.status(), 200);
    reply.bytes().await.unwrap();
    began.elapsed()
}

/// Returns a question whose explanation takes at least [`LONG`], or a question about a request with
/// [`PROMPTS_MAX`] prompts.
async fn long_question(client: &reqwest::Client, url: &str) -> Bytes {
    let mut prompts = 1 << 19;
    loop {
        let list = r#"\"x\","#.repeat(prompts);
        let question = Bytes::from(format!(
            r#"{{"request":"{{\"model\":\"m\",\"prompt\":[{list}\"x\"]}}"}}"#
        ));
        if prompts == PROMPTS_MAX || explanation_time(client, url, &question).await >= LONG {
            return question;
        }
        prompts *= 2;
    }
}

/// Checks that nothing waits for an explanation. The daemon of this test has one thread, and
/// answers no request while that thread computes an explanation.
#[tokio::test]
async fn nothing_waits_for_an_explanation_that_is_computed() {
    const EXPLANATIONS: u64 = 2;
    let (engine, scrapes) = counting_engine().await;
    let daemon = daemon(&["--endpoint", &engine]).await;
    let client = reqwest::Client::new();
    let explain = format!("http://{}/api/v1/explain", daemon.admin_address);
    let livez = format!("http://{}/livez", daemon.admin_address);
    let short = json!({"request": r#"{"model":"m","prompt":"x"}"#});
    until("the endpoint is known", || async {
        post(&daemon, &short).await.0 == 200
    })
    .await;
    let question = long_question(&client, &explain).await;
    let (mut filter, _) =
        FilterStream::connect(daemon.state_address, "node-7", 7, &["default"]).await;
    filter.pool_update().await;

    let done = Cell::new(false);
    let explanations = async {
        let mut shortest = Duration::MAX;
        for _ in 0..EXPLANATIONS {
            shortest = shortest.min(explanation_time(&client, &explain, &question).await);
        }
        done.set(true);
        shortest
    };
    let pages_of_another_site = join_all((0..6).map(|_| async {
        while !done.get() {
            let page = client.post(&explain).header("sec-fetch-site", "cross-site");
            let reply = page.body(short.to_string()).send().await.unwrap();
            assert_eq!(reply.status(), 403);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }));
    let probes = async {
        let mut longest = Duration::ZERO;
        while !done.get() {
            let began = Instant::now();
            let reply = client.get(&livez).send().await.unwrap();
            assert_eq!(reply.status(), 200);
            longest = longest.max(began.elapsed());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        longest
    };
    let metrics = async {
        let mut messages = 0;
        while !done.get() {
            filter.metrics().await;
            messages += 1;
        }
        messages
    };
    let before = scrapes.load(Ordering::Relaxed);
    let (shortest, _, longest, messages) =
        tokio::join!(explanations, pages_of_another_site, probes, metrics);
    let scraped = scrapes.load(Ordering::Relaxed) - before;
    eprintln!(
        "explained in {shortest:?}, probed in {longest:?}, {scraped} scrapes, {messages} metrics"
    );
    assert!(
        4 * longest < shortest,
        "a probe took {longest:?}, an explanation {shortest:?}"
    );
    // An engine with work is scraped ten times a second.
    assert!(scraped >= 4 * EXPLANATIONS, "{scraped} scrapes");
    assert!(messages >= 4 * EXPLANATIONS, "{messages} metrics");
    daemon.stop().await;
}

#[tokio::test]
async fn questions_that_cannot_be_meant_are_refused() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1"]).await;
    let laughs: String = (1..=8)
        .map(|n| {
            format!(
                "a{n}: &a{n} [{}]\n",
                vec![format!("*a{}", n - 1); 9].join(",")
            )
        })
        .collect();
    for (part, value, why) in [
        ("without", json!(vec!["127.0.0.1:1"; 1_025]), "at most 1024"),
        (
            "config",
            json!(" ".repeat((1 << 20) + 1)),
            "at most 1048576",
        ),
        (
            "config",
            json!(format!("a0: &a0 [x,x,x]\n{laughs}")),
            "too complex",
        ),
    ] {
        let mut question = json!({"request": r#"{"model":"m","prompt":"x"}"#});
        question[part] = value;
        let (status, failure) = post(&daemon, &question).await;
        assert_eq!(status, 400, "{part}");
        assert!(
            failure["error"].as_str().unwrap().contains(why),
            "{failure}"
        );
    }
    daemon.stop().await;
}

#[tokio::test]
async fn the_text_of_a_configuration_is_there_to_be_edited() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    write(&file, ONE_SEAT);
    for (options, known) in [
        (vec!["--endpoint", "127.0.0.1:1"], None),
        (
            vec![
                "--endpoint",
                "127.0.0.1:1",
                "--config",
                file.to_str().unwrap(),
            ],
            Some(ONE_SEAT),
        ),
    ] {
        let daemon = daemon(&options).await;
        until("the pool is known", || async {
            !get_json(daemon.admin_address, "/api/v1/configs").await["pools"][0].is_null()
        })
        .await;
        let configs = get_json(daemon.admin_address, "/api/v1/configs").await;
        schema().check("Configs", &configs);
        let text = configs["pools"][0]["text"].as_str().unwrap();
        assert!(known.is_none_or(|known| known == text), "{text}");
        assert_eq!(configs["pools"][0]["file"].is_null(), known.is_none());
        let (status, explained) = post(
            &daemon,
            &json!({"request": r#"{"model":"m","prompt":"x"}"#, "config": text}),
        )
        .await;
        assert_eq!(
            (status, &explained["picked"][0]),
            (200, &json!("127.0.0.1:1")),
            "{explained}"
        );
        if known.is_some() {
            write(&file, &format!("# edited\n{ONE_SEAT}"));
            let text = || async {
                get_json(daemon.admin_address, "/api/v1/configs").await["pools"][0]["text"]
                    .to_string()
            };
            until("the new text is in force", || async {
                text().await.contains("# edited")
            })
            .await;
        }
        daemon.stop().await;
    }
}

const ONE_SEAT: &str = "apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {type: marginal-cost-scorer}
- {type: concurrency-detector, parameters: {maxConcurrency: 1}}
flowControl:
  saturationDetector: {pluginRef: concurrency-detector}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: marginal-cost-scorer}]
";

#[tokio::test]
async fn requests_held_are_shown_and_explained() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.yaml");
    std::fs::write(&config, ONE_SEAT).unwrap();
    let daemon = daemon(&[
        "--endpoint",
        "127.0.0.1:1",
        "--config",
        config.to_str().unwrap(),
    ])
    .await;
    let (mut filter, _) =
        FilterStream::connect(daemon.state_address, "node-7", 7, &["default"]).await;
    let endpoint = filter.pool_update().await.endpoints[0].clone();
    let question = json!({"request": r#"{"model":"m","prompt":"x"}"#, "path": "/v1/completions"});
    let (schema, (_, free)) = (schema(), post(&daemon, &question).await);
    assert_eq!(
        (&free["held"], &free["picked"][0]),
        (&Value::Null, &json!("127.0.0.1:1"))
    );

    let row = state::EndpointCounters {
        slot: endpoint.slot,
        generation: endpoint.generation,
        requests: 2,
        ..Default::default()
    };
    let band = |priority, held, outcomes| state::BandCounters {
        priority,
        held,
        bytes: 100 * held,
        oldest_ms: 1_500,
        full_slot: Some(endpoint.slot),
        full_generation: endpoint.generation,
        outcomes,
        ..Default::default()
    };
    let bands = vec![band(-1, 3, vec![5, 1]), band(4, 0, vec![9])];
    let vm = state::VmCounters {
        pool: "default".to_owned(),
        vm_id: 1,
        endpoints: vec![row],
        bands,
        ..Default::default()
    };
    filter
        .say(proxy_message::Message::Report(state::Report {
            counters: vec![vm.encode_to_vec()],
        }))
        .await;
    let bands = || async {
        get_json(daemon.admin_address, "/api/v1/overview").await["pools"][0]["bands"].clone()
    };
    until("the report is counted", || async {
        bands().await != json!([])
    })
    .await;
    let overview = get_json(daemon.admin_address, "/api/v1/overview").await;
    let bands = bands().await;
    schema.check("Overview", &overview);
    assert_eq!(overview["pools"][0]["flow_control"], true);
    let row = |band: &Value| {
        ["priority", "held", "bytes", "oldest_ms", "full"].map(|name| band[name].clone())
    };
    assert_eq!(
        row(&bands[0]),
        [json!(4), json!(0), json!(0), Value::Null, Value::Null]
    );
    assert_eq!(
        row(&bands[1]),
        [
            json!(-1),
            json!(3),
            json!(300),
            json!(1_500),
            json!("127.0.0.1:1")
        ]
    );
    assert_eq!(
        (
            &bands[1]["outcomes"]["Dispatched"],
            &bands[1]["outcomes"]["RejectedCapacity"]
        ),
        (&json!(5), &json!(1))
    );

    let (_, held) = post(&daemon, &question).await;
    schema.check("Explanation", &held);
    assert_eq!(
        held["held"],
        json!({"ms": 0, "priority": 0, "full": "127.0.0.1:1"}),
        "{held}"
    );
    assert_eq!(
        (
            &held["picked"][0],
            held["candidates"].as_array().unwrap().len()
        ),
        (&json!("127.0.0.1:1"), 1)
    );
    daemon.stop().await;
}
