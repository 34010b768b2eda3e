"""The field `spec.rollout` of an InferenceService: strategy, surge, gates, canary steps and their analysis."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from slipway_api.types import DecimalString, Rule, Struct, bounded_list, cel_rules, decimal, decimal_rule


class RollingUpdate(Struct):
    """How many replicas more or fewer a rollout may have."""

    model_config = cel_rules(
        Rule("self.maxSurge + self.maxUnavailable > 0", "maxSurge and maxUnavailable must not both be 0")
    )

    max_surge: int = Field(default=1, ge=0, le=1000)
    """Replicas above the desired number."""
    max_unavailable: int = Field(default=0, ge=0, le=1000)
    """Replicas below the desired number."""
    min_ready_seconds: int = Field(default=0, ge=0, le=3600)
    """How long a new replica has to be ready before the next old one leaves, as in a Deployment: its prefix cache fills
    in that time. With maxSurge 1, one replica at a time is cold. Strategy RollingUpdate."""


class RolloutStrategy(StrEnum):
    """How a new revision replaces the old one."""

    ROLLING_UPDATE = "RollingUpdate"
    CANARY = "Canary"
    BLUE_GREEN = "BlueGreen"
    RECREATE = "Recreate"


class SmokeTest(Struct):
    """A prompt, and a text that must be in the answer."""

    prompt: str = Field(min_length=1, max_length=4096)
    """Sent to one replica as /v1/completions with temperature 0 and at most 64 tokens; it is never logged."""
    must_match: str = Field(min_length=1, max_length=512)
    """Text that the answer must contain, letter for letter."""


CONFIG_MAP_URI = r"^configmap://[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9._-]+$"


class GoldenGate(Struct):
    """Prompts whose answers by the new revision are compared with those of the stable one, and with stored answers."""

    model_config = cel_rules(
        decimal_rule("maxDropPercent", "value <= 100.0", 'maxDropPercent is in points, such as "2.0": at most 100'),
        decimal_rule(
            "maxDisagreementPercent",
            "value <= 100.0",
            'maxDisagreementPercent is a share of the prompts, such as "5.0": at most 100',
        ),
    )

    uri: str = Field(pattern=CONFIG_MAP_URI, max_length=512)
    """configmap://NAME/KEY of the same namespace: at most 200 JSON Lines with `prompt`, and optionally `answer`, a text
    that a right answer contains, and `maxTokens` (16 where absent). Nothing of it is logged."""
    max_drop_percent: DecimalString = decimal("2.0")
    """How many points fewer of the stored answers the new revision may give than the stable one; without a ready
    replica of the stable one, than all of them."""
    max_disagreement_percent: DecimalString = decimal("5.0")
    """Share of the prompts to which both revisions may give different texts; needs a ready stable replica."""


class Gates(Struct):
    """Tests that a new revision passes before it gets any traffic."""

    smoke: Annotated[tuple[SmokeTest, ...], bounded_list(at_most=16)] = ()
    """Prompts that one ready replica of the new revision answers; one wrong answer rolls the revision back."""
    golden: GoldenGate | None = None
    """Prompts that are sent after the smoke tests, to the new and to the stable revision; answers that are worse than
    the limits allow roll the revision back."""


class Analyze(Struct):
    """A step that waits for a verdict of the analysis."""


class CanaryStep(Struct):
    """One step of a canary; exactly one of its fields is set."""

    model_config = cel_rules(
        Rule(
            "[has(self.mirrorPercent), has(self.setWeight), has(self.pauseSeconds), has(self.analyze)]"
            ".filter(x, x).size() == 1",
            "a step is exactly one of mirrorPercent, setWeight, pauseSeconds and analyze",
        )
    )

    mirror_percent: int | None = Field(default=None, ge=0, le=100)
    """Share of requests that the gateway copies to the canary; its answers are discarded. Holds until setWeight."""
    set_weight: int | None = Field(default=None, ge=1, le=100)
    """Percent of the traffic for the canary; reached when as many of its replicas are ready as that takes."""
    pause_seconds: int | None = Field(default=None, ge=1, le=604_800)
    """Seconds to wait."""
    analyze: Analyze | None = None
    """Wait until the analysis passes: `analyze: {}`."""


class AnalysisMetricType(StrEnum):
    """What the analysis compares between canary and stable, measured by the gateways."""

    ERROR_RATE = "ErrorRate"
    TTFT_P95 = "TTFTP95"
    ITL_P95 = "ITLP95"


class AnalysisMetric(Struct):
    """One metric of the analysis, and how bad the canary may be."""

    model_config = cel_rules(
        Rule("(self.type == 'ErrorRate') == has(self.max)", "ErrorRate needs max, and no other metric has it", ".max"),
        Rule(
            "(self.type != 'ErrorRate') == has(self.maxRegressionPercent)",
            "TTFTP95 and ITLP95 need maxRegressionPercent, and ErrorRate must not have it",
            ".maxRegressionPercent",
        ),
        decimal_rule("max", "value < 1.0", 'max is a share of the requests, such as "0.01": below 1'),
    )

    type: AnalysisMetricType
    """ErrorRate: share of requests that failed. TTFTP95: time to first token. ITLP95: time between two tokens."""
    max: DecimalString | None = None
    """ErrorRate: the canary fails where its rate is above this and above that of the stable revision."""
    max_regression_percent: int | None = Field(default=None, ge=1, le=1000)
    """TTFTP95, ITLP95: the canary fails where its P95 is above that of the stable revision by more than this."""


class OnInconclusive(StrEnum):
    """What happens when the analysis can tell neither success nor failure."""

    PAUSE = "Pause"


class OnFailure(StrEnum):
    """What happens when the analysis fails."""

    ROLLBACK = "Rollback"


class Analysis(Struct):
    """Compares the canary with the stable revision from the first weight on, by a test that allows repeated looks."""

    interval_seconds: int = Field(default=30, ge=5, le=3600)
    """Shortest time of a step before its first verdict, and between two failures that count."""
    min_requests: int = Field(default=100, ge=10, le=1_000_000)
    """Nothing is decided on fewer requests answered by the canary since the step started."""
    failure_limit: int = Field(default=2, ge=1, le=100)
    """Failures of one step after which the canary has failed."""
    on_inconclusive: OnInconclusive = OnInconclusive.PAUSE
    """Pause: the step holds until a later verdict, or until a person promotes or aborts."""
    on_failure: OnFailure = OnFailure.ROLLBACK
    """Rollback: all traffic goes back to the stable revision, and the failed one is not tried again."""
    metrics: Annotated[tuple[AnalysisMetric, ...], bounded_list(at_most=8, key="type")] = (
        AnalysisMetric(type=AnalysisMetricType.ERROR_RATE, max=decimal("0.01")),
        AnalysisMetric(type=AnalysisMetricType.TTFT_P95, max_regression_percent=20),
        AnalysisMetric(type=AnalysisMetricType.ITL_P95, max_regression_percent=20),
    )
    """The metrics; each must pass."""


class Canary(Struct):
    """The steps of a canary, and the analysis that may end it."""

    model_config = cel_rules(
        Rule(
            "self.steps.all(i, s, i < size(self.steps) - 1 || (has(s.setWeight) && s.setWeight == 100))",
            "the last step must be setWeight: 100",
            ".steps",
        ),
        Rule(
            "self.steps.all(i, s, !has(s.setWeight) || "
            "self.steps.all(j, t, j <= i || !has(t.setWeight) || t.setWeight > s.setWeight))",
            "setWeight must grow from step to step",
            ".steps",
        ),
        Rule(
            "self.steps.all(i, s, !has(s.mirrorPercent) || self.steps.all(j, t, j >= i || !has(t.setWeight)))",
            "mirrorPercent must come before the first setWeight",
            ".steps",
        ),
        Rule(
            "self.steps.all(i, s, !has(s.analyze) || self.steps.exists(j, t, j < i && has(t.setWeight)))",
            "analyze needs a setWeight before it: without traffic there is nothing to compare",
            ".steps",
        ),
        Rule(
            "!self.steps.exists(s, has(s.analyze)) || (has(self.analysis.metrics) && size(self.analysis.metrics) > 0)",
            "analyze needs at least one metric in analysis.metrics",
            ".analysis",
        ),
    )

    steps: Annotated[tuple[CanaryStep, ...], bounded_list(at_most=20)] = Field(min_length=1)
    """The steps, in order; the last is setWeight: 100."""
    analysis: Analysis = Analysis()
    """Compares the canary with the stable revision."""


class Rollout(Struct):
    """How a new revision replaces the old one."""

    model_config = cel_rules(
        Rule(
            "(self.strategy == 'Canary') == has(self.canary)",
            "strategy Canary needs canary with its steps, and no other strategy has it",
            ".canary",
        ),
        Rule(
            "self.strategy != 'Canary' || self.rollingUpdate.maxSurge >= 1",
            "strategy Canary needs rollingUpdate.maxSurge of at least 1: the first canary runs beside the stable "
            "replicas; without a spare GPU use RollingUpdate or Recreate",
            ".rollingUpdate",
        ),
        Rule(
            "self.rollingUpdate.minReadySeconds < self.progressDeadlineSeconds",
            "progressDeadlineSeconds must be above rollingUpdate.minReadySeconds",
            ".progressDeadlineSeconds",
        ),
    )

    strategy: RolloutStrategy = RolloutStrategy.ROLLING_UPDATE
    """RollingUpdate: start new replicas, wait until they are ready, drain old ones. Canary: shift the traffic in
    steps, with analysis. BlueGreen: start a second full set, switch immediately. Recreate: drain all, then start."""
    rolling_update: RollingUpdate = RollingUpdate()
    """How many replicas more or fewer a rollout may have, whatever the strategy."""
    canary: Canary | None = None
    """Steps and analysis of strategy Canary."""
    gates: Gates | None = None
    """Tests that a new revision passes before it gets any traffic."""
    paused: bool = False
    """True: the rollout stops where it is, and lost replicas are replaced."""
    progress_deadline_seconds: int = Field(default=1800, ge=30, le=86_400)
    """A rollout without progress for this long is reported as Stalled."""
    revision_history_limit: int = Field(default=5, ge=0, le=5)
    """Number of old revisions that are kept."""
