//! Readers of the traces in `data/`.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use serde_json::Value;

/// One line of a trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct TraceRequest {
    /// Time since the trace began, ms.
    pub(crate) at: f64,
    pub(crate) prompt: u32,
    pub(crate) output: u32,
    /// One id for each 512 tokens of the prompt; empty if the prompt shares nothing with others.
    pub(crate) ids: Vec<u64>,
    /// The LoRA adapter of the request; 0 is none.
    pub(crate) adapter: u16,
}

/// The times of a request at a real server, ms.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MeasuredTimes {
    pub(crate) ttft: f64,
    pub(crate) tpot: f64,
}

/// Tokens that one id of a trace stands for.
pub(crate) const ID_TOKENS: usize = 512;

pub(crate) fn mooncake(which: &str) -> Result<Vec<TraceRequest>, String> {
    let line = |value: &Value| {
        Some(TraceRequest {
            at: value.get("timestamp")?.as_f64()?,
            prompt: tokens(value.get("input_length")?)?.max(1),
            output: tokens(value.get("output_length")?)?.max(1),
            ids: value
                .get("hash_ids")?
                .as_array()?
                .iter()
                .map(Value::as_u64)
                .collect::<Option<_>>()?,
            ..TraceRequest::default()
        })
    };
    json_lines(&format!("mooncake_{which}_trace.jsonl.gz"), line)
}

/// An Azure trace of 2023, of one day, with the columns `TIMESTAMP,ContextTokens,GeneratedTokens`.
pub(crate) fn azure(which: &str) -> Result<Vec<TraceRequest>, String> {
    let file = format!("azure2023_{which}.csv.gz");
    let mut lines = Vec::new();
    for text in read(&file)?
        .iter()
        .skip(1)
        .filter(|text| !text.trim().is_empty())
    {
        let mut cells = text.trim().split(',');
        let line = (|| {
            let clock = cells.next()?.split_once(' ')?.1;
            let seconds = clock.split(':').try_fold(0.0, |sum, part| {
                Some(sum * 60.0 + part.parse::<f64>().ok()?)
            })?;
            let prompt = cells.next()?.parse::<u32>().ok()?;
            let output = cells.next()?.parse::<u32>().ok()?;
            Some(TraceRequest {
                at: seconds * 1e3,
                prompt: prompt.max(1),
                output: output.max(1),
                ..TraceRequest::default()
            })
        })();
        lines.push(line.ok_or_else(|| format!("{file}: no such line is known: {text}"))?);
    }
    Ok(lines)
}

/// A client of ServeGen: the distributions from which its requests are drawn.
#[derive(Clone, Debug)]
pub(crate) struct ServeGenClient {
    /// Requests a second and the coefficient of variation of the gaps between them, one pair for
    /// each ten minutes.
    pub(crate) windows: Vec<[f64; 2]>,
    /// Evenly spaced quantiles.
    pub(crate) prompt: Vec<u32>,
    pub(crate) output: Vec<u32>,
}

/// The clients of one model in ServeGen.
pub(crate) fn servegen() -> Result<Vec<ServeGenClient>, String> {
    let counts = |value: &Value| {
        value
            .as_array()?
            .iter()
            .map(tokens)
            .collect::<Option<Vec<u32>>>()
    };
    let pair = |value: &Value| Some([value.get(0)?.as_f64()?, value.get(1)?.as_f64()?]);
    let line = |value: &Value| {
        let windows = value
            .get("windows")?
            .as_array()?
            .iter()
            .map(pair)
            .collect::<Option<_>>()?;
        Some(ServeGenClient {
            windows,
            prompt: counts(value.get("prompt")?)?,
            output: counts(value.get("output")?)?,
        })
    };
    json_lines("servegen_m-small_clients.jsonl.gz", line)
}

/// A recorded run of a real vLLM server.
pub(crate) fn vllm(which: &str) -> Result<(Vec<TraceRequest>, Vec<MeasuredTimes>), String> {
    let line = |value: &Value| {
        let second = |name: &str| value.get(name)?.as_f64();
        let queued = second("queued_ts")?;
        let first = second("first_token_ts")?;
        let last = second("last_token_ts")?;
        let line = TraceRequest {
            at: queued * 1e3,
            prompt: tokens(value.get("input_toks")?)?,
            output: tokens(value.get("output_toks")?)?,
            ..TraceRequest::default()
        };
        let steps = f64::from(line.output.saturating_sub(1).max(1));
        Some((
            line,
            MeasuredTimes {
                ttft: (first - queued) * 1e3,
                tpot: (last - first) * 1e3 / steps,
            },
        ))
    };
    let mut rows = json_lines(
        &format!("llmservingsim_vllm_{which}_requests.jsonl.gz"),
        line,
    )?;
    rows.sort_by(|a, b| a.0.at.total_cmp(&b.0.at));
    Ok(rows.into_iter().unzip())
}

fn tokens(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|tokens| u32::try_from(tokens).ok())
}

fn json_lines<T>(file: &str, line: impl Fn(&Value) -> Option<T>) -> Result<Vec<T>, String> {
    let parse = |text: &String| serde_json::from_str(text).ok().as_ref().and_then(&line);
    read(file)?
        .iter()
        .map(|text| parse(text).ok_or_else(|| format!("{file}: no such line is known: {text}")))
        .collect()
}

fn read(file: &str) -> Result<Vec<String>, String> {
    /// Relative to the package. The package of tools/simulator/aisimulate lies within this one.
    const DATA: &str = if cfg!(feature = "aisimulate") {
        "../data"
    } else {
        "data"
    };
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join(DATA).join(file);
    let open = File::open(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    BufReader::new(MultiGzDecoder::new(open))
        .lines()
        .collect::<Result<_, _>>()
        .map_err(|error| format!("{file}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_trace_is_read_whole() {
        let shape = |lines: &[TraceRequest]| {
            (
                lines.len(),
                lines.iter().map(|line| u64::from(line.prompt)).sum::<u64>() / lines.len() as u64,
            )
        };
        assert_eq!(shape(&mooncake("conversation").unwrap()), (12_031, 12_035));
        assert_eq!(shape(&mooncake("synthetic").unwrap()), (3_993, 15_325));
        assert_eq!(shape(&azure("code").unwrap()), (8_819, 2_047));
        assert_eq!(shape(&azure("conv").unwrap()), (19_366, 1_154));
        let clients = servegen().unwrap();
        assert_eq!(
            (
                clients.len(),
                clients.iter().map(|client| client.windows.len()).min()
            ),
            (23, Some(24))
        );
        for run in [
            "llama31-8b_rtx4090",
            "llama31-8b_rtxpro6000",
            "qwen3-32b_tp2_rtxpro6000",
        ] {
            let (lines, served) = vllm(run).unwrap();
            assert_eq!((lines.len(), served.len()), (300, 300));
            assert!(served.iter().all(|row| row.ttft > 0.0 && row.tpot > 0.0));
        }
    }

    #[test]
    fn ids_cover_the_prompt() {
        for line in mooncake("conversation").unwrap() {
            assert_eq!(line.ids.len(), (line.prompt as usize).div_ceil(ID_TOKENS));
        }
    }
}
