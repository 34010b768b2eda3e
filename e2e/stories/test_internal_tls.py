"""An installation turns on TLS between its parts: streams, rotation, the plugin, zero replicas, adapters; and off.

The stories share one installation with `internalTLS.enabled`; the last one turns it on and off under load.
"""

import json
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e import checks, internal_tls
from e2e.cluster.launch import Cluster
from e2e.internal_tls import ENABLED, call, renew
from e2e.ledger import Ledger
from e2e.live_streams import Streams, disturbances
from e2e.manifests import as_yaml, deterministic, static
from e2e.slipway import EXAMPLES, RELEASE_NAMESPACE, USER_NAMESPACE, Slipway, speaks_tls, wait_for
from e2e.stories.conftest import delete_services
from slipway_api import names
from slipway_api.internal_tls import replicas_name

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(900), pytest.mark.capability("SE-10")]

PORTS = (names.SERVING_PORT, names.ADMIN_PORT)
PLUGIN = Path(sys.executable).parent / "kubectl-slipway"
TEAM = replicas_name(USER_NAMESPACE)


@pytest.fixture(scope="module")
def installation(slipway: Slipway) -> Iterator[Slipway]:
    """Slipway with TLS between its parts; without it afterwards."""
    delete_services(slipway)
    begun = time.monotonic()
    slipway.install(ENABLED)
    print(f"the upgrade took {time.monotonic() - begun:.1f} s")
    yield slipway
    delete_services(slipway)
    slipway.install()


@pytest.fixture
def secured(installation: Slipway, clean: Slipway) -> Slipway:
    """The same, without services."""
    return clean


def plugin(slipway: Slipway, *arguments: str) -> str:
    """What `kubectl slipway` prints."""
    done = subprocess.run(
        [PLUGIN, *arguments], env=slipway.access.environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def console(slipway: Slipway) -> Iterator[str]:
    """The address that `kubectl slipway console` prints, while it runs."""
    environment = slipway.access.environment() | {"PYTHONUNBUFFERED": "1"}
    command = [PLUGIN, "console", "--no-browser"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def touch(slipway: Slipway, service: str) -> None:
    """Annotate the pods: a kubelet then mounts their Secrets anew, as it does by itself within two minutes."""
    pods = [pod.metadata.name for pod in slipway.pods(service)]
    mark = f"example.com/touched={time.time()}"
    slipway.access.kubectl("annotate", "pod", *pods, mark, "-n", USER_NAMESPACE, "--overwrite")


def is_other(shown: set[str], before: set[str]) -> bool:
    """Whether all show one certificate, and another than before."""
    return len(shown) == 1 and not shown & before


def serials(cluster: Cluster, slipway: Slipway, service: str) -> set[str]:
    """The certificates that both ports of all replicas show to new connections."""
    bundle = internal_tls.authorities(slipway)
    addresses = [pod.status.pod_ip for pod in checks.ready_pods(slipway, service)]
    answers = [call(cluster, one, port, name=TEAM, authorities=bundle) for one in addresses for port in PORTS]
    assert {answer.get("status") for answer in answers} == {200}, answers
    return {answer["serial"] for answer in answers}


def test_replicas_speak_tls_alone_and_only_callers_with_the_authority_and_the_name_of_the_namespace_accept_them(
    secured: Slipway, cluster: Cluster
) -> None:
    secured.apply(as_yaml(deterministic("sealed", 1)))
    service = secured.wait_ready("sealed", replicas=1)
    (pod,) = secured.pods("sealed")
    assert speaks_tls(pod)
    assert all(one["url"].startswith("https://") for one in service["status"]["addresses"] if one["name"] != "gateway")

    streams = Streams(secured.base_url, "sealed", count=4, tokens=40)
    read = streams.read(run="sealed")
    assert disturbances(read, streams.read(run="again")) == []

    bundle, address = internal_tls.authorities(secured), pod.status.pod_ip
    for port in PORTS:
        assert call(cluster, address, port, name=TEAM, authorities=bundle)["status"] == 200
        plain = call(cluster, address, port)
        assert "status" not in plain, plain
        assert "certificate verify failed" in call(cluster, address, port, name=TEAM)["error"]
        other = call(cluster, address, port, name=replicas_name("other"), authorities=bundle)
        assert "Hostname mismatch" in other["error"]

    gateway = secured.core.list_namespaced_pod(RELEASE_NAMESPACE, label_selector="app.kubernetes.io/component=gateway")
    assert "status" not in call(cluster, gateway.items[0].status.pod_ip, names.ADMIN_PORT)

    said = plugin(secured, "status", "sealed")
    assert "Ready=True" in said
    accounts = json.loads(plugin(secured, "why", "sealed-0", "-o", "json"))
    assert accounts, "the account of a request comes from admin ports that speak TLS"
    assert not accounts[0]["missing"], accounts


def test_the_plugin_reads_and_drains_replicas_that_speak_tls(secured: Slipway) -> None:
    secured.apply(as_yaml(static("pair", 2)))
    secured.wait_ready("pair", replicas=2)
    checks.wait_serving(secured, "pair")

    with console(secured) as url:
        assert url.startswith("https://")
        address, _, token = url.partition("#token=")
        request = urllib.request.Request(address, headers={names.HEADER_ADMIN_TOKEN: token})
        with urllib.request.urlopen(request, context=ssl._create_unverified_context(), timeout=10) as page:
            assert page.status == 200

    leaving = secured.pods("pair")[0].metadata.name
    load = secured.load("pair", concurrency=2, seconds=600, max_tokens=16)
    assert leaving in plugin(secured, "drain", "pair", leaving)
    wait_for("it is replaced", lambda: leaving not in {one.metadata.name for one in secured.pods("pair")}, timeout=120)
    secured.wait_ready("pair", replicas=2)
    report = load.stop()
    assert report.failed == 0
    assert all(speaks_tls(pod) for pod in secured.pods("pair"))


def test_zero_replicas_wake_up_and_adapters_load_over_tls(secured: Slipway) -> None:
    secured.apply(EXAMPLES / "idle-to-zero.yaml")
    secured.apply(EXAMPLES / "lora-adapter.yaml")
    for name in ("idle", "lora"):
        secured.wait_ready(name, replicas=1)
    chats = secured.openai().chat.completions
    messages: Any = [{"role": "user", "content": "Hello"}]
    ask = {"messages": messages, "max_tokens": 8, "temperature": 0}

    loaded = lambda: secured.custom("LoRAAdapter", "sailor")["status"].get("loaded") == "1/1"  # noqa: E731
    wait_for("the adapter is loaded", loaded)
    assert chats.create(model="sailor", **ask).choices[0].message.content
    wait_for("no pod of idle is left", lambda: not secured.pods("idle"), timeout=150)
    assert chats.create(model="idle", **ask).choices[0].finish_reason in ("stop", "length")
    assert all(speaks_tls(pod) for pod in secured.pods("idle"))


def test_a_rotation_cuts_no_stream_and_new_connections_get_the_new_certificate(
    secured: Slipway, cluster: Cluster, open_ledger: Callable[[str], Ledger]
) -> None:
    secured.apply(as_yaml(deterministic("rotated", 2)))
    secured.wait_ready("rotated", replicas=2)
    streams = Streams(secured.base_url, "rotated", count=32, tokens=300)
    undisturbed = streams.read()
    before = serials(cluster, secured, "rotated")
    assert len(before) == 1

    ledger = open_ledger("rotated")
    load = secured.load("rotated", concurrency=2, seconds=900, max_tokens=16)
    renew(secured)
    touch(secured, "rotated")
    wait_for(
        "both ports of both replicas have it",
        lambda: is_other(serials(cluster, secured, "rotated"), before),
        timeout=150,
    )
    checks.no_request_lost(load.stop(), ledger)

    older = serials(cluster, secured, "rotated")

    def rotate() -> None:
        renew(secured)
        touch(secured, "rotated")
        wait_for("the next certificate", lambda: is_other(serials(cluster, secured, "rotated"), older), timeout=150)

    assert disturbances(streams.read(rotate, run="rotated"), undisturbed) == []
    assert len(secured.pods("rotated")) == 2
    assert all(status.restart_count == 0 for pod in secured.pods("rotated") for status in pod.status.container_statuses)


@pytest.mark.timeout(1800)
def test_turning_it_on_and_off_replaces_replicas_under_load_and_loses_no_request(
    installation: Slipway, clean: Slipway, cluster: Cluster, open_ledger: Callable[[str], Ledger]
) -> None:
    clean.install()
    clean.apply(as_yaml(static("switched", 2)))
    clean.wait_ready("switched", replicas=2)
    assert not any(map(speaks_tls, clean.pods("switched")))
    checks.wait_serving(clean, "switched")

    for enabled in (True, False):
        clean.install(*([ENABLED] if enabled else []))
        ledger = open_ledger("switched")
        load = clean.load("switched", concurrency=2, seconds=1500, max_tokens=16)

        def are_replaced(enabled: bool = enabled) -> bool:
            pods = clean.pods("switched")
            return len(pods) == 2 and all(speaks_tls(pod) == enabled and checks.is_ready(pod) for pod in pods)

        wait_for(f"two replicas, TLS: {enabled}", are_replaced, timeout=600)
        checks.no_request_lost(load.stop(), ledger)
        (address, *_) = [pod.status.pod_ip for pod in clean.pods("switched")]
        assert (call(cluster, address, names.SERVING_PORT).get("status") == 200) == (not enabled)
