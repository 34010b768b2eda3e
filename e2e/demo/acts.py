"""The steps of the demo between the installation and the end of the cluster; each fills in its figures."""

import time
from typing import Any

import yaml

from e2e import canary
from e2e.canary import edit, wait_served, weights
from e2e.demo.narration import Subject, Watcher, console, print_note, print_result, step
from e2e.demo.summary import WANTED_REPLICAS, Figures
from e2e.manifests import as_yaml
from e2e.slipway import EXAMPLES, Json, Load, Slipway, wait_for

CHAT, CANARY, LORA, IDLE = "chat", "canary", "lora", "idle"
ADAPTER, POOL, WARM, COLD = "sailor", "standby", "warm", "cold"
QUESTION = "Tell me a short story about a lighthouse."
USERS = 24
LOAD_SECONDS = 120.0  # the most; it ends when three replicas have served for a while
SERVING_SECONDS = 5.0  # under load, after the last replica came


class Acts:
    """The steps 3 to 11, on a cluster with Slipway installed."""

    def __init__(self, slipway: Slipway, figures: Figures) -> None:
        self.slipway, self.figures = slipway, figures
        self.watcher = Watcher(slipway, self._note_replicas)
        (self.lora_service, self.lora_adapter) = documents("lora-adapter.yaml")
        (self.pool, self.warm) = documents("warm-pool.yaml")
        self.canary = canary.manifest(CANARY, {"setWeight": 50}, {"analyze": {}}, {"setWeight": 100})

    def run(self) -> None:
        """All steps in order."""
        self.apply_first_service()
        self.stream_one_answer()
        self.scale_out()
        self.promote_and_roll_back()
        self.serve_adapter()
        self.start_cold_and_warm()
        self.answer_from_zero()
        self.scale_in()

    def _note_replicas(self, name: str, status: Json) -> None:
        if name == CHAT:
            self.figures.most_replicas = max(self.figures.most_replicas, status.get("readyReplicas", 0))

    def apply_first_service(self) -> None:
        with step(3, "kubectl apply -f examples/chat.yaml"):
            with self.watcher.watching(service(CHAT)):
                started = time.monotonic()
                self.slipway.apply(EXAMPLES / "chat.yaml")
                self.slipway.wait_ready(CHAT, replicas=1)
                self.figures.ready_seconds = time.monotonic() - started
            print_result(f"from kubectl apply to Ready: {self.figures.ready_seconds:.1f} s")
        self.slipway.apply(EXAMPLES / "idle-to-zero.yaml")
        print_note(
            "Applied ahead of its step: examples/idle-to-zero.yaml, which goes to zero after 60 s without a request."
        )

    def stream_one_answer(self) -> None:
        with step(4, "One request, with the stock openai client"):
            print_note(f"client = OpenAI(base_url={self.slipway.base_url!r})")
            console.print(f"    [bold]user[/]  {QUESTION}\n    [bold]{CHAT}[/]  ", end="")
            self.figures.ttft_seconds, self.figures.stream_tokens_per_second = self.stream(CHAT, QUESTION, 96)

    def scale_out(self) -> None:
        title = f"Load: {USERS} users ask again and again; replicas follow KV-cache usage and queue depth"
        with step(5, title), self.watcher.watching(service(CHAT)):
            load = self.slipway.load(CHAT, concurrency=USERS, seconds=LOAD_SECONDS, max_tokens=96, retry_429=True)
            wait_for(
                f"{WANTED_REPLICAS} replicas are ready",
                lambda: self.slipway.service(CHAT)["status"].get("readyReplicas", 0) >= WANTED_REPLICAS,
                timeout=LOAD_SECONDS,
            )
            time.sleep(SERVING_SECONDS)  # all three serve for a while, so that the figures under load show them
            self.figures.load = self.end_load(CHAT, load)
            self.slipway.apply(as_yaml(self.canary))
            for manifest in (self.lora_service, self.pool):
                self.slipway.apply(yaml.safe_dump(manifest))
            print_note(f"Applied ahead of their steps: the services {CANARY} and {LORA}, and the WarmPool {POOL}.")

    def promote_and_roll_back(self) -> None:
        """Two canaries under the same load: one like the revision before it, one that takes a request at a time."""
        old = wait_served(self.slipway, CANARY)
        # Answers so long that waiting for one of them is unlike the noise of a shared machine.
        load = self.slipway.load(CANARY, concurrency=8, seconds=300, max_tokens=64, retry_429=True)
        try:
            with step(6, "A canary that is promoted: 50 % of the requests, analysis, 100 %"):
                print_note(
                    "The change: runtime.maxNumSeqs 16 → 24. The gateways compare errors and TTFT of both revisions."
                )
                with self.watcher.watching(service(CANARY)):
                    started = time.monotonic()
                    good = edit(self.slipway, self.canary, maxNumSeqs=24)
                    self.wait_canary("the canary is promoted", "currentRevision", good)
                    self.figures.promoted_seconds = time.monotonic() - started
                    self.event(CANARY, "RolloutCompleted")
                print_result(f"revision {good} replaced {old} after {self.figures.promoted_seconds:.1f} s")
            with step(7, "A canary that is rolled back"):
                print_note("The change: runtime.maxNumSeqs 24 → 1. It answers rightly, and makes others wait.")
                with self.watcher.watching(service(CANARY)):
                    started = time.monotonic()
                    slow = edit(self.slipway, self.canary, maxNumSeqs=1)
                    self.wait_canary("the slow canary is rolled back", "failedRevision", slow)
                    self.figures.rolled_back_seconds = time.monotonic() - started
                    self.figures.rolled_back_because = self.event(CANARY, "CanaryRolledBack")
                shares = ", ".join(f"{share} % {one}" for one, share in weights(self.slipway, CANARY).items() if share)
                print_result(
                    f"rolled back after {self.figures.rolled_back_seconds:.1f} s; traffic now: {shares}; "
                    f"the spec still asks for {slow}, which is not tried again"
                )
        finally:
            self.end_load(CANARY, load)
        self.slipway.delete(CANARY)  # its cores are for the next steps

    def serve_adapter(self) -> None:
        self.slipway.wait_ready(LORA, replicas=1)
        title = f"A LoRA adapter for a running replica: kubectl apply, then model={ADAPTER!r}"
        with step(8, title):
            print_note(f"/v1/models before: {', '.join(self.models())}")
            with self.watcher.watching(Subject("LoRAAdapter", ADAPTER)):
                started = time.monotonic()
                self.slipway.apply(yaml.safe_dump(self.lora_adapter))
                wait_for("the gateways list the adapter", lambda: ADAPTER in self.models(), every=0.1)
                answer = wait_for("the adapter answers", lambda: self.ask(ADAPTER), every=0.1)
                self.figures.adapter_seconds = time.monotonic() - started
            self.figures.adapter_answers = (self.ask(LORA), answer)
            (pod,) = self.slipway.pods(LORA)
            self.figures.adapter_restarts = pod.status.container_statuses[0].restart_count
            print_note(f"/v1/models after:  {', '.join(self.models())}")
            for model, answer in zip((LORA, ADAPTER), self.figures.adapter_answers, strict=True):
                console.print(f"    [bold]{model:<7}[/] ", end="")
                console.print(answer, markup=False, soft_wrap=True)
            print_result(
                f"listed and answering after {self.figures.adapter_seconds:.1f} s, in the pod {pod.metadata.name}, "
                f"{self.figures.adapter_restarts} restarts"
            )

    def start_cold_and_warm(self) -> None:
        wait_for("a warm pod", lambda: self.slipway.custom("WarmPool", POOL).get("status", {}).get("ready"), 120)
        cold = self.warm | {"metadata": {"name": COLD}}
        cold["spec"] = {field: value for field, value in self.warm["spec"].items() if field != "warmPool"}
        subjects = (service(COLD), service(WARM), Subject("WarmPool", POOL))
        with step(9, "A cold start, then the same service from a warm pool"):
            with self.watcher.watching(*subjects):
                self.figures.cold_seconds = self.seconds_to_ready(cold)
                self.figures.warm_seconds = self.seconds_to_ready(self.warm)
                (pod,) = self.slipway.pods(WARM)
                self.figures.claimed_pod = pod.metadata.name if pod.metadata.name.startswith(POOL) else ""
            print_result(
                f"cold start {self.figures.cold_seconds:.1f} s, warm claim {self.figures.warm_seconds:.1f} s "
                f"(the pod {pod.metadata.name} has changed hands)"
            )

    def answer_from_zero(self) -> None:
        with step(10, "Scale to zero, and the first token after it"):
            with self.watcher.watching(service(IDLE)):
                wait_for(f"{IDLE} has no pod", lambda: not self.slipway.pods(IDLE), timeout=150)
                self.figures.zero_pods = len(self.slipway.pods(IDLE))
            console.print(f"    [bold]user[/]  {QUESTION}\n    [bold]{IDLE}[/]  ", end="")
            self.figures.zero_ttft_seconds, _ = self.stream(IDLE, QUESTION, 32)
            self.event(IDLE, "Activated")
            self.watcher.print_changes(service(IDLE))
            print_result(
                f"the gateway held the request while a replica started: {self.figures.zero_ttft_seconds:.1f} s"
            )

    def scale_in(self) -> None:
        with step(11, f"Back in: what {CHAT} has done since the load of step 5 ended"):
            with self.watcher.watching(service(CHAT)):
                status = self.slipway.wait_ready(CHAT, replicas=1, timeout=180)["status"]
            self.figures.replicas_after = status["readyReplicas"]
            print_result(f"replicas: 1 → {self.figures.most_replicas} → {self.figures.replicas_after}")

    # Helpers

    def stream(self, model: str, question: str, tokens: int) -> tuple[float, float]:
        """Ask, and print the answer as it comes; seconds to the first token, and tokens per second after it."""
        started, first, count = time.monotonic(), 0.0, 0
        chunks = self.slipway.openai().chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], stream=True, max_tokens=tokens, seed=7
        )
        for chunk in chunks:
            if chunk.choices and (text := chunk.choices[0].delta.content):
                first = first or time.monotonic()
                count += 1
                console.print(text, end="", markup=False, soft_wrap=True)
        console.print()
        if not count:
            raise AssertionError(f"{model} answered without a token")
        return first - started, (count - 1) / max(time.monotonic() - first, 1e-9)

    def end_load(self, name: str, load: Load) -> Any:
        """Stop the load; its report, which is also kept for the summary."""
        report = load.stop()
        self.figures.loads.append((name, report))
        for sentence, count in report.failures.items():
            console.print(f"    [red]failed {count}×:[/] {sentence}")
        return report

    def wait_canary(self, what: str, field: str, revision: str) -> None:
        """Wait until this field of the canary's status is the revision."""
        wait_for(what, lambda: self.slipway.service(CANARY)["status"].get(field) == revision, timeout=150)

    def event(self, name: str, reason: str) -> str:
        """The note of the service's newest event with this reason."""
        return self.slipway.notes(name, reason)[-1]

    def models(self) -> list[str]:
        return sorted(model.id for model in self.slipway.openai().models.list())

    def ask(self, model: str) -> str:
        """The model's answer to the question, in one line."""
        answer = self.slipway.openai().chat.completions.create(
            model=model, messages=[{"role": "user", "content": QUESTION}], max_tokens=40, temperature=0
        )
        return " ".join((answer.choices[0].message.content or "").split())

    def seconds_to_ready(self, manifest: Json) -> float:
        """Apply a service; seconds until it is Ready."""
        name, started = manifest["metadata"]["name"], time.monotonic()
        self.slipway.apply(yaml.safe_dump(manifest))

        def ready() -> bool:
            return (self.slipway.condition(name, "Ready") or {}).get("status") == "True"

        wait_for(f"{name} Ready", ready, timeout=120, every=0.1)
        return time.monotonic() - started


def service(name: str) -> Subject:
    """An InferenceService, as something to watch."""
    return Subject("InferenceService", name)


def documents(example: str) -> list[Json]:
    """The manifests of an example."""
    return list(yaml.safe_load_all((EXAMPLES / example).read_text()))
