"""Faults caused by tenants: a broken tenants file, and a hostile tenant beside the calm one, who sends the load."""

import hashlib
import json
import time

import yaml

from e2e.chaos import hostile
from e2e.chaos.client import CALM_KEY, Counts
from e2e.chaos.stage import AUTO, FIXED, Stage
from e2e.slipway import GATEWAY, RELEASE_NAMESPACE

HOSTILE_KEY = "sk-chaos-hostile"
FILES = "chaos-tenants"  # the ConfigMap and the Secret
WINDOW_SECONDS = 30.0  # of each of the two measurements
BROKEN_SECONDS = 75.0  # a kubelet updates a mounted ConfigMap within about a minute
SLOWER, SLOWER_SECONDS = 2.0, 1.0  # how much later the calm tenant's p99 may be: both processors are shared

TENANTS = yaml.safe_dump(
    {
        "tenants": [
            {"name": "calm", "keys": ["calm"], "models": [FIXED, AUTO], "priority": 10},
            {
                "name": "hostile",
                "keys": ["hostile"],
                "models": [FIXED],
                "concurrency": 4,
                "requestsPerMinute": 120,
                "tokensPerMinute": 4000,
                "maxTokens": 64,
            },
        ]
    }
)


def admit_two_tenants(stage: Stage) -> None:
    """The gateways know the calm tenant and the hostile one."""
    digests = {
        name: hashlib.sha256(key.encode()).hexdigest() for name, key in (("calm", CALM_KEY), ("hostile", HOSTILE_KEY))
    }
    for manifest in (
        {"kind": "ConfigMap", "data": {"tenants.yaml": TENANTS}},
        {"kind": "Secret", "stringData": digests},
    ):
        metadata = {"name": FILES, "namespace": RELEASE_NAMESPACE}
        stage.apply({"apiVersion": "v1", "metadata": metadata} | manifest)
    stage.slipway.api_key = CALM_KEY
    stage.configure(f"gateway.tenants.configMap={FILES}", f"gateway.tenants.keysSecret={FILES}")
    stage.wait_settled()


def break_tenants_file(stage: Stage) -> None:
    """The file that was valid last stays in force."""
    patch = json.dumps({"data": {"tenants.yaml": "tenants: nonsense"}})
    stage.kubectl("-n", RELEASE_NAMESPACE, "patch", "configmap", FILES, "-p", patch)
    time.sleep(BROKEN_SECONDS)


def be_hostile(stage: Stage) -> None:
    """The calm tenant's failures and its p99 of the first byte are those of the same run without the hostile tenant."""
    failed_before, p99_before = measure(stage.counts)
    with hostile.hostile_tenant(stage.slipway.access.port(GATEWAY), FIXED, HOSTILE_KEY) as seen:
        failed, p99 = measure(stage.counts)
    stage.notes.append(
        f"calm tenant without and with the hostile one: {failed_before} and {failed} failed first attempts, "
        f"p99 of the first byte {p99_before:.2f} and {p99:.2f} s; the hostile one saw {dict(sorted(seen.items()))}"
    )
    assert sum(seen.values()) > 0, "the hostile tenant got no answer"
    assert failed <= failed_before, f"the calm tenant lost {failed} first attempts, and {failed_before} without it"
    limit = p99_before * SLOWER + SLOWER_SECONDS
    assert p99 <= limit, f"the calm tenant's p99 is {p99:.2f} s, above {limit:.2f} s"


def measure(counts: Counts) -> tuple[int, float]:
    """The failed first attempts, and the 99th percentile of seconds to a first byte, of the next half minute."""
    failed, seen = counts.failed_first, len(counts.first_bytes)
    time.sleep(WINDOW_SECONDS)
    waits = sorted(counts.first_bytes[seen:])
    assert waits, "no answer began in this window"
    return counts.failed_first - failed, waits[min(len(waits) - 1, int(len(waits) * 0.99))]
