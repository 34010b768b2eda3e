"""The kubectl plugin as one file, as a release has it."""

import hashlib
import platform
import subprocess
import sys
import tarfile

import pytest

import slipway_api
from release import plugin

MACHINES = {"x86_64": "linux-amd64", "aarch64": "linux-arm64"}
HERE = MACHINES.get(platform.machine(), "")


@pytest.mark.capability("PL-14")
@pytest.mark.skipif(not HERE or sys.platform != "linux", reason="no plugin is built for this platform's machine")
def test_the_plugin_runs_without_a_checkout_and_without_an_environment(tmp_path):
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    made = plugin.build(HERE, tmp_path, pythons=(python,))
    packed = plugin.archive(made, tmp_path)
    alone = tmp_path / "alone"
    with tarfile.open(packed) as tar:
        tar.extractall(alone, filter="data")
    environment = {"PATH": f"{sys.base_prefix}/bin:/usr/bin:/bin", "HOME": str(alone)}

    done = subprocess.run(
        [alone / "kubectl-slipway", "--version"],
        cwd=alone,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"kubectl-slipway {slipway_api.__version__} ")
    assert sorted(path.name for path in alone.iterdir() if not path.name.startswith(".")) == [
        "LICENSE",
        "kubectl-slipway",
    ]


@pytest.mark.capability("PL-14")
def test_the_krew_manifest_names_each_archive_with_its_checksum(tmp_path):
    archives = []
    for name in plugin.PLATFORMS:
        (path := tmp_path / f"kubectl-slipway-{name}.tar.gz").write_text(name)
        archives.append(path)

    manifest = plugin.krew_manifest("0.1.0", "owner/slipway", archives)

    assert manifest["spec"]["version"] == "v0.1.0"
    found = {
        f"{one['selector']['matchLabels']['os']}-{one['selector']['matchLabels']['arch']}": one
        for one in manifest["spec"]["platforms"]
    }
    assert set(found) == set(plugin.PLATFORMS)
    for name, one in found.items():
        assert one["sha256"] == hashlib.sha256(name.encode()).hexdigest()
        assert one["uri"].endswith(f"/owner/slipway/releases/download/v0.1.0/kubectl-slipway-{name}.tar.gz")
