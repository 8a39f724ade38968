"""The cluster's DNS: A records of Services, from the API server. A headless Service has the addresses of its ready endpoints.

    dns.py KUBECONFIG
"""

import http
import http.client
import json
import pathlib
import socket
import ssl
import struct
import sys
import threading
import time

from paths import IMAGE_HOSTS, NODE_ADDRESS

POLL_SECONDS = 0.5
TIMEOUT_SECONDS = 5
TTL_SECONDS = 1
TYPE_A = 1
HEADER = 12
# The flags of a reply (response, authoritative, recursion available), and the code for a name that does not exist.
FLAGS, UNKNOWN_NAME = 0x8580, 3

Table = dict[str, list[str]]


class ApiServer:
    """Reads the API server over one connection. `kubectl` twice per poll would take half a core."""

    def __init__(self, kubeconfig: str):
        config = json.loads(pathlib.Path(kubeconfig).read_text())
        cluster = config["clusters"][0]["cluster"]
        self.headers = {"Authorization": f"Bearer {config['users'][0]['user']['token']}"}
        tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self.connection = http.client.HTTPSConnection(cluster["server"].removeprefix("https://"), timeout=TIMEOUT_SECONDS, context=tls)

    def get(self, path: str) -> list[dict]:
        try:
            self.connection.request("GET", path, headers=self.headers)
            reply = self.connection.getresponse()
            body = reply.read()
        except (OSError, http.client.HTTPException):
            self.connection.close()  # the next request connects again
            raise
        if reply.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(f"{path}: {reply.status}")
        return json.loads(body)["items"]


def records(services: list[dict], slices: list[dict]) -> Table:
    """Returns the addresses of each Service's name."""
    table: Table = {IMAGE_HOSTS[0]: [NODE_ADDRESS]}
    for service in services:
        name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
        address = service["spec"].get("clusterIP")
        addresses = [address] if address and address != "None" else endpoints(name, namespace, service, slices)
        table[f"{name}.{namespace}.svc.cluster.local"] = addresses
    return table


def endpoints(name: str, namespace: str, service: dict, slices: list[dict]) -> list[str]:
    """Returns the addresses of a headless Service."""
    all_addresses = service["spec"].get("publishNotReadyAddresses", False)
    return [
        address
        for part in slices
        if part["metadata"]["namespace"] == namespace and part["metadata"].get("labels", {}).get("kubernetes.io/service-name") == name
        for endpoint in part.get("endpoints") or []
        if all_addresses or endpoint.get("conditions", {}).get("ready")
        for address in endpoint["addresses"]
    ]


def answer(query: bytes, table: Table) -> bytes:
    """Returns the reply to one DNS query of one question."""
    at, labels = HEADER, []
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode())
        at += query[at] + 1
    (kind,) = struct.unpack(">H", query[at + 1 : at + 3])
    end, name = at + 5, ".".join(labels).lower()
    addresses = table.get(name, []) if kind == TYPE_A else []
    code = 0 if name in table else UNKNOWN_NAME
    head = query[:2] + struct.pack(">HHHHH", FLAGS | code, 1, len(addresses), 0, 0)
    # Each record names the question's name by a pointer.
    rows = [b"\xc0\x0c" + struct.pack(">HHIH", TYPE_A, 1, TTL_SECONDS, 4) + socket.inet_aton(address) for address in addresses]
    return head + query[HEADER:end] + b"".join(rows)


class Server:
    """Answers on port 53 of the node. While the API server is away, it keeps the last addresses."""

    def __init__(self, kubeconfig: str):
        self.api_server = ApiServer(kubeconfig)
        self.table: Table = {}

    def poll(self) -> None:
        while True:
            try:
                services = self.api_server.get("/api/v1/services")
                self.table = records(services, self.api_server.get("/apis/discovery.k8s.io/v1/endpointslices"))
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                print(f"no new addresses: {error}", flush=True)
            time.sleep(POLL_SECONDS)

    def serve(self) -> None:
        threading.Thread(target=self.poll, daemon=True).start()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
            server.bind((NODE_ADDRESS, 53))
            while True:
                query, client = server.recvfrom(1500)
                try:
                    server.sendto(answer(query, self.table), client)
                except (IndexError, struct.error, UnicodeDecodeError) as error:
                    print(f"a query that cannot be read: {error}", flush=True)


if __name__ == "__main__":
    Server(sys.argv[1]).serve()
