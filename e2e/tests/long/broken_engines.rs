//! Pools with a broken engine behind one worker, behind two workers, and behind two proxies that
//! share state.

use std::net::SocketAddr;
use std::time::Duration;

use testbed::Result;
use testbed::broken_pools::BrokenPools;
use testbed::second_envoy::SecondEnvoy;

/// The maximum time until a mended engine gets traffic again: ten times as long as this should
/// take.
const MENDED_LIMIT: Duration = Duration::from_secs(100);

/// The maximum share of all requests after the first seconds that a broken engine may get.
const SHARE_MAX: f64 = 0.02;

/// The number of probes that each proxy sends in the measured time. A broken engine may always get
/// these probes, and one more from each worker, because two workers may probe at the same time. On
/// a busy machine the probes are more than [`SHARE_MAX`], because fewer requests run in that time.
const PROBES: u64 = 4;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_engine_gets_next_to_no_traffic_behind_one_worker_two_and_two_proxies()
-> Result<()> {
    for (workers, proxies) in [(1, 1), (2, 1), (2, 2)] {
        let pools = BrokenPools::start(workers).await?;
        let second = if proxies == 2 {
            Some(SecondEnvoy::start(&pools.world().stack, "second", workers).await?)
        } else {
            None
        };
        let first = [pools.world().stack.address()];
        let addresses: Vec<SocketAddr> = first
            .into_iter()
            .chain(second.as_ref().map(|second| second.envoy.listener()))
            .collect();
        let probes_max = proxies * (PROBES + u64::from(workers));
        for sent in pools.count(&addresses).await {
            println!(
                "{workers} workers, {proxies} proxies, {}: {:?}",
                sent.fault, sent.requests
            );
            assert!(
                sent.share_of_broken() <= SHARE_MAX || sent.requests[0] <= probes_max,
                "{workers} workers, {proxies} proxies: {sent:?}"
            );
        }
        pools.mend(MENDED_LIMIT).await?;
    }
    Ok(())
}
