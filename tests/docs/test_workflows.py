"""The workflows of the repository: actions are pinned by hash, and rights are minimal."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
# The jobs that may write something.
RIGHTS = {
    ("release.yml", "images"): {"contents": "read", "packages": "write"},
    ("release.yml", "release"): {"contents": "write", "packages": "write", "id-token": "write"},
}
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_by_its_commit_and_names_its_version(workflow):
    lines = [line for line in workflow.read_text().splitlines() if re.search(r"\buses:", line)]

    assert lines
    for line in lines:
        assert re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_states_its_rights_and_keeps_no_credentials_in_the_checkout(workflow):
    parsed = yaml.safe_load(workflow.read_text())

    assert parsed["permissions"]["contents"] == "read"
    assert set(parsed["permissions"]) == {"contents"}
    for name, job in parsed["jobs"].items():
        assert job.get("permissions") == RIGHTS.get((workflow.name, name))
        checkouts = [step for step in job["steps"] if "checkout" in step.get("uses", "")]
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_no_expression_is_expanded_inside_a_command_except_those_of_the_matrix():
    """A tag or a branch may have a name that a shell executes."""
    for workflow in WORKFLOWS:
        for job in yaml.safe_load(workflow.read_text())["jobs"].values():
            for step in job["steps"]:
                assert set(re.findall(r"\$\{\{ *([\w.]+) *\}\}", step.get("run", ""))) <= {
                    "matrix.architecture",
                    "matrix.targets",
                }
