//! The records of a run: one JSON file for each cell, seed and router.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use testbed::Result;

/// One request, as its client saw it. All times are in ms.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RequestRecord {
    pub session: u32,
    /// The turn within the session, from 0.
    pub turn: u32,
    /// Whether the session arrived in the first quarter of the arrivals, when caches were empty.
    pub cold: bool,
    /// The name of the client's [`SessionClass`](race_cells::SessionClass), such as `interactive`.
    pub class: String,
    /// The time from the start of the run until the request was sent.
    pub sent_ms: f64,
    /// The delay between the time at which the request was due and the sending.
    pub late_ms: f64,
    /// The time from the sending until the first token.
    pub ttft_ms: f64,
    /// The time from the sending until the last byte of the reply.
    pub e2e_ms: f64,
    /// The mean time between two tokens after the first token. `None` for a reply of one token.
    pub tpot_ms: Option<f64>,
    /// The tokens of the request, as the engine counts them.
    pub tokens: RequestTokens,
    /// The reason why the request failed. The times of a failed request are set to the timeout.
    pub failure: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestTokens {
    pub prompt: u64,
    /// Tokens of the prompt that the engine had cached.
    pub cached: u64,
    pub output: u64,
}

/// The counts of one engine during a run. Of Dynamo's engines, only the number of requests is
/// known.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct EngineRecord {
    /// The number of requests that the engine finished.
    pub requests: u64,
    /// The prompt tokens of the requests that the engine admitted.
    pub prompt_tokens: u64,
    /// The prompt tokens that were cached, of the requests that the engine admitted.
    pub cached_tokens: u64,
    /// The delay with which the engine's steps ended, 99th percentile, in ms. A delay of more than
    /// a few ms means that the machine was too busy.
    pub late_p99_ms: f64,
}

/// One run of one router in one cell.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunRecord {
    pub cell: String,
    pub seed: u64,
    pub router: String,
    /// The version of the rival's package, or the commit of Switchpoint.
    pub version: String,
    /// The number of routers with their engines that ran at the same time, including this router.
    pub side_by_side: usize,
    /// The length of the arrivals, in s.
    pub arrivals_s: f64,
    pub requests: Vec<RequestRecord>,
    pub engines: Vec<EngineRecord>,
}

/// The maximum delay of engines and of the load generator (99th percentile), in ms: a fifth of a
/// decode step. A run above this limit measured the machine and not the router.
pub const LATE_MS_MAX: f64 = 5.0;

// === impl RunRecord ===

impl RunRecord {
    /// Returns the path of a run's file below `folder`.
    #[must_use]
    pub fn path(folder: &Path, cell: &str, seed: u64, router: &str) -> PathBuf {
        folder
            .join(cell)
            .join(seed.to_string())
            .join(format!("{router}.json"))
    }

    /// Reads a run. Returns `None` if the file does not exist.
    ///
    /// # Errors
    /// Fails if the file cannot be read as a run.
    pub fn read(path: &Path) -> Result<Option<Self>> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        Ok(Some(
            serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?,
        ))
    }

    /// Writes the run, in place of an earlier run of the same cell, seed and router.
    ///
    /// # Errors
    /// Fails if the folder cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let draft = path.with_extension("draft");
        std::fs::write(&draft, serde_json::to_string(self)?)?;
        Ok(std::fs::rename(draft, path)?)
    }

    /// Returns the delay with which the load generator sent requests, 99th percentile, in ms.
    #[must_use]
    pub fn generator_late_p99_ms(&self) -> f64 {
        crate::judge::percentile(
            self.requests
                .iter()
                .map(|request| request.late_ms)
                .collect(),
            0.99,
        )
    }

    /// Returns the greatest delay over all engines with which steps ended, 99th percentile, in ms.
    #[must_use]
    pub fn engines_late_p99_ms(&self) -> f64 {
        self.engines
            .iter()
            .map(|engine| engine.late_p99_ms)
            .fold(0.0, f64::max)
    }

    /// Whether the machine was fast enough for the run, so that the run may be published.
    #[must_use]
    pub fn is_in_time(&self) -> bool {
        self.generator_late_p99_ms() <= LATE_MS_MAX && self.engines_late_p99_ms() <= LATE_MS_MAX
    }

    /// Returns the share of the prompt tokens that engines had cached, or 0 without prompts. The
    /// engines count the tokens. If they count no prompt tokens, the numbers come from the `usage`
    /// of the replies.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        let counted = |[cached, all]: [u64; 2], engine: &EngineRecord| {
            [cached + engine.cached_tokens, all + engine.prompt_tokens]
        };
        let replied = |[cached, all]: [u64; 2], request: &RequestRecord| {
            [cached + request.tokens.cached, all + request.tokens.prompt]
        };
        let [cached, all] = match self.engines.iter().fold([0, 0], counted) {
            [_, 0] => self.requests.iter().fold([0, 0], replied),
            counted => counted,
        };
        if all == 0 {
            0.0
        } else {
            cached as f64 / all as f64
        }
    }

    #[must_use]
    pub fn failures(&self) -> usize {
        self.requests
            .iter()
            .filter(|request| request.failure.is_some())
            .count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_are_those_of_the_replies_where_engines_count_no_tokens() {
        let request = |prompt, cached| RequestRecord {
            session: 0,
            turn: 0,
            cold: false,
            class: "interactive".into(),
            sent_ms: 0.0,
            late_ms: 0.0,
            ttft_ms: 1.0,
            e2e_ms: 1.0,
            tpot_ms: None,
            tokens: RequestTokens {
                prompt,
                cached,
                output: 1,
            },
            failure: None,
        };
        let engine = |prompt_tokens, cached_tokens| EngineRecord {
            requests: 2,
            prompt_tokens,
            cached_tokens,
            late_p99_ms: 0.0,
        };
        let run = |engine: EngineRecord| RunRecord {
            cell: "agents-50".into(),
            seed: 1,
            router: "ours".into(),
            version: "1".into(),
            side_by_side: 1,
            arrivals_s: 1.0,
            requests: vec![request(100, 50), request(300, 50)],
            engines: vec![engine],
        };
        let rates = [
            run(engine(0, 0)).hit_rate(),
            run(engine(400, 200)).hit_rate(),
        ];
        assert_eq!(rates.map(|rate| (rate * 100.0).round()), [25.0, 50.0]);
    }
}
