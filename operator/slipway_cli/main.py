"""The command `kubectl slipway`: status, why, rollouts, drain, wake, simulate, plan, routes, console, bundle, cleanup.

Verbs that change something write what their user could write with kubectl: a field of the spec or an annotation. They
need no access to the operator, and work while it is away.
"""

import json
import sys
import webbrowser
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
import yaml
from rich.console import Console
from rich.table import Table

import slipway_api
from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_api.words import count
from slipway_cli.bundle import collect_bundle, write_bundle
from slipway_cli.cluster import KINDS, Cluster, ClusterError, with_our_finalizer
from slipway_cli.completion import SCRIPTS
from slipway_cli.console import forwarded_console, wait_for_interrupt
from slipway_cli.explain import explain_plan, explain_scaling, explain_status
from slipway_cli.routes import NotExportedError, Options, export_routes
from slipway_cli.simulation import ReplicaModel, Result, simulate
from slipway_cli.templates import read_templates, resolve_templates, stored_templates
from slipway_cli.traces import BadInputError, read_service, read_trace
from slipway_cli.why import Step, find_accounts
from slipway_operator.core.scaling.limits import LIMIT_NAMES

NOTHING_TO_DO: Final = 3  # exit code of a verb that would have no effect

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
DISRUPTION_BUDGET: Final = 429  # the API server's answer to an eviction that a PodDisruptionBudget forbids
PIPE_WIDTH: Final = 10_000  # a table in a pipe is read by grep: one row, one line
out = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"kubectl-slipway {slipway_api.__version__} ({names.API_VERSION})")
        raise typer.Exit


@app.callback()
def options(
    *,
    kubeconfig: Annotated[str, typer.Option("--kubeconfig", help="Path of the kubeconfig; default: KUBECONFIG.")] = "",
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Show, roll out, drain, plan and export the InferenceServices of a cluster."""
    Cluster.kubeconfig = kubeconfig or None


class Output(StrEnum):
    """Form of the output."""

    TABLE = "table"
    JSON = "json"


class Shell(StrEnum):
    """A shell with completion."""

    BASH = "bash"
    ZSH = "zsh"


Name = Annotated[str, typer.Argument(help="Name of the InferenceService.")]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Namespace; default: that of the context.")]
Context = Annotated[str, typer.Option("--context", help="Context of the kubeconfig; default: the current one.")]
Form = Annotated[Output, typer.Option("--output", "-o", help="table, or json for programs.")]
TemplateFiles = Annotated[
    list[Path] | None, typer.Option("--templates", "-t", help="File with ServiceTemplates; may be given again.")
]
Manifest = Annotated[Path, typer.Option("--filename", "-f", help="Manifest with one InferenceService.")]


@app.command()
def status(name: Name, namespace: Namespace = "", context: Context = "", output: Form = Output.TABLE) -> None:
    """Show where a service stands: readiness, replicas, revisions and their traffic."""
    found = explain_status(Cluster(namespace, context).service(name))
    if output is Output.JSON:
        return _print_json(found)
    out.print(f"{found['name']}  Ready={found['ready']} {found['reason']}: {found['message']}", soft_wrap=True)
    if not found["upToDate"]:
        out.print("the operator has not followed the newest change of the spec yet")
    for template in found["inherits"]:
        blocks = ", ".join(template.get("blocks", ())) or "nothing: the service or a later template has its blocks"
        out.print(f"from ServiceTemplate {template['name']} (generation {template['generation']}): {blocks}")
    replicas = found["replicas"]
    out.print(f"replicas: {replicas['ready']} of {replicas['desired']} ready, {replicas['draining']} draining")
    if (slo := found["slo"]) is not None:
        out.print(
            f"error budget: {slo.get('errorBudgetRemainingPercent', '?')} % of {slo['windowDays']} days left "
            f"({slo['state']}); P95 of the last hour: first token {slo.get('ttftP95Seconds', '?')} s, "
            f"between tokens {slo.get('itlP95Seconds', '?')} s",
            soft_wrap=True,
        )
    if (cost := found["cost"]) is not None:
        out.print(
            f"cost: {cost.get('perHour', '?')} {cost['currency']} an hour for {count(cost['gpus'], 'GPU')}; "
            f"{cost.get('perMillionOutputTokens', '?')} {cost['currency']} for a million output tokens",
            soft_wrap=True,
        )
    if upgrade := found["pendingUpgrade"]:
        out.print(f"runtime image on offer: {upgrade['image']}; {upgrade['reason']}", soft_wrap=True)
    _print_table(("REVISION", "ROLE", "TRAFFIC", "READY", "IMAGE"), found["revisions"], _revision_row)
    return _print_table(("CONDITION", "STATUS", "REASON", "MESSAGE"), found["conditions"], _values)


@app.command()
def why_scale(name: Name, namespace: Namespace = "", context: Context = "", output: Form = Output.TABLE) -> None:
    """Explain the number of replicas: the last decision, its numbers, its limits, and those before it."""
    found = explain_scaling(Cluster(namespace, context).service(name))
    if output is Output.JSON:
        return _print_json(found)
    out.print(f"{found['name']}: {count(found['desired'], 'replica')}, decided by {found['decidedBy']}")
    out.print(found["because"], soft_wrap=True)
    if found["limitedBy"]:
        limit = LIMIT_NAMES[found["limitedBy"]]
        out.print(f"the metrics ask for {found['recommended']}; limited by {limit}", soft_wrap=True)
    _print_table(("METRIC", "VALUE", "TARGET", "REPLICAS"), found["metrics"], _values)
    return _print_table(("TIME", "FROM", "TO", "REASON"), found["history"], _values)


@app.command()
def why(
    request_id: Annotated[str, typer.Argument(help="The x-request-id of the answer.")],
    release_namespace: Annotated[str, typer.Option(help="Namespace of operator and gateway.")] = "slipway-system",
    context: Context = "",
    output: Form = Output.TABLE,
) -> None:
    """Explain one request: the chosen replica and its scores, queue, prefill, cache hits, decode, handovers."""
    accounts = find_accounts(Cluster(context=context), release_namespace, request_id)
    if output is Output.JSON:
        return _print_json([account.to_json() for account in accounts])
    for account in accounts:
        out.print(account.summary, soft_wrap=True)
        _print_table(("AT", "PART", "EVENT"), account.steps, _step_row)
        _print_table(
            ("REPLICA", "SCORE", "SENT BEFORE", "LOAD (TOKENS)", "KV USAGE", "HOME"), account.considered, _values
        )
        for sentence in account.missing:
            typer.echo(sentence, err=True)
    return None


@app.command()
def promote(name: Name, namespace: Namespace = "", context: Context = "") -> None:
    """Skip the remaining gates and steps of the rollout: the new revision gets all traffic."""
    cluster = Cluster(namespace, context)
    _annotate(cluster, name, names.ANNOTATION_PROMOTE, _rolling(cluster.service(name)))


@app.command()
def abort(name: Name, namespace: Namespace = "", context: Context = "") -> None:
    """Roll back the rollout that runs: the stable revision gets all traffic, the new one is not tried again."""
    cluster = Cluster(namespace, context)
    _annotate(cluster, name, names.ANNOTATION_ABORT, _rolling(cluster.service(name)))


@app.command()
def rollback(
    name: Name,
    revision: Annotated[str, typer.Option("--to", help="Hash, or its beginning; see `status`.")],
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Go back to a revision that status lists; set the spec back too, or the next change rolls forward again."""
    cluster = Cluster(namespace, context)
    known = [one.hash for one in cluster.service(name).status.revisions if one.hash.startswith(revision)]
    if len(known) != 1:
        _fail(f"{count(len(known), 'revision')} of {name} start with {revision}, not one")
    _annotate(cluster, name, names.ANNOTATION_ROLLBACK_TO, known[0])


@app.command()
def pause(
    name: Name,
    resume: Annotated[bool, typer.Option("--resume", help="Continue instead.")] = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Hold the rollout where it is; --resume continues it."""
    cluster = Cluster(namespace, context)
    own = cluster.get("InferenceService", name)["spec"].get("rollout")
    # A service without a block of its own would no longer inherit spec.rollout if one were written.
    mark = {"metadata": {"annotations": {names.ANNOTATION_PAUSE: None if resume else "true"}}}
    cluster.patch("InferenceService", name, mark if own is None else {"spec": {"rollout": {"paused": not resume}}})
    if resume and own is not None:
        cluster.patch("InferenceService", name, mark)
    out.print(f"{name}: the rollout {'continues' if resume else 'is paused'}")


@app.command()
def drain(
    name: Name,
    pod: Annotated[str, typer.Argument(help="Name of the replica's pod.")],
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Drain one replica and replace it: by eviction, or after its replacement is ready if every replica is needed."""
    cluster = Cluster(namespace, context)
    if pod not in [one["metadata"]["name"] for one in cluster.pods(name)]:
        _fail(f"{pod} is not a replica of {name}")
    try:
        cluster.evict(pod)
    except ClusterError as exc:
        if exc.status != DISRUPTION_BUDGET:
            raise
        cluster.request_replacement(pod, _now())
        out.print(
            f"{pod} drains when its replacement is ready: the disruption budget needs every replica", soft_wrap=True
        )
        return
    out.print(f"{pod} is being evicted: it finishes its requests, and another replica takes its place")


@app.command()
def wake(name: Name, namespace: Namespace = "", context: Context = "") -> None:
    """Start a service that is scaled to zero before a request comes; it stays up for its idleSeconds at least."""
    cluster = Cluster(namespace, context)
    spec = cluster.service(name).spec
    rules = spec.autoscaling.scale_to_zero if spec.autoscaling else None
    if rules is None:
        _fail(f"{name} never scales to zero: it has no spec.autoscaling.scaleToZero")
    if spec.suspend:
        _fail(f"{name} is suspended: set spec.suspend to false")
    moment = datetime.now(UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z")
    _annotate(cluster, name, names.ANNOTATION_WAKE, moment)


@app.command()
def routes(
    name: Name,
    gateway: Annotated[str, typer.Option(help="The Gateway that the route is attached to: NAME or NAMESPACE/NAME.")],
    hostname: Annotated[list[str] | None, typer.Option(help="Host name of the route; may be given again.")] = None,
    endpoint_picker: Annotated[
        str, typer.Option(metavar="SERVICE:PORT", help="Make InferencePools with this endpoint picker, not Services.")
    ] = "",
    model_header: Annotated[
        str, typer.Option(metavar="NAME", help="Match the served name in this header, which the mesh sets.")
    ] = "",
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Print the split of a service as an HTTPRoute of the Gateway API, with a pool for each revision."""
    picker, _, port = endpoint_picker.partition(":")
    if endpoint_picker and not (picker and port.isdecimal()):
        _fail(f"--endpoint-picker must be SERVICE:PORT, not {endpoint_picker}")
    chosen = (picker, int(port)) if endpoint_picker else None
    options = Options(gateway, tuple(hostname or ()), chosen, model_header)
    try:
        objects = export_routes(Cluster(namespace, context).service(name), options)
    except NotExportedError as exc:
        _fail(f"{name} cannot be exported: {exc}")
    typer.echo(yaml.safe_dump_all(objects, sort_keys=False), nl=False)


@app.command(name="simulate")
def simulate_load(
    manifest: Manifest,
    trace: Annotated[Path, typer.Option(help="CSV: seconds,requests_per_second[,prompt_tokens,output_tokens].")],
    seconds: Annotated[float, typer.Option(help="Length; default: two minutes beyond the last row.")] = 0.0,
    cold_start: Annotated[float, typer.Option(help="Seconds from pod to ready.")] = 60.0,
    token_seconds: Annotated[float, typer.Option(help="Seconds between two tokens of a request.")] = 0.03,
    kv_tokens: Annotated[int, typer.Option(help="Tokens that the KV cache of a replica holds.")] = 200_000,
    templates: TemplateFiles = None,
    output: Form = Output.TABLE,
) -> None:
    """Replay a load against a manifest: the operator's own decisions in virtual time. Needs no cluster."""
    loads = read_trace(trace)
    model = ReplicaModel(cold_start=timedelta(seconds=cold_start), token_seconds=token_seconds, kv_tokens=kv_tokens)
    service, _ = _merged(manifest, templates or [])
    result = simulate(service, loads, model, seconds=seconds or loads[-1].seconds + 120)
    if output is Output.JSON:
        return _print_json(_result(result))
    _print_table(("AT", "EVENT", "REASON"), list(result.changes), lambda row: (f"{row[0]:.0f}s", row[1], row[2]))
    peak = max(moment.desired for moment in result.moments)
    longest = max(moment.waiting for moment in result.moments)
    out.print(
        f"{count(result.requests, 'request')}, {result.unfinished} unfinished at the end; "
        f"at most {count(peak, 'replica')}, "
        f"{result.replica_hours:.2f} replica hours; longest queue {longest}; "
        f"wait before the first token p50 {result.wait_p50:.1f}s, p95 {result.wait_p95:.1f}s",
        soft_wrap=True,
    )
    return None


@app.command()
def plan(
    manifest: Manifest,
    gpu_hour_cost: Annotated[float, typer.Option(help="Price of one GPU for an hour.")] = 0.0,
    templates: TemplateFiles = None,
    from_cluster: Annotated[
        bool, typer.Option("--from-cluster", help="Read the ServiceTemplates that no file has from the cluster.")
    ] = False,
    context: Context = "",
    output: Form = Output.TABLE,
) -> None:
    """Print memory, concurrency and cost of a manifest, whether it fits, and what it inherits. Needs no cluster."""
    in_cluster = Cluster(context=context).templates() if from_cluster else []
    service, blocks = _merged(manifest, templates or [], in_cluster)
    found = explain_plan(service, gpu_hour_cost=gpu_hour_cost)
    if service.spec.base_refs:
        found["blocks"] = blocks
    if output is Output.JSON:
        _print_json(found)
    else:
        out.print(f"{found['name']}: {found['message']}", soft_wrap=True)
        flat = {key: value for key, value in found.items() if isinstance(value, dict) and key != "blocks"}
        rows = [(key, ", ".join(f"{name} {one}" for name, one in value.items())) for key, value in flat.items()]
        _print_table(("PART", "VALUES"), rows, lambda row: row)
        if "blocks" in found:
            _print_table(("BLOCK", "FROM", "VALUE"), list(blocks.items()), _block_row)
        for sentence in found["advice"]:
            out.print(f"advice: {sentence}", soft_wrap=True)
    if found["fits"] is False:
        raise typer.Exit(1)


@app.command()
def bundle(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("slipway-bundle.tar.gz"),
    release_namespace: Annotated[
        str, typer.Option(help="Namespace of operator and gateway, for their logs and routes.")
    ] = "slipway-system",
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Write a support bundle: objects, pods, events, logs, nodes, routes, versions. No secrets, no prompts."""
    files = collect_bundle(Cluster(namespace, context), release_namespace)
    written = write_bundle(path, files)
    out.print(f"wrote {path}: {', '.join(written)}", soft_wrap=True)
    for part, cause in files["not-collected"].items():
        typer.echo(f"not collected: {part}: {cause}", err=True)


@app.command()
def console(
    release_namespace: Annotated[str, typer.Option(help="Namespace of operator and gateway.")] = "slipway-system",
    browser: Annotated[bool, typer.Option(help="Open the browser; else only print the address.")] = True,
    context: Context = "",
) -> None:
    """Open the console of a gateway in the browser, through kubectl port-forward, until Ctrl-C."""
    cluster = Cluster(context=context)
    with forwarded_console(cluster, release_namespace, context=context) as url:
        out.print(f"The console is at {url}", soft_wrap=True)
        out.print("The address contains a token that opens the admin port of this gateway. Press Ctrl-C to end.")
        if browser:
            webbrowser.open(url)
        wait_for_interrupt()


@app.command()
def cleanup(
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, only list.")] = False,
    context: Context = "",
) -> None:
    """Release objects that Slipway's finalizer holds although its operator is gone. For after an uninstall."""
    cluster = Cluster(context=context)
    held = [
        (kind, body) for kind in KINDS for body in with_our_finalizer(cluster.objects(kind, all_namespaces=True))
    ]  # fmt: skip
    for kind, body in held:
        metadata = body["metadata"]
        if yes:
            cluster.remove_finalizer(kind, body)
        out.print(f"{'released' if yes else 'held'}: {kind} {metadata['namespace']}/{metadata['name']}")
    if not held:
        out.print("nothing is held by Slipway's finalizer")
    elif not yes:
        out.print("run again with --yes, when the operator is uninstalled: pods then go without draining")


def main() -> None:
    """Run the plugin; errors are one sentence on stderr and exit code 1."""
    try:
        app()
    except (ClusterError, BadInputError) as exc:
        print(f"error: {' '.join(str(exc).split())}", file=sys.stderr)
        sys.exit(1)
    except Exception as exc:  # noqa: BLE001  a person reads this, and a traceback helps nobody on call
        print(f"error: {type(exc).__name__}: {' '.join(str(exc).split())[:500]}", file=sys.stderr)
        sys.exit(1)


# --- helpers ----------------------------------------------------------------------------------------------------------


@app.command()
def completion(shell: Annotated[Shell, typer.Argument(help="bash or zsh.")]) -> None:
    """Print the completion script of a shell for the command kubectl-slipway."""
    typer.echo(SCRIPTS[shell], nl=False)


def _merged(
    manifest: Path, templates: list[Path], in_cluster: list[dict[str, Any]] | None = None
) -> tuple[InferenceService, dict[str, dict[str, Any]]]:
    """The service of a manifest with what it inherits; templates may stand in the manifest too."""
    found = stored_templates(in_cluster or []) | read_templates([manifest, *templates])
    return resolve_templates(read_service(manifest), found)


def _block_row(row: tuple[str, dict[str, Any]]) -> tuple[str, str, str]:
    name, block = row
    return name, block["from"], json.dumps(block["value"])


def _rolling(service: InferenceService) -> str:
    """The hash of the revision that rolls out; ends the command where nothing does."""
    status = service.status
    if not status.update_revision or status.update_revision == status.current_revision:
        typer.echo(f"{service.metadata.name}: nothing rolls out", err=True)
        raise typer.Exit(NOTHING_TO_DO)
    return status.update_revision


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _annotate(cluster: Cluster, name: str, annotation: str, revision: str) -> None:
    cluster.patch("InferenceService", name, {"metadata": {"annotations": {annotation: revision}}})
    out.print(f"{name}: {annotation}={revision}")


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_table(headers: tuple[str, ...], rows: list[Any], cells: Callable[[Any], tuple[Any, ...]]) -> None:
    if not rows:
        return
    table = Table(*headers, box=None, pad_edge=False, header_style="")
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in cells(row)))
    out.print(table)


def _values(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.values())


def _step_row(step: Step) -> tuple[str, str, str]:
    return "" if step.at is None else f"{step.at:+.3f} s", step.part, step.text


def _revision_row(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["hash"], row["role"], f"{row['weight']}%", row["ready"], row["image"]


def _result(result: Result) -> dict[str, Any]:
    return {
        "requests": result.requests,
        "unfinished": result.unfinished,
        "waitSeconds": {"p50": result.wait_p50, "p95": result.wait_p95},
        "replicaHours": round(result.replica_hours, 3),
        "changes": [{"seconds": at, "reason": reason, "message": message} for at, reason, message in result.changes],
        "moments": [
            {
                "seconds": one.seconds,
                "desired": one.desired,
                "ready": one.ready,
                "running": one.running,
                "waiting": one.waiting,
            }
            for one in result.moments
        ],
    }
