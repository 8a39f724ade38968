//! Measures how long requests of 1 KB take at one worker of Envoy, while another client uploads
//! bodies of 23 MiB one after the other, and while it does not.

use std::net::SocketAddr;

use hyper::body::Bytes;
use serde::Serialize;
use testbed::{Result, client};

use crate::load::{LoadFigures, LoadRun};
use crate::overhead::write_bodies;
use crate::stats::median;
use crate::world::{BenchStack, RequestPath};
use crate::{Args, write_result};

const SMALL_BYTES: usize = 1_000;
const LARGE_BYTES: usize = 23 << 20;

/// The connections and the requests/s of the small requests: so few that they do not delay each
/// other.
const CONNECTIONS: usize = 4;
const RATE: u32 = 100;

/// One row of the result file.
#[derive(Debug, Serialize)]
struct NeighbourRow {
    front: &'static str,
    uploads: bool,
    errors: u64,
    p50_us: f64,
    p99_us: f64,
}

pub(crate) async fn bench(args: &Args) -> Result<()> {
    let mut world = BenchStack::start(10, 1, &args.daemon_argument).await?;
    let bodies = write_bodies(SMALL_BYTES, false, world.folder.path())?;
    let mut rows = Vec::new();
    let cases = RequestPath::SHIPPED.map(|path| [(path, false), (path, true)]);
    for (path, uploads) in cases.concat() {
        let mut runs: Vec<LoadFigures> = Vec::new();
        for _ in 0..args.rounds {
            let target = world.address(path);
            let processes = world.processes(path);
            let load = LoadRun {
                rate: Some(RATE),
                ..LoadRun::closed_loop(target, bodies.clone(), CONNECTIONS, args.seconds, processes)
            };
            let uploader = uploads.then(|| tokio::spawn(upload(target)));
            runs.push(load.run(world.folder.path()).await?);
            if let Some(uploader) = uploader {
                if uploader.is_finished() {
                    return Err(uploader.await?);
                }
                uploader.abort();
            }
        }
        let of = |figure: fn(&LoadFigures) -> f64| {
            let figures: Vec<f64> = runs.iter().map(figure).collect();
            median(&figures)
        };
        let row = NeighbourRow {
            front: path.name(),
            uploads,
            errors: runs.iter().map(|run| run.errors).sum(),
            p50_us: of(|run| run.p50_us),
            p99_us: of(|run| run.p99_us),
        };
        println!("{row:?}");
        rows.push(row);
    }
    world.stop().await?;
    write_result("neighbour", &rows)
}

/// Uploads bodies until one is not accepted. Returns the error.
async fn upload(target: SocketAddr) -> testbed::Error {
    let text = "word ".repeat(LARGE_BYTES / 5);
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}]}}"#);
    let body = Bytes::from(body);
    loop {
        match client::post(target, "/v1/chat/completions", body.clone()).await {
            Ok(reply) if reply.status == 200 => {}
            Ok(reply) => return format!("an upload got {}", reply.status).into(),
            Err(error) => return error,
        }
    }
}
