//! A worker that registers itself in a directory, publishes its metadata, and serves /metadata and
//! /health.
//!
//! ```sh
//! cargo run -p discovery --example worker -- /tmp/instances 127.0.0.1:8000
//! cargo run -p discovery --example frontend -- /tmp/instances
//! ```

use std::error::Error;
use std::net::SocketAddr;

use discovery::directory::DirectoryRegistry;
use discovery::{InstanceStatus, ServiceRegistry, serve};
use serde_json::{Map, json};
use tokio::net::TcpListener;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("usage: worker FOLDER IP:PORT")?;
    let address: SocketAddr = arguments
        .next()
        .ok_or("usage: worker FOLDER IP:PORT")?
        .parse()?;
    let worker = DirectoryRegistry::new(folder, address)
        .register_instance("dynamo", "decode")
        .await?;
    let routes = serve::router(&worker); // mounted into the worker's own server
    let listener = TcpListener::bind(address).await?;
    worker.set_metadata(Map::from_iter([(
        "model".to_owned(),
        json!({ "name": "Qwen3-32B" }),
    )]))?;
    worker.set_ready(InstanceStatus::Ready);
    Ok(axum::serve(listener, routes).await?)
}
