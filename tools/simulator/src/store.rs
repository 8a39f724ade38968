//! `quality.json`: the results of all runs, by name. A repeated run replaces its old result, so a
//! campaign can be run in parts.

use std::path::Path;

use serde_json::{Value, json};

use crate::grid::GridCell;
use crate::measure::RunMeasures;
use crate::recovery::{Recovery, RecoveryResult};
use crate::slo::{ClassOutcome, SloAttainment};

/// The highest rate at which 90 % of the requests meet their SLO.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HighestRate {
    pub(crate) workload: String,
    pub(crate) policy: String,
    pub(crate) seed: u64,
    pub(crate) requests_per_s: f64,
}

#[derive(Debug, Default)]
pub(crate) struct ResultStore {
    pub(crate) cells: Vec<GridCell>,
    pub(crate) rates: Vec<HighestRate>,
    pub(crate) recoveries: Vec<RecoveryResult>,
    pub(crate) slo: Vec<SloAttainment>,
}

// === impl ResultStore ===

impl ResultStore {
    /// Reads the file; a missing file is an empty store.
    ///
    /// # Errors
    /// When the file is not valid JSON or a row of it is invalid.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let Ok(text) = std::fs::read_to_string(path) else {
            return Ok(Self::default());
        };
        let value: Value =
            serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        let rows = |name: &str| {
            value
                .get(name)
                .and_then(Value::as_array)
                .cloned()
                .unwrap_or_default()
        };
        let wrong = || format!("{}: invalid row", path.display());
        Ok(Self {
            cells: rows("rows")
                .iter()
                .map(cell)
                .collect::<Option<_>>()
                .ok_or_else(wrong)?,
            rates: rows("highest_rates")
                .iter()
                .map(rate)
                .collect::<Option<_>>()
                .ok_or_else(wrong)?,
            recoveries: rows("recoveries")
                .iter()
                .map(recovered)
                .collect::<Option<_>>()
                .ok_or_else(wrong)?,
            slo: rows("slo_classes")
                .iter()
                .map(attained)
                .collect::<Option<_>>()
                .ok_or_else(wrong)?,
        })
    }

    /// Adds results. They replace older ones of the same names.
    pub(crate) fn put(&mut self, new: Self) {
        let Self {
            cells,
            rates,
            recoveries,
            slo,
        } = new;
        let run = |cell: &GridCell| {
            (
                cell.setting.clone(),
                cell.workload.clone(),
                cell.load.to_bits(),
                cell.policy.clone(),
                cell.seed,
            )
        };
        let new: std::collections::BTreeSet<_> = cells.iter().map(run).collect();
        self.cells.retain(|cell| !new.contains(&run(cell)));
        self.cells.extend(cells);
        self.rates.retain(|old| {
            !rates.iter().any(|new| {
                (&new.workload, &new.policy, new.seed) == (&old.workload, &old.policy, old.seed)
            })
        });
        self.rates.extend(rates);
        let names = |row: &RecoveryResult| {
            (
                row.setting.clone(),
                row.workload.clone(),
                row.policy.clone(),
            )
        };
        self.recoveries
            .retain(|old| !recoveries.iter().any(|new| names(new) == names(old)));
        self.recoveries.extend(recoveries);
        let run = |row: &SloAttainment| {
            (
                row.by.clone(),
                row.load.to_bits(),
                row.class.clone(),
                row.seed,
            )
        };
        self.slo
            .retain(|old| !slo.iter().any(|new| run(new) == run(old)));
        self.slo.extend(slo);
    }

    pub(crate) fn write(&self, path: &Path) -> Result<(), String> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)
                .map_err(|error| format!("{}: {error}", folder.display()))?;
        }
        let rows: Vec<Value> = self.cells.iter().map(cell_json).collect();
        let rates: Vec<Value> = self.rates.iter().map(rate_json).collect();
        let recoveries: Vec<Value> = self.recoveries.iter().map(recovered_json).collect();
        let slo: Vec<Value> = self.slo.iter().map(attained_json).collect();
        let parts = [
            ("rows", rows),
            ("highest_rates", rates),
            ("recoveries", recoveries),
            ("slo_classes", slo),
        ]
        .map(|(name, rows)| {
            let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
            format!("\"{name}\":[\n{}\n]", lines.join(",\n"))
        });
        let text = format!("{{{}}}\n", parts.join(","));
        std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
    }
}

fn cell_json(cell: &GridCell) -> Value {
    let m = &cell.measures;
    json!({
        "setting": cell.setting, "workload": cell.workload, "load": cell.load, "policy": cell.policy, "seed": cell.seed,
        "ttft_ms": {"mean": m.ttft_mean, "p50": m.ttft_p50, "p90": m.ttft_p90, "p99": m.ttft_p99},
        "e2e_ms": {"mean": m.e2e_mean}, "tpot_p99_ms": m.tpot_p99, "slo": m.slo, "hits": m.hits, "late_ttft_ms": m.late_ttft,
    })
}

fn cell(value: &Value) -> Option<GridCell> {
    let ttft = |name: &str| value.get("ttft_ms")?.get(name)?.as_f64();
    let number = |name: &str| value.get(name)?.as_f64();
    let text = |name: &str| value.get(name)?.as_str().map(str::to_owned);
    let measures = RunMeasures {
        ttft_mean: ttft("mean")?,
        ttft_p50: ttft("p50")?,
        ttft_p90: ttft("p90")?,
        ttft_p99: ttft("p99")?,
        e2e_mean: value.get("e2e_ms")?.get("mean")?.as_f64()?,
        tpot_p99: number("tpot_p99_ms")?,
        slo: number("slo")?,
        hits: number("hits")?,
        late_ttft: number("late_ttft_ms")?,
    };
    let setting = text("setting")?;
    let workload = text("workload")?;
    let policy = text("policy")?;
    Some(GridCell {
        setting,
        workload,
        load: number("load")?,
        policy,
        seed: value.get("seed")?.as_u64()?,
        measures,
    })
}

fn rate_json(rate: &HighestRate) -> Value {
    json!({"workload": rate.workload, "policy": rate.policy, "seed": rate.seed, "requests_per_s": rate.requests_per_s})
}

fn rate(value: &Value) -> Option<HighestRate> {
    let text = |name: &str| value.get(name)?.as_str().map(str::to_owned);
    let seed = value.get("seed")?.as_u64()?;
    let requests_per_s = value.get("requests_per_s")?.as_f64()?;
    Some(HighestRate {
        workload: text("workload")?,
        policy: text("policy")?,
        seed,
        requests_per_s,
    })
}

fn recovered_json(row: &RecoveryResult) -> Value {
    let RecoveryResult {
        setting,
        workload,
        policy,
        all,
        by_seed,
        curve,
    } = row;
    let by_seed: Vec<Value> = by_seed.iter().map(recovery_json).collect();
    json!({"setting": setting, "workload": workload, "policy": policy, "all": recovery_json(all), "by_seed": by_seed, "curve": curve})
}

fn recovered(value: &Value) -> Option<RecoveryResult> {
    let text = |name: &str| value.get(name)?.as_str().map(str::to_owned);
    let by_seed = value
        .get("by_seed")?
        .as_array()?
        .iter()
        .map(recovery)
        .collect::<Option<_>>()?;
    let curve = value
        .get("curve")?
        .as_array()?
        .iter()
        .map(Value::as_f64)
        .collect::<Option<_>>()?;
    let setting = text("setting")?;
    let workload = text("workload")?;
    let policy = text("policy")?;
    Some(RecoveryResult {
        setting,
        workload,
        policy,
        all: recovery(value.get("all")?)?,
        by_seed,
        curve,
    })
}

/// Seconds are `null` for a policy that did not recover within the run.
fn recovery_json(Recovery { seconds, worst }: &Recovery) -> Value {
    json!({"seconds": seconds, "worst": worst})
}

fn recovery(value: &Value) -> Option<Recovery> {
    Some(Recovery {
        seconds: value.get("seconds")?.as_u64(),
        worst: value.get("worst")?.as_f64()?,
    })
}

fn attained_json(
    SloAttainment {
        by,
        load,
        class,
        seed,
        outcome,
    }: &SloAttainment,
) -> Value {
    let ClassOutcome {
        sent,
        in_time,
        shed,
    } = outcome;
    json!({"by": by, "load": load, "class": class, "seed": seed, "sent": sent, "in_time": in_time, "shed": shed})
}

fn attained(value: &Value) -> Option<SloAttainment> {
    let text = |name: &str| value.get(name)?.as_str().map(str::to_owned);
    let count = |name: &str| u32::try_from(value.get(name)?.as_u64()?).ok();
    let outcome = ClassOutcome {
        sent: count("sent")?,
        in_time: count("in_time")?,
        shed: count("shed")?,
    };
    let load = value.get("load")?.as_f64()?;
    let seed = value.get("seed")?.as_u64()?;
    Some(SloAttainment {
        by: text("by")?,
        load,
        class: text("class")?,
        seed,
        outcome,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_read_as_written_and_a_repeated_run_replaces_the_old_one() {
        let measures = RunMeasures {
            ttft_mean: 1.5,
            slo: 0.25,
            ..RunMeasures::default()
        };
        let of = |load, ttft_mean| GridCell {
            setting: "main".into(),
            workload: "code".into(),
            load,
            policy: "ours".into(),
            seed: 3,
            measures: RunMeasures {
                ttft_mean,
                ..measures
            },
        };
        let rate = HighestRate {
            workload: "code".into(),
            policy: "ours".into(),
            seed: 1,
            requests_per_s: 61.5,
        };
        let recovered = |seconds| RecoveryResult {
            setting: "one-restarts".into(),
            workload: "code".into(),
            policy: "ours".into(),
            all: Recovery {
                seconds,
                worst: 1.25,
            },
            by_seed: vec![Recovery {
                seconds: None,
                worst: 3.0,
            }],
            curve: vec![1.5, 1.0],
        };
        let attained = |in_time| SloAttainment {
            by: "slo".into(),
            load: 0.9,
            class: "batch".into(),
            seed: 2,
            outcome: ClassOutcome {
                sent: 10,
                in_time,
                shed: 1,
            },
        };
        let mut store = ResultStore::default();
        let rates = vec![rate.clone()];
        let recoveries = vec![recovered(None)];
        store.put(ResultStore {
            cells: vec![of(0.5, 1.0), of(0.7, 2.0)],
            rates: rates.clone(),
            recoveries,
            slo: vec![attained(3)],
        });
        store.put(ResultStore {
            cells: vec![of(0.7, 3.0)],
            rates,
            recoveries: vec![recovered(Some(31))],
            slo: vec![attained(9)],
        });
        let path =
            std::env::temp_dir().join(format!("simulator-store-{}.json", std::process::id()));
        store.write(&path).unwrap();
        let read = ResultStore::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(
            (read.cells, read.rates),
            (vec![of(0.5, 1.0), of(0.7, 3.0)], vec![rate])
        );
        assert_eq!(
            (read.recoveries, read.slo),
            (vec![recovered(Some(31))], vec![attained(9)])
        );
    }
}
