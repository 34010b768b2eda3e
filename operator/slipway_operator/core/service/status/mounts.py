"""Names the cause of a volume that cannot be mounted, from the sentence of the kubelet, and the remedy."""

import re
from typing import Final

# `MountVolume.SetUp failed for volume "keys" : secret "hf" not found`
_MISSING: Final = re.compile(r'\b(secret|configmap|persistentvolumeclaim) "([^"]+)" not found', re.IGNORECASE)
# `... references non-existent secret key: token`, `configmap references non-existent config key: a.json`
_MISSING_KEY: Final = re.compile(r"references non-existent (secret|config) key: (\S+)")
_KINDS: Final = {"secret": "Secret", "config": "ConfigMap", "configmap": "ConfigMap"}


def describe_mount(sentence: str, namespace: str, pod: str) -> str:
    """`a volume cannot be mounted: …; create the Secret hf in the namespace team, or correct the volume …`."""
    return f"a volume cannot be mounted: {sentence}; {_remedy(sentence, namespace, pod)}"


def is_for_author(sentence: str) -> bool:
    """Whether a person has to act: an object or a key that the volume names does not exist."""
    return _MISSING.search(sentence) is not None or _MISSING_KEY.search(sentence) is not None


def missing_secret(sentence: str) -> str:
    """The name of the Secret that does not exist; empty: the sentence names none."""
    found = _MISSING.search(sentence)
    return found[2] if found and found[1].lower() == "secret" else ""


def _remedy(sentence: str, namespace: str, pod: str) -> str:
    if found := _MISSING.search(sentence):
        kind = _KINDS.get(found[1].lower(), "PersistentVolumeClaim")
        return f"create the {kind} {found[2]} in the namespace {namespace}, or correct the volume in the spec"
    if found := _MISSING_KEY.search(sentence):
        return f"add the key {found[2]} to the {_KINDS[found[1]]} of the volume, or correct the volume in the spec"
    return f"the kubelet tries again; see kubectl describe pod -n {namespace} {pod}"
