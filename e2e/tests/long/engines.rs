//! Engines of every kind behind one worker, behind two, and behind two proxies.

use e2e::Result;
use e2e::engine_matrix::{self, SERVERS_USED_MIN};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_engine_is_loaded_evenly_behind_one_worker_two_and_two_proxies() -> Result<()> {
    for (workers, proxies) in [(1, 1), (2, 1), (2, 2)] {
        let rows = engine_matrix::run(workers, proxies).await?;
        for row in &rows {
            println!("{row:?}");
        }
        let broken: Vec<String> = rows.iter().flat_map(|row| row.broken_bounds(SERVERS_USED_MIN)).collect();
        assert!(broken.is_empty(), "{workers} workers, {proxies} proxies: {broken:?}");
    }
    Ok(())
}
