"""The files of tenants and keys: what they allow, what is refused in them, and that a bad one changes nothing."""

from pathlib import Path

import pytest
import yaml
from structlog.testing import capture_logs

from slipway_gateway.tenants import CHECK_SECONDS, Tenant, TenantFiles, TenantsError, build, digest_of

KEY, OTHER = "sk-research-1", "sk-sales-1"
TENANTS = """
tenants:
- name: research
  keys: [laptops]
  models: [chat, team-a/*]
  requestsPerMinute: 600
- name: sales
  keys: [crm]
  models: ["*"]
"""
KEYS = {"laptops": digest_of(KEY), "crm": f"# since May\nsha256:{digest_of(OTHER)}\n{digest_of('sk-next')}\n"}


@pytest.mark.parametrize(
    ("patterns", "model", "service", "allowed"),
    [
        (["*"], "chat", "a/chat", True),
        (["chat"], "chat", "a/llama", True),
        (["chat"], "a/llama", "a/llama", False),
        (["chat"], "chatty", "a/chatty", False),
        (["chat*"], "chatty", "a/chatty", True),
        (["a/*"], "chat", "a/llama", True),
        (["a/*"], "a/llama", "a/llama", True),
        (["a/*"], "chat", "b/llama", False),
        (["a/law"], "a/law", "a/llama", False),
        (["a/law"], "law", "a/law", True),
        (["a/law"], "a/llama", "a/llama", False),
        (["a/*"], "a/law", "b/thief", False),  # review/control-plane.md 1: the client's text names no object
        (["**"], "a/law", "b/thief", False),
        (["Qwen/*"], "Qwen/Qwen2.5-7B", "a/qwen", False),
        (["*/chat"], "chat", "b/chat", True),
        ([], "chat", "a/chat", False),
    ],
)
@pytest.mark.capability("SE-1", "MT-1")
def test_a_tenant_may_use_what_its_patterns_name(patterns, model, service, allowed):
    assert Tenant(name="t", models=tuple(patterns)).may_use(model, service) is allowed


def test_a_key_leads_to_its_tenant_and_both_digests_of_a_rotation_do():
    directory = build(TENANTS, KEYS)

    assert directory.callers[digest_of(KEY)].tenant.name == "research"
    assert {directory.callers[digest_of(key)].key for key in (OTHER, "sk-next")} == {"crm"}
    assert digest_of("sk-research-2") not in directory.callers


def test_a_key_that_no_tenant_names_is_known_and_leads_nowhere():
    directory = build(TENANTS, KEYS | {"old": digest_of("sk-old")})

    assert digest_of("sk-old") in directory.unclaimed
    assert digest_of("sk-old") not in directory.callers


def test_a_tenant_whose_key_is_not_in_the_secret_yet_leaves_the_others_alone():
    assert build(TENANTS, {"crm": KEYS["crm"]}).missing == ("research",)


@pytest.mark.parametrize(
    ("text", "keys", "says"),
    [
        ("tenants: [", {}, "not YAML"),
        ("[]", {}, "tenants.yaml"),
        ("tenants: [{name: a, model: [x]}]", {}, "tenants.0.model"),
        ("tenants: [{name: a}, {name: a}]", {}, "two tenants 'a'"),
        ("tenants: [{keys: [k]}]", {}, "needs a name"),
        ("tenants: [{name: 'a b'}]", {}, "tenants.0.name"),
        ("tenants: [{name: a, maxTokens: 0}]", {}, "tenants.0.maxTokens"),
        ("tenants: [{name: a, maxTokens: 5, defaultMaxTokens: 6}]", {}, "defaultMaxTokens"),
        ("tenants: [{name: a, keys: [k]}, {name: b, keys: [k]}]", {"k": digest_of("x")}, "both 'a' and 'b'"),
        ("tenants: [{name: a, keys: [k]}]", {"k": "sk-plain-text-key"}, "line 1 of the key 'k' is not a SHA-256"),
        ("tenants: [{name: a, keys: [k, l]}]", {"k": digest_of("x"), "l": digest_of("x")}, "same digest"),
    ],
)
def test_what_breaks_a_rule_is_refused_with_its_place(text, keys, says):
    with pytest.raises(TenantsError, match=says):
        build(text, keys)


@pytest.mark.capability("SE-1")
@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("tenants: [{name: a, keys: [k]}]", {"k": "sk-plain"}),
        ("tenants: [{name: a, keys: [sk-plain", {}),
        ("tenants: [{name: a, maxTokens: sk-plain}]", {}),
    ],
)
def test_a_key_that_was_pasted_by_mistake_is_not_repeated_in_the_error(text, keys):
    with pytest.raises(TenantsError) as refusal:
        build(text, keys)

    assert "sk-plain" not in str(refusal.value)


class Mounted:
    """A ConfigMap and a Secret as the kubelet mounts them, and a gateway that looks at them later and later."""

    def __init__(self, directory: Path) -> None:
        self.keys = directory / "keys"
        self.keys.mkdir()
        self.file = directory / "tenants.yaml"
        self.files = TenantFiles(self.file, self.keys)
        self.now = 0.0

    def write(self, tenants: str, **keys: str) -> "Mounted":
        """Replace the files by new ones under the same names, as the kubelet does."""
        for path, text in {self.file: tenants, **{self.keys / name: text for name, text in keys.items()}}.items():
            new = path.with_name(f"..{path.name}")
            new.write_text(text)
            new.replace(path)
        return self

    def tenant_of(self, key: str) -> str | None:
        self.now += CHECK_SECONDS
        directory = self.files.refresh(self.now)
        caller = directory.callers.get(digest_of(key)) if directory is not None else None
        return caller.tenant.name if caller is not None else None


@pytest.mark.capability("SE-1", "PL-8")
def test_a_rotated_key_is_valid_within_a_second_and_the_old_one_is_not(tmp_path):
    mounted = Mounted(tmp_path).write(TENANTS, **KEYS)
    assert mounted.tenant_of(KEY) == "research"

    mounted.write(TENANTS, laptops=digest_of("sk-research-2"))

    assert mounted.tenant_of("sk-research-2") == "research"
    assert mounted.tenant_of(KEY) is None


@pytest.mark.capability("SE-1")
def test_files_that_break_a_rule_keep_the_last_good_ones_and_say_so_once(tmp_path):
    mounted = Mounted(tmp_path).write(TENANTS, **KEYS)
    assert mounted.tenant_of(KEY) == "research"
    with capture_logs() as logs:
        mounted.write("tenants: nonsense")
        assert [mounted.tenant_of(KEY) for _ in range(5)] == ["research"] * 5

    assert mounted.files.fault
    assert [entry["log_level"] for entry in logs] == ["error"]
    assert mounted.write(TENANTS.replace("research", "science")).tenant_of(KEY) == "science"
    assert mounted.files.fault == ""


def test_files_that_were_removed_change_nothing(tmp_path):
    mounted = Mounted(tmp_path).write(TENANTS, **KEYS)
    assert mounted.tenant_of(KEY) == "research"
    mounted.file.unlink()

    assert mounted.tenant_of(KEY) == "research"
    assert "cannot be read" in mounted.files.fault


def test_without_good_files_from_the_start_there_is_no_directory(tmp_path):
    mounted = Mounted(tmp_path)

    assert mounted.tenant_of(KEY) is None
    assert mounted.files.directory is None
    assert mounted.write(TENANTS, **KEYS).tenant_of(KEY) == "research"


def test_unchanged_files_are_read_once(tmp_path):
    mounted = Mounted(tmp_path).write(TENANTS, **KEYS)
    for _ in range(20):
        mounted.tenant_of(KEY)

    assert mounted.files.reloads == 1


def test_the_example_is_valid_and_its_keys_are_those_that_it_names():
    example = Path(__file__).resolve().parents[2] / "examples" / "gateway" / "tenants.yaml"
    config, secret = yaml.safe_load_all(example.read_text())
    directory = build(config["data"]["tenants.yaml"], secret["stringData"])

    assert directory.callers[digest_of("sk-example-research")].tenant.name == "research"
    assert directory.callers[digest_of("sk-example-shop")].tenant.priority == 10
    assert not directory.missing
    assert not directory.unclaimed
