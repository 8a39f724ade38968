"""Certificates, tokens and kubeconfigs of the node, made again at each start."""

import json
import secrets
import subprocess

from paths import ADMIN_KUBECONFIG, API_SERVICE_ADDRESS, ETC, NODE_ADDRESS, NODE_NAME

# The users: the file stem of the kubeconfig, the user's name, and the user's groups.
USERS = (
    ("admin", "admin", "system:masters"),
    ("kcm", "system:kube-controller-manager", ""),
    ("scheduler", "system:kube-scheduler", ""),
    ("kubelet", f"system:node:{NODE_NAME}", "system:nodes"),
    ("proxy", "system:kube-proxy", ""),
)
EC_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30"]
API_NAMES = ",".join(
    [f"DNS:{name}" for name in ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost")]
    + [f"IP:{address}" for address in ("127.0.0.1", NODE_ADDRESS, API_SERVICE_ADDRESS)]
)


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=ETC, check=True, capture_output=True)


def authority(stem: str, name: str) -> None:
    """Makes STEM.pem and STEM.key of a certificate authority."""
    usage = "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"
    openssl("req", "-x509", *EC_KEY, "-subj", f"/CN={name}", "-addext", usage, "-keyout", f"{stem}.key", "-out", f"{stem}.pem")


def certificate(stem: str, issuer: str, names: str, usage: str) -> None:
    """Makes STEM.pem and STEM.key for `names`, as in subjectAltName, signed by the authority of the stem `issuer`."""
    openssl(
        "req", "-x509", *EC_KEY, "-subj", f"/CN={stem}", "-CA", f"{issuer}.pem", "-CAkey", f"{issuer}.key",
        "-keyout", f"{stem}.key", "-out", f"{stem}.pem", "-addext", f"subjectAltName={names}",
        "-addext", "basicConstraints=critical,CA:FALSE", "-addext", f"extendedKeyUsage={usage}",
    )  # fmt: skip


def write() -> None:
    ETC.mkdir(parents=True, exist_ok=True)
    ETC.chmod(0o700)
    authority("ca", "kubernetes-ca")
    certificate("apiserver", "ca", API_NAMES, "serverAuth")
    openssl("genrsa", "-out", "sa.key", "2048")
    openssl("rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub")
    rows = []
    for number, (stem, user, groups) in enumerate(USERS):
        token = secrets.token_hex(16)
        rows.append(f'{token},{user},{number},"{groups}"' if groups else f"{token},{user},{number}")
        (ETC / f"{stem}.conf").write_text(json.dumps(kubeconfig(token)))
    (ETC / "tokens.csv").write_text("\n".join(rows) + "\n")
    assert ADMIN_KUBECONFIG.exists()


def kubeconfig(token: str) -> dict:
    """Returns a kubeconfig as JSON, which is also valid YAML."""
    cluster = {"server": "https://127.0.0.1:6443", "certificate-authority": str(ETC / "ca.pem")}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "node", "cluster": cluster}],
        "users": [{"name": "user", "user": {"token": token}}],
        "contexts": [{"name": "node", "context": {"cluster": "node", "user": "user"}}],
        "current-context": "node",
    }
