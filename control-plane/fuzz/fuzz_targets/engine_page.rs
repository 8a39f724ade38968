//! Pages with the series of an engine but impossible values and labels: each number is unknown or
//! within its range.

#![no_main]

use arbitrary::Arbitrary;
use control_plane::scrape::engine::EngineTable;
use control_plane::scrape::exposition::ExpositionParser;
use control_plane::scrape::extract::{Extraction, RestartWatch};
use libfuzzer_sys::fuzz_target;
use scheduler::metrics::METRICS;

#[derive(Arbitrary, Debug)]
struct Series {
    name: u8,
    labels: Vec<(u8, Text)>,
    value: f64,
}

#[derive(Arbitrary, Debug)]
enum Text {
    Number(i32),
    Any(String),
}

#[derive(Arbitrary, Debug)]
struct Pages {
    engine: u8,
    pages: Vec<Vec<Series>>,
}

const LABELS: [&str; 12] = [
    "engine",
    "dp_rank",
    "tp_rank",
    "priority",
    "block_size",
    "num_gpu_blocks",
    "page_size",
    "request_type",
    "kv_cache_block_type",
    "max_lora",
    "running_lora_adapters",
    "waiting_lora_adapters",
];

fn write(series: &Series, names: &[&str]) -> String {
    let labels: Vec<String> = series
        .labels
        .iter()
        .map(|(label, text)| {
            let text = match text {
                Text::Number(number) => number.to_string(),
                Text::Any(text) => text
                    .replace('\\', "\\\\")
                    .replace('"', "\\\"")
                    .replace('\n', "\\n"),
            };
            format!("{}=\"{text}\"", LABELS[usize::from(*label) % LABELS.len()])
        })
        .collect();
    format!(
        "{}{{{}}} {}\n",
        names[usize::from(series.name) % names.len()],
        labels.join(","),
        series.value
    )
}

fuzz_target!(|input: Pages| {
    let engines = EngineTable::try_new(&[], "", "").expect("the built-in table is sound");
    let engines = engines.all();
    let engine = engines[usize::from(input.engine) % engines.len()];
    let names = engine.names();
    let mut restarts = RestartWatch::default();
    for page in &input.pages {
        let text: String = page.iter().map(|series| write(series, &names)).collect();
        let mut extraction = Extraction::full_page(engine);
        let mut parser = ExpositionParser::default();
        parser.feed(text.as_bytes(), &mut extraction);
        parser.finish(&mut extraction);
        let reading = extraction.finish();
        let metrics = &reading.metrics;
        assert!(
            [metrics.queue_depth, metrics.running_requests]
                .iter()
                .flatten()
                .all(|requests| (0.0..=1e7).contains(requests))
        );
        for metric in METRICS {
            let value = (metric.get)(metrics);
            assert_eq!(value.and_then(|value| metric.unit.valid(value)), value);
        }
        let lora = metrics
            .lora
            .iter()
            .flat_map(|lora| lora.running.iter().chain(&lora.waiting));
        assert!(
            lora.into_iter()
                .all(|name| !name.is_empty() && name.trim() == &**name && !name.contains(','))
        );
        restarts.observe(&reading);
        assert!(
            !restarts.observe(&reading),
            "the same page twice is not a restart"
        );
    }
});
