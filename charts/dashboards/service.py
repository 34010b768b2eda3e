"""For the owner of a service: objectives, latency and jitter, drift of prompts and answers, the rollout."""

from charts.dashboards.grafana import Choice, Panel, Variable
from charts.dashboards.promql import BY, OF, OF_GATEWAY, mean, quantile, quantiles, rate, ratio, shift

VARIABLES = (
    Variable("namespace", "label_values(vllm:num_requests_running, namespace)"),
    Variable("service", 'label_values(vllm:num_requests_running{namespace=~"$namespace"}, service)'),
    Choice("reference", "compare with", ("7d", "1d", "14d", "28d")),
)

TTFT, ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
PROMPT, OUTPUT = "vllm:request_prompt_tokens", "vllm:request_generation_tokens"
REFERENCE = "$reference"
REVISION = "service, revision"
NAME = "{{namespace}}/{{service}}"


def gateway_errors() -> str:
    """The share of a revision's requests that got a 5xx."""
    failed = rate("slipway_gateway_requests_total", f'{OF_GATEWAY}, code=~"5.."', by=REVISION)
    every = rate("slipway_gateway_requests_total", OF_GATEWAY, by=REVISION)
    return f"({failed} or {every} * 0) / {every}"


def now_and_then(title: str, histogram: str, description: str) -> Panel:
    """P50 and P95 of the last hour, and of the same hour in the reference window."""
    targets = {}
    for q in (0.5, 0.95):
        targets[f"P{q * 100:.0f} now {{{{service}}}}"] = quantile(q, histogram, over="1h")
        targets[f"P{q * 100:.0f} $reference ago {{{{service}}}}"] = quantile(q, histogram, over="1h", offset=REFERENCE)
    return Panel(title, "short", targets, description)


def times(histogram: str) -> str:
    """The mean of the last hour, as a multiple of the mean in the reference window."""
    return f"({mean(histogram, over='1h')}) / ({mean(histogram, over='1h', offset=REFERENCE)})"


ROWS = {
    "Objectives": (
        Panel(
            "Error budget left", "percentunit",
            {"{{objective}} {{service}}":
             f"max by ({BY}, objective) (slipway_service_slo_error_budget_remaining_ratio{{{OF}}})"},
            "By objective of spec.slo; at 0 new revisions wait.", least=None,
        ),
        Panel(
            "Burn rate over an hour", "short",
            {"{{objective}} {{service}}":
             f'max by ({BY}, objective) (slipway_service_slo_burn_rate{{{OF}, window="1h"}})'},
            "At 1 the budget lasts exactly the window of spec.slo.",
        ),
        Panel(
            "Goodput", "percentunit",
            {NAME: ratio("slipway_service_good_requests_total", "slipway_service_requests_total")},
            "Requests without an error and within the latency limits of spec.slo, of all.",
        ),
        Panel(
            "Requests by status", "reqps",
            {"{{code}} {{service}}": rate("slipway_gateway_requests_total", OF_GATEWAY, by="service, code")},
            "As gateways answered them; 499: the client left.",
        ),
        Panel(
            "Errors by class", "reqps", {"{{class}} {{service}}": rate("slipway:errors_total", by=f"{BY}, class")},
            "Requests without an answer, as replicas count them.",
        ),
        Panel(
            "Requests running and waiting", "short",
            {"running {{service}}": f"sum by ({BY}) (vllm:num_requests_running{{{OF}}})",
             "waiting {{service}}": f"sum by ({BY}) (vllm:num_requests_waiting{{{OF}}})"},
            "A queue that grows is the first sign of too few replicas.",
        ),
    ),
    "Latency": (
        Panel(
            "Time to first token", "s", quantiles(TTFT, "{{service}}"),
            "From a request's arrival at its replica. The tail moves first: watch P99 against P50.",
        ),
        Panel(
            "Inter-token latency", "s", quantiles(ITL, "{{service}}"),
            "Time between two outputs of one request. Prefill of others shows here as peaks.",
        ),
        Panel(
            "Inter-token jitter", "s",
            {"P95 − P50 {{service}}": f"{quantile(0.95, ITL)} - {quantile(0.5, ITL)}",
             "P99 − P50 {{service}}": f"{quantile(0.99, ITL)} - {quantile(0.5, ITL)}"},
            "How unevenly a stream arrives: readers see pauses, not means. It grows with long prompts beside running"
            " answers; a smaller maxBatchedTokens limits what one step may add.",
        ),
        Panel(
            "Time to first token, as clients see it", "s",
            quantiles("slipway_gateway_time_to_first_token_seconds", "{{service}}", OF_GATEWAY, by="service"),
            "At the gateway, of streams: with waits, retries and the network.",
        ),
        Panel(
            "Inter-token jitter, as clients see it", "s",
            {"P99 − P50 {{service}}":
             f"{quantile(0.99, 'slipway_gateway_inter_token_latency_seconds', OF_GATEWAY, by='service')}"
             f" - {quantile(0.5, 'slipway_gateway_inter_token_latency_seconds', OF_GATEWAY, by='service')}"},
            "At the gateway, of streams; jitter here and not in the replica comes from the network or the gateway.",
        ),
        Panel(
            "Where the time of a request goes", "s",
            {f"{stage} {{{{service}}}}": mean(f"vllm:request_{stage}_time_seconds")
             for stage in ("queue", "prefill", "decode")},
            "Mean of the requests that ended. kubectl slipway why shows one request; traces show each.",
        ),
        Panel(
            "Time to first token by replica, P95", "s",
            {"{{pod}}": quantile(0.95, TTFT, by="namespace, pod")},
            "One slow replica among fast ones: kubectl slipway drain moves its requests elsewhere.",
        ),
        Panel(
            "Inter-token latency by replica, P95", "s",
            {"{{pod}}": quantile(0.95, ITL, by="namespace, pod")},
            "A replica that is slower than its peers has a hot or failing GPU, or a noisy neighbour.",
        ),
    ),
    "Drift against the reference window": (
        now_and_then(
            "Prompt length", PROMPT,
            "Tokens of prompts in the last hour, and in the same hour of the reference window.",
        ),
        now_and_then(
            "Output length", OUTPUT,
            "Tokens of answers in the last hour, and in the same hour of the reference window. Answers that suddenly"
            " are longer or shorter mean another prompt, template or model.",
        ),
        Panel(
            "Mean length, as a multiple", "short",
            {"prompts {{service}}": times(PROMPT), "answers {{service}}": times(OUTPUT)},
            "Of the mean in the reference window; 1: no change. Capacity was planned for the lengths of then.",
        ),
        Panel(
            "Shift of the distribution", "percentunit",
            {"prompts {{service}}": shift(PROMPT, REFERENCE), "answers {{service}}": shift(OUTPUT, REFERENCE)},
            "The largest difference between the shares of requests below each length, now and then (the statistic of"
            " Kolmogorov and Smirnov over the buckets). 0: the same. Above 20 %, look at what clients send.",
        ),
        Panel(
            "Prefix cache hit rate", "percentunit",
            {"now {{service}}": ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", over="1h"),
             "$reference ago {{service}}": ratio(
                 "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", over="1h", offset=REFERENCE)},
            "A changed system prompt or template shows here first.",
        ),
        Panel(
            "Requests", "reqps",
            {"now {{service}}": rate(f"{PROMPT}_count", over="1h"),
             "$reference ago {{service}}": rate(f"{PROMPT}_count", over="1h", offset=REFERENCE)},
            "Requests that ended, in a second.",
        ),
    ),
    "Rollout": (
        Panel(
            "Requests by revision", "reqps",
            {"{{revision}} {{service}}": rate("slipway_gateway_requests_total", OF_GATEWAY, by=REVISION)},
            "The weight of a canary, as it is really applied.",
        ),
        Panel(
            "Errors by revision", "percentunit", {"{{revision}} {{service}}": gateway_errors()},
            "Share of 5xx answers.",
        ),
        Panel(
            "Time to first token by revision, P95", "s",
            {"{{revision}} {{service}}": quantile(
                0.95, "slipway_gateway_time_to_first_token_seconds", OF_GATEWAY, by=REVISION)},
            "The analysis of a canary compares these, from the same counters.",
        ),
        Panel(
            "Inter-token latency by revision, P95", "s",
            {"{{revision}} {{service}}": quantile(
                0.95, "slipway_gateway_inter_token_latency_seconds", OF_GATEWAY, by=REVISION)},
            "The analysis of a canary compares these, from the same counters.",
        ),
        Panel(
            "Replicas by revision", "short",
            {"{{revision}} {{service}}":
             f"max by ({REVISION}) (slipway_gateway_endpoints_ready{{{OF_GATEWAY}}})"},
            "Replicas that take requests, as gateways count them.",
        ),
        Panel(
            "Streams broken or continued", "short",
            {"broken {{revision}} {{service}}": rate(
                "slipway_gateway_broken_streams_total", OF_GATEWAY, by=REVISION),
             "continued {{revision}} {{service}}": rate("slipway_gateway_handovers_total", OF_GATEWAY, by=REVISION)},
            "Broken: ended with an error event. Continued: another replica finished the answer.",
        ),
    ),
}  # fmt: skip
