//! Measures how a real Envoy spreads traffic over engines of every kind, and over pools with broken
//! engines, for `docs/reference/engines.md`.

use std::net::SocketAddr;

use testbed::Result;
use testbed::broken_pools::BrokenPools;
use testbed::engine_matrix::EngineMatrix;
use testbed::engine_page::{MatrixRow, MatrixShape};
use testbed::second_envoy::SecondEnvoy;
use testbed::stack::Stack;

/// The number of workers of each proxy, and the number of proxies.
const SHAPES: [(u32, u32); 4] = [(4, 1), (1, 1), (2, 1), (2, 2)];

/// Sets the prompts and the shapes to measure.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Args {
    /// Seed of the prompts
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many of these shapes to measure, in this order: 4 workers, 1 worker, 2 workers, 2
    /// proxies of 2 workers
    #[arg(long, default_value_t = SHAPES.len())]
    shapes: usize,
}

/// Measures, prints and writes `target/bench/engines.json`.
pub(crate) async fn bench(args: Args) -> Result<()> {
    let mut rows = Vec::new();
    for (workers, proxies) in SHAPES.into_iter().take(args.shapes) {
        let shape = MatrixShape {
            workers,
            proxies,
            seed: args.seed,
        };
        let matrix = EngineMatrix::start(workers, args.seed).await?;
        let (second, addresses) = proxies_of(matrix.stack(), shape).await?;
        for found in matrix.measure(&addresses).await? {
            println!("{shape:?} {found:?}");
            rows.push(MatrixRow::of_engine(shape, &found));
        }
        drop((second, matrix));
        let broken =
            BrokenPools::start_with(|builder| builder.concurrency(workers).quiet()).await?;
        let (_second, addresses) = proxies_of(&broken.world().stack, shape).await?;
        for sent in broken.count(&addresses).await {
            println!("{shape:?} {sent:?}");
            rows.push(MatrixRow::of_broken(shape, &sent));
        }
    }
    crate::write_result("engines", &rows)
}

async fn proxies_of(
    stack: &Stack,
    shape: MatrixShape,
) -> Result<(Option<SecondEnvoy>, Vec<SocketAddr>)> {
    let second = if shape.proxies == 2 {
        Some(SecondEnvoy::start(stack, "second", shape.workers).await?)
    } else {
        None
    };
    let addresses = [stack.address()]
        .into_iter()
        .chain(second.as_ref().map(|second| second.envoy.listener()))
        .collect();
    Ok((second, addresses))
}
