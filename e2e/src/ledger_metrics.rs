//! Checks the end of a drill: which requests failed, and whether the ledgers of requests in flight
//! are empty.
//!
//! [`testbed::load::LoadGenerator`] runs while something breaks. At the end every request must have
//! been served, except those that no proxy can save (streams whose model server or proxy process
//! dies). When no request runs any more, every ledger must be empty, by endpoint and by model.

use std::time::Duration;

use serde_json::Value;

use testbed::load::{LoadGenerator, LoadOutcome};
use testbed::stack::Stack;
use testbed::{Result, wait_for};

/// The maximum time until all VMs have sent their last report. The product promises one or two
/// seconds.
const LIMIT: Duration = Duration::from_secs(60);

/// The number of reports that each proxy must have sent since the end of the traffic. The first
/// report may have begun before the traffic ended, so the second report counts.
const REPORTS: f64 = 2.0;

/// The fields of a ledger entry, which must all become 0.
const ENTRIES: [&str; 6] = [
    "in_flight",
    "in_flight_prefill_tokens",
    "in_flight_decode_tokens",
    "in_flight_prompts",
    "in_flight_with_slo",
    "unread",
];

/// Ends a drill in which no request may fail.
///
/// # Errors
/// Fails if a request failed, or a ledger is not empty.
pub async fn close(drill: &str, load: LoadGenerator, stack: &Stack) -> Result<LoadOutcome> {
    close_but(drill, load, stack, |_| false).await
}

/// Ends a drill in which only failures that match `excused` may happen. The outcome lists all
/// failures.
///
/// # Errors
/// Fails if another failure happened, or a ledger is not empty.
pub async fn close_but(
    drill: &str,
    load: LoadGenerator,
    stack: &Stack,
    excused: impl Fn(&str) -> bool,
) -> Result<LoadOutcome> {
    let outcome = load.stop().await?;
    let mut rest = outcome.clone();
    rest.failures.retain(|failure| !excused(failure));
    rest.check_all_served()?;
    nothing_left(stack).await?;
    note(
        drill,
        &format!(
            "{} served, {} failed",
            outcome.total(),
            outcome.failures.len()
        ),
    );
    Ok(outcome)
}

/// Prints what a drill observed.
pub fn note(drill: &str, seen: &str) {
    #[allow(
        clippy::print_stdout,
        reason = "it is shown by `--nocapture`, and docs/reference/failure-drills.md is written from it"
    )]
    {
        println!("drill {drill}: {seen}");
    }
}

/// Waits until exactly `expected` lines of Envoy's access log match `lost`. Envoy writes the log
/// once a second.
///
/// # Errors
/// Fails if the number of matching lines stays different from `expected`. The error has the number.
pub async fn agree(stack: &Stack, expected: usize, lost: impl Fn(&Value) -> bool) -> Result<()> {
    let count = || {
        stack
            .envoy
            .access_log()
            .iter()
            .filter(|line| lost(line))
            .count()
    };
    let agrees = || async { (count() == expected).then_some(()) };
    wait_for(
        LIMIT,
        "Envoy's access log to have as many lost requests",
        agrees,
    )
    .await
    .map_err(|error| format!("{error}: {} and not {expected}", count()).into())
}

/// Waits until the proxy has no request in flight, and its VMs have then reported empty ledgers.
///
/// # Errors
/// Fails if a ledger does not become empty in time.
pub async fn nothing_left(stack: &Stack) -> Result<()> {
    let idle = || async {
        (stack
            .envoy
            .stat("cluster.inference-pool.upstream_rq_active")
            .await
            .ok()?
            == 0)
            .then_some(())
    };
    wait_for(LIMIT, "all requests to end", idle).await?;
    let before = LedgerMetrics::read(stack).await?;
    let empty = || async {
        let now = LedgerMetrics::read(stack).await.ok()?;
        (now.reports >= before.reports + REPORTS * before.proxies.max(1.0)
            && now.entries.is_empty())
        .then_some(())
    };
    match wait_for(LIMIT, "the ledgers to be empty", empty).await {
        Ok(()) => Ok(()),
        Err(error) => Err(format!(
            "{error}; left: {:?}",
            LedgerMetrics::read(stack).await?.entries
        )
        .into()),
    }
}

/// The ledger metrics that the daemon reports.
struct LedgerMetrics {
    reports: f64,
    /// The number of proxies connected to the daemon.
    proxies: f64,
    /// All ledger values that are not zero.
    entries: Vec<String>,
}

impl LedgerMetrics {
    async fn read(stack: &Stack) -> Result<Self> {
        let daemon = stack.daemon.as_ref().ok_or("the stack has no daemon")?;
        let page = daemon.admin("/metrics").await?.text();
        let number = |line: &str| {
            line.rsplit(' ')
                .next()
                .and_then(|number| number.parse::<f64>().ok())
        };
        let reports = page
            .lines()
            .find(|line| line.starts_with("switchpoint_reports_total"))
            .and_then(number)
            .ok_or("no count of reports")?;
        let running = page.lines().filter(|line| {
            line.starts_with("llm_d_epp_request_running{") && number(line) != Some(0.0)
        });
        let mut entries: Vec<String> = running.map(str::to_owned).collect();
        for endpoint in daemon.endpoints().await? {
            for entry in ENTRIES {
                if endpoint[entry] != 0 {
                    entries.push(format!(
                        "{entry} {} at {}",
                        endpoint[entry], endpoint["name"]
                    ));
                }
            }
        }
        let state: Value = serde_json::from_str(&daemon.admin("/debug/state").await?.text())?;
        for pool in state["pools"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|pool| pool["in_flight_at_former_endpoints"] != 0)
        {
            entries.push(format!(
                "{} in flight at former endpoints of pool {}",
                pool["in_flight_at_former_endpoints"], pool["name"]
            ));
        }
        let proxies = state["proxies"].as_array().map_or(0, Vec::len) as f64;
        Ok(Self {
            reports,
            proxies,
            entries,
        })
    }
}
