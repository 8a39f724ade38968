//! Prints the `/metrics` page and the ORCA header. The page has vLLM's families in the format of
//! prometheus_client, or the core gauges of another engine.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use clap::ValueEnum;

use super::driver::EngineReport;
use super::engine::BLOCK_TOKENS;
use super::stats::{HISTOGRAMS, StatsHistogram};

/// The false metric values to report: the name without the engine's prefix, and the raw text of the
/// value.
pub type MetricOverrides = BTreeMap<String, String>;

/// The name of the only false value that is not a number: the adapters in use, as the text of a
/// label.
const RUNNING_ADAPTERS: &str = "running_lora_adapters";

/// The engine whose metric names to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum EngineNames {
    /// vLLM, the whole page.
    #[default]
    Vllm,
    /// SGLang, with only the core gauges.
    Sglang,
    /// TensorRT-LLM's own server, with only the core gauges.
    Trtllm,
    /// Triton with the TensorRT-LLM backend, with only the core gauges.
    Triton,
}

/// The data of a page, except the engine's report.
#[derive(Clone, Debug)]
pub(super) struct PageOptions {
    pub names: EngineNames,
    pub old_names: bool,
    pub model: String,
    pub kv_blocks: u32,
    pub max_lora: usize,
}

/// Prints a page. If `wanted` is not empty, the page has only samples with these names, as
/// prometheus_client does for `?name[]=`.
pub(super) fn page(
    options: &PageOptions,
    report: &EngineReport,
    overrides: &MetricOverrides,
    wanted: &[String],
) -> String {
    let mut page = ModelPage {
        out: String::new(),
        names: wanted,
        overrides,
        family: None,
    };
    page.family(
        "gauge",
        "process_start_time_seconds",
        "Start time of the process since unix epoch in seconds.",
    );
    page.sample("", "", report.stats.started_at);
    match options.names {
        EngineNames::Vllm => vllm(&mut page, options, report),
        EngineNames::Sglang => sglang(&mut page, options, report),
        EngineNames::Trtllm => trtllm(&mut page, options, report),
        EngineNames::Triton => triton(&mut page, options, report),
    }
    page.out
}

/// Returns the value of `endpoint-load-metrics` in the requested format (`TEXT` or `JSON`), as vLLM
/// writes it; `None` for other formats.
pub(super) fn orca(
    format: &str,
    kv_usage: f64,
    waiting: usize,
    overrides: &MetricOverrides,
) -> Option<String> {
    let value = |name: &str, value: f64| {
        overrides
            .get(name)
            .cloned()
            .unwrap_or_else(|| format!("{value:?}"))
    };
    let metrics = [
        (
            "kv_cache_usage_perc",
            value("kv_cache_usage_perc", kv_usage),
        ),
        (
            "num_requests_waiting",
            value("num_requests_waiting", waiting as f64),
        ),
    ];
    if format.eq_ignore_ascii_case("text") {
        Some(format!(
            "TEXT {}",
            metrics
                .map(|(name, value)| format!("named_metrics.{name}={value}"))
                .join(", ")
        ))
    } else if format.eq_ignore_ascii_case("json") {
        Some(format!(
            r#"JSON {{"named_metrics": {{{}}}}}"#,
            metrics
                .map(|(name, value)| format!(r#""{name}": {value}"#))
                .join(", ")
        ))
    } else {
        None
    }
}

struct ModelPage<'a> {
    out: String,
    names: &'a [String],
    overrides: &'a MetricOverrides,
    /// The name of the family, and its HELP and TYPE lines until a sample of the family is printed.
    family: Option<(&'static str, String)>,
}

impl ModelPage<'_> {
    fn family(&mut self, kind: &str, name: &'static str, help: &str) {
        self.family = Some((
            name,
            format!("# HELP {name} {help}\n# TYPE {name} {kind}\n"),
        ));
    }

    fn sample(&mut self, suffix: &str, labels: &str, value: f64) {
        let Some((family, head)) = &mut self.family else {
            return;
        };
        if !self.names.is_empty()
            && !self
                .names
                .iter()
                .any(|name| name.strip_prefix(*family) == Some(suffix))
        {
            return;
        }
        self.out.push_str(head);
        head.clear();
        let _ = write!(self.out, "{family}{suffix}"); // writing to a String cannot fail
        if !labels.is_empty() {
            let _ = write!(self.out, "{{{labels}}}");
        }
        self.out.push(' ');
        let bare = family.rsplit_once(':').map_or(*family, |(_, bare)| bare);
        match self.overrides.get(&format!("{bare}{suffix}")) {
            Some(lie) => self.out.push_str(lie),
            None => self.out.push_str(&go_float(value)),
        }
        self.out.push('\n');
    }

    fn gauge(&mut self, name: &'static str, help: &str, labels: &str, value: f64) {
        self.family("gauge", name, help);
        self.sample("", labels, value);
    }

    /// Prints a counter. `name` includes the suffix `_total`.
    fn counter(&mut self, name: &'static str, help: &str, samples: &[(&str, f64)]) {
        self.family("counter", name, help);
        for (labels, value) in samples {
            self.sample("", labels, *value);
        }
    }

    fn created(&mut self, name: &'static str, help: &str, labels: &[&str], at: f64) {
        self.family("gauge", name, help);
        for labels in labels {
            self.sample("", labels, at);
        }
    }

    fn histogram(
        &mut self,
        name: &'static str,
        help: &str,
        model: &str,
        histogram: &StatsHistogram,
    ) {
        self.family("histogram", name, help);
        let mut below = 0;
        let bounds = histogram.bounds.iter().copied().chain([f64::INFINITY]);
        for (bound, count) in bounds.zip(&histogram.counts) {
            below += count;
            self.sample(
                "_bucket",
                &format!(
                    r#"engine="0",le="{}",model_name="{model}""#,
                    go_float(bound)
                ),
                below as f64,
            );
        }
        let labels = format!(r#"engine="0",model_name="{model}""#);
        self.sample("_count", &labels, below as f64);
        self.sample("_sum", &labels, histogram.sum);
    }
}

fn vllm(page: &mut ModelPage<'_>, options: &PageOptions, report: &EngineReport) {
    let model = escaped(&options.model);
    let labels = format!(r#"engine="0",model_name="{model}""#);
    let load = &report.load;
    page.gauge(
        "vllm:num_requests_running",
        "Number of requests in model execution batches.",
        &labels,
        load.running as f64,
    );
    page.gauge(
        "vllm:num_requests_waiting",
        "Number of requests waiting to be processed.",
        &labels,
        load.waiting as f64,
    );
    page.gauge(
        "vllm:engine_sleep_state",
        "Engine sleep state; awake = 0 means engine is sleeping.",
        &format!(r#"{labels},sleep_state="awake""#),
        1.0,
    );
    let (kv_usage, help) = if options.old_names {
        (
            "vllm:gpu_cache_usage_perc",
            "GPU KV-cache usage. 1 means 100 percent usage.",
        )
    } else {
        (
            "vllm:kv_cache_usage_perc",
            "KV-cache usage. 1 means 100 percent usage.",
        )
    };
    page.gauge(kv_usage, help, &labels, load.kv_usage);
    vllm_counters(page, report, &labels);
    vllm_finished(page, report, &model);
    for ((name, _, help), histogram) in HISTOGRAMS.iter().zip(&report.stats.histograms) {
        page.histogram(name, help, &model, histogram);
    }
    vllm_info(page, options, report);
}

fn vllm_counters(page: &mut ModelPage<'_>, report: &EngineReport, labels: &str) {
    let stats = &report.stats;
    let counters = [
        (
            "vllm:prefix_cache_queries_total",
            "vllm:prefix_cache_queries_created",
            "Prefix cache queries, in terms of number of queried tokens.",
            stats.prefix_queries,
        ),
        (
            "vllm:prefix_cache_hits_total",
            "vllm:prefix_cache_hits_created",
            "Prefix cache hits, in terms of number of cached tokens.",
            stats.prefix_hits,
        ),
        (
            "vllm:num_preemptions_total",
            "vllm:num_preemptions_created",
            "Cumulative number of preemption from the engine.",
            report.preemptions,
        ),
        (
            "vllm:prompt_tokens_total",
            "vllm:prompt_tokens_created",
            "Number of prefill tokens processed.",
            stats.prompt_tokens,
        ),
        (
            "vllm:generation_tokens_total",
            "vllm:generation_tokens_created",
            "Number of generation tokens processed.",
            stats.generation_tokens,
        ),
    ];
    for (name, created, help, value) in counters {
        page.counter(name, help, &[(labels, value as f64)]);
        page.created(created, help, &[labels], stats.started_at);
    }
}

/// Prints the number of ended requests by reason.
fn vllm_finished(page: &mut ModelPage<'_>, report: &EngineReport, model: &str) {
    let stats = &report.stats;
    let reasons = ["stop", "length", "abort"]
        .map(|reason| format!(r#"engine="0",finished_reason="{reason}",model_name="{model}""#));
    let [stop, length, abort] =
        [0, 1, 2].map(|index| (reasons[index].as_str(), stats.finished[index] as f64));
    let help = "Count of successfully processed requests.";
    page.counter("vllm:request_success_total", help, &[stop, length, abort]);
    page.created(
        "vllm:request_success_created",
        help,
        &[stop.0, length.0, abort.0],
        stats.started_at,
    );
}

fn vllm_info(page: &mut ModelPage<'_>, options: &PageOptions, report: &EngineReport) {
    let cache = format!(
        concat!(
            r#"block_size="{}",cache_dtype="auto",calculate_kv_scales="False",cpu_kvcache_space_bytes="None",cpu_offload_gb="0","#,
            r#"enable_prefix_caching="True",engine="0",gpu_memory_utilization="0.9",is_attention_free="False",num_cpu_blocks="None","#,
            r#"num_gpu_blocks="{}",num_gpu_blocks_override="None",prefix_caching_hash_algo="sha256",sliding_window="None",swap_space="4""#
        ),
        BLOCK_TOKENS, options.kv_blocks
    );
    page.gauge(
        "vllm:cache_config_info",
        "Information of the LLMEngine CacheConfig",
        &cache,
        1.0,
    );
    if options.max_lora > 0 {
        page.family(
            "gauge",
            "vllm:lora_requests_info",
            "Running stats on lora requests.",
        );
        if let Some(running) = page.overrides.get(RUNNING_ADAPTERS) {
            let max = options.max_lora;
            let running = escaped(running);
            return page.sample(
                "",
                &format!(
                    r#"max_lora="{max}",running_lora_adapters="{running}",waiting_lora_adapters="""#
                ),
                1.0,
            );
        }
        for ([running, waiting], at) in &report.lora_series {
            let running = escaped(running);
            let waiting = escaped(waiting);
            let max = options.max_lora;
            page.sample("", &format!(r#"max_lora="{max}",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}""#), *at);
        }
    }
}

fn sglang(page: &mut ModelPage<'_>, options: &PageOptions, report: &EngineReport) {
    let labels = format!(
        r#"engine_type="unified",model_name="{}",pp_rank="0",tp_rank="0""#,
        escaped(&options.model)
    );
    let load = &report.load;
    page.gauge(
        "sglang:num_running_reqs",
        "The number of running requests.",
        &labels,
        load.running as f64,
    );
    page.gauge(
        "sglang:num_queue_reqs",
        "The number of requests in the waiting queue.",
        &labels,
        load.waiting as f64,
    );
    page.gauge(
        "sglang:token_usage",
        "The token usage.",
        &labels,
        load.kv_usage,
    );
    let cache = format!(
        r#"num_pages="{}",page_size="{BLOCK_TOKENS}""#,
        options.kv_blocks
    );
    page.gauge(
        "sglang:cache_config_info",
        "Information of the cache configuration.",
        &cache,
        1.0,
    );
}

fn trtllm(page: &mut ModelPage<'_>, options: &PageOptions, report: &EngineReport) {
    let labels = format!(r#"model_name="{}""#, escaped(&options.model));
    let load = &report.load;
    page.gauge(
        "trtllm_num_requests_running",
        "Number of running requests.",
        &labels,
        load.running as f64,
    );
    page.gauge(
        "trtllm_num_requests_waiting",
        "Number of waiting requests.",
        &labels,
        load.waiting as f64,
    );
    page.gauge(
        "trtllm_kv_cache_utilization",
        "KV cache utilization, 0 to 1.",
        &labels,
        load.kv_usage,
    );
    page.gauge(
        "trtllm_kv_cache_tokens_per_block",
        "Tokens per KV cache block.",
        &labels,
        f64::from(BLOCK_TOKENS),
    );
    page.gauge(
        "trtllm_kv_cache_max_blocks",
        "KV cache blocks.",
        &labels,
        f64::from(options.kv_blocks),
    );
}

fn triton(page: &mut ModelPage<'_>, options: &PageOptions, report: &EngineReport) {
    let model = escaped(&options.model);
    let load = &report.load;
    page.family(
        "gauge",
        "nv_trt_llm_request_metrics",
        "TRT LLM request metrics",
    );
    for (kind, value) in [
        ("waiting", load.waiting),
        ("scheduled", load.running),
        ("active", load.running + load.waiting),
    ] {
        page.sample(
            "",
            &format!(r#"model="{model}",request_type="{kind}",version="1""#),
            value as f64,
        );
    }
    page.family(
        "gauge",
        "nv_trt_llm_kv_cache_block_metrics",
        "TRT LLM KV cache block metrics",
    );
    let blocks = f64::from(options.kv_blocks);
    let used = (load.kv_usage * blocks).round();
    for (kind, value) in [
        ("fraction", load.kv_usage),
        ("tokens_per", f64::from(BLOCK_TOKENS)),
        ("used", used),
        ("free", blocks - used),
        ("max", blocks),
    ] {
        page.sample(
            "",
            &format!(r#"kv_cache_block_type="{kind}",model="{model}",version="1""#),
            value,
        );
    }
}

/// Escapes a label value for the exposition format.
fn escaped(value: &str) -> String {
    value
        .replace('\\', r"\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

/// Formats a number as prometheus_client does: as Python's repr, but from a million up with an
/// exponent (`1.0e+06`).
fn go_float(value: f64) -> String {
    if value.is_infinite() {
        return if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned();
    }
    let plain = format!("{value:?}");
    match plain.find('.') {
        Some(dot) if value > 0.0 && dot > 6 => {
            let digits = plain.replace('.', "");
            let mantissa = format!("{}.{}", &digits[..1], &digits[1..]);
            format!("{}e+{:02}", mantissa.trim_end_matches(['0', '.']), dot - 1)
        }
        _ => plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_look_as_prometheus_client_prints_them() {
        for (value, text) in [
            (0.0, "0.0"),
            (16.0, "16.0"),
            (0.25, "0.25"),
            (100_000.0, "100000.0"),
            (1_000_000.0, "1e+06"),
            (1_763_737_001.25, "1.76373700125e+09"),
            (f64::NAN, "NaN"),
            (f64::INFINITY, "+Inf"),
        ] {
            assert_eq!(go_float(value), text);
        }
    }

    #[test]
    fn orca_is_written_as_vllm_does() {
        let overrides = MetricOverrides::new();
        assert_eq!(
            orca("TEXT", 0.5, 3, &overrides).unwrap(),
            "TEXT named_metrics.kv_cache_usage_perc=0.5, named_metrics.num_requests_waiting=3.0"
        );
        assert_eq!(
            orca("json", 0.5, 3, &overrides).unwrap(),
            r#"JSON {"named_metrics": {"kv_cache_usage_perc": 0.5, "num_requests_waiting": 3.0}}"#
        );
        assert_eq!(orca("BIN", 0.5, 3, &overrides), None);
        assert!(
            orca(
                "TEXT",
                0.5,
                3,
                &MetricOverrides::from([("kv_cache_usage_perc".into(), "NaN".into())])
            )
            .unwrap()
            .contains("perc=NaN,")
        );
    }
}
