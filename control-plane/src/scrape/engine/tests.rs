use super::super::extract::tests::read;
use scheduler::metrics::QUEUE_DEPTH;

use super::*;
use scheduler::metrics::METRICS;

fn configs(yaml: &str) -> Vec<EngineConfig> {
    serde_saphyr::from_str(yaml).unwrap()
}

fn labels(pairs: &[(&str, &str)]) -> Vec<(Box<str>, Box<str>)> {
    pairs
        .iter()
        .map(|(key, value)| ((*key).into(), (*value).into()))
        .collect()
}

#[test]
fn the_label_names_the_engine_the_newer_label_first() {
    let engines = EngineTable::try_new(&[], "", "").unwrap();
    let of = |pairs: &[(&str, &str)]| engines.of_labels(&labels(pairs)).name.to_string();
    assert_eq!(of(&[]), "vllm");
    assert_eq!(of(&[(ENGINE_LABEL, "sglang")]), "sglang");
    assert_eq!(of(&[(ENGINE_LABEL_OLDER, "triton")]), "triton");
    assert_eq!(
        of(&[
            (ENGINE_LABEL_OLDER, "triton"),
            (ENGINE_LABEL, "trtllm-serve")
        ]),
        "trtllm-serve"
    );
    assert_eq!(of(&[(ENGINE_LABEL, "abacus")]), "vllm");
}

#[test]
fn a_label_and_default_of_ones_own() {
    let engines = EngineTable::try_new(&[], "sglang", "engine").unwrap();
    assert_eq!(
        &*engines.of_labels(&labels(&[("engine", "vllm")])).name,
        "vllm"
    );
    assert_eq!(&*engines.of_labels(&[]).name, "sglang");
}

#[test]
fn every_row_of_the_table_is_sound() {
    let engines = EngineTable::try_new(&[], "", "").unwrap();
    for row in TABLE {
        let spec = engines.get(row.name).unwrap();
        assert!(
            spec.metrics
                .iter()
                .any(|metric| metric.meaning == MetricMeaning::Number(&QUEUE_DEPTH)),
            "{} has no queue",
            row.name
        );
        assert!(spec.names().contains(&PROCESS_START));
        for (metric, _) in row.numbers {
            assert!(
                METRICS.contains(metric),
                "{} is not in METRICS, so no message carries it",
                metric.name
            );
        }
    }
}

#[test]
fn engine_configs_of_the_reference_are_understood() {
    let configs = configs(
        "- name: sglang
  queuedRequestsSpec: sglang:num_queue_reqs
  runningRequestsSpec: sglang:num_running_reqs
  kvUsageSpec: sglang:token_usage
  cacheBlockSizeSpec: sglang:page_size
  cacheNumBlocksSpec: sglang:num_pages
  customMetrics:
  - attributeKey: sglang.decode_prealloc_queue_reqs
    metricSpec: sglang:num_decode_prealloc_queue_reqs
- name: mine
  queuedRequestsSpec: \"my_queue{kind=waiting}\"
  kvUsageSpec: my_kv_percent
  kvUsageScale: 0.01
  cacheInfoSpec: my_cache
  cacheBlockSizeLabelName: tokens
",
    );
    let engines = EngineTable::try_new(&configs, "mine", "").unwrap();
    let mine = engines.of_labels(&[]);
    assert_eq!(
        mine.names(),
        [
            "my_cache",
            "my_kv_percent",
            "my_queue",
            "process_start_time_seconds"
        ]
    );
    let reading = read(
        &mine,
        "my_queue{kind=\"waiting\"} 2\nmy_kv_percent 50\nmy_cache{tokens=\"8\",num_gpu_blocks=\"9\"} 1\n",
    );
    assert_eq!(reading.metrics.queue_depth, Some(2.0));
    assert_eq!(reading.metrics.kv_cache_utilization, Some(0.5));
    assert_eq!(
        (reading.metrics.kv_block_tokens, reading.metrics.kv_blocks),
        (Some(8), Some(9))
    );
    let sglang = engines.get("sglang").unwrap();
    let reading = read(sglang, "sglang:num_decode_prealloc_queue_reqs -3\n");
    assert_eq!(
        *reading.metrics.attributes,
        [("sglang.decode_prealloc_queue_reqs".into(), -3.0)]
    );
    assert!(
        sglang.names().contains(&"sglang:generation_tokens_total"),
        "restart signals of a built-in engine stay"
    );
}

#[test]
fn attributes_are_sorted_by_key_and_hold_what_the_page_says() {
    let configs = configs(
        "- name: mine
  customMetrics: [{attributeKey: z, metricSpec: first}, {attributeKey: a, metricSpec: 'second{x=y}'}, {attributeKey: m, metricSpec: third}]
",
    );
    let engines = EngineTable::try_new(&configs, "mine", "").unwrap();
    let page = "first 1\nsecond{x=\"z\"} 7\nsecond{x=\"y\"} 2.5\nthird NaN\n";
    let attributes = read(&engines.of_labels(&[]), page).metrics.attributes;
    assert_eq!(
        *attributes,
        [("a".into(), 2.5), ("z".into(), 1.0)],
        "in the scheduler's order, without values that are not numbers"
    );
}

#[test]
fn refusals_name_engine_and_field() {
    let refusal = |yaml: &str, default: &str| {
        EngineTable::try_new(&configs(yaml), default, "")
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        refusal("[{name: ''}]", ""),
        "engineConfigs: the name \"\" is empty or reserved"
    );
    assert_eq!(
        refusal("[{name: default}]", ""),
        "engineConfigs: the name \"default\" is empty or reserved"
    );
    assert_eq!(
        refusal("[{name: a}, {name: a}]", ""),
        "engineConfigs: engine \"a\" is defined twice"
    );
    assert_eq!(
        refusal("[{name: a, kvUsageScale: 0}]", ""),
        "engineConfigs: engine \"a\": kvUsageScale must be a positive number"
    );
    assert_eq!(
        refusal("[{name: a, loraSpec: 'm{x'}]", ""),
        "engineConfigs: engine \"a\": loraSpec: \"m{x\" must be metric or metric{label=value,...}"
    );
    assert_eq!(
        refusal("[]", "abacus"),
        "defaultEngine \"abacus\" is neither built in nor in engineConfigs"
    );
    let many: Vec<String> = (0..=METRICS_MAX)
        .map(|n| format!("{{attributeKey: k{n}, metricSpec: m{n}}}"))
        .collect();
    assert!(
        refusal(
            &format!("[{{name: a, customMetrics: [{}]}}]", many.join(", ")),
            ""
        )
        .contains("more than 64 metrics")
    );
    for keys in [["", "b"], ["a", "a"], [&"k".repeat(KEY_BYTES_MAX + 1), "b"]] {
        let custom = keys
            .map(|key| format!("{{attributeKey: '{key}', metricSpec: m}}"))
            .join(", ");
        assert!(
            refusal(&format!("[{{name: a, customMetrics: [{custom}]}}]"), "")
                .contains("empty, longer than 128 bytes, or given twice")
        );
    }
    assert!(
        serde_saphyr::from_str::<Vec<EngineConfig>>("[{name: a, queueSpec: m}]").is_err(),
        "a misspelt field is not ignored"
    );
}

#[test]
fn the_documented_fields_are_those_that_are_read() {
    for (known, refusal) in [
        (
            &EngineConfig::FIELDS[..],
            serde_json::from_str::<EngineConfig>(r#"{"?": 1}"#).unwrap_err(),
        ),
        (
            &CustomMetric::FIELDS[..],
            serde_json::from_str::<CustomMetric>(r#"{"?": 1}"#).unwrap_err(),
        ),
    ] {
        let refusal = refusal.to_string();
        assert_eq!(
            refusal.matches('`').count(),
            2 * (known.len() + 1),
            "{refusal}"
        );
        assert!(
            known
                .iter()
                .all(|field| refusal.contains(&format!("`{field}`"))),
            "{refusal}"
        );
    }
}
