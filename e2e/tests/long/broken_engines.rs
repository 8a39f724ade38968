//! Pools with a broken engine behind one worker, behind two workers, and behind two proxies that
//! share state.

use std::net::SocketAddr;
use std::time::Duration;

use testbed::Result;
use testbed::broken_pools::BrokenPools;
use testbed::second_envoy::SecondEnvoy;

/// Ten times what mending should take.
const MENDED_LIMIT: Duration = Duration::from_secs(100);

/// The largest share of all requests after the first seconds that a broken engine may get.
const SHARE_MAX: f64 = 0.02;

/// The number of requests that a broken engine may always get from each proxy: four probes are due
/// in the measured time, and a fifth may come early or late on a busy machine. On such a machine
/// fewer than 250 requests per proxy run in that time, and then five are more than [`SHARE_MAX`].
const PROBES_MAX: u64 = 5;

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
        for sent in pools.count(&addresses).await {
            println!(
                "{workers} workers, {proxies} proxies, {}: {:?}",
                sent.fault, sent.requests
            );
            assert!(
                sent.share_of_broken() <= SHARE_MAX || sent.requests[0] <= PROBES_MAX * proxies,
                "{workers} workers, {proxies} proxies: {sent:?}"
            );
        }
        pools.mend(MENDED_LIMIT).await?;
    }
    Ok(())
}
