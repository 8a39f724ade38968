//! The end of a drill: who was failed, and what is left in the books.
//!
//! While something breaks, [`testbed::load::LoadGenerator`] runs. At the end everybody must have been served, except whom the laws of nature took (a stream
//! whose server or own proxy dies), and then, when nothing runs any more, nothing may be in any ledger: not at an endpoint, not of a model.

use std::time::Duration;

use serde_json::Value;

use testbed::load::{LoadGenerator, LoadOutcome};
use testbed::stack::Stack;
use testbed::{Result, wait_for};

/// How long the last report of all VMs may take; promised is a second or two.
const LIMIT: Duration = Duration::from_secs(60);

/// Reports that must have come of each proxy since the end of the traffic: of one that is under way the beginning may be older.
const REPORTS: f64 = 2.0;

/// What a ledger has of an endpoint.
const ENTRIES: [&str; 5] = ["in_flight", "in_flight_prefill_tokens", "in_flight_decode_tokens", "in_flight_prompts", "in_flight_with_slo"];

/// Ends a drill in which nobody may be failed.
///
/// # Errors
/// If somebody was, or something is left.
pub async fn close(drill: &str, load: LoadGenerator, stack: &Stack) -> Result<LoadOutcome> {
    close_but(drill, load, stack, |_| false).await
}

/// Ends a drill in which failures that are `excused` may happen; says how many did.
///
/// # Errors
/// If another happened, or something is left.
pub async fn close_but(drill: &str, load: LoadGenerator, stack: &Stack, excused: impl Fn(&str) -> bool) -> Result<LoadOutcome> {
    let outcome = load.stop().await?;
    let mut rest = outcome.clone();
    rest.failures.retain(|failure| !excused(failure));
    rest.check_all_served()?;
    nothing_left(stack).await?;
    note(drill, &format!("{} served, {} failed", outcome.total(), outcome.failures.len()));
    Ok(outcome)
}

/// Writes down what a drill saw, for who reads the test's output.
pub fn note(drill: &str, seen: &str) {
    #[allow(clippy::print_stdout, reason = "it is shown by `--nocapture`, and docs/reference/failure-drills.md is written from it")]
    {
        println!("drill {drill}: {seen}");
    }
}

/// Holds failures against Envoy's own account of them: of its access log, which it writes once a second, as many lines are `lost` as are expected.
///
/// # Errors
/// If it has more or fewer, with how many.
pub async fn agree(stack: &Stack, expected: usize, lost: impl Fn(&Value) -> bool) -> Result<()> {
    let count = || stack.envoy.access_log().iter().filter(|line| lost(line)).count();
    let agrees = || async { (count() == expected).then_some(()) };
    wait_for(LIMIT, "Envoy to have lost as many", agrees).await.map_err(|error| format!("{error}: {} and not {expected}", count()).into())
}

/// Waits until the proxy has nothing under way, and what its VMs report since then is nothing too.
///
/// # Errors
/// If anything stays in a ledger.
pub async fn nothing_left(stack: &Stack) -> Result<()> {
    let idle = || async { (stack.envoy.stat("cluster.inference-pool.upstream_rq_active").await.ok()? == 0).then_some(()) };
    wait_for(LIMIT, "no request to be under way", idle).await?;
    let before = LedgerMetrics::read(stack).await?;
    let empty = || async {
        let now = LedgerMetrics::read(stack).await.ok()?;
        (now.reports >= before.reports + REPORTS * before.proxies.max(1.0) && now.entries.is_empty()).then_some(())
    };
    match wait_for(LIMIT, "the ledgers to be empty", empty).await {
        Ok(()) => Ok(()),
        Err(error) => Err(format!("{error}; left: {:?}", LedgerMetrics::read(stack).await?.entries).into()),
    }
}

/// What the daemon knows of ledgers.
struct LedgerMetrics {
    reports: f64,
    /// Proxies that the daemon hears.
    proxies: f64,
    /// Everything that is not zero.
    entries: Vec<String>,
}

impl LedgerMetrics {
    async fn read(stack: &Stack) -> Result<Self> {
        let daemon = stack.daemon.as_ref().ok_or("no daemon keeps the books")?;
        let page = daemon.admin("/metrics").await?.text();
        let number = |line: &str| line.rsplit(' ').next().and_then(|number| number.parse::<f64>().ok());
        let reports =
            page.lines().find(|line| line.starts_with("switchpoint_reports_total")).and_then(number).ok_or("no count of reports")?;
        let running = page.lines().filter(|line| line.starts_with("llm_d_epp_request_running{") && number(line) != Some(0.0));
        let mut entries: Vec<String> = running.map(str::to_owned).collect();
        for endpoint in daemon.endpoints().await? {
            for entry in ENTRIES {
                if endpoint[entry] != 0 {
                    entries.push(format!("{entry} {} at {}", endpoint[entry], endpoint["name"]));
                }
            }
        }
        let state: Value = serde_json::from_str(&daemon.admin("/debug/state").await?.text())?;
        for pool in state["pools"].as_array().into_iter().flatten().filter(|pool| pool["in_flight_at_former_endpoints"] != 0) {
            entries.push(format!("{} in flight at former endpoints of pool {}", pool["in_flight_at_former_endpoints"], pool["name"]));
        }
        let proxies = state["proxies"].as_array().map_or(0, Vec::len) as f64;
        Ok(Self { reports, proxies, entries })
    }
}
