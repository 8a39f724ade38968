//! Many pools of plain engines behind one Envoy, selected by the header `x-pool`. So the default
//! configuration meets engines of every kind at the same time.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::Request;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Result;
use crate::client::{self, Body, ClientReply};
use crate::plain_engine::{PlainBehaviour, PlainEngine};
use crate::stack::{Stack, StackBuilder};

/// The request header that names the pool.
pub const POOL_HEADER: &str = "x-pool";

#[derive(Debug)]
pub struct PlainPool {
    /// The name of the pool, which is also the value of `x-pool` that selects the pool.
    pub name: String,
    pub engines: Vec<PlainEngine>,
    /// The number of engines, counted from the first, that are endpoints of the pool at the start.
    pub listed: usize,
}

/// All pools, one daemon and one Envoy.
#[derive(Debug)]
pub struct PlainPools {
    pub stack: Stack,
    pub pools: Vec<Arc<PlainPool>>,
    folder: TempDir,
}

// === impl PlainPool ===

impl PlainPool {
    /// Starts one engine per behaviour.
    ///
    /// # Errors
    /// Fails if no port is free.
    pub async fn start(
        name: &str,
        behaviours: impl IntoIterator<Item = PlainBehaviour>,
    ) -> Result<Self> {
        let mut engines = Vec::new();
        for behaviour in behaviours {
            engines
                .push(PlainEngine::start(SocketAddr::from(([127, 0, 0, 1], 0)), behaviour).await?);
        }
        let listed = engines.len();
        Ok(Self {
            name: name.to_owned(),
            engines,
            listed,
        })
    }

    /// Returns the text of an endpoints file with the first `listed` engines.
    fn endpoints(&self, listed: usize) -> String {
        let row = |engine: &PlainEngine| {
            let address = engine.addr();
            json!({"name": format!("{}-{}", self.name, address.port()), "address": address.ip().to_string(), "port": address.port()})
        };
        json!({"endpoints": self.engines.iter().take(listed).map(row).collect::<Vec<_>>()})
            .to_string() // a YAML reader accepts JSON
    }

    /// Counts the inference requests that each engine received, in order.
    #[must_use]
    pub fn requests(&self) -> Vec<u64> {
        self.engines.iter().map(PlainEngine::requests).collect()
    }

    /// Counts the requests that each engine received, by path, in the order of
    /// [`crate::plain_engine::paths`].
    #[must_use]
    pub fn requests_by_path(&self) -> Vec<Vec<u64>> {
        let engines = self.engines.iter();
        engines.map(PlainEngine::requests_by_path).collect()
    }

    /// Sends a body to this pool through the proxy at `proxy`.
    ///
    /// # Errors
    /// Fails if the proxy cannot be reached, or its reply ends early.
    pub async fn post(&self, proxy: SocketAddr, path: &str, body: &Value) -> Result<ClientReply> {
        let request = Request::post(path)
            .header(POOL_HEADER, &self.name)
            .header("content-type", "application/json");
        client::send(proxy, request.body::<Body>(client::full(body.to_string()))?).await
    }
}

// === impl PlainPools ===

impl PlainPools {
    /// Starts a daemon that serves all of these pools, and a proxy that uses the daemon. `change`
    /// makes further changes to the stack.
    ///
    /// # Errors
    /// Fails if any part does not start.
    pub async fn start(
        pools: Vec<PlainPool>,
        change: impl FnOnce(StackBuilder) -> StackBuilder,
    ) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("pools.list");
        for pool in &pools {
            std::fs::write(
                endpoints_file(folder.path(), pool),
                pool.endpoints(pool.listed),
            )?;
        }
        let row = |pool: &PlainPool| json!({"name": pool.name, "endpointsFile": endpoints_file(folder.path(), pool)});
        std::fs::write(
            &file,
            json!({"pools": pools.iter().map(row).collect::<Vec<_>>()}).to_string(),
        )?;
        let names: Vec<String> = pools.iter().map(|pool| pool.name.clone()).collect();
        let keys: Vec<Value> = names
            .iter()
            .map(|name| json!({"name": name, "clusters": [format!("{name}-pool")]}))
            .collect();
        let builder = Stack::builder()
            .daemon_arguments(&["--pools", &file.display().to_string()])
            .envoy_config(move |config| route_by_header(config, &names))
            .picker(json!({"pools": keys}));
        let stack = change(builder).start().await?;
        Ok(Self {
            stack,
            pools: pools.into_iter().map(Arc::new).collect(),
            folder,
        })
    }

    /// Makes the first `listed` engines of this pool its endpoints. The file is replaced by a
    /// rename, so that no reader sees half a file.
    ///
    /// # Errors
    /// Fails if the folder cannot be written.
    pub fn list(&self, pool: &PlainPool, listed: usize) -> Result<()> {
        let draft = self.folder.path().join(format!("{}.draft", pool.name));
        let file = endpoints_file(self.folder.path(), pool);
        std::fs::write(&draft, pool.endpoints(listed))?;
        Ok(std::fs::rename(draft, file)?)
    }
}

fn endpoints_file(folder: &Path, pool: &PlainPool) -> PathBuf {
    folder.join(format!("{}.yaml", pool.name))
}

/// Adds for each pool a cluster like the shipped one, and a route for requests whose header names
/// the pool.
fn route_by_header(config: &mut Value, names: &[String]) {
    let routes_path = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/route_config/virtual_hosts/0/routes";
    let plain_cluster = config
        .pointer("/static_resources/clusters/0")
        .cloned()
        .unwrap_or_default();
    let plain_route = config
        .pointer(&format!("{routes_path}/0"))
        .cloned()
        .unwrap_or_default();
    for name in names {
        let mut cluster = plain_cluster.clone();
        cluster["name"] = json!(format!("{name}-pool"));
        cluster["eds_cluster_config"]["service_name"] = json!(name);
        let mut route = plain_route.clone();
        route["match"] = json!({"prefix": "/", "headers": [{"name": POOL_HEADER, "string_match": {"exact": name}}]});
        route["route"]["cluster"] = json!(format!("{name}-pool"));
        route["metadata"]["filter_metadata"]["switchpoint"]["pool"] = json!(name);
        let mut add = |path: &str, value: Value| {
            if let Some(list) = config.pointer_mut(path).and_then(Value::as_array_mut) {
                list.insert(0, value);
            }
        };
        add(routes_path, route);
        add("/static_resources/clusters", cluster);
    }
}
