//! The connection to the daemon with the shipped configuration, for both transports (gRPC stream
//! and HTTP calls): the proxy detects a stalled daemon, finds a restarted daemon immediately, and
//! with `mtls.yaml` proxy and daemon verify each other.

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::certificates::{Authority, daemon_arguments};
use testbed::envoy::EnvoyConfig;
use testbed::stack::{Stack, StackBuilder};
use testbed::{Result, wait_for};

/// The maximum wait for a change. It is far above every promised time, because a machine that
/// compiles at the same time is slow.
const LIMIT: Duration = Duration::from_secs(30);

async fn stat_until(
    stack: &Stack,
    name: &str,
    wanted: impl Fn(i64) -> bool,
    limit: Duration,
) -> Result<i64> {
    wait_for(limit, name, || async {
        stack
            .envoy
            .stat(name)
            .await
            .ok()
            .filter(|value| wanted(*value))
    })
    .await
}

/// Waits until Envoy has received `count` hosts from the daemon.
async fn hosts_are(stack: &Stack, count: i64) -> Result<()> {
    stat_until(
        stack,
        "cluster.inference-pool.membership_total",
        |hosts| hosts == count,
        LIMIT,
    )
    .await
    .map(drop)
}

/// Describes a stack whose picker receives state by this transport.
fn by(transport: &str) -> StackBuilder {
    Stack::builder()
        .servers(2)
        .picker(json!({"state": {"cluster": "switchpoint-state", "transport": transport}}))
}

#[tokio::test]
async fn a_daemon_that_stands_still_is_noticed_by_its_silence_to_pings() -> Result<()> {
    tokio::try_join!(stands_still("grpc"), stands_still("http")).map(drop)
}

/// Makes Envoy send pings sooner than the shipped file, which would take 15 s. `shipped_config`
/// checks the times of the shipped file.
fn impatient(config: &mut Value) {
    let options = config["static_resources"]["clusters"][1]["typed_extension_protocol_options"]
        .as_object_mut()
        .expect("options");
    for options in options.values_mut() {
        let pings =
            &mut options["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"];
        assert!(pings.is_object(), "{options}");
        *pings = json!({"interval": "1s", "timeout": "2s"});
    }
}

async fn stands_still(transport: &str) -> Result<()> {
    let mut stack = by(transport).envoy_config(impatient).start().await?;
    hosts_are(&stack, 2).await?;
    assert_eq!(
        stack
            .envoy
            .stat("cluster.inference-pool.update_failure")
            .await?,
        0
    );
    // The kernel of a stopped daemon still acknowledges, and EDS is silent for hours if nothing
    // changes, so only a ping detects the stopped daemon. (The picker ends its own stream earlier,
    // but not the connection.)
    stack.daemon()?.process().signal(Signal::STOP)?;
    stat_until(
        &stack,
        "cluster.switchpoint-state.http2.keepalive_timeout",
        |timeouts| timeouts > 0,
        LIMIT,
    )
    .await?;
    stat_until(
        &stack,
        "cluster.inference-pool.update_failure",
        |failures| failures > 0,
        LIMIT,
    )
    .await?;
    assert_eq!(
        stack.get("/v1/models").await?.status,
        200,
        "requests are still served"
    );

    stack.set_pool(&[1])?;
    stack.daemon()?.process().signal(Signal::CONT)?;
    hosts_are(&stack, 1).await
}

#[tokio::test]
async fn a_daemon_that_comes_back_is_found_at_once() -> Result<()> {
    tokio::try_join!(comes_back("grpc"), comes_back("http")).map(drop)
}

async fn comes_back(transport: &str) -> Result<()> {
    const TRIES: i64 = 20;
    let mut stack = by(transport).start().await?;
    hosts_are(&stack, 2).await?;
    stack.daemon()?.process().kill()?;
    // Only failed attempts of EDS count. With at most 0.25 s between them, 20 attempts take at most
    // 5 s. With Envoy's defaults (doubling from 0.5 s to 30 s), 20 attempts would take minutes, and
    // the next attempt would come half a minute later.
    stat_until(
        &stack,
        "cluster.inference-pool.update_failure",
        |failures| failures >= TRIES,
        LIMIT,
    )
    .await?;
    stack.set_pool(&[0])?;
    stack.daemon()?.start_again()?;
    let listens = || async {
        stack
            .daemon
            .as_ref()?
            .admin("/readyz")
            .await
            .ok()
            .filter(|reply| reply.status == 200)
    };
    wait_for(LIMIT, "the daemon", listens).await?;
    // The limit is ten times the longest pause between attempts.
    stat_until(
        &stack,
        "cluster.inference-pool.membership_total",
        |hosts| hosts == 1,
        Duration::from_millis(2_500),
    )
    .await?;
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_state_connected",
            |connected| connected == 1,
            LIMIT,
        )
        .await
        .map(drop)
}

// === mTLS ===

/// Creates a folder `certs` as in the documentation: a CA, and certificates of the daemon and of a
/// proxy, signed by the CA.
fn certificates(ours: &Authority) -> Result<TempDir> {
    ours.folder("switchpointd")
}

/// Describes a stack whose daemon is started as `mtls.yaml` describes.
fn guarded(certs: &Path, transport: &str) -> StackBuilder {
    let arguments = daemon_arguments(certs);
    by(transport).daemon_arguments(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Returns the edit of Envoy's configuration that `mtls.yaml` describes, with `certs/` in this
/// folder.
fn with_fragment(certs: &Path) -> Result<impl Fn(&mut Value) + Send + 'static> {
    let mut fragment = EnvoyConfig::shipped("mtls.yaml")?.value().clone();
    replace_folder(&mut fragment, certs);
    Ok(move |config: &mut Value| {
        let cluster = config
            .pointer_mut("/static_resources/clusters/1")
            .and_then(Value::as_object_mut)
            .expect("the cluster of the daemon");
        assert_eq!(cluster["name"], "switchpoint-state");
        cluster.extend(fragment.as_object().expect("keys of a cluster").clone());
    })
}

fn replace_folder(value: &mut Value, folder: &Path) {
    match value {
        Value::Object(fields) => fields
            .values_mut()
            .for_each(|value| replace_folder(value, folder)),
        Value::Array(items) => items
            .iter_mut()
            .for_each(|value| replace_folder(value, folder)),
        Value::String(text) => {
            if let Some(file) = text.strip_prefix("certs/") {
                *text = folder.join(file).to_string_lossy().into_owned();
            }
        }
        _ => {}
    }
}

#[tokio::test]
async fn proxy_and_daemon_authenticate_each_other() -> Result<()> {
    tokio::try_join!(prove_who_they_are("grpc"), prove_who_they_are("http")).map(drop)
}

async fn prove_who_they_are(transport: &str) -> Result<()> {
    let ours = Authority::new()?;
    let certs = certificates(&ours)?;
    let mut stack = guarded(certs.path(), transport)
        .envoy_config(with_fragment(certs.path())?)
        .start()
        .await?;
    assert_eq!(
        stack.get("/v1/models").await?.status,
        200,
        "the picker has state, which comes by the first stream"
    );
    stack.set_pool(&[1])?;
    hosts_are(&stack, 1).await?; // EDS is the second stream
    let reply = stack.get("/v1/models").await?;
    assert_eq!((reply.status, stack.server_of(&reply)?), (200, 1));
    let tls = stack
        .envoy
        .stats("^cluster\\.switchpoint-state\\.(ssl\\.handshake|upstream_cx_total)$")
        .await?;
    assert_eq!(
        tls["cluster.switchpoint-state.ssl.handshake"],
        tls["cluster.switchpoint-state.upstream_cx_total"],
        "no connection without TLS: {tls:?}"
    );
    Ok(())
}

/// Checks that this proxy receives neither state nor hosts.
async fn learns_nothing(stack: &Stack, what: &str) -> Result<()> {
    assert_eq!(stack.get("/switchpoint/ready").await?.status, 503, "{what}");
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_state_pool_updates_total")
            .await?,
        0,
        "{what}"
    );
    assert_eq!(
        stack
            .envoy
            .stat("cluster.inference-pool.update_success")
            .await?,
        0,
        "{what}"
    );
    Ok(())
}

#[tokio::test]
async fn a_proxy_without_a_valid_certificate_gets_no_state() -> Result<()> {
    tokio::try_join!(gets_nothing("grpc"), gets_nothing("http")).map(drop)
}

async fn gets_nothing(transport: &str) -> Result<()> {
    type LinkEdit = Box<dyn Fn(&mut Value) + Send>;
    let ours = Authority::new()?;
    let theirs = Authority::new()?;
    let certs = certificates(&ours)?;
    let forged = certificates(&ours)?;
    theirs.certify("a-proxy", "proxy", forged.path())?;
    let with_forged = with_fragment(forged.path())?;
    let with_none = with_fragment(certs.path())?;
    let anonymous = move |config: &mut Value| {
        with_none(config);
        let path = "/static_resources/clusters/1/transport_socket/typed_config/common_tls_context";
        let context = config
            .pointer_mut(path)
            .and_then(Value::as_object_mut)
            .expect("the fragment");
        context
            .remove("tls_certificates")
            .expect("the proxy's certificate");
    };
    let edits: [(&str, &str, LinkEdit); 3] = [
        (
            "without a certificate",
            "peer sent no certificates",
            Box::new(anonymous),
        ),
        (
            "with a certificate of another CA",
            "invalid peer certificate",
            Box::new(with_forged),
        ),
        (
            "without TLS, as without the fragment",
            "received corrupt message",
            Box::new(|_| ()),
        ),
    ];
    for (what, reason, edit) in edits {
        let mut stack = guarded(certs.path(), transport)
            .envoy_config(edit)
            .without_waiting()
            .start()
            .await?;
        let daemon = stack.daemon()?;
        let refused = || {
            std::future::ready(
                (daemon.process().stderr().matches(reason).count() >= 5).then_some(()),
            )
        };
        wait_for(
            LIMIT,
            &format!("the daemon to refuse a proxy {what}"),
            refused,
        )
        .await?;
        learns_nothing(&stack, what).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_daemon_without_a_valid_certificate_is_not_used() -> Result<()> {
    tokio::try_join!(is_not_listened_to("grpc"), is_not_listened_to("http")).map(drop)
}

async fn is_not_listened_to(transport: &str) -> Result<()> {
    let ours = Authority::new()?;
    let theirs = Authority::new()?;
    // A proxy's certificate is signed by the right CA, but not for the daemon's name.
    for (what, signer, name, stat) in [
        ("of another name", &ours, "a-proxy", "fail_verify_san"),
        (
            "of another CA",
            &theirs,
            "switchpointd",
            "fail_verify_error",
        ),
    ] {
        let certs = certificates(&ours)?;
        let stack = guarded(certs.path(), transport)
            .envoy_config(with_fragment(certs.path())?)
            .without_waiting();
        signer.certify(name, "daemon", certs.path())?;
        let stack = stack.start().await?;
        stat_until(
            &stack,
            &format!("cluster.switchpoint-state.ssl.{stat}"),
            |failures| failures >= 5,
            LIMIT,
        )
        .await?;
        learns_nothing(&stack, what).await?;
    }
    Ok(())
}
