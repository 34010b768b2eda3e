"""The chart ships Engines: the operator's init container applies them with the rights that the chart gives it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from e2e.cluster.access import Access, CommandError
from slipway_api.crd import engine_manifest
from slipway_api.inference_service import InferenceService
from slipway_operator.core.engines import PinnedEngine, find_lacking, see_engine
from tests.api.conftest import CRDS
from tests.chart.rights import apply_rights, kubeconfig_of
from tests.chart.test_chart import of_kind, render

pytestmark = [pytest.mark.apiserver, pytest.mark.capability("OP-11")]
NAMES = ("slipway", "vllm", "sglang")
NAMESPACE = "engines-of-the-chart"


def init_containers(manifests) -> dict[str, dict]:
    pod = of_kind(manifests, "Deployment")["slipway-operator"]["spec"]["template"]["spec"]
    return {one["name"]: one for one in pod.get("initContainers", ())}


def test_the_operator_gets_the_engines_and_the_image_of_the_agent(apiserver):
    rendered = render(apiserver, "image.registry=registry.internal", "agent.image.tag=v9")

    shipped = of_kind(rendered, "ConfigMap")["slipway-engines"]["data"]
    assert {name: json.loads(text) for name, text in shipped.items()} == {
        f"{name}.json": engine_manifest(name) for name in NAMES
    }
    operator = of_kind(rendered, "Deployment")["slipway-operator"]["spec"]["template"]
    (container,) = operator["spec"]["containers"]
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert values["SLIPWAY_AGENT_IMAGE"] == "registry.internal/slipway/agent:v9"
    assert init_containers(rendered)["apply-engines"]["securityContext"] == container["securityContext"]
    assert "slipway.dev/engines" in operator["metadata"]["annotations"]


def test_without_engines_the_operator_may_only_read_them(apiserver):
    rendered = render(apiserver, "engines.install=false", "adminMaster.existingSecret=a", "gatewayKey.existingSecret=b")

    assert init_containers(rendered) == {}
    assert "slipway-engines" not in of_kind(rendered, "ConfigMap")
    verbs = {
        verb
        for role in of_kind(rendered, "ClusterRole").values()
        for rule in role["rules"]
        for verb in rule["verbs"]
        if "engines" in rule.get("resources", ())
    }
    assert verbs == {"get", "list", "watch"}


class Operator:
    """The init container, run with the rights of the operator's ServiceAccount and nothing else."""

    def __init__(self, access: Access, folder: Path) -> None:
        apply_rights(access, "operator", NAMESPACE)
        self._access, self._kubeconfig = access, kubeconfig_of(access, "slipway-operator", NAMESPACE, folder)
        self._engines = folder / "engines"
        self._engines.mkdir()
        for name, text in of_kind(render(access), "ConfigMap")["slipway-engines"]["data"].items():
            (self._engines / name).write_text(text)

    def start(self) -> str:
        command = [Path(sys.executable).with_name("slipway-operator"), "apply-engines", self._engines]
        environment = {"PATH": os.environ["PATH"], "KUBECONFIG": str(self._kubeconfig)}
        done = subprocess.run(command, env=environment, check=True, timeout=60, capture_output=True, text=True)
        return done.stdout + done.stderr

    def engine(self, name: str) -> dict:
        return json.loads(self._access.kubectl("get", "engine", name, "-o", "json"))


@pytest.fixture
def operator(apiserver, tmp_path) -> Iterator[Operator]:
    apiserver.serve_kinds(CRDS)
    yield Operator(apiserver, tmp_path)
    apiserver.kubectl("delete", "engines", "--all")  # they belong to the cluster, which other tests use too


def test_engines_are_applied_upgraded_and_kept_where_the_platform_team_changed_them(apiserver, operator, tmp_path):
    operator.start()
    assert {name: operator.engine(name)["spec"].get("image", "") for name in NAMES} == {
        name: engine_manifest(name)["spec"].get("image", "") for name in NAMES
    }
    versions = {name: operator.engine(name)["metadata"]["resourceVersion"] for name in NAMES}
    operator.start()
    assert {name: operator.engine(name)["metadata"]["resourceVersion"] for name in NAMES} == versions, "no write"

    (tmp_path / "engines" / "sglang.json").write_text(
        json.dumps(engine_manifest("sglang") | {"spec": engine_manifest("sglang")["spec"] | {"image": "sglang:newer"}})
    )
    apiserver.kubectl("patch", "engine", "vllm", "--type=merge", "-p", '{"spec": {"image": "vllm:of-the-team"}}')
    (tmp_path / "engines" / "vllm.json").write_text(
        json.dumps(engine_manifest("vllm") | {"spec": engine_manifest("vllm")["spec"] | {"image": "vllm:newer"}})
    )
    said = operator.start()

    assert operator.engine("sglang")["spec"]["image"] == "sglang:newer"
    assert operator.engine("vllm")["spec"]["image"] == "vllm:of-the-team"
    assert "kept as it is" in said


def test_the_operator_may_not_change_other_engines(apiserver, operator):
    account = f"system:serviceaccount:{NAMESPACE}:slipway-operator"

    with pytest.raises(CommandError):
        apiserver.kubectl("auth", "can-i", "patch", "engines/mine", f"--as={account}", "-q")
    with pytest.raises(CommandError):
        apiserver.kubectl("auth", "can-i", "delete", "engines/vllm", f"--as={account}", "-q")


@pytest.mark.parametrize("name", ["vllm-amd", "vllm-intel", "vllm-tpu"])
def test_the_examples_of_other_accelerators_are_accepted(apiserver, name):
    apiserver.serve_kinds(CRDS)
    printed = apiserver.kubectl(
        "create", "--dry-run=server", "-o", "name", "-f", CRDS.parent / "examples" / "engines" / f"{name}.yaml"
    )
    assert printed.strip() == f"inferenceservice.slipway.dev/{name.replace('vllm', 'qwen')}"


def test_the_example_is_accepted_and_its_engine_can_run_it(apiserver):
    apiserver.serve_kinds(CRDS)
    example = CRDS.parent / "examples" / "engines" / "vllm.yaml"

    printed = apiserver.kubectl("create", "--dry-run=server", "-o", "json", "-f", example)

    service = InferenceService.parse(json.loads(printed))
    seen = see_engine(service.spec.runtime.engine, {"vllm": engine_manifest("vllm")["spec"]})
    assert seen is not None
    assert seen.spec is not None
    engine = PinnedEngine(name="vllm", spec=seen.spec, agent_image="agent")
    assert find_lacking(service.spec, engine) == ""
    documented = (CRDS.parent / "docs" / "engines.md").read_text()
    (block,) = [part for part in documented.split("```yaml\n") if "name: qwen" in part]
    documents = [yaml.safe_load(text) for text in (block.partition("```")[0], example.read_text())]
    assert documents[0] == documents[1], "the page shows another manifest than the file"
