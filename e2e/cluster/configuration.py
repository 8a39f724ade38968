"""Configuration files of the node's components."""

import json

from paths import BIN, CGROUP, ETC, IMAGE_HOSTS, NODE_ADDRESS, NODE_NAME, NODE_POD_RANGE, POD_RANGE, REGISTRY, RUN, WRAPPERS

PAUSE_IMAGE = f"{REGISTRY}/pause:1"

KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    # Allows cgroup v1, which the kubelet refuses by default since Kubernetes 1.35.
    "failCgroupV1": False,
    "cgroupDriver": "cgroupfs",
    "cgroupRoot": f"/{CGROUP}",
    "failSwapOn": False,
    "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "clusterDNS": [NODE_ADDRESS],
    "clusterDomain": "cluster.local",
    "resolvConf": "",
    "podLogsDir": str(RUN / "pods"),
    "volumePluginDir": str(RUN / "kubelet/volumeplugins"),
    # Sets low limits, because by default a disk that is over 85 % full would taint the node.
    "evictionHard": {"imagefs.available": "1%", "nodefs.available": "1%", "nodefs.inodesFree": "1%", "memory.available": "100Mi"},
    "imageGCHighThresholdPercent": 100,
    "imageGCLowThresholdPercent": 99,
    "makeIPTablesUtilChains": False,
    # Changes of Secrets and ConfigMaps reach pods sooner than by the default of one minute.
    "syncFrequency": "5s",
    "maxPods": 60,
}

KUBE_PROXY = {
    "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
    "kind": "KubeProxyConfiguration",
    "mode": "nftables",
    "clusterCIDR": POD_RANGE,
    "hostnameOverride": NODE_NAME,
    "clientConnection": {"kubeconfig": str(ETC / "proxy.conf")},
    # Zero leaves these sysctls unchanged, because they apply to the whole machine.
    "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
}

# `ptp` routes pods, so a ClusterIP that leads to a pod of the same node needs no bridge netfilter.
CNI = {
    "cniVersion": "1.0.0",
    "name": "pods",
    "plugins": [
        {
            "type": "ptp",
            "ipMasq": False,
            "mtu": 1500,
            "ipam": {"type": "host-local", "dataDir": "/run/cni-ipam", "ranges": [[{"subnet": NODE_POD_RANGE}]], "routes": [{"dst": "0.0.0.0/0"}]},
        },
        {"type": "portmap", "capabilities": {"portMappings": True}, "backend": "nftables"},
    ],
}

CONTAINERD = f"""version = 3
root = '{RUN}/containerd'
state = '/run/containerd'
disabled_plugins = [
  'io.containerd.snapshotter.v1.btrfs', 'io.containerd.snapshotter.v1.zfs', 'io.containerd.snapshotter.v1.devmapper',
  'io.containerd.snapshotter.v1.erofs', 'io.containerd.internal.v1.tracing', 'io.containerd.nri.v1.nri',
]
[grpc]
  address = '/run/containerd/containerd.sock'
[plugins.'io.containerd.internal.v1.opt']
  path = '{RUN}/opt'
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = '{PAUSE_IMAGE}'
[plugins.'io.containerd.cri.v1.images'.registry]
  config_path = '{ETC}/certs.d'
[plugins.'io.containerd.cri.v1.runtime']
  # Without CAP_SYS_RESOURCE every sandbox would fail.
  restrict_oom_score_adj = true
  tolerate_missing_hugetlb_controller = true
  disable_hugetlb_controller = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ['{BIN}']
  conf_dir = '{ETC}/cni'
[plugins.'io.containerd.cri.v1.runtime'.containerd]
  default_runtime_name = 'runc'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
  BinaryName = '{WRAPPERS}/runc'
  SystemdCgroup = false
"""

HOSTS = f"""server = 'http://{REGISTRY}'
[host.'http://{REGISTRY}']
  capabilities = ['pull', 'resolve']
"""


def write() -> None:
    (ETC / "cni").mkdir(parents=True, exist_ok=True)
    # The files are JSON, which every YAML reader accepts.
    (ETC / "kubelet.yaml").write_text(json.dumps(KUBELET))
    (ETC / "kube-proxy.yaml").write_text(json.dumps(KUBE_PROXY))
    (ETC / "cni/10-ptp.conflist").write_text(json.dumps(CNI))
    (ETC / "containerd.toml").write_text(CONTAINERD)
    for host in IMAGE_HOSTS:
        folder = ETC / "certs.d" / host
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts.toml").write_text(HOSTS)
