"""Published agent programs run a whole tool loop against the runtime, directly and through the gateway.

The model follows a script (`tests/scripted_model.py`): it calls the program's shell, and answers after the result.
The programs come from npm in fixed versions; at run time they reach only the loopback interface through HTTP.
review/peer-suites.md 1, 2, 3, 7.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.servers import MODEL_NAME
from e2e.scripted_server import ServedScripts, loopback_only
from tests.scripted_model import ANSWER

# The mark `cluster` selects the story in `make e2e`; the story itself starts two processes and no cluster.
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm"),
]

PACKAGES = ("@openai/codex@0.169.0", "@anthropic-ai/claude-code@2.1.332", "opencode-ai@1.18.33")
PROGRAM_SECONDS = 240
PROMPT = "Write the word."


def codex(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """The command line of Codex, and the environment that it needs."""
    provider = f'{{name="slipway", base_url="{url}/v1", wire_api="responses"}}'
    settings = ["-c", f"model_providers.slipway={provider}", "-c", "model_provider=slipway", "-m", MODEL_NAME]
    unattended = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["codex", "exec", *unattended, *settings, PROMPT], {"CODEX_HOME": str(home)}


def claude(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """The command line of Claude Code, and the environment that it needs."""
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "CLAUDE_CONFIG_DIR": str(home),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "500",
    }
    return ["claude", "-p", PROMPT, "--model", MODEL_NAME, "--allowedTools", "Bash"], environment


def opencode(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """The command line of opencode, and the environment that it needs."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL_NAME: {"limit": {"context": 100_000, "output": 500}}},
    }
    settings = {"provider": {"slipway": provider}, "autoupdate": False, "share": "disabled", "permission": "allow"}
    (home / "opencode.json").write_text(json.dumps(settings))
    environment = {"OPENCODE_CONFIG": str(home / "opencode.json"), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return ["opencode", "run", "--model", f"slipway/{MODEL_NAME}", PROMPT], environment


PROGRAMS = (codex, claude, opencode)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the installed programs' commands."""
    prefix = tmp_path_factory.mktemp("npm")
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--prefix", prefix, *PACKAGES], check=True, timeout=300
    )
    return prefix / "node_modules" / ".bin"


@pytest.mark.capability("API-26")
@pytest.mark.parametrize("server", ["runtime", "gateway"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_runs_the_command_and_prints_the_answer(
    program: Callable[[str, Path], tuple[list[str], dict[str, str]]],
    server: str,
    programs: Path,
    scripts: ServedScripts,
    tmp_path: Path,
) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    command, settings = program(scripts[server], home)

    ended = subprocess.run(
        [programs / command[0], *command[1:]],
        cwd=work,
        env=loopback_only(home) | settings,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
        check=False,
    )

    written = work / "proof.txt"
    assert written.exists(), ended.stdout[-2000:] + ended.stderr[-2000:]
    assert written.read_text() == f"slipway-{program.__name__}\n"
    assert ANSWER in ended.stdout
    assert ended.returncode == 0
