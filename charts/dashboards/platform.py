"""For platform teams: the fleet, its GPUs, KV cache and queues."""

from charts.dashboards.grafana import Panel, Variable
from charts.dashboards.promql import BY, OF, OF_GATEWAY, mean, quantile, rate, ratio

VARIABLES = (
    Variable("namespace", "label_values(vllm:num_requests_running, namespace)"),
    Variable("service", 'label_values(vllm:num_requests_running{namespace=~"$namespace"}, service)'),
)

# One series with the value 1 for each replica: it gives the GPUs of a pod their service.
REPLICAS = f"max by (namespace, pod, service) (vllm:cache_config_info{{{OF}}})"
JOIN = f"* on (namespace, pod) group_left (service) {REPLICAS}"
JOINED = "Joined to replicas by the labels namespace and pod: the DCGM exporter has to be scraped with honor_labels."


def of_gpu(metric: str, how: str = "avg") -> str:
    """A DCGM metric of the GPUs of each replica, with the replica's service."""
    return f'{how} by (namespace, pod) ({metric}{{namespace=~"$namespace"}}) {JOIN}'


def replicas(metric: str) -> str:
    """A gateway's gauge of replicas; gateways count the same ones."""
    return f"sum by (service) (max by (service, revision) ({metric}{{{OF_GATEWAY}}}))"


def services(condition: str, status: str) -> str:
    """The number of services whose condition has this status."""
    labels = f'{OF}, condition="{condition}", status="{status}"'
    return f"count(max by ({BY}) (slipway_service_condition{{{labels}}}) == 1) or vector(0)"


ROWS = {
    "Fleet": (
        Panel(
            "Replicas that take requests", "short",
            {"{{service}}": replicas("slipway_gateway_endpoints_ready"),
             "ejected {{service}}": replicas("slipway_gateway_endpoints_ejected")},
            "As gateways count them. Ejected replicas failed or were slower than their peers.",
        ),
        Panel(
            "Services that need a person", "short",
            {"Ready is False": services("Ready", "False"), "Stalled": services("Stalled", "True")},
            "kubectl slipway status shows the cause and the remedy.",
        ),
        Panel(
            "GPUs that replicas hold", "short",
            {"{{namespace}}/{{service}}": f"max by ({BY}) (slipway_service_gpus{{{OF}}})"},
            "Of services with spec.budget.gpuHourCost; loading, idle and draining replicas hold theirs too.",
        ),
        Panel(
            "Tokens per second", "short",
            {"prefill {{service}}": rate("vllm:prompt_tokens_total"),
             "decode {{service}}": rate("vllm:generation_tokens_total")},
            "Prefill (prompt tokens) and decode (generated tokens).",
        ),
        Panel(
            "Start of a replica, P95 by phase", "s",
            {"{{phase}}": quantile(0.95, "slipway_operator_cold_start_seconds", "", by="phase", over="1h")},
            "Cold starts of the last hour: schedule, pull, download, load, warmup.",
        ),
        Panel(
            "Warm pools", "short",
            {"{{state}} {{namespace}}/{{pool}}":
             'max by (namespace, pool, state) (slipway_operator_warm_pool_pods{namespace=~"$namespace"})'},
            "Pods that wait for a claim, start, or were claimed.",
        ),
    ),
    "GPUs (DCGM exporter)": (
        Panel(
            "GPU utilization", "percent", {"{{service}} {{pod}}": of_gpu("DCGM_FI_DEV_GPU_UTIL")},
            f"Share of the time in which a kernel runs; not how much of the GPU that kernel uses. {JOINED}",
        ),
        Panel(
            "GPU memory bandwidth", "percentunit", {"{{service}} {{pod}}": of_gpu("DCGM_FI_PROF_DRAM_ACTIVE")},
            f"Share of the cycles in which device memory is read or written. Decode is bound by it. {JOINED}",
        ),
        Panel(
            "Tensor cores", "percentunit", {"{{service}} {{pod}}": of_gpu("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")},
            f"Share of the cycles in which they compute. Prefill is bound by it. {JOINED}",
        ),
        Panel(
            "GPU memory in use", "percentunit",
            {"{{service}} {{pod}}":
             'sum by (namespace, pod) (DCGM_FI_DEV_FB_USED{namespace=~"$namespace"})'
             ' / (sum by (namespace, pod) (DCGM_FI_DEV_FB_USED{namespace=~"$namespace"})'
             f' + sum by (namespace, pod) (DCGM_FI_DEV_FB_FREE{{namespace=~"$namespace"}})) {JOIN}'},
            f"Weights and KV cache are allocated at the start, so this is flat. {JOINED}",
        ),
        Panel(
            "Power", "watt", {"{{service}} {{pod}}": of_gpu("DCGM_FI_DEV_POWER_USAGE", "sum")},
            f"Of all GPUs of a replica. {JOINED}",
        ),
        Panel(
            "Energy of an output token", "joule",
            {"{{namespace}}/{{service}}":
             f"sum by ({BY}) ({of_gpu('DCGM_FI_DEV_POWER_USAGE', 'sum')}) / {rate('vllm:generation_tokens_total')}"},
            "Power of the GPUs of a service divided by its output tokens in a second, idle time included.",
        ),
        Panel(
            "GPU temperature", "celsius", {"{{service}} {{pod}}": of_gpu("DCGM_FI_DEV_GPU_TEMP", "max")},
            f"The hottest GPU of each replica; a hot GPU lowers its clock. {JOINED}",
        ),
        Panel(
            "Last XID error", "short",
            {"{{service}} {{pod}}": of_gpu("DCGM_FI_DEV_XID_ERRORS", "max")},
            f"0: none since the exporter started. 79: the GPU fell off the bus; the node needs a person. {JOINED}",
        ),
        Panel(
            "GPUs by use", "short",
            {"all": "count(DCGM_FI_DEV_GPU_UTIL)",
             "held by replicas": f'count(DCGM_FI_DEV_GPU_UTIL{{namespace=~"$namespace"}} {JOIN}) or vector(0)',
             "held, no request runs":
             f"count(DCGM_FI_DEV_GPU_UTIL and on (namespace, pod) (sum by (namespace, pod)"
             f" (vllm:num_requests_running{{{OF}}}) == 0)) or vector(0)"},
            "All GPUs of the cluster that the exporter sees, and those of the chosen services.",
        ),
    ),
    "KV cache and queue": (
        Panel(
            "Requests running and waiting", "short",
            {"running {{service}}": f"sum by ({BY}) (vllm:num_requests_running{{{OF}}})",
             "waiting {{service}}": f"sum by ({BY}) (vllm:num_requests_waiting{{{OF}}})"},
            "A queue that grows is the first sign of too few replicas.",
        ),
        Panel(
            "Prompt tokens that wait", "short",
            {"{{namespace}}/{{service}}": f"sum by ({BY}) (slipway:waiting_tokens{{{OF}}})"},
            "Prefill that is due: divided by the prefill rate it is the time of the queue.",
        ),
        Panel(
            "Requests held in gateways", "short",
            {"{{service}}": f"sum by (service) (slipway_gateway_waiting_requests{{{OF_GATEWAY}}}) or vector(0)"},
            "They wait for the first ready replica of a service that is scaled to zero or starts.",
        ),
        Panel(
            "KV cache occupancy", "percentunit",
            {"highest replica {{service}}": f"max by ({BY}) (vllm:kv_cache_usage_perc{{{OF}}})",
             "mean {{service}}": f"avg by ({BY}) (vllm:kv_cache_usage_perc{{{OF}}})"},
            "Blocks that live requests hold. Near 1 requests are preempted.",
        ),
        Panel(
            "KV blocks by state", "short",
            {"{{state}} {{service}}": f"sum by ({BY}, state) (slipway:kv_cache_blocks{{{OF}}})"},
            "Live blocks belong to requests; cached ones are prefixes that may be used again.",
        ),
        Panel(
            "Preemptions", "short", {"{{namespace}}/{{service}}": rate("vllm:num_preemptions_total")},
            "Requests set back to give up their blocks, in a second.",
        ),
        Panel(
            "Prefix cache hit rate", "percentunit",
            {"{{namespace}}/{{service}}": ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")},
            "Prompt tokens found in the cache, of all that were looked up.",
        ),
        Panel(
            "Batch: tokens per step", "short",
            {"{{namespace}}/{{service}}": mean("vllm:iteration_tokens_total")},
            "Mean number of tokens that one step computes.",
        ),
        Panel(
            "Speculation acceptance", "percentunit",
            {"{{namespace}}/{{service}}": ratio(
                "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total")},
            "Draft tokens kept, of all that were drafted. Below 40 % speculation costs more than it gives.",
        ),
        Panel(
            "Scheduler, P99 of a step", "s", {"{{namespace}}/{{service}}": quantile(0.99, "slipway:schedule_seconds")},
            "CPU time between two steps of the GPU.",
        ),
    ),
}  # fmt: skip
