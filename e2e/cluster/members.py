"""Watches how many endpoints the gateways' Envoys have in a pool's cluster, by their own metrics.

    members.py SECONDS CLUSTER ADDRESS...
"""

import json
import re
import sys
import time
import urllib.request

INTERVAL_SECONDS = 0.25
PATH = "/stats/prometheus?filter=cluster.*membership_total"


def members(address: str, cluster: str) -> int | None:
    """Returns the number of endpoints, or None if the gateway does not answer."""
    try:
        with urllib.request.urlopen(f"http://{address}{PATH}", timeout=2) as reply:
            text = reply.read().decode()
    except OSError:
        return None
    found = re.search(rf'^envoy_cluster_membership_total\{{[^}}]*envoy_cluster_name="{re.escape(cluster)}"[^}}]*\}} (\d+)$', text, re.MULTILINE)
    return int(found[1]) if found else None


def watch(seconds: float, cluster: str, addresses: list[str]) -> dict[str, float]:
    """Returns the fewest and the most endpoints that a gateway had (-1 if none answered), and for how long a gateway had none. Reads the
    metrics at least once."""
    began, seen, empty = time.monotonic(), [], 0.0
    while True:
        counts = [count for address in addresses if (count := members(address, cluster)) is not None]
        seen += counts
        empty += INTERVAL_SECONDS * (0 in counts)
        if time.monotonic() - began >= seconds:
            return {"fewest": min(seen, default=-1), "most": max(seen, default=-1), "empty_seconds": empty}
        time.sleep(INTERVAL_SECONDS)


if __name__ == "__main__":
    print(json.dumps(watch(float(sys.argv[1]), sys.argv[2], sys.argv[3:])))
