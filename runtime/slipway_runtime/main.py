"""`slipway-runtime serve | drain | pull`: the command line.

Each verb imports only the modules that it needs: `drain` runs in a preStop hook, where a second of imports is taken
from the pod's termination grace period.

`drain` asks the replica of this pod to drain, through its socket (the other end is in `server/admin.py`), and waits for
the end of the drain. `pull` brings a model into the cache. In a pod that pre-pulls a model to its node, the result is
the termination message, which the operator reads: `{"bytes": 16060522496, "path": "..."}`, or on failure the message
that a replica would write.
"""

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipway_api import names
from slipway_api.early_sigterm import end_at_once_on_sigterm


def main() -> None:
    """The console script."""
    end_at_once_on_sigterm()
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run the verb of the command line; returns the exit code."""
    from slipway_runtime.command_line import cache_directory, parse_arguments, run_directory, serve_settings

    try:
        arguments = parse_arguments(argv)
    except SystemExit as exit:
        if exit.code:
            _refuse_arguments(f"the command line is not understood: {' '.join(argv[1:])[:500]}")
        raise
    if arguments.verb == "drain":
        return drain(run_directory(os.environ) / "drain.sock", arguments.timeout or None, arguments.refuse_after)
    if arguments.verb == "pull":
        cache = cache_directory(os.environ)
        tokenizer = os.environ.get(names.ENV_PRE_PULL_TOKENIZER)
        if tokenizer is not None:
            draft_model = os.environ.get(names.ENV_PRE_PULL_DRAFT_MODEL, "")
            return pre_pull(arguments.model_uri, tokenizer, cache, draft_model_uri=draft_model)
        return pull(arguments.model_uri, cache)
    try:
        settings = serve_settings(arguments, os.environ)
    except (ValueError, OSError) as error:
        print(f"slipway-runtime: {error}", file=sys.stderr)
        _refuse_arguments(str(error))
        return 2
    from slipway_runtime import serve

    return serve.run(settings)


def _refuse_arguments(sentence: str) -> None:
    """Leave the termination message of a pod whose spec has a value that only the runtime can judge."""
    from slipway_runtime.termination import write_termination_message

    fields = "spec.runtime.args, or a field of spec.runtime or spec.model"
    write_termination_message(f"{names.WORD_INVALID_SPEC}{fields}: {sentence}")


def pull(uri: str, cache: Path) -> int:
    """Fetch a model into the cache; prints its directory and the digest to pin."""
    from slipway_runtime.server.tokenizer import load_tokenizer
    from slipway_runtime.storage.fetch import FetchError, fetch, weights_digest

    try:
        directory = fetch(uri, cache=cache)
        tokenizer = load_tokenizer(directory)
    except (FetchError, FileNotFoundError) as error:
        print(f"slipway-runtime: {error}", file=sys.stderr)
        return 1
    found = {"path": str(directory), "digest": weights_digest(directory, cache), "tokenizerSha256": tokenizer.sha256}
    print(json.dumps(found, indent=2))
    return 0


def pre_pull(uri: str, tokenizer_uri: str, cache: Path, *, draft_model_uri: str = "") -> int:
    """Fetch a model into the cache, with its draft model and a tokenizer that is elsewhere; returns the exit code."""
    from slipway_runtime.loading import fetch_draft_model
    from slipway_runtime.storage.fetch import FetchError, fetch, shown
    from slipway_runtime.termination import termination_message, write_termination_message

    try:
        directory = fetch(uri, cache=cache)
        if tokenizer_uri:
            fetch(tokenizer_uri, cache=cache, weights=False)
        if draft_model_uri:
            fetch_draft_model(draft_model_uri, cache)
    except FetchError as error:
        message = termination_message(uri, error)
        print(f"slipway-runtime: cannot bring {shown(uri)}: {error}", file=sys.stderr)
        write_termination_message(message)
        return 1
    size = sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
    result = json.dumps({"bytes": size, "path": str(directory)})
    print(result)
    write_termination_message(result)
    return 0


def drain(control: Path, timeout_seconds: float | None, refuse_after_seconds: float = 0.0) -> int:
    """Drain the replica, for at most `timeout_seconds` where given; returns the exit code.

    0 where no server runs: then nothing is left to drain, and Kubernetes would report a failing preStop hook.
    """
    try:
        ask_for_drain(control, timeout_seconds, refuse_after_seconds)
    except (FileNotFoundError, ConnectionError) as error:
        print(f"slipway-runtime: nothing to drain: no server answers at {control}: {error.strerror}", file=sys.stderr)
    except OSError as error:
        print(f"slipway-runtime: cannot ask for a drain at {control}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def ask_for_drain(control: Path, timeout_seconds: float | None, refuse_after_seconds: float = 0.0) -> dict[str, Any]:
    """Send the drain request; returns the replica's answer at the end of the drain. Blocks."""
    body = {"refuseAfterSeconds": refuse_after_seconds}
    if timeout_seconds is not None:
        body["timeoutSeconds"] = timeout_seconds
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(control))
        connection.sendall(json.dumps(body).encode() + b"\n")
        with connection.makefile("rb") as answers:
            answer: dict[str, Any] = json.loads(answers.readline() or b"{}")
            return answer


if __name__ == "__main__":
    main()
