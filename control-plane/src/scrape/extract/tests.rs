use std::sync::Arc;

use super::super::engine::EngineTable;
use super::super::exposition::{ExpositionParser, ParseProgress};
use super::*;

pub(crate) fn read(engine: &EngineSpec, page: &str) -> PageReading {
    let mut extraction = Extraction::full_page(engine);
    let mut parser = ExpositionParser::default();
    parser.feed(page.as_bytes(), &mut extraction);
    assert_eq!(
        parser.finish(&mut extraction).skipped,
        0,
        "a bad line in the test's own page"
    );
    extraction.finish()
}

fn built_in(name: &str) -> Arc<EngineSpec> {
    Arc::clone(
        EngineTable::try_new(&[], "", "")
            .unwrap()
            .get(name)
            .unwrap(),
    )
}

/// Formats the reading as text, with `?` for unknown values.
fn shown(reading: &PageReading) -> String {
    fn show<T: ToString>(value: Option<T>) -> String {
        value.map_or("?".into(), |value| value.to_string())
    }
    let EndpointMetrics {
        queue_depth,
        running_requests,
        kv_cache_utilization,
        kv_block_tokens,
        kv_blocks,
        lora,
        attributes,
    } = &reading.metrics;
    assert!(attributes.is_empty(), "none is configured");
    let lora = lora.as_ref().map(|l| {
        let running = l.running.join("+");
        let waiting = l.waiting.join("+");
        format!(
            " lora {running} running, {waiting} waiting, max {}, base {}",
            l.max,
            l.base_models.join("+")
        )
    });
    format!(
        "queued {} running {} kv {} blocks {}x{} started {}{}",
        show(*queue_depth),
        show(*running_requests),
        show(*kv_cache_utilization),
        show(*kv_blocks),
        show(*kv_block_tokens),
        show(reading.process_start),
        lora.unwrap_or_default()
    )
}

#[track_caller]
fn check(engine: &str, page: &str, expected: &str) {
    assert_eq!(shown(&read(&built_in(engine), page)), expected, "{page}");
}

#[test]
fn vllm_today() {
    check(
        "vllm",
        r#"
process_start_time_seconds 1.76e+09
vllm:num_requests_running{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="27648"} 1.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql, chat",waiting_lora_adapters=""} 1.7e+09
"#,
        "queued 2 running 7 kv 0.25 blocks 27648x16 started 1760000000 lora sql+chat running,  waiting, max 4, base m",
    );
}

/// Pages that `tools/race/vllm record` took from vLLM 0.32 on a CPU, without and with adapters.
#[test]
fn vllm_0_32_as_recorded() {
    check(
        "vllm",
        include_str!("../../../../tools/testbed/data/vllm-0.32/metrics.txt"),
        "queued 0 running 0 kv 0 blocks 800x32 started 1790000000",
    );
    let lora = "queued 0 running 0 kv 0 blocks 800x32 started 1790000000 lora  running,  waiting, max 1, base smollm2";
    check(
        "vllm",
        include_str!("../../../../tools/testbed/data/vllm-0.32/lora-metrics.txt"),
        lora,
    );
}

#[test]
fn vllm_before_0_9() {
    check(
        "vllm",
        "vllm:num_requests_running{model_name=\"m\"} 1\nvllm:num_requests_waiting{model_name=\"m\"} 0\nvllm:gpu_cache_usage_perc{model_name=\"m\"} 0.5\n",
        "queued 0 running 1 kv 0.5 blocks ?x? started ?",
    );
}

#[test]
fn the_newer_name_wins_wherever_it_stands() {
    check(
        "vllm",
        "vllm:gpu_cache_usage_perc 0.1\nvllm:kv_cache_usage_perc 0.7\n",
        "queued ? running ? kv 0.7 blocks ?x? started ?",
    );
    check(
        "vllm",
        "vllm:kv_cache_usage_perc NaN\nvllm:gpu_cache_usage_perc 0.1\n",
        "queued ? running ? kv ? blocks ?x? started ?",
    );
}

#[test]
fn data_parallel_ranks_of_vllm_add_up() {
    check(
        "vllm",
        r#"
vllm:num_requests_running{engine="0",model_name="m"} 3
vllm:num_requests_running{engine="1",model_name="m"} 5
vllm:num_requests_waiting{engine="0",model_name="m"} 0
vllm:num_requests_waiting{engine="1",model_name="m"} 4
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="100"} 1
"#,
        "queued 4 running 8 kv 0.5 blocks 200x16 started ?",
    );
}

#[test]
fn sglang_with_priorities_and_ranks() {
    check(
        "sglang",
        r#"
sglang:num_running_reqs{dp_rank="0",tp_rank="0",priority=""} 3
sglang:num_running_reqs{dp_rank="0",tp_rank="0",priority="1"} 2
sglang:num_running_reqs{dp_rank="0",tp_rank="0",priority="2"} 1
sglang:num_running_reqs{dp_rank="0",tp_rank="1",priority=""} 3
sglang:num_running_reqs{dp_rank="1",tp_rank="0",priority=""} 5
sglang:num_queue_reqs{dp_rank="0",tp_rank="0",priority=""} 1
sglang:num_queue_reqs{dp_rank="1",tp_rank="0",priority=""} 0
sglang:token_usage{dp_rank="0",tp_rank="0"} 0.2
sglang:token_usage{dp_rank="0",tp_rank="1"} 0.2
sglang:token_usage{dp_rank="1",tp_rank="0"} 0.4
sglang:page_size{dp_rank="0",tp_rank="0"} 16
sglang:page_size{dp_rank="1",tp_rank="0"} 16
sglang:num_pages{dp_rank="0",tp_rank="0"} 1000
sglang:num_pages{dp_rank="1",tp_rank="0"} 1000
"#,
        "queued 1 running 8 kv 0.3 blocks 2000x16 started ?",
    );
}

#[test]
fn sglang_before_0_5_11() {
    check(
        "sglang",
        "sglang:num_running_reqs 1\nsglang:num_queue_reqs 0\nsglang:token_usage 0.0\nsglang:cache_config_info{page_size=\"1\",num_pages=\"59902\"} 1\n",
        "queued 0 running 1 kv 0 blocks 59902x1 started ?",
    );
}

#[test]
fn tensorrt_llm_by_itself_and_in_triton() {
    check(
        "trtllm-serve",
        "trtllm_num_requests_running 4\ntrtllm_num_requests_waiting 1\ntrtllm_kv_cache_utilization 0.125\ntrtllm_kv_cache_max_blocks 500\n\
         trtllm_kv_cache_tokens_per_block 32\n",
        "queued 1 running 4 kv 0.125 blocks 500x32 started ?",
    );
    check(
        "triton-tensorrt-llm",
        r#"
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 9
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 2
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 1
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 6239
"#,
        "queued 1 running 2 kv 0.5 blocks 6239x64 started ?",
    );
}

#[test]
fn triton_does_not_say_how_many_run() {
    check(
        "triton",
        "nv_inference_exec_count{model=\"a\",version=\"1\"} 123456\nnv_inference_pending_request_count{model=\"a\",version=\"1\"} 2\n\
         nv_inference_pending_request_count{model=\"b\",version=\"1\"} 3\n",
        "queued 5 running ? kv ? blocks ?x? started ?",
    );
}

#[test]
fn numbers_that_cannot_be_are_unknown() {
    let unknown = "queued ? running ? kv ? blocks ?x? started ?";
    for value in ["NaN", "+Inf", "-Inf", "-1", "1e300"] {
        check(
            "vllm",
            &format!("vllm:num_requests_waiting {value}\nvllm:kv_cache_usage_perc {value}\n"),
            unknown,
        );
    }
    // The table says that the value is 0 to 1, so it is not per cent.
    check("vllm", "vllm:kv_cache_usage_perc 42\n", unknown);
    check(
        "vllm",
        "vllm:num_requests_waiting{engine=\"0\"} 1\nvllm:num_requests_waiting{engine=\"1\"} NaN\n",
        unknown,
    );
    check(
        "vllm",
        "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"None\"} 1\n",
        "queued ? running ? kv ? blocks ?x16 started ?",
    );
    check(
        "vllm",
        "vllm:cache_config_info{block_size=\"0\",num_gpu_blocks=\"-5\"} 1\n",
        unknown,
    );
    check(
        "vllm",
        "vllm:kv_cache_usage_perc 1.004\n",
        "queued ? running ? kv 1 blocks ?x? started ?",
    );
}

#[test]
fn a_base_model_is_named_if_all_load_metrics_name_the_same() {
    let page = |models: [&str; 2]| {
        let [one, other] = models.map(|model| {
            if model.is_empty() {
                String::new()
            } else {
                format!(r#"{{model_name="{model}"}}"#)
            }
        });
        let lora = r#"vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""} 1"#;
        format!("vllm:num_requests_running{one} 0\nvllm:num_requests_waiting{other} 0\n{lora}\n")
    };
    for (models, base) in [
        (["m", "m"], "m"),
        (["m", "n"], ""),
        (["", "m"], "m"),
        (["", ""], ""),
    ] {
        let expected = format!(
            "queued 0 running 0 kv ? blocks ?x? started ? lora  running,  waiting, max 2, base {base}"
        );
        check("vllm", &page(models), &expected);
    }
}

#[test]
fn the_newest_lora_series_counts() {
    let page = |lines: &[&str]| {
        lines
            .iter()
            .map(|line| format!("vllm:lora_requests_info{line}\n"))
            .collect::<String>()
    };
    let old = r#"{max_lora="2",running_lora_adapters="old",waiting_lora_adapters=""} 1.0"#;
    let new = r#"{max_lora="2",running_lora_adapters="a, b ,,c",waiting_lora_adapters=" d "} 2.0"#;
    let expected =
        "queued ? running ? kv ? blocks ?x? started ? lora a+b+c running, d waiting, max 2, base ";
    check("vllm", &page(&[old, new]), expected);
    check("vllm", &page(&[new, old]), expected);
    check(
        "vllm",
        &page(&[new, r#"{max_lora="x",running_lora_adapters="bad"} 3.0"#]),
        expected,
    );
    check(
        "vllm",
        &page(&[new, r#"{max_lora="2",running_lora_adapters="bad"} NaN"#]),
        expected,
    );
}

#[test]
fn thousands_of_series_are_refused_not_summed() {
    let page: String = (0..5000)
        .map(|n| format!("vllm:num_requests_waiting{{engine=\"{n}\"}} 1\n"))
        .collect();
    check(
        "vllm",
        &page,
        "queued ? running ? kv ? blocks ?x? started ?",
    );
}

#[test]
fn reading_ends_after_the_last_wanted_family() {
    let engine = built_in("vllm");
    let page = "vllm:num_requests_running 1\nvllm:num_requests_waiting{engine=\"0\"} 2\nvllm:num_requests_waiting{engine=\"1\"} 3\nhistogram_bucket 1\nrest 1\n";
    let present = read(&engine, page).present;
    let mut extraction = Extraction::new(&engine, Some(present));
    let mut parser = ExpositionParser::default();
    assert_eq!(
        parser.feed(page.as_bytes(), &mut extraction),
        ParseProgress::Done
    );
    assert_eq!(
        parser.finish(&mut extraction).read,
        4,
        "the line after the last wanted one shows that it was the last"
    );
    assert_eq!(
        shown(&extraction.finish()),
        "queued 5 running 1 kv ? blocks ?x? started ?"
    );
}

#[test]
fn restarts_show_in_the_start_time_and_in_counters() {
    let engine = built_in("vllm");
    let page = |start: f64, tokens: &[u32]| {
        let tokens = tokens
            .iter()
            .enumerate()
            .map(|(n, count)| format!("vllm:generation_tokens_total{{engine=\"{n}\"}} {count}\n"));
        let start = if start > 0.0 {
            format!("process_start_time_seconds {start}\n")
        } else {
            String::new()
        };
        read(&engine, &(start + &tokens.collect::<String>()))
    };
    let restarted = |pages: &[(f64, &[u32])]| -> Vec<bool> {
        let mut watch = RestartWatch::default();
        pages
            .iter()
            .map(|(start, tokens)| watch.observe(&page(*start, tokens)))
            .collect()
    };
    assert_eq!(
        restarted(&[(100.0, &[5]), (100.0, &[9]), (100.01, &[9])]),
        [false; 3]
    );
    assert_eq!(
        restarted(&[(100.0, &[5]), (160.5, &[9]), (160.5, &[9])]),
        [false, true, false]
    );
    assert_eq!(
        restarted(&[(0.0, &[5]), (0.0, &[4]), (0.0, &[4])]),
        [false, true, false]
    );
    assert_eq!(
        restarted(&[(0.0, &[5, 5]), (0.0, &[5, 0])]),
        [false, true],
        "one rank restarted"
    );
    assert_eq!(
        restarted(&[(0.0, &[5, 5]), (0.0, &[6])]),
        [false, false],
        "a series that disappeared is not a counter that fell"
    );
    assert_eq!(
        restarted(&[(100.0, &[5]), (0.0, &[]), (160.0, &[6])]),
        [false, false, true],
        "pages without the value in between hide nothing"
    );
}

#[test]
fn computed_prompt_tokens_are_those_that_the_cache_did_not_have() {
    let computed = |engine: &str, page: &str| read(&built_in(engine), page).computed_tokens;
    let all =
        "vllm:prompt_tokens_total{engine=\"0\"} 900\nvllm:prompt_tokens_total{engine=\"1\"} 100\n";
    let cached = "vllm:prefix_cache_hits_total{engine=\"0\"} 400\n";
    assert_eq!(computed("vllm", &format!("{all}{cached}")), Some(600));
    assert_eq!(
        computed("vllm", all),
        None,
        "how many were cached is unknown"
    );
    assert_eq!(computed("vllm", cached), None);
    let page = "sglang:prompt_tokens_total 100\nsglang:cached_tokens_total 130\n";
    assert_eq!(computed("sglang", page), Some(0), "read at two moments");
}
