//! A frontend that watches the workers of a directory: see the example `worker`.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::Write;

use discovery::directory::DirectoryBackend;
use discovery::{InstanceEvent, LocalAddresses, ServiceDiscovery};
use futures::StreamExt;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args().nth(1).ok_or("usage: frontend FOLDER")?;
    // Here the workers run on the same machine.
    let discovery = DirectoryBackend::new(folder)
        .discovery()
        .with_local_addresses(LocalAddresses::Allowed);
    let mut events = discovery.watch("dynamo", "decode")?;
    // The address and the models of each worker, which are all that a router needs to start.
    let mut workers: BTreeMap<String, (String, Vec<String>)> = BTreeMap::new();
    while let Some(event) = events.next().await {
        match event {
            InstanceEvent::Added(instance) => {
                let models = instance
                    .metadata()
                    .models()
                    .into_iter()
                    .map(|model| model.name)
                    .collect();
                workers.insert(
                    instance.name.clone(),
                    (instance.address.to_string(), models),
                );
            }
            InstanceEvent::Removed(id) => drop(workers.remove(&*id)),
        }
        writeln!(std::io::stdout(), "{workers:?}")?;
    }
    Ok(())
}
