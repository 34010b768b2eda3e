"""The images as their Dockerfile describes them: who they run as, what starts, what they are made from."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import slipway_api
from e2e import kind

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "images" / "Dockerfile").read_text()
BAKE = (ROOT / "images" / "docker-bake.hcl").read_text()
SHIPPED = {
    "operator": "slipway-operator",
    "gateway": "slipway-gateway",
    "agent": "slipway-agent",
    "runtime": "slipway-runtime",
    "runtime-cpu": "slipway-runtime",
}


def stages() -> dict[str, tuple[str, list[str]]]:
    """Each stage by name: what it is built from, and its instructions, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#")))
    found: dict[str, tuple[str, list[str]]] = {}
    name = ""
    for line in filter(None, joined.splitlines()):
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            name = match[2]
            found[name] = (match[1], [])
        elif name:
            found[name][1].append(line)
    return found


def lineage(name: str) -> list[str]:
    """The instructions of a stage and of all that it is built from, the oldest first."""
    base, own = stages()[name]
    return [*(lineage(base) if base in stages() else []), *own]


def test_exactly_these_images_are_shipped():
    targets = {name for name, (_, lines) in stages().items() if any(line.startswith("ENTRYPOINT") for line in lines)}
    baked = set(re.findall(r'^  target +?= "(\S+)"$', BAKE, re.MULTILINE))

    assert targets == baked == SHIPPED.keys()


@pytest.mark.capability("SE-3")
@pytest.mark.parametrize("name", SHIPPED)
def test_an_image_runs_as_a_number_that_is_not_root(name):
    *_, last = [line for line in lineage(name) if line.startswith("USER ")]

    assert last == "USER 65532:65532"
    after = lineage(name)[lineage(name).index(last) :]
    assert [line for line in after if line.startswith(("RUN", "COPY", "ADD"))] == []


@pytest.mark.parametrize(("name", "command"), SHIPPED.items())
def test_an_image_starts_what_the_chart_and_the_local_cluster_start(name, command):
    (entrypoint,) = [line for line in lineage(name) if line.startswith(("ENTRYPOINT", "CMD"))]
    catalogue = yaml.safe_load((ROOT / "e2e" / "cluster" / "images.yaml").read_text())
    part = name.removesuffix("-cpu")

    assert entrypoint == f'ENTRYPOINT ["{command}"]'
    assert catalogue[f"slipway/{part}:{{version}}"]["command"] == [f"{{bin}}/{command}"]
    template = ROOT / "charts" / "slipway" / "templates" / f"{part}.yaml"
    if template.exists():  # a runtime pod is made by the operator, which leaves the command to the image, too
        named = re.findall(r"^\s+(?:command|args):.*", template.read_text(), re.MULTILINE)
        own = ('"create-keys"', "[apply-engines,")
        assert all(any(one in line for one in own) for line in named), "only init containers have arguments"


def test_bases_are_pinned_by_name_and_tag():
    (base,) = re.findall(r"^ARG BASE=(\S+)$", DOCKERFILE, re.MULTILINE)
    foreign = {source for source, _ in stages().values() if source not in stages()}

    assert re.fullmatch(r"docker\.io/library/debian:\d+\.\d+-slim", base)
    assert foreign == {"${BASE}"}
    assert f'default = "{base}"' in BAKE
    copied = {match for _, lines in stages().values() for match in re.findall(r"--from=(\S+)", " ".join(lines))}
    assert copied <= stages().keys()


def test_no_secret_and_no_weights_but_the_embedded_model_get_into_an_image():
    lines = [line for _, own in stages().values() for line in own]
    copied = {part for line in lines if line.startswith("COPY") and "--from" not in line for part in line.split()[1:-1]}
    sent = set((ROOT / ".dockerignore").read_text().split())

    assert copied == {
        *("pyproject.toml", "constraints.txt", "hatch_build.py", "README.md", "LICENSE"),
        *("api", "kube", "operator", "runtime", "gateway", "agent", "models/tiny", "models/adapters"),
    }
    assert {f"!{path}" for path in copied} == {word for word in sent if word.startswith("!")}
    assert not [line for line in lines if line.startswith("ADD")]
    assert not re.search(r"(?i)password|passwd=|token=|secret", "\n".join(lines))
    assert "COPY models/tiny /opt/slipway/models/tiny" in lineage("runtime")
    assert not [line for line in lineage("operator") + lineage("gateway") + lineage("agent") if "models" in line]


def folders_of_the_checkout(name: str) -> dict[str, str]:
    """Path in the image -> path in the checkout, of all that the image copies from there."""
    lines = [line.split() for line in lineage(name) if line.startswith("COPY ") and "--from" not in line]
    return {words[-1]: words[1] for words in lines}


@pytest.mark.parametrize("name", ["runtime", "runtime-cpu"])
def test_an_image_has_every_file_that_the_local_cluster_binds_into_its_pods(name):
    """review/containers.md 3: the catalogue bound adapters that no image had."""
    catalogue = yaml.safe_load((ROOT / "e2e" / "cluster" / "images.yaml").read_text())
    bound: dict[str, str] = catalogue["slipway/runtime:{version}"].get("binds", {})

    assert bound
    copied = folders_of_the_checkout(name)
    assert {path: source.removeprefix("{checkout}/") for path, source in bound.items()}.items() <= copied.items()


def test_only_the_runtime_has_binds_in_the_catalogue():
    """Otherwise the test above would have to compare other images too."""
    catalogue = yaml.safe_load((ROOT / "e2e" / "cluster" / "images.yaml").read_text())

    assert [name for name, image in catalogue.items() if image.get("binds")] == ["slipway/runtime:{version}"]


@pytest.mark.parametrize("manifest", sorted((ROOT / "examples").glob("**/*.yaml")), ids=lambda path: path.name)
def test_an_example_names_only_files_that_the_image_contains(manifest):
    """review/containers.md 3: three examples named adapters that were only in the checkout."""
    copied = folders_of_the_checkout("runtime-cpu")
    for address in re.findall(r"file://(/[^\s\"',}]+)", manifest.read_text()):
        sources = [
            ROOT / source / address[len(path) + 1 :] for path, source in copied.items() if address.startswith(path)
        ]
        assert [source for source in sources if source.exists()], f"{address} is not in the image of the runtime"


@pytest.mark.parametrize("name", ["runtime", "runtime-cpu"])
def test_the_runtime_keeps_what_it_compiles_where_pods_may_write(name):
    """Kernels finding 2: with a read-only root, Triton had nowhere to keep what it compiles."""
    environment = " ".join(line for line in lineage(name) if line.startswith("ENV"))

    assert "HOME=/var/cache/slipway" in environment
    assert "TRITON_CACHE_DIR=/var/cache/slipway/triton" in environment


def test_only_the_runtime_for_gpus_ships_a_compiler():
    """Kernels finding 2: Triton compiles its launchers when a kernel is first used."""

    def installed(name: str) -> set[str]:
        return {word for line in lineage(name) if "apt-get install" in line for word in line.split()}

    assert {"gcc", "libc6-dev", "python3-dev"} <= installed("runtime")
    for name in ("operator", "gateway", "agent", "runtime-cpu"):
        assert installed(name).isdisjoint({"gcc", "g++", "python3-dev", "python3-venv"})


def test_dependencies_are_a_layer_of_their_own_before_slipway_itself():
    for name in SHIPPED:
        copies = [line.split()[-1] for line in lineage(name) if "--from=" in line]
        assert copies == ["/opt/slipway/venv", "/opt/slipway/app"]
    for name in ("operator-dependencies", "gateway-dependencies", "agent-dependencies", "runtime-dependencies"):
        assert [line for line in lineage(name) if line.startswith("COPY")] == ["COPY pyproject.toml constraints.txt ./"]


def test_one_version_of_uv_and_of_slipway_everywhere():
    values: dict[str, Any] = yaml.safe_load((ROOT / "charts" / "slipway" / "values.yaml").read_text())
    (uv,) = re.findall(r"^ARG UV_VERSION=(\S+)$", DOCKERFILE, re.MULTILINE)

    assert f"UV_VERSION := {uv}" in (ROOT / "Makefile").read_text()
    assert f'default = "{slipway_api.__version__}"' in BAKE
    repositories = {values[part]["image"]["repository"] for part in ("operator", "gateway", "runtime")}
    assert repositories == {"slipway/operator", "slipway/gateway", "slipway/runtime"}


def test_kind_loads_the_images_that_its_group_builds_and_the_chart_is_told_of():
    """Otherwise the pods would wait for images that nobody pushed."""
    (group,) = re.findall(r'group "kind" \{\n +targets = \[(.+)\]', BAKE)
    blocks = {block.split('"', 1)[0]: block for block in BAKE.split('\ntarget "')[1:]}
    tags = {name: re.findall(r'tags += \["\$\{REGISTRY\}/(.+?)"\]', block) for name, block in blocks.items()}
    named = [tag for target in re.findall(r'"([\w-]+)"', group) for tag in tags[target]]
    built = {f"slipway/{tag}".replace("${TAG}", "1.2.3") for tag in named}
    argvs = [step.argv for step in kind.steps(Path("/k"), "1.2.3")]
    loaded = {argv[3] for argv in argvs if argv[:3] == ("kind", "load", "docker-image")}

    assert built == loaded == set(kind.images("1.2.3"))
    (install,) = [argv for argv in argvs if argv[0] == "helm"]
    assert "runtime.image.tag=1.2.3-cpu" in install


def test_the_workflow_pushes_the_names_that_the_bake_file_takes():
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    parsed = yaml.safe_load(workflow)

    assert parsed[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    steps = [step.get("run", "") for step in parsed["jobs"]["images"]["steps"]]
    started = next(index for index, text in enumerate(steps) if "images/start.sh" in text)
    pushed = next(index for index, text in enumerate(steps) if "--push" in text)
    assert started < pushed, "review/containers.md 1: images were pushed that had never been started"
    machines = parsed["jobs"]["images"]["strategy"]["matrix"]["include"]
    assert {one["architecture"]: set(one["targets"].split()) for one in machines} == {
        "amd64": set(SHIPPED),
        "arm64": set(SHIPPED) - {"runtime"},  # no GPU of another architecture is supported
    }
    for variable in ("REGISTRY", "TAG"):
        assert f'variable "{variable}"' in BAKE
        assert f"{variable}=" in workflow
