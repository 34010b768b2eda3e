"""Events that users read with `kubectl describe`: fixed reasons, one Event per story, never in anybody's way."""

from slipway_kube.writer import Writer


class Recorder:
    """Records Events in the background. `record` never blocks and never fails; what cannot be sent is counted."""

    def __init__(self, writer: Writer, *, controller: str = "slipway.dev/operator", instance: str) -> None:
        self.dropped = 0

    def record(
        self,
        regarding: dict[str, str],
        reason: str,
        note: str,
        *,
        action: str,
        warning: bool = False,
        related: dict[str, str] | None = None,
    ) -> None:
        """Say that `action` was taken on `regarding` for `reason`. `note` is the decision's sentence (cut at 1 KB).

        `regarding` and `related` are object references (see `reference`).
        """
        raise NotImplementedError

    async def run(self) -> None:
        """Send what was recorded, until cancelled."""
        raise NotImplementedError

    async def flush(self) -> None:
        """Return when everything recorded so far was sent or dropped."""
        raise NotImplementedError


def reference(api_version: str, kind: str, namespace: str, name: str, uid: str) -> dict[str, str]:
    """An ObjectReference for `record`."""
    return {"apiVersion": api_version, "kind": kind, "namespace": namespace, "name": name, "uid": uid}
