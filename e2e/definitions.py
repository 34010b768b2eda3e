"""Fetches the CustomResourceDefinitions of other projects from their Go modules; nothing is compiled."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.build import go_environment
from e2e.cluster.paths import cache_folder
from e2e.cluster.toolchain import find_go


@dataclass(frozen=True, slots=True)
class Module:
    """A Go module at one version, and the checksum (`h1:…`) of its contents."""

    path: str
    version: str
    checksum: str


ARGO_CD = Module("github.com/argoproj/argo-cd/v3", "v3.4.2", "h1:S3j0K34uGW4geWiM88+0cHcCEtInn2Sa9U7/Sa18L7Y=")
FLUX_HELM = Module("github.com/fluxcd/helm-controller", "v1.6.3", "h1:MSiDP/s8xRSkO3g11vBiDStxfmJ5ZVdwDEpW7BSE/UA=")
FLUX_SOURCES = Module(
    "github.com/fluxcd/source-controller", "v1.9.0", "h1:5msg2yyjVYDULZos+2ve8MZzcSqTpusiXmrOeBhc9yY="
)
GATEWAY_API = Module("sigs.k8s.io/gateway-api", "v1.5.1", "h1:RqVRIlkhLhUO8wOHKTLnTJA6o/1un4po4/6M1nRzdd0=")


class ModuleNotReachedError(RuntimeError):
    """The module cannot be fetched from here; the message has Go's reason."""


def fetch(module: Module) -> Path:
    """The folder with the module's files. Raises ModuleNotReachedError, and ValueError for other contents."""
    argv = [str(find_go(cache_folder())), "mod", "download", "-json", f"{module.path}@{module.version}"]
    done = subprocess.run(argv, cwd=cache_folder(), env=go_environment(), capture_output=True, text=True, check=False)
    answer = json.loads(done.stdout) if done.stdout else {}
    if done.returncode:
        raise ModuleNotReachedError(f"{' '.join(argv[1:])}: {answer.get('Error') or done.stderr.strip()}")
    if answer["Sum"] != module.checksum:
        raise ValueError(f"{module.path}@{module.version} has the checksum {answer['Sum']}, not {module.checksum}")
    return Path(answer["Dir"])
