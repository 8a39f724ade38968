//! Measures the share of mixed traffic that is in time, on a pool with fast and slow servers at 0.9
//! of its capacity. Compares four policies with the same seeds: SLO-aware, without a configuration,
//! with weighted load and prefix scorers, and with round robin.

use std::time::Duration;

use e2e::slo::{ExperimentClass, ExperimentPolicy, SloExperiment};
use testbed::Result;
use testbed::model_server::ModelServerOptions;

#[tokio::test]
async fn critical_requests_are_in_time_where_without_slos_they_are_late() -> Result<()> {
    let experiment = SloExperiment {
        servers: [2, 2],
        engine: ModelServerOptions {
            models: vec!["demo".to_owned()],
            max_num_seqs: 4,
            speed: 0.5,
            ..ModelServerOptions::default()
        },
        slowdown: 3.0,
        classes: vec![
            ExperimentClass {
                name: "critical",
                priority: 1,
                tenths: 3,
                ttft_ms: 1_500.0,
                tpot_ms: 26.0,
            },
            ExperimentClass {
                name: "standard",
                priority: 0,
                tenths: 4,
                ttft_ms: 5_000.0,
                tpot_ms: 150.0,
            },
            ExperimentClass {
                name: "batch",
                priority: -1,
                tenths: 3,
                ttft_ms: 5_000.0,
                tpot_ms: 150.0,
            },
        ],
        load: 0.9,
        measured: Duration::from_secs(40),
        seeds: vec![1, 2, 3],
    };
    let rate = experiment.capacity().await? * experiment.load;
    let [by_slo, by_default, by_weights, by_turns] = [
        experiment.run(ExperimentPolicy::Slo, rate).await?,
        experiment.run(ExperimentPolicy::Default, rate).await?,
        experiment.run(ExperimentPolicy::Weighed, rate).await?,
        experiment.run(ExperimentPolicy::RoundRobin, rate).await?,
    ];
    println!(
        "{rate:.1} requests/s\nSLO-aware {by_slo:#?}\ndefault {by_default:#?}\nweighted {by_weights:#?}\nround robin {by_turns:#?}"
    );
    let ours = by_slo["critical"].attainment();
    assert!(ours >= 0.95, "critical in time: {ours}");
    for (policy, without) in [
        ("default", &by_default),
        ("weighted", &by_weights),
        ("round robin", &by_turns),
    ] {
        let late = without["critical"].attainment();
        assert!(
            late < 0.95,
            "{policy}: {late} of critical requests are in time without SLOs, so this load proves nothing"
        );
    }
    assert_eq!(
        by_slo["critical"].shed, 0,
        "only requests that are not critical are shed"
    );
    Ok(())
}
