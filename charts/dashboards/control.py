"""For who operates Slipway itself: the operator and the gateways."""

from charts.dashboards.grafana import Panel, Variable
from charts.dashboards.promql import quantile, quantiles, rate

VARIABLES = (
    Variable("namespace", "label_values(slipway_service_condition, namespace)"),
    Variable("service", 'label_values(slipway_service_condition{namespace=~"$namespace"}, service)'),
)
OF = 'service=~"$namespace/$service"'


def operator(name: str, by: str) -> str:
    """A counter of the operator, in a second."""
    return rate(f"slipway_operator_{name}", "", by=by)


def gateway(name: str, by: str) -> str:
    """A counter of the gateways with the label `service`, in a second."""
    return rate(f"slipway_gateway_{name}", OF, by=by)


ROWS = {
    "Operator": (
        Panel(
            "Leader and gateways", "short",
            {"leaders": "sum(slipway_operator_is_leader)", "gateways that answer": "max(slipway_operator_gateways)"},
            "One operator leads; without one nothing is scaled or replaced, and serving continues.",
        ),
        Panel(
            "Duration of a pass", "s", quantiles("slipway_operator_reconcile_duration_seconds", "", "", by=""),
            "One pass over one object.",
        ),
        Panel(
            "Work queue", "short",
            {"waiting {{pod}}": "max by (pod) (slipway_operator_queue_depth)",
             "running {{pod}}": "max by (pod) (slipway_operator_queue_active)"},
            "Objects that wait for a worker, and that one works on.",
        ),
        Panel(
            "Decisions", "short", {"{{reason}}": operator("decisions_total", "reason")},
            "In a second, by the reason of their event.",
        ),
        Panel(
            "Passes that failed", "short", {"{{error}}": operator("reconcile_errors_total", "error")},
            "They are repeated with a delay that grows; the log names the object.",
        ),
        Panel(
            "Writes to the API server", "reqps",
            {"{{verb}} {{resource}} {{code}}": operator("writes_total", "verb, resource, code")},
            "409 is another writer; 403 is a right that is missing.",
        ),
        Panel(
            "Age of watches", "s",
            {"{{resource}} {{pod}}": "max by (pod, resource) (slipway_operator_watch_age_seconds)"},
            "Seconds since a watch last said anything; bookmarks come at least once a minute.",
        ),
        Panel(
            "Age of replicas' signals, P95", "s",
            {"signals": quantile(0.95, "slipway_operator_signal_age_seconds", "", by="")},
            "The age of the load that autoscaling decides on.",
        ),
        Panel(
            "Signals that failed", "reqps",
            {"{{error}}": operator("signal_errors_total", "error"),
             "Prometheus: {{error}}": operator("prometheus_errors_total", "error")},
            "Replicas, or the Prometheus of operator.prometheusURL, that gave no usable answer.",
        ),
        Panel(
            "Objects", "short",
            {"objects of our kinds": "max(slipway_operator_services)", "pods": "max(slipway_operator_pods)"},
            "In the caches of the operator.",
        ),
        Panel(
            "Full lists and drift", "short",
            {"lists of {{resource}}": "max by (resource) (slipway_operator_relists)",
             "drift": "sum(rate(slipway_operator_drift_total[$__rate_interval]))"},
            "Lists since the start; drift is an object that a list found different from what the watch had shown.",
        ),
        Panel(
            "Event loop lag", "s",
            {"operator {{pod}}": "max by (pod) (slipway_operator_event_loop_lag_seconds)",
             "gateway {{pod}}": "max by (pod) (slipway_gateway_event_loop_lag_seconds)"},
            "How late the process wakes: leases and streams are late by as much.",
        ),
        Panel(
            "Lists that the API server refuses", "short",
            {"operator: {{resource}} {{namespace}}": "max by (resource, namespace) (slipway_operator_list_refused)",
             "gateway: {{resource}} {{namespace}}": "max by (resource, namespace) (slipway_gateway_list_refused)"},
            "A Role that is missing in a namespace.",
        ),
    ),
    "Gateway: requests": (
        Panel(
            "Requests by status", "reqps", {"{{code}}": gateway("requests_total", "code")},
            "499: the client left.",
        ),
        Panel(
            "Latency that the gateway adds", "s",
            quantiles("slipway_gateway_added_latency_seconds", "", "", by=""),
            "The part of the time to first byte that no replica spent.",
        ),
        Panel(
            "Time to first byte", "s", quantiles("slipway_gateway_time_to_first_byte_seconds", "", OF, by=""),
            "From the request's last byte to the answer's first.",
        ),
        Panel(
            "Open now", "short",
            {"requests {{pod}}": "max by (pod) (slipway_gateway_open_requests)",
             "streams": f"sum(slipway_gateway_open_streams{{{OF}}})"},
            "Requests inside each gateway, and answers that are forwarded.",
        ),
        Panel(
            "Connections", "short",
            {"open {{port}}": "sum by (port) (slipway_gateway_connections)",
             "refused {{port}}": rate("slipway_gateway_connections_refused_total", "", by="port"),
             "timed out {{port}} {{phase}}": rate(
                 "slipway_gateway_connections_timed_out_total", "", by="port, phase")},
            "Open ones, and in a second those beyond the limits and those whose client was too slow.",
        ),
        Panel(
            "Tokens on their way", "short",
            {"{{service}}": f"sum by (service) (slipway_gateway_outstanding_tokens{{{OF}}})"},
            "Sent or asked for, and not answered yet: what routing balances.",
        ),
    ),
    "Gateway: failures": (
        Panel(
            "Attempts without a usable answer", "reqps",
            {"{{reason}} {{service}}": gateway("upstream_errors_total", "service, reason")},
            "By replica's failure; most are retried and no client sees them.",
        ),
        Panel(
            "Retries", "reqps",
            {"{{reason}} {{service}}": gateway("retries_total", "service, reason"),
             "denied {{service}}": gateway("retries_denied_total", "service")},
            "Denied: the retry budget of the service is spent.",
        ),
        Panel(
            "Refused for want of a resource", "reqps",
            {"{{resource}} {{service}}": gateway("refused_total", "service, resource")},
            "The service holds its share of memory, connections or places.",
        ),
        Panel(
            "Streams handed over", "short",
            {"{{reason}} {{service}}": gateway("handovers_total", "service, reason"),
             "failed: {{reason}} {{service}}": gateway("handovers_failed_total", "service, reason"),
             "broken {{service}}": gateway("broken_streams_total", "service")},
            "In a second: continued on another replica, not continued, and ended with an error event.",
        ),
        Panel(
            "Overload", "reqps",
            {"{{step}} {{service}}": gateway("degraded_total", "service, step"),
             "to {{fallback}}: {{reason}}": gateway("fallbacks_total", "fallback, reason")},
            "What the degrade ladder did, and requests that another service answered.",
        ),
        Panel(
            "Second attempts for the first token", "reqps",
            {"{{outcome}} {{service}}": gateway("hedges_total", "service, outcome")},
            "Requests sent to a second replica because the first was late.",
        ),
    ),
    "Gateway: its view of the cluster": (
        Panel(
            "Age of the view", "s", {"{{pod}}": "max by (pod) (slipway_gateway_view_age_seconds)"},
            "Since the API server last gave a sign of life; routing continues with what is known.",
        ),
        Panel(
            "Files in use", "short",
            {"tenants {{pod}}": "min by (pod) (slipway_gateway_tenants_valid)",
             "certificate {{pod}}": "min by (pod) (slipway_gateway_certificate_valid)"},
            "0: the new files are wrong, and the last good ones hold.",
        ),
        Panel(
            "KV events", "short",
            {"feeds {{pod}}": "max by (pod) (slipway_gateway_kv_feeds)",
             "{{event}}": rate("slipway_gateway_kv_events_total", "", by="event")},
            "Replicas whose caches a gateway follows (gateway.kvEvents), and blocks stored and removed in a second.",
        ),
        Panel(
            "Routing table on disk", "short",
            {"{{outcome}}": rate("slipway_gateway_snapshot_writes_total", "", by="outcome"),
             "in use {{pod}}": "max by (pod) (slipway_gateway_routes_from_snapshot)"},
            "Writes in a second; in use: the API server has not answered since the start.",
        ),
    ),
}  # fmt: skip
