//! The code in the documentation of the library. As a test of rustdoc it would compile the library
//! and its dependencies once more.

use std::net::SocketAddr;

use discovery::directory::{DirectoryBackend, DirectoryRegistry};
use discovery::{InstanceEvent, InstanceStatus, ServiceDiscovery, ServiceRegistry};
use futures::StreamExt;
use serde_json::json;

#[tokio::test]
async fn the_documented_code_registers_watches_and_removes()
-> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let folder = folder.path();
    // The documentation has the lines from here
    // The worker publishes its address, its models and, once it can serve, its readiness.
    let registry = DirectoryRegistry::new(folder, SocketAddr::from(([10, 0, 0, 1], 8000)));
    let worker = registry.register_instance("dynamo", "decode").await?;
    let metadata = json!({"model": {"name": "Qwen3-32B"}});
    worker.set_metadata(metadata.as_object().cloned().unwrap_or_default())?;
    worker.set_ready(InstanceStatus::Ready);

    // The frontend gets all current instances first, then every change, without a gap.
    let discovery = DirectoryBackend::new(folder).discovery();
    let mut events = discovery.watch("dynamo", "decode")?;
    let Some(InstanceEvent::Added(instance)) = events.next().await else {
        panic!("the first event is an instance");
    };
    assert_eq!(instance.name, worker.instance_id());
    assert_eq!(instance.metadata().models()[0].name, "Qwen3-32B");

    drop(worker);
    let Some(InstanceEvent::Removed(id)) = events.next().await else {
        panic!("an instance that ends is removed");
    };
    assert_eq!(*id, *instance.name);
    // to here.
    Ok(())
}

#[test]
fn the_documentation_has_the_code_of_this_test() {
    let documented: Vec<&str> = include_str!("../../src/lib.rs")
        .lines()
        .skip_while(|line| *line != "//! ```ignore")
        .skip(1)
        .take_while(|line| *line != "//! ```")
        .map(|line| line.trim_start_matches("//!").trim())
        .collect();
    let tested: Vec<&str> = include_str!("documented.rs")
        .lines()
        .skip_while(|line| !line.ends_with("from here"))
        .skip(1)
        .take_while(|line| !line.ends_with("// to here."))
        .map(str::trim)
        .collect();
    assert!(documented.len() > 10, "{documented:?}");
    assert_eq!(documented, tested);
}
