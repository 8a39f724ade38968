//! Reads the trace in `data/`.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use flate2::read::MultiGzDecoder;

/// One line of a trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct TraceRequest {
    /// The time since the trace began, in ms.
    pub(crate) at: f64,
    pub(crate) prompt: u32,
    pub(crate) output: u32,
    /// One id for each 512 tokens of the prompt. The list is empty if the prompt shares nothing
    /// with others.
    pub(crate) ids: Vec<u64>,
}

/// The number of tokens that one id of a trace represents.
pub(crate) const ID_TOKENS: usize = 512;

/// Reads the requests of Azure's trace of conversations of 2023. The columns of the file are
/// `TIMESTAMP,ContextTokens,GeneratedTokens`.
pub(crate) fn azure_conversations() -> Result<Vec<TraceRequest>, String> {
    const FILE: &str = "data/azure2023_conv.csv.gz";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(FILE);
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let text = BufReader::new(MultiGzDecoder::new(File::open(&path).map_err(failed)?));
    let parse = |line: &str| {
        let mut lengths = line.trim().split(',').skip(1).map(str::parse::<u32>);
        Some(TraceRequest {
            prompt: lengths.next()?.ok()?.max(1),
            output: lengths.next()?.ok()?.max(1),
            ..TraceRequest::default()
        })
    };
    let mut requests = Vec::new();
    for line in text.lines().skip(1) {
        let line = line.map_err(failed)?;
        if !line.trim().is_empty() {
            requests.push(parse(&line).ok_or_else(|| format!("{FILE}: no request: {line}"))?);
        }
    }
    Ok(requests)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_is_read() {
        let requests = azure_conversations().unwrap();
        let tokens: u64 = requests.iter().map(|line| u64::from(line.prompt)).sum();
        assert_eq!(
            (requests.len(), tokens / requests.len() as u64),
            (19_366, 1_154)
        );
    }
}
