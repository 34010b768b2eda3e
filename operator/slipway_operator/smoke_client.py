"""Asks replicas the prompts of their gates, in the background. Prompts and answers are neither logged nor kept.

Smoke tests are in the spec; golden prompts are read from the ConfigMap that the spec names, and asked of a replica of
the new and of one of the stable revision at the same time. Each prompt goes to /v1/completions on the replica's serving
port with temperature 0. A replica that only answers the gateway is shown a serving token; like an admin token, it is
sent only to a pod that the service controls.
"""

import asyncio
from collections.abc import Callable, MutableMapping
from datetime import datetime
from functools import partial
from typing import Final

import msgspec

from slipway_api import names
from slipway_api.admin_token import token_digest
from slipway_kube import resources
from slipway_kube.client import Client
from slipway_kube.errors import KubeError, NotFound
from slipway_kube.objects import Pod
from slipway_operator.controller.isolation import BackgroundCalls
from slipway_operator.controller.kinds import Key
from slipway_operator.core.actions import AskSmokeTests, GoldenTest, SmokeResult
from slipway_operator.core.service.rollout.golden import GoldenError, GoldenPrompt, judge_answers, parse_config_map
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


class _NoAnswerError(Exception):
    """A prompt got no answer; the message says why, without texts."""


class SmokeTests:
    """Runs the tests of gates on replicas, a few at a time, one for each service."""

    def __init__(
        self, client: Client, dial: Dial, keys: GatewayKeys, calls: BackgroundCalls[Key], *, now: Callable[[], datetime]
    ) -> None:
        """`client` reads ConfigMaps; `dial` connects to serving ports; `calls` bounds how many run at once, and reports
        which have ended."""
        self._client = client
        self._dial = dial
        self._keys = keys
        self._calls = calls
        self._now = now

    def start(
        self,
        service: Key,
        uid: str,
        pod: Pod,
        action: AskSmokeTests,
        results: MutableMapping[str, SmokeResult],
        *,
        beside: Pod | None = None,
    ) -> None:
        """Ask the pod, unless it is being asked; `uid` is that of the service, the result appears in `results`.

        `beside` is the pod of the stable revision that golden prompts are asked of as well.
        """
        if _is_of(beside, uid) and beside is not None and action.golden and beside.uid == action.golden.beside_uid:
            compared = beside
        else:
            compared = None
        if _is_of(pod, uid):
            self._calls.start(service, action.uid, partial(self._run, service, pod, compared, action, results))

    async def stop(self) -> None:
        """Cancel the tests under way."""
        await self._calls.stop()

    async def _run(
        self,
        service: Key,
        pod: Pod,
        beside: Pod | None,
        action: AskSmokeTests,
        results: MutableMapping[str, SmokeResult],
    ) -> None:
        result = await self._ask_all(service, pod, action)
        if result.is_passed and action.golden is not None:
            result = await self._ask_golden(service, pod, beside, action, action.golden)
        results[action.uid] = result
        while len(results) > RESULTS_KEPT:
            del results[next(iter(results))]

    async def _ask_all(self, service: Key, pod: Pod, action: AskSmokeTests) -> SmokeResult:
        for number, (prompt, must_match) in enumerate(action.tests, start=1):
            try:
                text = await self._answer(service, pod, action.model, prompt, MOST_TOKENS)
            except _NoAnswerError as exc:
                return SmokeResult(at=self._now(), errors=action.errors + 1, error=str(exc))
            if must_match not in text:
                return SmokeResult(at=self._now(), wrong=number)
        return SmokeResult(at=self._now(), is_passed=True)

    async def _ask_golden(
        self, service: Key, pod: Pod, beside: Pod | None, action: AskSmokeTests, test: GoldenTest
    ) -> SmokeResult:
        new, stable = [], []
        if test.beside and beside is None:
            error = f"{test.beside} of the stable revision is gone"
            return SmokeResult(at=self._now(), errors=action.errors + 1, error=error, is_golden=True)
        try:
            prompts = await self._read_prompts(service.namespace, test)
            for one in prompts:
                answers = await asyncio.gather(
                    self._answer(service, pod, action.model, one.prompt, one.max_tokens),
                    *(
                        [self._answer(service, beside, test.beside_model, one.prompt, one.max_tokens)]
                        if beside is not None
                        else []
                    ),
                )
                new.append(answers[0])
                stable += answers[1:]
        except (_NoAnswerError, GoldenError) as exc:
            return SmokeResult(at=self._now(), errors=action.errors + 1, error=str(exc), is_golden=True)
        verdict = judge_answers(test, prompts, new, stable if beside is not None else None)
        return SmokeResult(at=self._now(), is_passed=verdict.is_passed, golden=verdict.sentence)

    async def _read_prompts(self, namespace: str, test: GoldenTest) -> tuple[GoldenPrompt, ...]:
        try:
            raw = await self._client.get(resources.CONFIG_MAPS.path(namespace, test.config_map))
        except NotFound as exc:
            raise _NoAnswerError(f"ConfigMap {test.config_map} does not exist") from exc
        except (KubeError, OSError) as exc:
            raise _NoAnswerError(f"ConfigMap {test.config_map} cannot be read: {type(exc).__name__}") from exc
        try:
            return parse_config_map(msgspec.json.decode(raw), test.key)
        except GoldenError as exc:
            raise GoldenError(f"ConfigMap {test.config_map}: {exc}") from exc

    async def _answer(self, service: Key, pod: Pod, model: str, prompt: str, max_tokens: int) -> str:
        """The text of the answer; raises _NoAnswerError."""
        try:
            async with asyncio.timeout(SECONDS_PER_PROMPT):
                status, text = await self._ask(service, pod, model, prompt, max_tokens)
        except TimeoutError as exc:
            raise _NoAnswerError(f"nothing within {SECONDS_PER_PROMPT:g} s") from exc
        except (KubeError, OSError) as exc:
            raise _NoAnswerError(type(exc).__name__) from exc
        if status != 200:
            raise _NoAnswerError(f"HTTP {status}")
        return text

    async def _ask(self, service: Key, pod: Pod, model: str, prompt: str, max_tokens: int) -> tuple[int, str]:
        body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "stream": False}
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


def _is_of(pod: Pod | None, uid: str) -> bool:
    """Whether the pod may be asked: the service with this uid controls it."""
    if pod is None:
        return False
    address = address_of(pod)
    return address.owner_uid == uid and bool(address.ip)
