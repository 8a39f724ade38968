//! Engines that differ strongly from the simulated default, on a real Envoy: load is spread, and
//! prompts return to the servers that cached them.

use testbed::Result;
use testbed::engine_matrix::{EngineMatrix, MatrixResult};

/// `make e2e-long` runs these tests.
mod slow {
    use super::*;

    /// Runs all kinds of engines at the same time, each in separate pools behind one Envoy with
    /// four workers.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn any_engine_is_loaded_evenly_and_keeps_its_prompts_by_four_workers() -> Result<()> {
        let matrix = EngineMatrix::start(4, 1).await?;
        let all = matrix.measure(&[matrix.stack().address()]).await?;
        for found in &all {
            println!("{found:?}");
        }
        let bad: Vec<&MatrixResult> = all.iter().filter(|found| !found.is_good(1)).collect();
        assert!(bad.is_empty(), "beyond the bounds: {bad:?}");
        Ok(())
    }
}
