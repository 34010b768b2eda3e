"""Asks replicas the prompts of their smoke tests, in the background. Prompts and answers are neither logged nor kept.

Each prompt goes to /v1/completions on the replica's serving port with temperature 0. A replica that only answers the
gateway is shown a serving token; like an admin token, it is sent only to a pod that the service controls.
"""

import asyncio
from collections.abc import Callable, MutableMapping
from datetime import datetime
from functools import partial
from typing import Final

import msgspec

from slipway_api import names
from slipway_api.admin_token import token_digest
from slipway_kube.errors import KubeError
from slipway_kube.objects import Pod
from slipway_operator.controller.isolation import BackgroundCalls
from slipway_operator.controller.kinds import Key
from slipway_operator.core.actions import AskSmokeTests, SmokeResult
from slipway_operator.masters import GatewayKeys
from slipway_operator.replica_client import Dial, address_of

PATH: Final = "/v1/completions"
MOST_TOKENS: Final = 64
SECONDS_PER_PROMPT: Final = 60.0
RESULTS_KEPT: Final = 16  # of one service


class _Choice(msgspec.Struct):
    text: str = ""


class _Completion(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()


class SmokeTests:
    """Runs smoke tests on replicas, a few at a time, one for each service."""

    def __init__(
        self, dial: Dial, keys: GatewayKeys, calls: BackgroundCalls[Key], *, now: Callable[[], datetime]
    ) -> None:
        """`dial` connects to serving ports; `calls` bounds how many run at once, and reports which have ended."""
        self._dial = dial
        self._keys = keys
        self._calls = calls
        self._now = now

    def start(
        self, service: Key, uid: str, pod: Pod, action: AskSmokeTests, results: MutableMapping[str, SmokeResult]
    ) -> None:
        """Ask the pod, unless it is being asked; `uid` is that of the service, the result appears in `results`."""
        address = address_of(pod)
        if address.owner_uid == uid and address.ip:
            self._calls.start(service, action.uid, partial(self._run, service, pod, action, results))

    async def stop(self) -> None:
        """Cancel the tests under way."""
        await self._calls.stop()

    async def _run(
        self, service: Key, pod: Pod, action: AskSmokeTests, results: MutableMapping[str, SmokeResult]
    ) -> None:
        result = await self._ask_all(service, pod, action)
        results[action.uid] = result
        while len(results) > RESULTS_KEPT:
            del results[next(iter(results))]

    async def _ask_all(self, service: Key, pod: Pod, action: AskSmokeTests) -> SmokeResult:
        for number, (prompt, must_match) in enumerate(action.tests, start=1):
            try:
                async with asyncio.timeout(SECONDS_PER_PROMPT):
                    status, text = await self._ask(service, pod, action.model, prompt)
                error = "" if status == 200 else f"HTTP {status}"
            except TimeoutError:
                text, error = "", f"nothing within {SECONDS_PER_PROMPT:g} s"
            except (KubeError, OSError) as exc:
                text, error = "", type(exc).__name__
            if error:
                return SmokeResult(at=self._now(), errors=action.errors + 1, error=error)
            if must_match not in text:
                return SmokeResult(at=self._now(), wrong=number)
        return SmokeResult(at=self._now(), is_passed=True)

    async def _ask(self, service: Key, pod: Pod, model: str, prompt: str) -> tuple[int, str]:
        body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": MOST_TOKENS, "stream": False}
        headers = {"Content-Type": "application/json", **self._serving_token(service, pod)}
        status, raw = await self._dial("POST", address_of(pod), PATH, headers, msgspec.json.encode(body))
        if status != 200:
            return status, ""
        try:
            answer = msgspec.json.decode(raw, type=_Completion)
        except msgspec.DecodeError as exc:
            raise OSError("not a completion") from exc
        return status, answer.choices[0].text if answer.choices else ""

    def _serving_token(self, service: Key, pod: Pod) -> dict[str, str]:
        """The header of the token that the pod accepts; nothing for a pod that accepts requests without one."""
        digests = pod.metadata.annotations.get(names.ANNOTATION_SERVING_TOKEN_SHA256, "").split(",")
        for token in self._keys.tokens(service.namespace, service.name):
            if token_digest(token) in digests:
                return {names.HEADER_SERVING_TOKEN: token}
        return {}
