"""The adapters of one simulated runtime: the admin port's contract, with failures that a test sets."""

import json
from dataclasses import dataclass, field

from slipway_api import names
from slipway_api.runtime_api import AdapterInfo, AdapterList, LoadAdapterRequest

COMPLETIONS = "/v1/completions"


@dataclass
class AdapterDouble:
    """What a runtime has in memory: gone with its process."""

    adapters: dict[str, AdapterInfo] = field(default_factory=dict)
    slow: dict[str, AdapterInfo] = field(default_factory=dict)
    """Loads that go on after their answer, by name; `finish` ends them."""
    refusals: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By uri: reason and message."""
    max_cpu_adapters: int = 300
    loads_slowly: bool = False
    drains_slowly: bool = False
    broken_probe: bool = False
    calls: list[str] = field(default_factory=list)
    credentials: list[dict[str, str]] = field(default_factory=list)

    def handles(self, path: str) -> bool:
        return path.startswith(names.PATH_ADAPTERS) or path == COMPLETIONS

    def answer(self, method: str, path: str, body: bytes | None, boot_id: str) -> tuple[int, bytes]:
        name = path.removeprefix(names.PATH_ADAPTERS).strip("/")
        if path == COMPLETIONS:
            return self._complete(json.loads(body or b"{}")["model"])
        if method == "GET":
            self.calls.append("list")
            listing = AdapterList(
                boot_id=boot_id,
                adapters=tuple(self.adapters.values()),
                max_adapters=4,
                max_cpu_adapters=self.max_cpu_adapters,
            )
            return 200, listing.wire()
        if method == "DELETE":
            return self._unload(name)
        return self._load(LoadAdapterRequest.model_validate_json(body or b"{}"))

    def finish(self, *names: str) -> None:
        """The slow loads of these names end, or all of them, and the slow unloads too."""
        for name in names or tuple(self.slow):
            if name in self.slow:
                self.adapters[name] = self.slow.pop(name)
        self.adapters = {name: info for name, info in self.adapters.items() if info.state != "draining"}

    def boot(self, boot_list: str) -> None:
        """A new process: nothing of the old one, and what the boot list names."""
        self.adapters.clear()
        self.slow.clear()
        for entry in json.loads(boot_list)["adapters"] if boot_list else ():
            self._load(LoadAdapterRequest.model_validate(entry))
            self.calls.pop()

    def _load(self, asked: LoadAdapterRequest) -> tuple[int, bytes]:
        self.calls.append(f"load {asked.name} {asked.uri}")
        self.credentials.append(dict(asked.credentials))
        info = AdapterInfo(
            name=asked.name,
            digest=asked.digest or f"sha256:{asked.uri}",
            uri=asked.uri,
            state="host",
            bytes=1000,
            rank=8,
            pinned=asked.pinned,
            version=asked.version,
        )
        serves = asked.name in self.adapters and self.adapters[asked.name].state == "host"
        if asked.uri in self.refusals:
            reason, message = self.refusals[asked.uri]
            if not serves:
                self.adapters[asked.name] = info.model_copy(
                    update={"state": "failed", "reason": reason, "message": message}
                )
            error = {"message": message, "type": "BadRequestError", "param": None, "code": 400, "reason": reason}
            return 400, json.dumps({"error": error}).encode()
        if self.loads_slowly:
            self.slow[asked.name] = info
            if not serves:
                self.adapters[asked.name] = info.model_copy(update={"state": "loading"})
            return 202, self.adapters[asked.name].wire()
        self.adapters[asked.name] = info
        return 200, info.wire()

    def _unload(self, name: str) -> tuple[int, bytes]:
        self.calls.append(f"unload {name}")
        if self.drains_slowly and name in self.adapters:
            self.adapters[name] = self.adapters[name].model_copy(update={"state": "draining"})
            return 202, b""
        self.adapters.pop(name, None)
        return 200, b""

    def _complete(self, model: str) -> tuple[int, bytes]:
        self.calls.append(f"probe {model}")
        info = self.adapters.get(model)
        if self.broken_probe or info is None or info.state != "host":
            is_known = info is not None and info.state in ("loading", "failed")
            return (500 if self.broken_probe else 503 if is_known else 404), b'{"error": {"message": "no"}}'
        return 200, b"{}"
