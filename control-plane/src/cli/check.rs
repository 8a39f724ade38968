//! `switchpointd check`: whether a configuration is valid, and whether a model server reports what
//! picking needs.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use scheduler::metrics::{METRICS, MetricDefinition};
use serde::Serialize;

use crate::cli::args::{CheckArgs, CheckTarget, OutputFormat};
use crate::config::{self, ConfigReport, ItemStatus, ResolvedConfig, gateway};
use crate::error::error_text;
use crate::pool::objects;
use crate::pool::sources;
use crate::scrape::engine::{EngineSpec, EngineTable, MetricMeaning};
use crate::scrape::exposition::ExpositionParser;
use crate::scrape::extract::{Extraction, PageReading};
use crate::scrape::http_client::{self, cause};
use crate::scrape::{MetricsLocation, PAGE_BYTES_MAX};

/// The maximum time that a model server may take to answer. The time is longer than in a scrape,
/// because an operator waits for the answer.
const FETCH_MAX: Duration = Duration::from_secs(5);

/// The result of a check; each number is the exit code of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CheckVerdict {
    /// No error was found.
    Fine = 0,
    /// The file is invalid, or the server cannot be reached or lacks a needed metric.
    Invalid = 1,
    /// The file is valid, but uses something that Switchpoint refuses.
    Refused = 2,
}

/// The result for one needed metric of a server.
#[derive(Debug, Serialize)]
struct MetricCheck {
    meaning: &'static str,
    status: &'static str,
    /// The series from which the metric is read.
    name: Option<String>,
    value: Option<String>,
    /// What happens because the metric is missing; `None` if the metric was found.
    consequence: Option<&'static str>,
}

/// The report on a file, and its pipeline if it is valid.
#[derive(Debug, Serialize)]
struct FileReport {
    #[serde(flatten)]
    report: ConfigReport,
    pipeline: Option<ResolvedConfig>,
}

#[derive(Debug, Serialize)]
struct EndpointReport {
    endpoint: String,
    url: String,
    engine: String,
    metrics: Vec<MetricCheck>,
}

/// A metric that a check looks for on the engine's metrics page.
struct NeededMetric {
    meaning: MetricMeaning,
    label: &'static str,
    /// Whether a pick depends on the metric.
    needed: bool,
    /// What happens if the metric is missing.
    consequence: &'static str,
}

/// Returns the metrics that a check looks for, in the order in which they are printed.
fn needed_metrics() -> impl Iterator<Item = NeededMetric> {
    let others = [
        (
            MetricMeaning::Lora,
            "LoRA adapters",
            "lora-affinity-scorer ranks this server like any other (fine without adapters)",
        ),
        (
            MetricMeaning::ProcessStart,
            "start of the process",
            "a restart is noticed only when a counter falls",
        ),
        (
            MetricMeaning::Counter,
            "a counter",
            "a restart is noticed only by the process start time",
        ),
    ];
    let others = others.map(|(meaning, label, consequence)| NeededMetric {
        meaning,
        label,
        needed: false,
        consequence,
    });
    METRICS.into_iter().map(needed_number).chain(others)
}

fn needed_number(metric: &'static MetricDefinition) -> NeededMetric {
    let (needed, consequence) = match metric.name {
        "queue_depth" => (true, "queue-scorer ranks this server like any other"),
        "running_requests" => (
            true,
            "running-requests-size-scorer ranks this server like any other",
        ),
        "kv_cache_utilization" => (
            true,
            "kv-cache-utilization-scorer ranks this server like any other, and marginal-cost-scorer ignores free KV memory",
        ),
        "kv_block_tokens" => (false, "the prefix index takes its default block size"),
        "kv_blocks" => (
            false,
            "the prefix index takes its default capacity, and marginal-cost-scorer ignores free KV memory",
        ),
        _ => (
            false,
            "plugins that read it rank this server like any other",
        ),
    };
    NeededMetric {
        meaning: MetricMeaning::Number(metric),
        label: metric.help,
        needed,
        consequence,
    }
}

/// Runs the check; returns the text to print and the result.
pub async fn check(args: CheckArgs) -> (String, CheckVerdict) {
    let CheckArgs {
        what: CheckTarget { file, endpoint },
        engine,
        format,
    } = args;
    match (file, endpoint) {
        (Some(path), _) => check_file(&path, format).await,
        (None, Some(endpoint)) => check_endpoint(&endpoint, engine.as_deref(), format)
            .await
            .unwrap_or_else(|why| (failure_text(&endpoint, &why, format), CheckVerdict::Invalid)),
        (None, None) => (
            "give a FILE or --endpoint\n".to_owned(),
            CheckVerdict::Invalid,
        ), // clap rules this out
    }
}

fn failure_text(what: &str, why: &str, format: OutputFormat) -> String {
    match format {
        OutputFormat::Text => format!("{what}: {why}\n"),
        OutputFormat::Json => format!("{}\n", serde_json::json!({ "error": why })),
    }
}

async fn check_file(path: &Path, format: OutputFormat) -> (String, CheckVerdict) {
    let file = path.display().to_string();
    let text = match discovery::file_watcher::read(path).await {
        Ok(text) => text,
        Err(error) => {
            return (
                failure_text(&file, &error.why, format),
                CheckVerdict::Invalid,
            );
        }
    };
    let (report, config) = if gateway::is_gateway_file(&text) {
        (gateway::report(&text), None)
    } else if objects::holds_objects(&text) {
        (objects::read(&text).0, None)
    } else {
        config::read(&text)
    };
    let pipeline = config.map(|config| ResolvedConfig::from_spec(&config.pipeline));
    let verdict = match (report.errors.is_empty(), report.refuses()) {
        (false, _) => CheckVerdict::Invalid,
        (true, true) => CheckVerdict::Refused,
        (true, false) => CheckVerdict::Fine,
    };
    let printed = match format {
        OutputFormat::Json => {
            serde_json::to_string_pretty(&FileReport { report, pipeline }).unwrap_or_default()
                + "\n"
        }
        OutputFormat::Text => file_text(&report, pipeline.as_ref(), &file, verdict),
    };
    (printed, verdict)
}

fn file_text(
    report: &ConfigReport,
    pipeline: Option<&ResolvedConfig>,
    file: &str,
    verdict: CheckVerdict,
) -> String {
    let mut text = String::new(); // writing to a String cannot fail
    for problem in &report.errors {
        let _ = writeln!(text, "{file}:{}: error: {problem}", problem.line);
    }
    for item in &report.items {
        let status = match item.status {
            ItemStatus::Implemented => "implemented",
            ItemStatus::NoEffect => "no effect",
            ItemStatus::Refused => "refused",
            ItemStatus::Warning => "warning",
        };
        let path = match item.path.as_str() {
            "" => String::new(),
            path => format!("{path}: "),
        };
        let _ = writeln!(
            text,
            "{file}:{}: {status}: {path}{}",
            item.line,
            item.advice()
        );
    }
    if let Some(pipeline) = pipeline {
        let _ = writeln!(text, "\n{}", pipeline.to_text());
    }
    let end = match verdict {
        CheckVerdict::Fine => "fine",
        CheckVerdict::Invalid => "invalid",
        CheckVerdict::Refused => "uses something that is refused here",
    };
    let _ = writeln!(text, "{file}: {end}");
    text
}

async fn check_endpoint(
    given: &str,
    engine: Option<&str>,
    format: OutputFormat,
) -> Result<(String, CheckVerdict), String> {
    let address = sources::resolve(given).await.map_err(error_text)?;
    let engines = EngineTable::try_new(&[], "", "").map_err(error_text)?;
    let known = || {
        engines
            .all()
            .iter()
            .map(|e| e.name.to_string())
            .collect::<Vec<_>>()
            .join(", ")
    };
    let candidates: Vec<&EngineSpec> = match engine {
        None => engines.all().into_iter().map(AsRef::as_ref).collect(),
        Some(name) => vec![
            engines
                .get(name)
                .ok_or_else(|| format!("unknown engine {name:?}; known are {}", known()))?,
        ],
    };
    // The check fetches the metrics page of each candidate engine, and chooses the engine with the
    // most metrics on its page.
    let mut best: Option<EndpointReport> = None;
    let mut last_error = String::new();
    for spec in candidates {
        let url = MetricsLocation::default()
            .url(address, spec)
            .map_err(error_text)?
            .to_string();
        match fetch(&url).await {
            Ok(page) => {
                let report = look_through(given, &url, spec, &page);
                if best.as_ref().is_none_or(|b| found(&report) > found(b)) {
                    best = Some(report);
                }
            }
            Err(error) => last_error = format!("{url}: {error}"),
        }
    }
    let report = best.ok_or(last_error)?;
    let lacks = report
        .metrics
        .iter()
        .zip(needed_metrics())
        .any(|(found, metric)| metric.needed && found.status == "missing");
    let verdict = if lacks {
        CheckVerdict::Invalid
    } else {
        CheckVerdict::Fine
    };
    let printed = match format {
        OutputFormat::Json => serde_json::to_string_pretty(&report).unwrap_or_default() + "\n",
        OutputFormat::Text => endpoint_text(&report, verdict),
    };
    Ok((printed, verdict))
}

fn found(report: &EndpointReport) -> usize {
    report
        .metrics
        .iter()
        .filter(|m| m.status == "found")
        .count()
}

async fn fetch(url: &str) -> Result<Vec<u8>, String> {
    let client = http_client::build(|| reqwest::Client::builder().no_proxy().timeout(FETCH_MAX))
        .map_err(error_text)?;
    let response = client.get(url).send().await.map_err(|e| cause(&e))?;
    if !response.status().is_success() {
        return Err(format!("answered {}", response.status()));
    }
    http_client::body(response, PAGE_BYTES_MAX)
        .await
        .map_err(|e| cause(&e))?
        .ok_or_else(|| format!("page longer than {PAGE_BYTES_MAX} bytes"))
}

fn look_through(endpoint: &str, url: &str, engine: &EngineSpec, page: &[u8]) -> EndpointReport {
    let mut extraction = Extraction::full_page(engine);
    let mut parser = ExpositionParser::default();
    parser.feed(page, &mut extraction);
    parser.finish(&mut extraction);
    let reading = extraction.finish();
    let metrics = needed_metrics().map(|needed| {
        let meaning = needed.meaning;
        let name = engine
            .looked_for()
            .filter(|(m, _)| *m == meaning)
            .map(|(_, name)| name)
            .find(|name| on_page(page, name));
        let value = name.and_then(|_| value(&reading, meaning));
        let known = name.is_some() && (value.is_some() || meaning == MetricMeaning::Counter);
        MetricCheck {
            meaning: needed.label,
            status: if known { "found" } else { "missing" },
            name: name.map(str::to_owned),
            value,
            consequence: (!known).then_some(needed.consequence),
        }
    });
    let metrics = metrics.collect();
    EndpointReport {
        endpoint: endpoint.to_owned(),
        url: url.to_owned(),
        engine: engine.name.to_string(),
        metrics,
    }
}

fn value(reading: &PageReading, meaning: MetricMeaning) -> Option<String> {
    let metrics = &reading.metrics;
    match meaning {
        MetricMeaning::Number(metric) => (metric.get)(metrics).map(|v| v.to_string()),
        MetricMeaning::Lora => metrics
            .lora
            .as_ref()
            .map(|l| format!("{} running, at most {}", l.running.len(), l.max)),
        MetricMeaning::ProcessStart => reading.process_start.map(|v| v.to_string()),
        MetricMeaning::Counter
        | MetricMeaning::PromptTokens
        | MetricMeaning::CachedTokens
        | MetricMeaning::Custom(_) => None,
    }
}

/// Returns whether the page has a series with that name.
fn on_page(page: &[u8], name: &str) -> bool {
    page.split(|b| *b == b'\n').any(|line| {
        line.strip_prefix(name.as_bytes())
            .is_some_and(|rest| matches!(rest.first(), Some(b'{' | b' ' | b'\t')))
    })
}

fn endpoint_text(report: &EndpointReport, verdict: CheckVerdict) -> String {
    let mut text = String::new(); // writing to a String cannot fail
    let _ = writeln!(
        text,
        "{} as {} ({})",
        report.endpoint, report.engine, report.url
    );
    for metric in &report.metrics {
        let meaning = metric.meaning;
        let name = metric.name.as_deref();
        let _ = match metric.consequence {
            None => {
                let value = metric.value.as_ref().map(|value| format!(" = {value}"));
                let value = value.unwrap_or_default();
                let name = name.unwrap_or_default();
                writeln!(text, "  found    {meaning}: {name}{value}")
            }
            Some(consequence) => {
                let why = name
                    .map(|n| format!(" ({n} is on the page, but its value cannot be used)"))
                    .unwrap_or_default();
                writeln!(text, "  missing  {meaning}{why}: {consequence}")
            }
        };
    }
    text.push_str(match verdict {
        CheckVerdict::Fine => "fine\n",
        _ => "lacks load metrics: proxies pick this server by their own counts alone\n",
    });
    text
}
