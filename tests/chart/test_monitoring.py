"""The alerts: a real Prometheus evaluates every expression over what our processes export."""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import msgspec
import pytest
import yaml
from aiohttp import web
from prometheus_client import generate_latest

from slipway_api.served_certificate import Certificate
from slipway_gateway import metrics as gateway_metrics
from slipway_gateway.fleet import Fleet
from slipway_gateway.tenancy import Tenancy
from slipway_operator.generation_metrics import GenerationMetrics
from slipway_runtime.server.metrics import Metrics
from tests.chart.operator_page import OperatorPage
from tests.gateway.doubles import Runtime, a_caller, a_gateway
from tests.prometheus_server import Target, a_prometheus, promtool
from tests.runtime.server.test_metrics_page import ENDED, FACTS, STATS

FILES = Path(__file__).resolve().parents[2] / "charts" / "slipway" / "files"
ALERTS = FILES / "alerts.yaml"
DOCS = Path(__file__).resolve().parents[2] / "docs"
# Of other exporters: DCGM, cAdvisor and kube-state-metrics.
EXTERNAL = {
    "DCGM_FI_DEV_GPU_UTIL",
    "container_cpu_usage_seconds_total",
    "kube_pod_container_resource_limits",
}
NAME = re.compile(r"\b(?:vllm:|slipway:|slipway_|DCGM_|container_|kube_)[a-zA-Z0-9_:]+")


def rules() -> dict[str, str]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


# --- what our processes export --------------------------------------------------------------------------------------


class Exporters:
    """The `/metrics` of a runtime, an operator and others, each with its own code; something happens between two."""

    def __init__(self) -> None:
        self._n = 0
        self._runtime = Metrics("chat", FACTS, self._stats, gpu_memory_utilization=0.9)
        self._operator = OperatorPage()

    def _stats(self) -> Any:
        n = self._n
        return msgspec.structs.replace(
            STATS, steps=n, running=2, waiting=n, blocks_total=100, blocks_live=97, prefix_queries=10 * n,
            prefix_hits=5 * n, prompt_tokens=10 * n, generated_tokens=20 * n, preemptions=n, draft_tokens=4 * n,
            accepted_tokens=n,
        )  # fmt: skip

    def runtime(self) -> str:
        self._n += 1
        self._runtime.stepped(self._stats())
        self._runtime.between_outputs(0.02)
        self._runtime.ended(ENDED)
        self._runtime.refused(429)
        return generate_latest(self._runtime.registry).decode()

    def operator(self) -> str:
        return self._operator.read()

    def external(self) -> str:
        self._n += 1
        return "\n".join(
            (
                'DCGM_FI_DEV_GPU_UTIL{namespace="team",pod="chat-0"} 20',
                f'container_cpu_usage_seconds_total{{namespace="team",pod="chat-0",container="server"}} {self._n}',
                'kube_pod_container_resource_limits{namespace="team",pod="chat-0",container="server",resource="cpu"} 1',
                "",
            )
        )


@asynccontextmanager
async def exporters() -> AsyncIterator[int]:
    """Serves the expositions at /<part>/metrics; gives the port."""
    parts = Exporters()
    async with Runtime() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:

        async def answer(request: web.Request) -> web.Response:
            match request.match_info["part"]:
                case "runtime":
                    return web.Response(text=parts.runtime())
                case "operator":
                    return web.Response(text=parts.operator())
                case "gateway":
                    async with caller.chat(stream=True) as response:
                        await response.read()
                    async with caller.session.get(f"{caller.admin_url}/metrics") as response:
                        return web.Response(text=await response.text())
            return web.Response(text=parts.external())

        app = web.Application()
        app.router.add_get("/{part}/metrics", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()


async def scrape(port: int, part: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/{part}/metrics") as response:
        assert response.status == 200
        return await response.text()


def exported_if_configured() -> Iterator[str]:
    """Metrics of a gateway with tenants, a certificate and streams that broke, unlike the gateway of `exporters`."""
    gateway = gateway_metrics.Metrics(Fleet(), open_to_anyone=False)
    gateway.add_certificate(Mock(spec=Certificate, fault=""))
    for metric in gateway.registry.collect():
        yield f"{metric.name}_total" if metric.type == "counter" else metric.name
    tenancy = Mock(is_open=False, fault="", gateways=1, tenant_names=())
    yield from (metric.name for metric in Tenancy.collect(tenancy))
    # Without samples while the status of each object follows its spec.
    yield from (metric.name for metric in GenerationMetrics(dict).collect())


@pytest.mark.capability("OB-5")
async def test_every_metric_of_the_alerts_is_exported():
    async with exporters() as port:
        texts = [await scrape(port, part) for part in ("runtime", "gateway", "operator")]
    exported = {re.split(r"[{ ]", line)[0] for text in texts for line in text.splitlines() if not line.startswith("#")}
    used = {name for expression in rules().values() for name in NAME.findall(expression)}

    assert len(used) > 20
    exported |= set(exported_if_configured())
    assert used - exported - EXTERNAL == set(), "in an expression, and exported by none of our processes"
    assert used >= EXTERNAL, "named as another exporter's, and not used"


# --- a real Prometheus ----------------------------------------------------------------------------------------------

# As the chart's PodMonitors label the series of pods.
LABELS = {
    "runtime": {"namespace": "team", "pod": "chat-0", "service": "chat", "revision": "r1"},
    "gateway": {"namespace": "slipway-system", "pod": "gateway-0"},
    "operator": {"namespace": "slipway-system", "pod": "operator-0"},
    "external": {},
}


@pytest.mark.capability("OB-5", "OB-9", "CO-1")
async def test_a_real_prometheus_takes_every_alert(tmp_path: Path):
    async with exporters() as port:
        targets = {part: Target(f"127.0.0.1:{port}/{part}/metrics", labels) for part, labels in LABELS.items()}
        async with a_prometheus(tmp_path, targets, rules=ALERTS) as prometheus:
            await prometheus.until_scraped()
            for expression in rules().values():
                await prometheus.ask(expression)
            loaded = await prometheus.rules()
            # The pool is 97 % in use: that is seen at once, and waits for its minute.
            saturated = await prometheus.ask(rules()["SlipwayKVCacheSaturated"])
    assert sum(len(group["rules"]) for group in loaded) == len(rules())
    assert [rule for group in loaded for rule in group["rules"] if rule.get("lastError")] == []
    assert [(one["metric"]["namespace"], one["metric"]["service"]) for one in saturated] == [("team", "chat")]


# --- when alerts fire -----------------------------------------------------------------------------------------------


@pytest.mark.capability("OB-5")
def test_promtool_finds_nothing_to_complain_about():
    promtool("check", "rules", ALERTS)


OF = 'namespace="team", service="chat"'
OBJECTIVE = f'{OF}, objective="TTFTP95"'
POD = 'namespace="team", pod="chat-0"'
LE = "vllm:time_to_first_token_seconds_bucket"
# alert: its series, a value each minute; when it fires, and when it does not. Minutes.
STORIES: dict[str, tuple[dict[str, str], int, int]] = {
    "SlipwayKVCacheSaturated": ({f"vllm:kv_cache_usage_perc{{{OF}}}": "0.5x10 0.97x10"}, 14, 9),
    "SlipwayQueueGrowing": ({f"vllm:num_requests_waiting{{{OF}}}": "3x10 6+6x10"}, 15, 9),
    "SlipwayPreemptions": ({f"vllm:num_preemptions_total{{{OF}}}": "0x10 60+60x10"}, 15, 10),
    "SlipwayTimeToFirstTokenTail": (
        {
            f'{LE}{{{OF}, le="0.1"}}': "0+45x40",
            f'{LE}{{{OF}, le="0.2"}}': "0+100x15 1590+90x25",
            f'{LE}{{{OF}, le="5.0"}}': "0+100x40",
            f'{LE}{{{OF}, le="+Inf"}}': "0+100x40",
            f"vllm:time_to_first_token_seconds_count{{{OF}}}": "0+100x40",
        },
        35,
        14,
    ),
    "SlipwayPrefixHitRateDropped": (
        {
            f"vllm:prefix_cache_hits_total{{{OF}}}": "0+80x120 9600+5x60",
            f"vllm:prefix_cache_queries_total{{{OF}}}": "0+100x180",
        },
        150,
        119,
    ),
    "SlipwaySpeculationAcceptanceLow": (
        {
            f"vllm:spec_decode_num_accepted_tokens_total{{{OF}}}": "0+70x30 2100+20x60",
            f"vllm:spec_decode_num_draft_tokens_total{{{OF}}}": "0+100x90",
        },
        65,
        29,
    ),
    "SlipwayCPUBound": (
        {
            f'container_cpu_usage_seconds_total{{{POD}, container="server"}}': "0+58x40",
            f'kube_pod_container_resource_limits{{{POD}, container="server", resource="cpu"}}': "1x40",
            f"DCGM_FI_DEV_GPU_UTIL{{{POD}}}": "90x10 20x30",
        },
        25,
        10,
    ),
    "SlipwayErrorBudgetBurningFast": (
        {
            f'slipway_service_slo_burn_rate{{{OBJECTIVE}, window="1h"}}': "1x10 15x10",
            f'slipway_service_slo_burn_rate{{{OBJECTIVE}, window="5m"}}': "20x20",
        },
        15,
        9,
    ),
    "SlipwayErrorBudgetBurningSlowly": (
        {
            f'slipway_service_slo_burn_rate{{{OBJECTIVE}, window="6h"}}': "1x10 7x10",
            f'slipway_service_slo_burn_rate{{{OBJECTIVE}, window="30m"}}': "9x20",
        },
        17,
        12,
    ),
    "SlipwayErrorBudgetExhausted": (
        {f"slipway_service_slo_error_budget_remaining_ratio{{{OBJECTIVE}}}": "0.2x10 -0.1x20"},
        20,
        9,
    ),
    "SlipwayNoLeader": ({'slipway_operator_is_leader{pod="operator-0"}': "1x10 0x10"}, 15, 9),
    "SlipwayGenerationNotObserved": (
        {'slipway_operator_unobserved_generations{kind="InferenceService", namespace="team", name="chat"}': "_x9 1x20"},
        16,
        12,
    ),
    "SlipwayOperatorEventLoopLag": (
        {'slipway_operator_event_loop_lag_seconds{pod="operator-0"}': "0.1x10 4x20"},
        22,
        11,
    ),
    "SlipwayGatewayEventLoopLag": (
        {'slipway_gateway_event_loop_lag_seconds{pod="gateway-0"}': "0.01x10 0.4x20"},
        22,
        11,
    ),
    "SlipwayReconcileErrors": ({'slipway_operator_reconcile_errors_total{error="Refused"}': "0x20 0+30x40"}, 50, 19),
    "SlipwayNoGateway": (  # review/shipping.md 3
        {
            'slipway_operator_is_leader{pod="operator-0"}': "1x30",
            'slipway_operator_gateways{pod="operator-0"}': "2x10 0x20",
            'slipway_operator_gateways{pod="operator-1"}': "0x30",
        },
        13,
        10,
    ),
    "SlipwayServiceStalled": (
        {f'slipway_service_condition{{{OF}, condition="Stalled", status="True", reason="Refused"}}': "_x10 1x20"},
        17,
        13,
    ),
    "SlipwayServiceNotReady": (
        {f'slipway_service_condition{{{OF}, condition="Ready", status="False", reason="Refused"}}': "_x10 1x20"},
        17,
        13,
    ),
    "SlipwayGatewayErrors": (  # review/shipping.md 14
        {
            'slipway_gateway_requests_total{service="team/chat", revision="r1", code="200"}': "0+60x30",
            'slipway_gateway_requests_total{service="team/chat", revision="r1", code="503"}': "0x10 0+30x20",
        },
        20,
        10,
    ),
    "SlipwayStreamsBroken": (
        {'slipway_gateway_broken_streams_total{service="team/chat", revision="r1"}': "0x10 0+1x10"},
        15,
        11,
    ),
    "SlipwayHandoversFailed": (
        {
            'slipway_gateway_handovers_failed_total{service="team/chat", reason="no_replica"}': "0x10 0+1x30",
        },
        30,
        20,
    ),
    "SlipwayTenantsInvalid": ({'slipway_gateway_tenants_valid{pod="gateway-0"}': "1x10 0x10"}, 13, 10),
    "SlipwayCertificateInvalid": ({'slipway_gateway_certificate_valid{pod="gateway-0"}': "1x10 0x10"}, 13, 10),
    "SlipwayInternalCertificate": (
        {
            # 7 days and 10 minutes from the start of the test
            'slipway_operator_certificate_expiry_timestamp_seconds{namespace="team"}': "605400x40",
        },
        *(17, 9),
    ),
    "SlipwayGatewayViewOld": ({'slipway_gateway_view_age_seconds{pod="gateway-0"}': "1x10 500x10"}, 15, 9),
    "SlipwayWarningEvents": ({'slipway_operator_decisions_total{reason="GPUFault"}': "0x10 1x10"}, 12, 9),
}


def written(tmp_path: Path, tests: list[dict[str, Any]]) -> Path:
    file = tmp_path / "alerts_test.yaml"
    content = {"rule_files": [str(ALERTS)], "evaluation_interval": "30s", "tests": tests}
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


def firing(alert: str, minute: int, *, yes: bool) -> dict[str, Any]:
    expression = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
    samples = [{"labels": "{}", "value": 1}] if yes else []
    return {"expr": expression, "eval_time": f"{minute}m", "exp_samples": samples}


@pytest.mark.capability("OB-5", "OB-13", "OP-10")
@pytest.mark.parametrize("alert", sorted(STORIES))
def test_an_alert_fires_when_it_should_and_not_before(alert, tmp_path):
    series, fires, silent = STORIES[alert]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [firing(alert, fires, yes=True), firing(alert, silent, yes=False)],
    }
    promtool("test", "rules", written(tmp_path, [test]))


@pytest.mark.capability("OB-13")
def test_every_alert_has_a_story_a_section_of_the_runbook_and_a_line_in_the_docs():
    runbook = (DOCS / "runbook.md").read_text(encoding="utf-8")
    observability = (DOCS / "observability.md").read_text(encoding="utf-8")

    assert set(STORIES) == set(rules())
    assert set(re.findall(r"^## (Slipway\w+)$", runbook, re.MULTILINE)) == set(rules())
    assert set(re.findall(r"^\| (Slipway\w+) \|", observability, re.MULTILINE)) == set(rules())


def test_a_service_that_is_being_deleted_fires_no_alert(tmp_path):
    deleted = f'slipway_service_condition{{{OF}, condition="Ready", status="False", reason="Terminating"}}'
    test = {
        "interval": "1m",
        "input_series": [{"series": deleted, "values": "1x30"}],
        "promql_expr_test": [firing("SlipwayServiceNotReady", 25, yes=False)],
    }
    promtool("test", "rules", written(tmp_path, [test]))


@pytest.mark.capability("OB-5")
def test_saturation_is_seen_before_latency(tmp_path):
    """The pool fills at minute 5, the queue grows from minute 6 on; clients notice at minute 20."""
    series = {
        f"vllm:kv_cache_usage_perc{{{OF}}}": "0.7x5 0.96x35",
        f"vllm:num_requests_waiting{{{OF}}}": "0x5 2+4x35",
        f"vllm:num_preemptions_total{{{OF}}}": "0x5 0+30x35",
        f'slipway_service_slo_burn_rate{{{OBJECTIVE}, window="1h"}}': "0.2x19 16x21",
        f'slipway_service_slo_burn_rate{{{OBJECTIVE}, window="5m"}}': "0.2x19 18x21",
    }
    early = ("SlipwayKVCacheSaturated", "SlipwayQueueGrowing", "SlipwayPreemptions")
    late = "SlipwayErrorBudgetBurningFast"
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            *(firing(alert, 12, yes=True) for alert in early),
            firing(late, 12, yes=False),
            firing(late, 25, yes=True),
        ],
    }
    promtool("test", "rules", written(tmp_path, [test]))
