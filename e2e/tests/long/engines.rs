//! Engines that differ strongly from the simulated default, behind one worker, behind two workers,
//! and behind two proxies that share state.

use std::net::SocketAddr;

use testbed::Result;
use testbed::engine_matrix::EngineMatrix;
use testbed::second_envoy::SecondEnvoy;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_engine_is_loaded_evenly_and_keeps_its_prompts_by_one_worker_two_and_two_proxies()
-> Result<()> {
    let mut bad = Vec::new();
    for (workers, proxies) in [(1, 1), (2, 1), (2, 2)] {
        let matrix = EngineMatrix::start(workers, 1).await?;
        let second = if proxies == 2 {
            Some(SecondEnvoy::start(matrix.stack(), "second", workers).await?)
        } else {
            None
        };
        let first = [matrix.stack().address()];
        let addresses: Vec<SocketAddr> = first
            .into_iter()
            .chain(second.as_ref().map(|second| second.envoy.listener()))
            .collect();
        for found in matrix.measure(&addresses).await? {
            println!("{workers} workers, {proxies} proxies: {found:?}");
            if !found.is_good(proxies) {
                bad.push((workers, proxies, found));
            }
        }
    }
    assert!(
        bad.is_empty(),
        "beyond the bounds (workers, proxies, found): {bad:?}"
    );
    Ok(())
}
