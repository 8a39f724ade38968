//! The metrics page, its variants for other engines, and false values.

use std::collections::BTreeMap;

use serde_json::json;
use testbed::model_server::{EngineNames, ModelServer, ModelServerOptions};

use crate::client::{chat, finish, get, instant, open, post, request, until, with};

/// Returns the samples of a page by name and labels. Panics on a line that is not a sample.
fn samples(page: &str) -> BTreeMap<String, String> {
    let sample = |line: &str| {
        let (series, value) = line.rsplit_once(' ').unwrap();
        assert!(
            value.parse::<f64>().is_ok() || ["+Inf", "NaN"].contains(&value),
            "{line}"
        );
        (series.to_owned(), value.to_owned())
    };
    page.lines()
        .filter(|line| !line.starts_with('#'))
        .map(sample)
        .collect()
}

async fn value(server: &ModelServer, name: &str) -> f64 {
    let page = get(server.addr(), "/metrics").await;
    let found = samples(page.text())
        .into_iter()
        .find(|(series, _)| series.split('{').next() == Some(name));
    found
        .unwrap_or_else(|| panic!("no {name}"))
        .1
        .parse()
        .unwrap()
}

#[tokio::test]
async fn the_page_counts_what_happened() {
    let server = with(ModelServerOptions {
        speed: 50.0,
        ..ModelServerOptions::default()
    });
    for _ in 0..2 {
        post(
            server.addr(),
            "/v1/chat/completions",
            &chat(&"x".repeat(640), 10, &json!({})),
        )
        .await;
    }
    let page = get(server.addr(), "/metrics").await;
    assert_eq!(
        page.headers["content-type"],
        "text/plain; version=0.0.4; charset=utf-8"
    );
    let samples = samples(page.text());
    for (series, expected) in [
        (
            r#"vllm:prompt_tokens_total{engine="0",model_name="demo"}"#,
            "332.0",
        ),
        (
            r#"vllm:generation_tokens_total{engine="0",model_name="demo"}"#,
            "20.0",
        ),
        (
            r#"vllm:prefix_cache_queries_total{engine="0",model_name="demo"}"#,
            "332.0",
        ),
        (
            r#"vllm:prefix_cache_hits_total{engine="0",model_name="demo"}"#,
            "160.0",
        ),
        (
            r#"vllm:request_success_total{engine="0",finished_reason="length",model_name="demo"}"#,
            "2.0",
        ),
        (
            r#"vllm:time_to_first_token_seconds_count{engine="0",model_name="demo"}"#,
            "2.0",
        ),
        (
            r#"vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="demo"}"#,
            "18.0",
        ),
        (
            r#"vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3",model_name="demo"}"#,
            "2.0",
        ),
        (
            r#"vllm:request_queue_time_seconds_sum{engine="0",model_name="demo"}"#,
            "0.0",
        ),
        (
            r#"vllm:num_requests_running{engine="0",model_name="demo"}"#,
            "0.0",
        ),
    ] {
        assert_eq!(
            samples.get(series).map(String::as_str),
            Some(expected),
            "{series}"
        );
    }
    assert!(
        samples
            .keys()
            .any(|series| series.contains(r#"block_size="16""#)
                && series.contains(r#"num_gpu_blocks="26313""#))
    );
}

#[tokio::test]
async fn the_page_is_as_large_as_a_real_one() {
    let server = ModelServer::start(ModelServerOptions {
        speed: 0.0,
        ..ModelServerOptions::default()
    })
    .unwrap();
    let bytes = get(server.addr(), "/metrics").await.body.len();
    assert!((35_000..60_000).contains(&bytes), "{bytes}");
}

#[tokio::test]
async fn names_filter_samples_as_prometheus_client_does() {
    let names = "?name[]=vllm:num_requests_running&name%5B%5D=vllm%3Aprompt_tokens_total&name[]=vllm:time_to_first_token_seconds&name[]=nothing";
    let server = instant();
    let page = get(server.addr(), &format!("/metrics{names}")).await;
    let series: Vec<String> = samples(page.text()).into_keys().collect();
    let labels = r#"{engine="0",model_name="demo"}"#;
    assert_eq!(
        series,
        ["vllm:num_requests_running", "vllm:prompt_tokens_total"]
            .map(|name| format!("{name}{labels}"))
    );
    assert_eq!(page.text().matches("# TYPE").count(), 2);

    let deaf = with(ModelServerOptions {
        speed: 0.0,
        no_name_filter: true,
        ..ModelServerOptions::default()
    });
    assert!(
        get(deaf.addr(), &format!("/metrics{names}"))
            .await
            .body
            .len()
            > 20_000
    );
}

#[tokio::test]
async fn every_engine_has_its_names() {
    for (engine, names) in [
        (
            EngineNames::Vllm,
            [
                "vllm:num_requests_waiting{",
                "vllm:num_requests_running{",
                "vllm:kv_cache_usage_perc{",
                "vllm:cache_config_info{block_size=\"16\"",
            ],
        ),
        (
            EngineNames::Sglang,
            [
                "sglang:num_queue_reqs{",
                "sglang:num_running_reqs{",
                "sglang:token_usage{",
                "sglang:cache_config_info{num_pages=\"26313\",page_size=\"16\"} 1.0",
            ],
        ),
        (
            EngineNames::Trtllm,
            [
                "trtllm_num_requests_waiting{",
                "trtllm_num_requests_running{",
                "trtllm_kv_cache_utilization{",
                "trtllm_kv_cache_tokens_per_block{",
            ],
        ),
        (
            EngineNames::Triton,
            [
                "request_type=\"waiting\"",
                "request_type=\"scheduled\"",
                "kv_cache_block_type=\"fraction\"",
                "kv_cache_block_type=\"tokens_per\"",
            ],
        ),
    ] {
        let server = with(ModelServerOptions {
            speed: 0.0,
            engine,
            ..ModelServerOptions::default()
        });
        let page = get(server.addr(), "/metrics").await;
        samples(page.text());
        assert!(
            names.iter().all(|name| page.text().contains(name)),
            "{engine:?}: {}",
            page.text()
        );
        assert!(page.text().contains("\nprocess_start_time_seconds "));
    }
    let old = with(ModelServerOptions {
        speed: 0.0,
        old_metric_names: true,
        ..ModelServerOptions::default()
    });
    let page = get(old.addr(), "/metrics").await;
    assert!(
        page.text().contains("vllm:gpu_cache_usage_perc{")
            && !page.text().contains("vllm:kv_cache_usage_perc")
    );
}

#[tokio::test]
async fn load_shows_and_a_client_that_leaves_frees_it() {
    let server = with(ModelServerOptions {
        max_num_seqs: 2,
        ..ModelServerOptions::default()
    });
    let mut streams = Vec::new();
    for _ in 0..3 {
        let request = request(server.addr(), "POST", "/v1/chat/completions");
        let body = chat(&"x".repeat(6400), 100_000, &json!({"stream": true})).to_string();
        streams.push(open(server.addr(), request, &body).await.unwrap());
    }
    until(&server, |state| {
        state["running"] == 2 && state["waiting"] == 1
    })
    .await;
    assert_eq!(value(&server, "vllm:num_requests_running").await, 2.0);
    assert_eq!(value(&server, "vllm:num_requests_waiting").await, 1.0);
    assert!(value(&server, "vllm:kv_cache_usage_perc").await > 0.003);
    drop(streams);
    let state = until(&server, |state| {
        state["running"] == 0 && state["waiting"] == 0
    })
    .await;
    assert_eq!(
        (&state["kv_usage"], &state["finished"]["abort"]),
        (&json!(0.0), &json!(3))
    );
}

#[tokio::test]
async fn adapters_show_in_the_newest_series() {
    let server = with(ModelServerOptions {
        loras: ["one", "two", "three"].map(str::to_owned).to_vec(),
        max_lora: 2,
        ..ModelServerOptions::default()
    });
    let mut streams = Vec::new();
    for model in ["one", "two", "three"] {
        let request = request(server.addr(), "POST", "/v1/chat/completions");
        let body = chat("hello", 100_000, &json!({"stream": true, "model": model})).to_string();
        streams.push(open(server.addr(), request, &body).await.unwrap());
    }
    until(&server, |state| {
        state["running"] == 2 && state["waiting"] == 1
    })
    .await;
    let page = get(server.addr(), "/metrics?name[]=vllm:lora_requests_info").await;
    let samples = samples(page.text());
    let newest = samples
        .iter()
        .max_by(|a, b| a.1.parse::<f64>().unwrap().total_cmp(&b.1.parse().unwrap()))
        .unwrap()
        .0;
    assert_eq!(
        newest,
        r#"vllm:lora_requests_info{max_lora="2",running_lora_adapters="one, two",waiting_lora_adapters="three"}"#
    );
    assert!(samples.len() > 1, "older combinations stay on the page");
}

#[tokio::test]
async fn lies_stand_on_the_page_and_in_the_reply_until_taken_back() {
    let server = instant();
    let answer = post(
        server.addr(),
        "/admin/lie",
        &json!({"num_requests_waiting": 50, "kv_cache_usage_perc": "NaN"}),
    )
    .await;
    assert_eq!(answer.json()["num_requests_waiting"], "50");
    assert_eq!(value(&server, "vllm:num_requests_waiting").await, 50.0);
    assert!(value(&server, "vllm:kv_cache_usage_perc").await.is_nan());
    let request = request(server.addr(), "POST", "/v1/chat/completions")
        .header("endpoint-load-metrics-format", "TEXT");
    let reply = finish(
        open(
            server.addr(),
            request,
            &chat("x", 1, &json!({})).to_string(),
        )
        .await
        .unwrap(),
    )
    .await;
    assert_eq!(
        reply.headers["endpoint-load-metrics"],
        "TEXT named_metrics.kv_cache_usage_perc=NaN, named_metrics.num_requests_waiting=50"
    );
    post(server.addr(), "/admin/lie", &json!({})).await;
    assert_eq!(value(&server, "vllm:num_requests_waiting").await, 0.0);
    assert_eq!(
        post(server.addr(), "/admin/lie", &json!({"x": []}))
            .await
            .status,
        400
    );
}

#[tokio::test]
async fn steps_take_as_long_as_ordered() {
    // At the normal speed a token takes a few ms. At a hundredth of this time, a busy machine adds
    // far more than the token takes.
    let server = with(ModelServerOptions {
        slowdown: 0.01,
        ..ModelServerOptions::default()
    });
    let token_s = async |slowdown: f64| {
        let answer = post(
            server.addr(),
            "/admin/pace",
            &json!({ "slowdown": slowdown }),
        )
        .await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.json()["slowdown"], json!(slowdown));
        let names = [
            "vllm:inter_token_latency_seconds_sum",
            "vllm:inter_token_latency_seconds_count",
        ];
        let sum = value(&server, names[0]).await;
        let count = value(&server, names[1]).await;
        let _ = post(
            server.addr(),
            "/v1/chat/completions",
            &chat("hello", 20, &json!({})),
        )
        .await;
        (value(&server, names[0]).await - sum) / (value(&server, names[1]).await - count)
    };
    let fast_s = token_s(0.01).await;
    let slow_s = token_s(1.0).await;
    assert!(
        (50.0..200.0).contains(&(slow_s / fast_s)),
        "{fast_s} s, then {slow_s} s a token"
    );
    for slowdown in [json!(0), json!(-1), json!(1e9), json!("fast")] {
        assert_eq!(
            post(
                server.addr(),
                "/admin/pace",
                &json!({ "slowdown": slowdown })
            )
            .await
            .status,
            400
        );
    }
}
