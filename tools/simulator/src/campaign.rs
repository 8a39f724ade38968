//! The campaigns whose results are in docs/reference/routing-quality.md, by name. Parameters were
//! tuned on seeds from 101 on; the campaigns use other seeds.

use crate::grid::{ExperimentGrid, parallel};
use crate::hardware::{LLAMA_8B_H100, QWEN_32B_H200};
use crate::policy::{EXACT, MAIN, OURS};
use crate::recovery::{RecoveryResult, RecoverySeries};
use crate::store::HighestRate;
use crate::workload::WorkloadKind;
use crate::world::{EngineModel, PoolSetting, SettingChange, SharingMode};

/// The seeds of all tables.
const SEEDS: [u64; 5] = [1, 2, 3, 4, 5];

/// Loads of the main table.
const LOADS: [f64; 3] = [0.5, 0.7, 0.9];

/// The policies of the other tables.
const FEW: [&str; 7] = [
    OURS,
    "2/2/3",
    "2/2/3/2",
    "2/2/3+active",
    "affinity+token-load",
    "lmetric",
    "least-request",
];

/// The policies of settings whose engines differ or change. [`EXACT`] is ours with known step
/// times.
const CHANGING: [&str; 8] = [
    OURS,
    EXACT,
    "2/2/3",
    "2/2/3/2",
    "2/2/3+active",
    "affinity+token-load",
    "lmetric",
    "least-request",
];

/// The policies of pools with LoRA adapters, and of pools that are split into prefill and decode,
/// where a policy picks two engines.
const LORA: [&str; 6] = [
    OURS,
    "2/2/3",
    "2/2/3+lora",
    "affinity+token-load",
    "lmetric",
    "least-request",
];
const SPLIT: [&str; 5] = [OURS, "2/2/3", "2/2/3/2", "affinity+token-load", "random"];

/// The policies whose ranking is compared on another engine model.
const RANKED: [&str; 6] = [
    OURS,
    "affinity+token-load",
    "lmetric",
    "2/2/3",
    "least-request",
    "round-robin",
];

/// The campaign whose results are the main table.
pub(crate) const MAIN_TABLE: &str = "main";

/// The campaign on the other engine model.
pub(crate) const SECOND_ENGINE: &str = "second-engine";

/// All campaigns, the main one first.
pub(crate) fn all() -> Vec<ExperimentGrid> {
    let plain = PoolSetting::plain(LLAMA_8B_H100);
    let grid =
        |name: &str, setting: &PoolSetting, loads: &[f64], policies: &[&str]| ExperimentGrid {
            name: name.to_owned(),
            setting: *setting,
            capacity: 1.0,
            kinds: WorkloadKind::MAIN.to_vec(),
            loads: loads.to_vec(),
            policies: policies.iter().map(|&name| name.to_owned()).collect(),
            seeds: SEEDS.to_vec(),
        };
    let mut small_budget = plain;
    small_budget.engine.budget = 2048;
    let mut with_adapters = plain;
    (
        with_adapters.engine.adapter_places,
        with_adapters.engine.adapter_load_ms,
    ) = (8, 200.0);
    let split = PoolSetting {
        prefillers: 4,
        ..plain
    };
    let mixed = PoolSetting {
        odd_slowdown: 2.0,
        ..plain
    };
    let four = |sharing| PoolSetting {
        proxies: 4,
        sharing,
        ..plain
    };
    let changing = |change| PoolSetting {
        change: Some(change),
        ..plain
    };
    let aged = |scrape_ms| PoolSetting { scrape_ms, ..plain };
    let scraped = [OURS, "2/2/3", "2/2/3/2", "2/2/3+active"];
    let shared = [
        OURS,
        "2/2/3/2",
        "2/2/3+active",
        "affinity+token-load",
        "lmetric",
    ];
    vec![
        grid(MAIN_TABLE, &plain, &LOADS, &MAIN),
        ExperimentGrid {
            kinds: WorkloadKind::FURTHER.to_vec(),
            ..grid("further-workloads", &plain, &[0.5, 0.7], &FEW)
        },
        ExperimentGrid {
            kinds: vec![WorkloadKind::Assistants],
            ..grid("light-load", &plain, &[0.1, 0.25], &FEW)
        },
        grid("budget-2048", &small_budget, &[0.5, 0.7], &FEW),
        ExperimentGrid {
            capacity: 0.75,
            ..grid("mixed-speeds", &mixed, &[0.5, 0.7], &CHANGING)
        },
        // The two GPUs differ by this factor on every workload except code, where it is twice as
        // much.
        ExperimentGrid {
            capacity: 0.35,
            ..grid(
                "qwen3-32b-h200",
                &PoolSetting::plain(QWEN_32B_H200),
                &[0.5],
                &FEW,
            )
        },
        grid(
            "4-proxies-private",
            &four(SharingMode::Private),
            &[0.7],
            &shared,
        ),
        grid(
            "4-proxies-10ms",
            &four(SharingMode::After(10.0)),
            &[0.7],
            &shared,
        ),
        grid(
            "4-proxies-100ms",
            &four(SharingMode::After(100.0)),
            &[0.7],
            &shared,
        ),
        grid("metrics-0ms", &aged(0.0), &[0.7], &scraped),
        grid("metrics-1s", &aged(1_000.0), &[0.7], &scraped),
        grid("metrics-2s", &aged(2_000.0), &[0.7], &scraped),
        grid(
            "one-slows-3x",
            &changing(SettingChange::Degrades(3.0)),
            &[0.5],
            &CHANGING,
        ),
        grid(
            "one-restarts",
            &changing(SettingChange::Restarts),
            &[0.7],
            &CHANGING,
        ),
        grid(
            "two-join",
            &changing(SettingChange::Grows),
            &[0.6],
            &CHANGING,
        ),
        ExperimentGrid {
            kinds: vec![WorkloadKind::Adapters],
            ..grid("lora-zipf", &with_adapters, &[0.5, 0.7], &LORA)
        },
        grid("prefill-decode", &split, &[0.35], &SPLIT),
        grid(
            SECOND_ENGINE,
            &PoolSetting {
                model: EngineModel::Aisimulate,
                ..plain
            },
            &[0.7],
            &RANKED,
        ),
    ]
}

/// The recovery of each policy in the campaigns that change the pool.
pub(crate) fn recoveries(
    policies: &[String],
    threads: usize,
) -> Result<Vec<RecoveryResult>, String> {
    let grids: Vec<ExperimentGrid> = all()
        .into_iter()
        .filter(|grid| grid.setting.change.is_some())
        .collect();
    let wanted = |policy: &&String| policies.is_empty() || policies.contains(policy);
    let jobs: Vec<(&ExperimentGrid, &String)> = grids
        .iter()
        .flat_map(|grid| {
            grid.policies
                .iter()
                .filter(wanted)
                .map(move |policy| (grid, policy))
        })
        .collect();
    let mut recovered = Vec::new();
    for kind in WorkloadKind::MAIN {
        let mut by_seed: Vec<Vec<RecoverySeries>> = Vec::new();
        for seed in SEEDS {
            let workload = kind.load(seed)?;
            by_seed.push(parallel(threads, &jobs, |(grid, policy)| {
                grid.after_change((kind, &workload), policy, seed)
            })?);
        }
        recovered.extend(jobs.iter().enumerate().map(|(at, (grid, policy))| {
            let series: Vec<&RecoverySeries> = by_seed
                .iter()
                .filter_map(|of_seed| of_seed.get(at))
                .collect();
            let all = RecoverySeries::together(&series);
            RecoveryResult {
                setting: grid.name.clone(),
                workload: kind.name().to_owned(),
                policy: (*policy).clone(),
                all: all.recovery(),
                by_seed: series.iter().map(|series| series.recovery()).collect(),
                curve: all.curve(),
            }
        }));
    }
    Ok(recovered)
}

/// The highest rates at which 90 % of the requests meet their SLO.
pub(crate) fn highest_rates(
    policies: &[String],
    threads: usize,
) -> Result<Vec<HighestRate>, String> {
    let names: Vec<String> = if policies.is_empty() {
        MAIN.iter().map(|&name| name.to_owned()).collect()
    } else {
        policies.to_vec()
    };
    let grid = ExperimentGrid {
        name: "highest-rate".to_owned(),
        setting: PoolSetting::plain(LLAMA_8B_H100),
        capacity: 1.0,
        kinds: Vec::new(),
        loads: Vec::new(),
        policies: Vec::new(),
        seeds: Vec::new(),
    };
    let mut rates = Vec::new();
    for kind in WorkloadKind::MAIN {
        for seed in SEEDS {
            let workload = kind.load(seed)?;
            rates.extend(parallel(threads, &names, |policy| {
                let requests_per_s =
                    grid.highest_rate((kind, &workload), policy, seed, |measures| {
                        measures.slo >= 0.9
                    })?;
                Ok(HighestRate {
                    workload: kind.name().to_owned(),
                    policy: policy.clone(),
                    seed,
                    requests_per_s,
                })
            })?);
        }
    }
    Ok(rates)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_there_are_at_least_five_seeds() {
        let all = all();
        assert!(
            all.iter()
                .all(|grid| grid.seeds.len() >= 5 && grid.seeds.iter().all(|&seed| seed < 100))
        );
        assert!(
            all.iter()
                .all(|grid| all.iter().filter(|other| other.name == grid.name).count() == 1)
        );
    }
}
