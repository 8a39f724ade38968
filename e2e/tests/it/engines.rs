//! Engines that nobody here wrote, as far as their manners go: each kind is loaded evenly and keeps its prompts, by the default configuration.

use e2e::Result;
use e2e::engine_matrix::{self, SERVERS_USED_MIN};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_engine_is_loaded_evenly_and_keeps_its_prompts() -> Result<()> {
    let rows = engine_matrix::run(4, 1).await?;
    for row in &rows {
        println!("{row:?}");
    }
    let broken: Vec<String> = rows.iter().flat_map(|row| row.broken_bounds(SERVERS_USED_MIN)).collect();
    assert!(broken.is_empty(), "{broken:?}");
    Ok(())
}
