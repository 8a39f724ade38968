//! The `EndpointPickerConfig` file: read strictly, answered item by item.
//!
//! Every item of a file ends as one of three: *implemented*, *no effect* (with the reason), *refused* (with what to use instead); or the
//! file is invalid, with line, path and, where a name is nearly right, what was probably meant. Nothing is ignored in silence, and all
//! that is wrong is said at once.

use std::path::PathBuf;
use std::sync::Arc;

use discovery::content::Follow;
use scheduler::ProfileSpec;
use serde::Serialize;

use crate::feed::Scraping;
use crate::scrape::MetricsLocation;
use crate::scrape::engine::Engines;

mod known;
mod reader;
mod yaml;

/// What a file says, compiled.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// How requests are scheduled.
    pub profile: ProfileSpec,
    /// How endpoints are scraped.
    pub scraping: Scraping,
}

/// What `check` prints, and what start-up goes by.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// What becomes of each item, in the order of the file.
    pub items: Vec<Item>,
    /// What makes the file invalid.
    pub errors: Vec<Problem>,
}

/// One item of a file.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Item {
    /// Where: `plugins[2].parameters.threshold`.
    pub path: String,
    /// Line, from 1.
    pub line: u64,
    /// What becomes of it.
    pub status: Status,
    /// Why, for people.
    pub reason: String,
    /// What to use instead, when refused.
    pub substitute: Option<String>,
}

/// What becomes of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It does what it says.
    Implemented,
    /// It changes nothing here.
    NoEffect,
    /// It would change decisions and cannot be had.
    Refused,
}

/// Something that makes a file invalid.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// Where.
    pub path: String,
    /// Line, from 1; 0 when it concerns the whole file.
    pub line: u64,
    /// What, and what was probably meant.
    pub message: String,
}

/// A configuration file that is followed.
#[derive(Debug)]
pub struct ConfigFile {
    follow: Follow,
}

/// Reads a file's text. The configuration is there unless the report names errors or refused items.
#[must_use]
pub fn read(text: &str) -> (Report, Option<PoolConfig>) {
    let (report, config) = reader::read(text);
    let good = report.errors.is_empty() && !report.refuses();
    (report, config.filter(|_| good))
}

// === impl PoolConfig ===

impl PoolConfig {
    /// What holds when there is no file.
    ///
    /// # Errors
    /// Never but by a mistake in the built-in table of engines.
    pub fn default_config() -> Result<Self, String> {
        let engines = Engines::try_new(&[], "", "").map_err(|e| e.to_string())?;
        let scraping = Scraping { engines: Arc::new(engines), location: MetricsLocation::default() };
        Ok(Self { profile: ProfileSpec::default_profile(), scraping })
    }
}

// === impl Report ===

impl Report {
    /// Is any item refused?
    #[must_use]
    pub fn refuses(&self) -> bool {
        self.items.iter().any(|item| item.status == Status::Refused)
    }

    /// Everything that keeps the file from being used, a line each, with the file's name.
    #[must_use]
    pub fn complaints(&self, file: &str) -> String {
        let errors = self.errors.iter().map(|p| format!("{file}:{}: {}", p.line, at(&p.path, &p.message)));
        let refused = self.items.iter().filter(|item| item.status == Status::Refused).map(|item| {
            let instead = item.substitute.as_deref().map(|s| format!("; instead: {s}")).unwrap_or_default();
            format!("{file}:{}: {}: refused: {}{instead}", item.line, item.path, item.reason)
        });
        errors.chain(refused).collect::<Vec<_>>().join("\n")
    }
}

fn at(path: &str, message: &str) -> String {
    if path.is_empty() { message.to_owned() } else { format!("{path}: {message}") }
}

// === impl ConfigFile ===

impl ConfigFile {
    /// Follows the file at `path`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { follow: Follow::new(path) }
    }

    /// Waits for the file to say something new; the first call tells what it says now. An error says why it cannot be used. Cancel-safe.
    pub async fn changed(&mut self) -> Result<PoolConfig, String> {
        let text = self.follow.changed().await.map_err(|e| e.to_string())?;
        let (report, config) = read(&text);
        let file = self.follow.path().display().to_string();
        for item in report.items.iter().filter(|item| item.status == Status::NoEffect) {
            tracing::info!(file, line = item.line, item = item.path, reason = item.reason, "has no effect");
        }
        config.ok_or_else(|| report.complaints(&file))
    }
}
