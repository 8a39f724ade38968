//! etcd as registry, with a real etcd: killed, paused beyond its lease, put back to what it was.

use std::net::SocketAddr;
use std::time::Duration;

use discovery::etcd::{Config, Etcd, EtcdRegistry, LEASE};
use discovery::{Discovery, InstanceStatus, Registrant, ServiceDiscovery, ServiceRegistry};
use serde_json::json;
use tempfile::TempDir;

use crate::cluster::{self, Service};
use crate::events::{next, silence, until};

struct Rig {
    etcd: Service,
    folder: TempDir,
    config: Config,
}

fn rig() -> Option<Rig> {
    let binary = cluster::tool("etcd")?;
    let (folder, port) = (tempfile::tempdir().unwrap(), cluster::free_port());
    let etcd = cluster::etcd(binary, folder.path(), port);
    let config = Config { endpoints: vec![format!("http://127.0.0.1:{port}")], ..Config::default() };
    Some(Rig { etcd, folder, config })
}

impl Rig {
    fn registry(&self, name: &str, port: u16) -> EtcdRegistry {
        EtcdRegistry::new(self.config.clone(), Registrant::from(SocketAddr::from(([10, 0, 0, 1], port))).with_name(name)).unwrap()
    }

    fn discovery(&self) -> Discovery<Etcd> {
        Etcd::new(self.config.clone()).unwrap().discovery()
    }
}

async fn listed(discovery: &Discovery<Etcd>) -> Vec<String> {
    discovery.list_instances("dynamo", "decode").await.map_or_else(|_| Vec::new(), |all| all.iter().map(|i| i.name.clone()).collect())
}

#[tokio::test]
async fn the_whole_flow() {
    let Some(rig) = rig() else { return };
    let discovery = rig.discovery();
    let mut events = discovery.watch("dynamo", "decode").unwrap();
    let worker = rig.registry("w0", 8000).register_instance("dynamo", "decode").await.unwrap();
    let other = rig.registry("w1", 8000).register_instance("dynamo", "decode2").await.unwrap();
    other.set_ready(InstanceStatus::Ready);
    worker.set_metadata(json!({"Model": {"name": "q"}}).as_object().cloned().unwrap()).unwrap();
    worker.set_ready(InstanceStatus::Ready);
    assert_eq!(next(&mut events).await, "+w0@10.0.0.1:8000");
    let [instance] = discovery.list_instances("dynamo", "decode").await.unwrap().try_into().unwrap();
    assert_eq!(instance.metadata().models()[0].name, "q");
    worker.set_ready(InstanceStatus::NotReady);
    assert_eq!(next(&mut events).await, "-w0");
    worker.set_ready(InstanceStatus::Ready);
    assert_eq!(next(&mut events).await, "+w0@10.0.0.1:8000");
    drop(worker);
    assert_eq!(next(&mut events).await, "-w0", "at once, not with its lease");
}

#[tokio::test]
async fn an_etcd_that_is_killed_or_loses_its_memory_costs_no_living_instance() {
    let Some(mut rig) = rig() else { return };
    let discovery = rig.discovery();
    let worker = rig.registry("lives", 1).register_instance("dynamo", "decode").await.unwrap();
    worker.set_ready(InstanceStatus::Ready);
    until(vec!["lives".to_owned()], || listed(&discovery)).await;
    let mut events = discovery.watch("dynamo", "decode").unwrap();
    assert_eq!(next(&mut events).await, "+lives@10.0.0.1:1");
    let followed = discovery.follow("dynamo", "decode").unwrap();
    let failing = || async { followed.status().borrow().error.is_some() };
    rig.etcd.kill();
    until(true, failing).await;
    assert_eq!(listed(&discovery).await, ["lives"], "the last known set");
    rig.etcd.start();
    until(false, failing).await;
    silence(&mut events, Duration::from_millis(500)).await;
    // All keys and leases are lost, revisions begin anew; with a set this small a loss is believed, until the instance is back.
    rig.etcd.kill();
    until(true, failing).await;
    std::fs::remove_dir_all(rig.folder.path().join("etcd")).unwrap();
    rig.etcd.start();
    assert_eq!(next(&mut events).await, "-lives");
    assert_eq!(next(&mut events).await, "+lives@10.0.0.1:1", "registered anew, by itself, under the same id");
}

/// Paused for longer than the lease: the lease is lost, or kept, as etcd sees it; either way the set stays meanwhile and is the truth afterwards.
#[tokio::test]
async fn an_etcd_that_is_paused_beyond_the_lease_is_survived() {
    let Some(rig) = rig() else { return };
    let discovery = rig.discovery();
    let worker = rig.registry("lives", 1).register_instance("dynamo", "decode").await.unwrap();
    worker.set_ready(InstanceStatus::Ready);
    until(vec!["lives".to_owned()], || listed(&discovery)).await;
    let followed = discovery.follow("dynamo", "decode").unwrap();
    rig.etcd.signal("STOP");
    until(true, || async { followed.status().borrow().error.is_some() }).await;
    tokio::time::sleep(LEASE).await;
    assert_eq!(listed(&discovery).await, ["lives"], "the last known set");
    let dead = rig.registry("dies", 2).register_instance("dynamo", "decode").await.unwrap();
    dead.set_ready(InstanceStatus::Ready);
    drop(dead); // it never reached etcd
    rig.etcd.signal("CONT");
    until(None, || async { followed.status().borrow().error.clone() }).await;
    until(vec!["lives".to_owned()], || listed(&discovery)).await;
    let mut events = discovery.watch("dynamo", "decode").unwrap();
    assert_eq!(next(&mut events).await, "+lives@10.0.0.1:1");
    drop(worker);
    assert_eq!(next(&mut events).await, "-lives");
}

#[tokio::test]
async fn a_wrong_password_is_said_and_nobody_is_there() {
    let Some(rig) = rig() else { return };
    let config = Config { user: Some(("root".to_owned(), "wrong".to_owned())), ..rig.config.clone() };
    let discovery = Etcd::new(config).unwrap().discovery();
    until(true, || async {
        let error = discovery.list_instances("dynamo", "decode").await.unwrap_err().to_string();
        error.contains("authentication is not enabled")
    })
    .await;
    assert!(Etcd::new(Config::default()).is_err());
    let wrong = Config { endpoints: vec!["not a url".to_owned()], ..Config::default() };
    assert!(Etcd::new(wrong).is_err());
}
