//! The file of learned models. The file is written while models change, and read at the start. So a
//! daemon continues with the models of the previous daemon, or of a daemon with a similar pool.
//!
//! The file is JSON. The models in it are encoded as in messages to proxies. If a part is invalid,
//! the whole file is ignored with a warning, and the daemon learns new models.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::PoisonError;

use discovery::whole_file::{self, with_suffix};
use scheduler::latency::LatencyModel;
use scheduler::latency::step::StepModel;
use serde::{Deserialize, Serialize};

use crate::error::error_text;

/// The version of the format.
const SCHEMA: u32 = 1;

/// The largest file read, in bytes: 64 KB of models for each of a hundred pools, as decimal
/// numbers.
const FILE_BYTES_MAX: u64 = 32 << 20;

/// The file mode. All users may read the file, because a daemon of another user may start with
/// these models.
const MODE: u32 = 0o644;

/// The saved models of a pool.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SavedModel {
    /// The step model of the pool's engines.
    pub step: StepModel,
    /// The latency model, if one was learned.
    pub latency: Option<LatencyModel>,
}

/// The file of learned models, and its content.
#[derive(Debug)]
pub struct ModelFile {
    path: PathBuf,
    pools: Mutex<BTreeMap<String, SavedModel>>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelFileContent {
    schema: u32,
    pools: BTreeMap<String, ModelWords>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelWords {
    step: Vec<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    latency: Vec<u32>,
}

// === impl SavedModel ===

impl SavedModel {
    fn read(words: &ModelWords) -> Result<Self, String> {
        let step = StepModel::from_words(&words.step).map_err(error_text)?;
        let latency = (!words.latency.is_empty())
            .then(|| LatencyModel::from_words(&words.latency))
            .transpose();
        Ok(Self {
            step,
            latency: latency.map_err(error_text)?,
        })
    }

    fn words(&self) -> ModelWords {
        ModelWords {
            step: self.step.words(),
            latency: self
                .latency
                .as_ref()
                .map(LatencyModel::words)
                .unwrap_or_default(),
        }
    }
}

// === impl ModelFile ===

impl ModelFile {
    /// Reads the file of learned models. A missing or invalid file is treated as empty.
    #[must_use]
    pub fn open(path: PathBuf) -> Self {
        let file = Self {
            path,
            pools: Mutex::default(),
        };
        file.read_again();
        file
    }

    /// Reads the file again, because another daemon may have written it.
    pub fn read_again(&self) {
        let pools =
            read(&self.path).and_then(|text| text.map_or(Ok(BTreeMap::new()), |text| parse(&text)));
        *self.pools.lock().unwrap_or_else(PoisonError::into_inner) = pools.unwrap_or_else(|why| {
            tracing::warn!(file = %self.path.display(), why, "cannot read models from the file; learning continues without them");
            BTreeMap::new()
        });
    }

    #[must_use]
    pub fn model(&self, pool: &str) -> Option<SavedModel> {
        self.pools
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(pool)
            .cloned()
    }

    /// Saves the models of a pool beside those of other pools. The file is replaced atomically, so
    /// that no reader finds a part of the file.
    ///
    /// # Errors
    /// Returns the error of the file system. In this case the old file is intact.
    pub fn save(&self, pool: &str, model: SavedModel) -> io::Result<()> {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.insert(pool.to_owned(), model);
        let words = pools
            .iter()
            .map(|(name, model)| (name.clone(), model.words()))
            .collect();
        let text = serde_json::to_string(&ModelFileContent {
            schema: SCHEMA,
            pools: words,
        })
        .map_err(io::Error::other)?;
        let draft = with_suffix(&self.path, ".new");
        whole_file::replace(&self.path, &draft, text.as_bytes(), MODE)
    }
}

fn read(path: &Path) -> Result<Option<String>, String> {
    match whole_file::read_text(path, FILE_BYTES_MAX) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

fn parse(text: &str) -> Result<BTreeMap<String, SavedModel>, String> {
    let content: ModelFileContent = serde_json::from_str(text).map_err(error_text)?;
    if content.schema != SCHEMA {
        return Err(format!(
            "schema {}, this daemon reads {SCHEMA}",
            content.schema
        ));
    }
    content
        .pools
        .iter()
        .map(|(name, words)| {
            Ok((
                name.clone(),
                SavedModel::read(words).map_err(|why| format!("pool {name}: {why}"))?,
            ))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::endpoint;
    use super::*;

    #[test]
    fn what_is_kept_is_there_in_the_next_life() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("models.json");
        let file = ModelFile::open(path.clone());
        assert_eq!(file.model("a"), None);
        let model = SavedModel {
            step: StepModel::default().with_speed(endpoint(3), 2.0, 1.5),
            latency: Some(LatencyModel::constant(120.0, 9.0).with_endpoint(endpoint(3), 2.0, 1.5)),
        };
        file.save("a", model.clone()).unwrap();
        file.save("b", SavedModel::default()).unwrap();
        let next = ModelFile::open(path);
        assert_eq!(
            (next.model("a"), next.model("b"), next.model("c")),
            (Some(model), Some(SavedModel::default()), None)
        );
    }

    #[test]
    fn what_cannot_be_used_holds_nothing_and_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("models.json");
        let nan = f32::NAN.to_bits();
        for text in [
            "",
            "{}",
            r#"{"schema":2,"pools":{}}"#,
            r#"{"schema":1,"pools":{"a":{"step":[]}}}"#,
            &format!(r#"{{"schema":1,"pools":{{"a":{{"step":[22321,{nan}]}}}}}}"#),
        ] {
            std::fs::write(&path, text).unwrap();
            let file = ModelFile::open(path.clone());
            assert_eq!(file.model("a"), None, "{text}");
            file.save("a", SavedModel::default()).unwrap();
            assert_eq!(
                ModelFile::open(path.clone()).model("a"),
                Some(SavedModel::default())
            );
        }
    }
}
