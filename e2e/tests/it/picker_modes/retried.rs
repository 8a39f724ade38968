//! Streams that find their daemon gone are opened again until another daemon answers.
//!
//! ```text
//! clients ▶ the gateway ▶ an address that refuses connections, as a Service does while it names a killed daemon ▶ the daemon
//! ```

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::future::try_join_all;
use serde_json::{Value, json};
use testbed::Result;
use testbed::ports::ReservedPort;
use testbed::stack::{PickerMode, Stack};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

use crate::echo;

/// The number of requests at the same time. Envoy retries at most 3 at the same time by default.
const REQUESTS: usize = 40;

/// The time for which connections are refused. It is much shorter than all retries of
/// `ext_proc.yaml` together take (about 2 s).
const OUTAGE: Duration = Duration::from_millis(400);

/// The daemon's port, which is set once it is known.
type Port = Arc<OnceLock<u16>>;

/// Passes connections on to the daemon until the task ends.
async fn pass_on(near: SocketAddr, daemon: Port) -> Result<JoinHandle<()>> {
    let listener = TcpListener::bind(near).await?;
    Ok(tokio::spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((mut client, _)) = listener.accept().await {
            let Some(port) = daemon.get().copied() else {
                continue;
            };
            connections.spawn(async move {
                if let Ok(mut daemon) = TcpStream::connect(("127.0.0.1", port)).await {
                    // The copy ends when either side ends.
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut daemon).await;
                }
            });
        }
    }))
}

#[tokio::test]
async fn all_streams_are_retried_while_a_daemon_is_replaced() -> Result<()> {
    let near = ReservedPort::lease()?;
    let daemon = Port::default();
    let address = near.address();
    let port_of_daemon = Port::clone(&daemon);
    let before = pass_on(address, Port::clone(&daemon)).await?;
    let stack = Stack::builder().servers(2).front(PickerMode::ExtProc).envoy_config(move |config| {
        let clusters = config.pointer_mut("/static_resources/clusters").and_then(Value::as_array_mut).expect("clusters");
        let cluster = clusters.iter_mut().find(|cluster| cluster["name"] == "switchpoint-ext-proc").expect("the daemon's cluster");
        let port =
            &mut cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]["port_value"];
        let _ = port_of_daemon.set(port.as_u64().and_then(|port| u16::try_from(port).ok()).expect("the daemon's port"));
        *port = json!(address.port());
    });
    let stack = stack.start().await?;
    let ask = || async {
        stack
            .send(echo::post(
                "/v1/chat/completions",
                &[],
                echo::chat("hi").to_string(),
            )?)
            .await
    };
    assert_eq!(ask().await?.status, 200);
    before.abort();
    let _ = before.await; // the connection to the daemon is closed now
    let asked = try_join_all((0..REQUESTS).map(|_| ask()));
    let replaced = async {
        tokio::time::sleep(OUTAGE).await;
        pass_on(address, daemon).await
    };
    let (replies, again) = tokio::try_join!(asked, replaced)?;
    let refused: Vec<String> = replies
        .iter()
        .filter(|reply| reply.status != 200)
        .map(|reply| reply.text())
        .collect();
    assert!(
        refused.is_empty(),
        "{} of {REQUESTS} requests were refused: {refused:?}",
        refused.len()
    );
    again.abort();
    Ok(())
}
