//! Engines that are nothing like the simulated ones, on a real Envoy: load is spread, and prompts find their servers again.

use std::time::Duration;

use e2e::Result;
use e2e::engine_matrix::{EngineMatrix, Found};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_engine_is_loaded_evenly_and_keeps_its_prompts_by_four_workers() -> Result<()> {
    let matrix = EngineMatrix::start(4, 1).await?;
    let begun = std::time::Instant::now();
    let found = matrix.measure(&[matrix.stack().address()]).await?;
    for found in &found { println!("{found:?}"); }
    println!("{:?}", begun.elapsed());
    Ok(())
}
