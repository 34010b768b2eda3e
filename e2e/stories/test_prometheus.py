"""A platform team's own Prometheus tells the operator the load of its replicas; when it dies, autoscaling goes on."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from e2e.cluster.launch import Cluster
from e2e.cluster.namespaces import Program
from e2e.slipway import EXAMPLES, RELEASE_NAMESPACE, Slipway, wait_for
from slipway_api import names
from tests.prometheus_server import find_binary

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(900)]  # two upgrades of the chart

ADDRESS = "172.30.0.1:9090"  # in the cluster's own network: pods reach it, nothing outside does
QUERIES = 'prometheus_http_requests_total{code="200",handler="/api/v1/query"}'
READ = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"


class Prometheus:
    """A Prometheus that scrapes the admin ports of all replicas, with the labels of the chart's PodMonitor.

    Debian builds it without discovery by Kubernetes, so a thread writes the replicas into a file that it watches.
    """

    def __init__(self, cluster: Cluster, slipway: Slipway, folder: Path) -> None:
        self._cluster = cluster
        self._slipway = slipway
        self._folder = folder
        folder.mkdir()
        folder.chmod(0o777)  # it runs as a user of the cluster's namespaces
        replicas = {
            "job_name": "replicas",
            "file_sd_configs": [{"files": [str(folder / "replicas.json")], "refresh_interval": "1s"}],
        }
        config = {"global": {"scrape_interval": "2s", "scrape_timeout": "2s"}, "scrape_configs": [replicas]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._program: Program | None = None
        self._is_closed = threading.Event()
        self._discovery = threading.Thread(target=self._discover)
        self._discovery.start()

    def _discover(self) -> None:
        new, file = self._folder / "replicas.new", self._folder / "replicas.json"
        while not self._is_closed.wait(1):
            pods = self._slipway.core.list_pod_for_all_namespaces(label_selector=names.LABEL_SERVICE).items
            groups = [
                {
                    "targets": [f"{pod.status.pod_ip}:{names.ADMIN_PORT}"],
                    "labels": {"namespace": pod.metadata.namespace, "pod": pod.metadata.name},
                }
                for pod in pods
                if pod.status.pod_ip
            ]
            new.write_text(json.dumps(groups))
            new.rename(file)

    def close(self) -> None:
        self.kill()
        self._is_closed.set()
        self._discovery.join()

    def start(self) -> None:
        flags = (f"--config.file={self._folder}/prometheus.yml", f"--storage.tsdb.path={self._folder}/data")
        argv = [*self._cluster.enter(), str(find_binary()), *flags, f"--web.listen-address={ADDRESS}"]
        with (self._folder / "log").open("ab") as log:
            self._program = Program(argv, {"PATH": os.environ["PATH"]}, log)

    def kill(self) -> None:
        if self._program is not None:
            self._program.stop(9)
            self._program = None

    def queries(self) -> float:
        """How many queries it has answered; its own metrics tell."""
        found = [line for line in self._get("/metrics").splitlines() if line.startswith(QUERIES)]
        return float(found[0].split()[-1]) if found else 0.0

    def pods(self) -> set[str]:
        """The replicas whose load it has."""
        answer = json.loads(self._get("/api/v1/series?match[]=vllm:num_requests_running"))
        return {series["pod"] for series in answer["data"]}

    def targets(self) -> str:
        """What it says of its targets: their health and last errors."""
        return self._get("/api/v1/targets")

    def _get(self, path: str) -> str:
        return self._cluster.run(sys.executable, "-c", READ, f"http://{ADDRESS}{path}")


@pytest.fixture
def prometheus(cluster: Cluster, clean: Slipway) -> Iterator[Prometheus]:
    """Scrapes the replicas, and the operator asks it; afterwards the operator asks the replicas alone again."""
    one = Prometheus(cluster, clean, cluster.folder / "prometheus")
    one.start()
    clean.install(f"operator.prometheusURL=http://{ADDRESS}")
    yield one
    clean.install("operator.prometheusURL=")
    one.close()


@pytest.mark.capability("AS-4")
def test_autoscaling_follows_the_load_with_a_prometheus_during_its_outage_and_after_it(
    clean: Slipway, prometheus: Prometheus
) -> None:
    wait_for("the operator asks Prometheus", lambda: prometheus.queries() > 0)
    clean.apply(EXAMPLES / "chat.yaml")
    clean.wait_ready("chat", replicas=1)
    scale_out_under_load(clean)
    assert prometheus.pods(), prometheus.targets()

    prometheus.kill()
    leader = clean.leader()
    wait_for("back to one replica", lambda: clean.wait_ready("chat", replicas=1, timeout=5), timeout=180)
    scale_out_under_load(clean)
    assert clean.leader() == leader
    logged = clean.logs("app.kubernetes.io/component=operator", RELEASE_NAMESPACE)
    assert logged.count("prometheus does not answer") == 1, "an outage is logged once"

    prometheus.start()
    wait_for("the operator asks Prometheus again", lambda: prometheus.queries() > 0)
    assert "prometheus answers again" in clean.logs("app.kubernetes.io/component=operator", RELEASE_NAMESPACE)
    pods = clean.core.list_namespaced_pod(RELEASE_NAMESPACE, label_selector="app.kubernetes.io/component=operator")
    assert [pod.status.container_statuses[0].restart_count for pod in pods.items] == [0] * len(pods.items)


def scale_out_under_load(slipway: Slipway) -> None:
    load = slipway.load("chat", concurrency=24, seconds=240, max_tokens=96, retry_429=True)
    try:
        slipway.wait_ready("chat", replicas=3, timeout=180)
    finally:
        report = load.stop()
    assert report.failed == 0, report.failures
