//! How the proxy verifies the daemon that it calls by ext_proc.

use serde_json::{Value, json};
use testbed::Result;

use super::ext_proc;
use crate::echo;

/// Replaces the transport socket of the proxy's cluster for the daemon.
fn transport(socket: Option<Value>) -> impl Fn(&mut Value) + Send + 'static {
    move |config| {
        let clusters = config
            .pointer_mut("/static_resources/clusters")
            .and_then(Value::as_array_mut);
        if let Some(cluster) = clusters
            .into_iter()
            .flatten()
            .find(|cluster| cluster["name"] == "switchpoint-ext-proc")
            && let Some(fields) = cluster.as_object_mut()
        {
            match &socket {
                Some(socket) => fields.insert("transport_socket".to_owned(), socket.clone()),
                None => fields.remove("transport_socket"),
            };
        }
    }
}

#[tokio::test]
async fn in_clear_on_request() -> Result<()> {
    let stack = ext_proc()
        .daemon_arguments(&["--ext-proc-plaintext"])
        .envoy_config(transport(None))
        .start()
        .await?;
    assert_eq!(
        stack
            .post("/v1/chat/completions", &echo::chat("x"))
            .await?
            .status,
        200
    );
    Ok(())
}

#[tokio::test]
async fn by_a_certificate_that_the_proxy_checks() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = |name: &str| folder.path().join(name).display().to_string();
    let made = rcgen::generate_simple_self_signed(["switchpointd".to_owned()])?;
    std::fs::write(file("cert.pem"), made.cert.pem())?;
    std::fs::write(file("key.pem"), made.signing_key.serialize_pem())?;
    let context = |sni: &str| {
        json!({"name": "envoy.transport_sockets.tls", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "sni": sni, "auto_sni_san_validation": true,
            "common_tls_context": {"alpn_protocols": ["h2"], "validation_context": {"trusted_ca": {"filename": file("cert.pem")}}},
        }})
    };
    let cert = file("cert.pem");
    let key = file("key.pem");
    let arguments = ["--ext-proc-tls-cert", &cert, "--ext-proc-tls-key", &key];
    let stack = ext_proc()
        .daemon_arguments(&arguments)
        .envoy_config(transport(Some(context("switchpointd"))))
        .start()
        .await?;
    assert_eq!(
        stack
            .post("/v1/chat/completions", &echo::chat("x"))
            .await?
            .status,
        200
    );
    drop(stack);
    // The proxy must not trust the certificate that the daemon makes at start by default.
    let stack = ext_proc()
        .envoy_config(transport(Some(context("switchpointd"))))
        .without_waiting()
        .start()
        .await?;
    assert_eq!(stack.get("/v1/models").await?.status, 503);
    Ok(())
}
