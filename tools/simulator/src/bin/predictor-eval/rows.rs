//! Measurements of real engines as rows: the conditions when a request was picked, and its times.
//!
//! The rows of the H200 files are in the order in which their outcomes were known. They do not have
//! the time of the pick, but the number of requests in flight at the pick, and queues are served in
//! order. So between a request's pick and its outcome, about as many outcomes became known as
//! requests were in flight. The files are of two pods, each request has up to two rows, and about
//! half of the rows are missing, which makes twice as many rows as requests. A prediction of a row
//! may use the rows that far above it, and none below.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use flate2::read::MultiGzDecoder;
use scheduler::latency::Conditions;
use serde_json::Value;

use crate::{EvaluationView, VIEWS};

/// The time that is predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EvaluatedTarget {
    Ttft,
    Tpot,
}

/// One request. In some files it has only one of the two times.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EvaluationRow {
    pub(crate) conditions: Conditions,
    pub(crate) ttft_ms: Option<f32>,
    pub(crate) tpot_ms: Option<f32>,
    /// When it was picked, and when its outcome was known, ms, on a clock that ticks with every
    /// row.
    pub(crate) picked_ms: u64,
    pub(crate) known_ms: u64,
}

/// One file.
pub(crate) struct EvaluationTrace {
    pub(crate) name: String,
    /// In the order in which outcomes were known if the file is `served`; else in the order of
    /// arrival.
    pub(crate) rows: Vec<EvaluationRow>,
    /// Whether outcomes were known at picks.
    pub(crate) served: bool,
}

/// An event of the row at this position.
#[derive(Clone, Copy, Debug)]
pub(crate) enum EvaluationEvent {
    Picked(usize),
    Known(usize),
}

const H200: [&str; 3] = ["sharegpt", "bimodal", "chatbot-synthetic"];
const SERVING_SIM: [&str; 3] = [
    "llama31-8b_rtx4090",
    "llama31-8b_rtxpro6000",
    "qwen3-32b_tp2_rtxpro6000",
];

/// Milliseconds for each row, as the files have no clock.
const TICK_MS: u64 = 100;

/// Rows between pick and outcome for each request that was in flight.
const ROWS_A_REQUEST: f64 = 2.0;

/// All files.
pub(crate) fn all() -> Result<Vec<EvaluationTrace>, String> {
    H200.iter()
        .map(|name| h200(name))
        .chain(SERVING_SIM.iter().map(|name| serving_sim(name)))
        .collect()
}

fn h200(name: &str) -> Result<EvaluationTrace, String> {
    let lines = lines(&format!("llmd_predictor_{name}-h200.jsonl.gz"))?;
    let row = |(at, line): (usize, &Value)| {
        let number = |key: &str| {
            line.get(key)
                .and_then(Value::as_f64)
                .ok_or_else(|| format!("{name}: line {at} has no {key}"))
        };
        let requests = number("num_request_running")?;
        let prompt = narrow(number("input_token_length")?);
        let time = |ms: f64| (ms > 0.0).then(|| narrow(ms));
        let conditions = Conditions {
            queued: Some(narrow(number("num_request_waiting")?)),
            running: None,
            requests: narrow(requests),
            prefill_tokens: narrow(number("prefill_tokens_in_flight")?),
            context_tokens: 0.0,
            kv_utilization: Some(narrow(number("kv_cache_percentage")?)),
            prompt_tokens: prompt,
            // The engines of these files ran without a prefix cache, so they compute the whole
            // prompt.
            uncached_tokens: prompt,
        };
        let known_ms = TICK_MS * (at as u64 + 1);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a count of rows"
        )]
        let before_ms = TICK_MS * (1 + (ROWS_A_REQUEST * requests).ceil() as u64);
        let picked_ms = known_ms.saturating_sub(before_ms);
        Ok(EvaluationRow {
            conditions,
            ttft_ms: time(number("actual_ttft_ms")?),
            tpot_ms: time(number("actual_tpot_ms")?),
            picked_ms,
            known_ms,
        })
    };
    let rows = lines
        .iter()
        .enumerate()
        .map(row)
        .collect::<Result<_, String>>()?;
    Ok(EvaluationTrace {
        name: format!("h200-{name}"),
        rows,
        served: true,
    })
}

/// One request of a recorded run. Times in seconds.
struct RecordedRun {
    input: f64,
    output: f64,
    queued: f64,
    scheduled: f64,
    first: f64,
    last: f64,
}

/// Reads a run that has the times when each request arrived, was scheduled, and had its first and
/// last token. The requests in flight at any time follow from them. Nearly all requests arrived
/// before the first few had ended, so no outcome of use was known at any pick: only the frozen
/// figures, of requests in the order of arrival, mean something.
fn serving_sim(name: &str) -> Result<EvaluationTrace, String> {
    let lines = lines(&format!("llmservingsim_vllm_{name}_requests.jsonl.gz"))?;
    let run = |line: &Value| {
        let number = |key: &str| line.get(key)?.as_f64();
        let queued = number("queued_ts")?;
        let scheduled = number("scheduled_ts")?;
        let first = number("first_token_ts")?;
        let last = number("last_token_ts")?;
        Some(RecordedRun {
            input: number("input_toks")?,
            output: number("output_toks")?,
            queued,
            scheduled,
            first,
            last,
        })
    };
    let runs: Vec<RecordedRun> = lines
        .iter()
        .map(run)
        .collect::<Option<_>>()
        .ok_or_else(|| format!("{name}: a line is not as known"))?;
    let start = runs
        .iter()
        .map(|run| run.queued)
        .fold(f64::INFINITY, f64::min);
    let mut rows: Vec<EvaluationRow> = runs.iter().map(|run| observed(run, &runs, start)).collect();
    rows.sort_by_key(|row| row.picked_ms);
    for (clock_ms, row) in (1..).map(|at| TICK_MS * at).zip(&mut rows) {
        row.picked_ms = clock_ms;
        row.known_ms = clock_ms;
    }
    Ok(EvaluationTrace {
        name: format!("llmservingsim-{name}"),
        rows,
        served: false,
    })
}

fn observed(run: &RecordedRun, runs: &[RecordedRun], start: f64) -> EvaluationRow {
    let now = run.queued;
    let there: Vec<&RecordedRun> = runs
        .iter()
        .filter(|other| other.queued < now && now < other.last)
        .collect();
    let count =
        |of: &dyn Fn(&RecordedRun) -> f64| narrow(there.iter().map(|other| of(other)).sum());
    let if_so = |so: bool, value: f64| if so { value } else { 0.0 };
    let done = |other: &RecordedRun| {
        other.output * (now - other.first) / (other.last - other.first).max(1e-9)
    };
    let conditions = Conditions {
        queued: Some(count(&|other| if_so(other.scheduled > now, 1.0))),
        running: Some(count(&|other| if_so(other.scheduled <= now, 1.0))),
        requests: count(&|_| 1.0),
        prefill_tokens: count(&|other| if_so(other.first > now, other.input)),
        context_tokens: count(&|other| if_so(other.first <= now, other.input + done(other))),
        kv_utilization: None,
        prompt_tokens: narrow(run.input),
        uncached_tokens: narrow(run.input),
    };
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "milliseconds of a run of minutes"
    )]
    let ms = |at: f64| ((at - start) * 1e3) as u64;
    EvaluationRow {
        conditions,
        ttft_ms: Some(narrow((run.first - run.queued) * 1e3)),
        tpot_ms: (run.output > 1.0)
            .then(|| narrow((run.last - run.first) * 1e3 / (run.output - 1.0))),
        picked_ms: ms(run.queued),
        known_ms: ms(run.last),
    }
}

// === impl EvaluatedTarget ===

impl EvaluatedTarget {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ttft => "ttft",
            Self::Tpot => "tpot",
        }
    }
}

// === impl EvaluationRow ===

impl EvaluationRow {
    pub(crate) fn actual(&self, target: EvaluatedTarget) -> Option<f32> {
        match target {
            EvaluatedTarget::Ttft => self.ttft_ms,
            EvaluatedTarget::Tpot => self.tpot_ms,
        }
    }
}

// === impl EvaluationTrace ===

impl EvaluationTrace {
    /// The number of rows in the first part.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "some thousands of rows"
    )]
    pub(crate) fn split(&self, part: f64) -> usize {
        (self.rows.len() as f64 * part) as usize
    }

    /// The views that this file supports.
    pub(crate) fn views(&self) -> impl Iterator<Item = EvaluationView> {
        let served = self.served;
        VIEWS
            .into_iter()
            .filter(move |view| served || *view != EvaluationView::Served)
    }

    /// Drops all rows but the first part.
    pub(crate) fn keep_first(&mut self, part: f64) {
        self.rows.truncate(self.split(part));
    }

    /// The number of rows between the row's pick and its outcome.
    pub(crate) fn delay(&self, row: &EvaluationRow) -> f32 {
        narrow((row.known_ms - row.picked_ms) as f64 / TICK_MS as f64)
    }

    /// All picks and outcomes, by time. A pick does not see the outcomes that become known at the
    /// same time.
    pub(crate) fn events(&self) -> Vec<EvaluationEvent> {
        let events = |(at, row): (usize, &EvaluationRow)| {
            [
                (row.picked_ms, 0, at, EvaluationEvent::Picked(at)),
                (row.known_ms, 1, at, EvaluationEvent::Known(at)),
            ]
        };
        let mut events: Vec<_> = self.rows.iter().enumerate().flat_map(events).collect();
        events.sort_by_key(|(ms, order, at, _)| (*ms, *order, *at));
        events.into_iter().map(|(.., event)| event).collect()
    }
}

fn lines(file: &str) -> Result<Vec<Value>, String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data")
        .join(file);
    let open = File::open(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let lines = BufReader::new(MultiGzDecoder::new(open)).lines();
    let value = |line: std::io::Result<String>| {
        let line = line.map_err(|error| format!("{file}: {error}"))?;
        serde_json::from_str(&line).map_err(|error| format!("{file}: {error}"))
    };
    lines.map(value).collect()
}

#[expect(clippy::cast_possible_truncation, reason = "rounding is meant")]
fn narrow(number: f64) -> f32 {
    number as f32
}
