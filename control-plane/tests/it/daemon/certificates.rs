//! The leader renews the chart's certificates in a real kube-apiserver.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ObjectMeta, Patch, PatchParams};
use kube::{Api, Client};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;

use super::cluster;
use super::outsiders::LoggedDaemon;

const CA: &str = include_str!("certificates/ca.pem");
const CA_KEY: &str = include_str!("../../../src/daemon/certificates/test_ca.key");
/// Two certificates: the first is valid from January to March 2026, the second until 2119.
const OLD: &str = include_str!("certificates/old.pem");
const FRESH: &str = include_str!("certificates/fresh.pem");

const NAMESPACE: &str = "renewal";

/// Returns a Secret as Helm writes it.
fn secret(name: &str, cert: &str, key: &str, ca: Option<&str>) -> Secret {
    let texts = [
        ("tls.crt", Some(cert)),
        ("tls.key", Some(key)),
        ("ca.crt", ca),
    ];
    let data = texts
        .into_iter()
        .filter_map(|(name, text)| Some((name.to_owned(), ByteString(text?.as_bytes().to_vec()))));
    Secret {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            labels: Some([("part-of".to_owned(), "switchpoint".to_owned())].into()),
            annotations: Some([("switchpoint/made-on-day".to_owned(), "20454".to_owned())].into()),
            ..ObjectMeta::default()
        },
        data: Some(data.collect()),
        type_: ca.map(|_| "kubernetes.io/tls".to_owned()),
        ..Secret::default()
    }
}

/// Writes a Secret as Helm does, which refuses to take a field from another owner.
async fn helm(secrets: &Api<Secret>, secret: &Secret) -> Result<(), String> {
    let name = secret.metadata.name.as_deref().unwrap();
    let parameters = PatchParams::apply("helm");
    let patch = Patch::Apply(secret);
    let applied = secrets.patch(name, &parameters, &patch).await;
    applied.map(drop).map_err(|error| error.to_string())
}

fn text<'s>(secret: &'s Secret, key: &str) -> &'s str {
    std::str::from_utf8(&secret.data.as_ref().unwrap()[key].0).unwrap()
}

/// Gives the account only the rights that the chart gives to the daemon.
async fn limit(client: &Client) {
    let group = "rbac.authorization.k8s.io/v1";
    let rules = json!([
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["old", "fresh"], "verbs": ["get", "patch"]},
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["ca"], "verbs": ["get"]},
    ]);
    let role = json!({"apiVersion": group, "kind": "Role", "metadata": {"name": "renewal"}, "rules": rules});
    let binding = json!({
        "apiVersion": group, "kind": "RoleBinding", "metadata": {"name": "renewal"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "renewal"},
        "subjects": [{"kind": "User", "name": "limited", "apiGroup": "rbac.authorization.k8s.io"}],
    });
    let at = |kind: &str| format!("/apis/{group}/namespaces/{NAMESPACE}/{kind}");
    cluster::post(client, &at("roles"), &role).await.unwrap();
    cluster::post(client, &at("rolebindings"), &binding)
        .await
        .unwrap();
}

#[tokio::test]
async fn the_leader_renews_a_certificate_that_is_due_and_helm_may_still_replace_it() {
    let Some(cluster) = cluster::shared().await else {
        return;
    };
    let admin = cluster.client("tok").await;
    let namespace = json!({"metadata": {"name": NAMESPACE}});
    cluster::post(&admin, "/api/v1/namespaces", &namespace)
        .await
        .unwrap();
    limit(&admin).await;
    let secrets: Api<Secret> = Api::namespaced(admin.clone(), NAMESPACE);
    let old = secret("old", OLD, "key", Some(CA));
    let fresh = secret("fresh", FRESH, "key", Some(CA));
    for one in [&secret("ca", CA, CA_KEY, None), &old, &fresh] {
        helm(&secrets, one).await.unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("kubeconfig");
    let all = std::fs::read_to_string(cluster.kubeconfig()).unwrap();
    std::fs::write(&kubeconfig, all.replace("token: tok", "token: limited")).unwrap();
    let arguments = [
        "--endpoint",
        "127.0.0.1:9",
        "--listen-ext-proc",
        "none",
        "--renew-certificates-ca",
        "renewal/ca",
        "--renew-certificates",
        "renewal/fresh=a.sp,renewal/old=proxy.sp.prod+b.sp",
    ];
    let environment = [("KUBECONFIG", kubeconfig.to_str().unwrap())];
    let daemon =
        LoggedDaemon::start_in(1_024, &arguments, "renewed a certificate", &environment).await;
    drop(daemon);

    let renewed = secrets.get("old").await.unwrap();
    assert_ne!(text(&renewed, "tls.crt"), OLD);
    assert_eq!(text(&renewed, "ca.crt"), CA);
    assert_eq!(renewed.metadata.labels, old.metadata.labels);
    assert_eq!(renewed.type_, old.type_);
    let today = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs() / 86_400;
    let made = renewed.metadata.annotations.as_ref().unwrap()["switchpoint/made-on-day"].clone();
    assert!(today - made.parse::<u64>().unwrap() < 2);
    let _ = rustls::crypto::ring::default_provider().install_default();
    rustls::ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(
            vec![CertificateDer::from_pem_slice(text(&renewed, "tls.crt").as_bytes()).unwrap()],
            PrivateKeyDer::from_pem_slice(text(&renewed, "tls.key").as_bytes()).unwrap(),
        )
        .expect("the key is that of the certificate");
    assert_eq!(secrets.get("fresh").await.unwrap().data, fresh.data);

    let kept = secret(
        "old",
        text(&renewed, "tls.crt"),
        text(&renewed, "tls.key"),
        Some(CA),
    );
    helm(&secrets, &kept)
        .await
        .expect("an upgrade of something else");
    helm(&secrets, &old)
        .await
        .expect("a new generation of certificates");
}
