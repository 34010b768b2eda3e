"""LiteLLM's proxy in front of one server: a peer of the gateway's benchmark, in an environment of its own."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.packages import CACHE, NoProgramError, version_of
from bench.servers import MODEL_NAME, Server, free_ports, served_by

REQUIREMENT = "litellm[proxy]>=1.80,<2"  # 580 MB with what it needs
INSTALL_SECONDS = 600

CONFIG = """
model_list:
- model_name: {model}
  litellm_params: {{model: openai/{model}, api_base: "{upstream}/v1", api_key: none}}
litellm_settings: {{telemetry: false, num_retries: 0}}
"""


def program() -> Path:
    """The command, installed on the first call; raises NoProgramError."""
    folder = CACHE / "litellm"
    command = folder / "bin" / "litellm"
    if not command.exists():
        python = folder / "bin" / "python"
        try:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True)
            subprocess.run(
                [python, "-m", "pip", "install", "--quiet", REQUIREMENT],
                check=True, capture_output=True, timeout=INSTALL_SECONDS,
            )  # fmt: skip
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
            raise NoProgramError(f"no LiteLLM: {error}") from error
    return command


@contextmanager
def a_litellm(upstream: str) -> Iterator[Server]:
    """A running proxy with one worker in front of `upstream` (a URL)."""
    command = program()
    with tempfile.TemporaryDirectory(prefix="slipway-litellm-") as folder:
        port, _ = free_ports(2)
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG.format(model=MODEL_NAME, upstream=upstream))
        arguments = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        environment = {
            "LITELLM_LOG": "ERROR",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would ask a server of its own for prices
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # it listens on this machine only
        }
        log = Path(folder) / "litellm.log"
        ready = "/health/liveliness"
        version = f"LiteLLM {version_of(command, '--version')}"
        with served_by(
            [str(command), *arguments], log, environment, (port, port), ready=ready, version=version
        ) as server:
            yield server
