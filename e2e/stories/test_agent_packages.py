"""Published agent packages run a whole tool loop against the runtime, directly and through the gateway.

The packages come from PyPI in fixed versions, into an environment of their own: Slipway does not depend on them.
review/peer-suites.md 3, 5, 7, 12.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from e2e import agent_loops
from e2e.scripted_server import ServedScripts, loopback_only
from tests.scripted_model import ANSWER

# The mark `cluster` selects the story in `make e2e`; the story itself starts two processes and no cluster.
pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]

PACKAGES = (
    "openai-agents==0.24.0", "pydantic-ai-slim[openai,anthropic]==2.68.0", "litellm==1.110.2",
    "langchain-openai==1.7.4", "langgraph==1.2.24",
)  # fmt: skip


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the packages."""
    folder = tmp_path_factory.mktemp("agents") / "environment"
    uv = Path(sys.executable).parent / "uv"
    interpreter = folder / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True, timeout=60)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", interpreter, *PACKAGES], check=True, timeout=300)
    return interpreter


@pytest.mark.capability("API-26")
@pytest.mark.parametrize("server", ["runtime", "gateway"])
@pytest.mark.parametrize("package", agent_loops.LOOPS)
def test_an_agent_calls_its_tool_and_gives_the_answer(
    package: str, server: str, python: Path, scripts: ServedScripts, tmp_path: Path
) -> None:
    environment = loopback_only(tmp_path) | {"LITELLM_LOCAL_MODEL_COST_MAP": "true"}
    ended = subprocess.run(
        [python, agent_loops.__file__, package, scripts[server]],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    said = [line for line in ended.stdout.splitlines() if line.strip()]
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-2000:]
    calls = [json.loads(line) for line in said if line.startswith('{"city"')]
    # A strict tool has a grammar, under which the scripted model writes some city.
    assert [list(call) for call in calls] == [["city"]]
    assert said[-1] == ANSWER
