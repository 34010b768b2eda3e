"""For those who pay: the cost of services, and tokens and limits of tenants."""

from charts.dashboards.grafana import Panel, Variable
from charts.dashboards.promql import BY, OF, OF_GATEWAY, rate

VARIABLES = (
    Variable("namespace", "label_values(slipway_service_gpus, namespace)"),
    Variable("service", 'label_values(slipway_service_gpus{namespace=~"$namespace"}, service)'),
    Variable("tenant", "label_values(slipway_gateway_tokens_total, tenant)"),
)

NAME = "{{namespace}}/{{service}}"
TENANT = 'tenant=~"$tenant"'
# Leaders change; each exports the counter from its start, so the largest is the one of now.
PRICE = f"max by ({BY}, currency) (rate(slipway_service_cost_total{{{OF}}}[1h])) * 3600"


def tokens(kind: str, by: str) -> str:
    """Tokens a second that the gateways counted."""
    return rate("slipway_gateway_tokens_total", f'{OF_GATEWAY}, {TENANT}, kind="{kind}"', by=by)


def share(by: str) -> str:
    """The share of a service's output tokens."""
    output = f'{OF}, kind="output"'
    some = rate("slipway:tokens_total", output, by=f"{BY}, {by}", over="1h")
    return f"{some} / on ({BY}) group_left () {rate('slipway:tokens_total', output, over='1h')}"


ROWS = {
    "Cost": (
        Panel(
            "Price of an hour", "short", {"{{currency}} {{namespace}}/{{service}}": PRICE},
            "All GPU time at spec.budget.gpuHourCost: loading, idle and draining time is included.",
        ),
        Panel(
            "Price of the last day", "short",
            {"{{currency}} {{namespace}}/{{service}}":
             f"max by ({BY}, currency) (increase(slipway_service_cost_total{{{OF}}}[1d]))"},
            "In units of the currency.",
        ),
        Panel(
            "Cost of a million output tokens", "short",
            {"{{currency}} {{namespace}}/{{service}}":
             f"max by ({BY}, currency) (slipway_service_cost_per_million_output_tokens{{{OF}}})"},
            "Price of all GPU time, idle time included, divided by the output tokens of the last hour, in units of the"
            " currency.",
        ),
        Panel(
            "GPUs that replicas hold", "short", {NAME: f"max by ({BY}) (slipway_service_gpus{{{OF}}})"},
            "Of services with spec.budget.gpuHourCost.",
        ),
        Panel(
            "Good requests for one unit of currency", "short",
            {"{{currency}} {{namespace}}/{{service}}":
             f"max by ({BY}, currency) (slipway_service_good_requests_per_cost{{{OF}}})"},
            "Requests of the last hour without an error and within the limits of spec.slo, divided by its price.",
        ),
        Panel(
            "Output tokens per second and GPU", "short",
            {NAME: f"{rate('slipway_service_output_tokens_total')}"
             f" / (max by ({BY}) (slipway_service_gpus{{{OF}}}) > 0)"},
            "The lever of the cost: the same GPUs with more tokens.",
        ),
    ),
    "Tenants": (
        Panel(
            "Price of an hour by tenant", "short",
            {"{{tenant}} {{currency}} {{service}}":
             f"({share('tenant')}) * on ({BY}) group_left (currency) ({PRICE})"},
            "The price of a service, divided among its tenants by their output tokens of the last hour. Input tokens do"
            " not count, and a service without traffic has a price that nobody is charged for.",
        ),
        Panel(
            "Share of output tokens", "percentunit", {"{{tenant}} {{service}}": share("tenant")},
            "Of each service, over the last hour, as replicas count them.",
        ),
        Panel(
            "Output tokens by tenant", "short", {"{{tenant}}": tokens("output", "tenant")},
            "In a second, as gateways count them.",
        ),
        Panel(
            "Input tokens by tenant", "short",
            {"{{tenant}}": tokens("input", "tenant"), "cached {{tenant}}": tokens("cached", "tenant")},
            "In a second; cached ones are a part of the input and cost no prefill.",
        ),
        Panel(
            "Requests of a tenant", "short",
            {"open {{tenant}}": f"sum by (tenant) (slipway_gateway_tenant_open_requests{{{TENANT}}})",
             "waiting {{tenant}}": f"sum by (tenant) (slipway:num_requests_waiting_by_tenant{{{OF}, {TENANT}}})"},
            "Open in the gateways, and waiting in the queues of replicas.",
        ),
        Panel(
            "Refused by a limit", "reqps",
            {"{{limit}} {{tenant}}": rate("slipway_gateway_tenant_denied_total", TENANT, by="tenant, limit")},
            "Answered with 429, by the limit of the tenants file.",
        ),
        Panel(
            "Requests without a valid key", "reqps",
            {"{{reason}}": rate("slipway_gateway_unauthenticated_total", "", by="reason")},
            "Answered with 401.",
        ),
    ),
    "Adapters and services": (
        Panel(
            "Output tokens by adapter", "short",
            {"{{adapter}} {{service}}": rate("slipway:tokens_total", f'{OF}, kind="output"', by=f"{BY}, adapter")},
            "In a second; without a name: the base model.",
        ),
        Panel(
            "Share of output tokens by adapter", "percentunit", {"{{adapter}} {{service}}": share("adapter")},
            "Of each service, over the last hour.",
        ),
        Panel(
            "Output tokens by service", "short", {"{{service}}": tokens("output", "service")},
            "In a second, as gateways count them.",
        ),
    ),
}  # fmt: skip
