"""`slipway-runtime serve | drain | pull`: the command line.

Each verb imports only the modules that it needs: `drain` runs in a preStop hook, where a second of imports is taken
from the pod's termination grace period.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from slipway_api import names


def main() -> None:
    """The console script."""
    end_at_once_on_sigterm()
    sys.exit(run(sys.argv[1:]))


def end_at_once_on_sigterm() -> None:
    """End at SIGTERM until the server handles it: the kernel ignores a signal that process 1 of a container does not.

    The imports take a second, or many on a busy node. A container that is told to end meanwhile would stay for the
    whole termination grace period, which is that of a drain.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))


def run(argv: Sequence[str]) -> int:
    """Run the verb of the command line; returns the exit code."""
    from slipway_runtime.command_line import arguments_of, cache_directory, run_directory, serve_settings

    arguments = arguments_of(argv)
    if arguments.verb == "drain":
        from slipway_runtime.drain import drain

        return drain(run_directory(os.environ) / "drain.sock", arguments.timeout or None, arguments.refuse_after)
    if arguments.verb == "pull":
        cache = cache_directory(os.environ)
        tokenizer = os.environ.get(names.ENV_PRE_PULL_TOKENIZER)
        if tokenizer is not None:
            from slipway_runtime.pre_pull import pre_pull

            return pre_pull(arguments.model_uri, tokenizer, cache)
        return pull(arguments.model_uri, cache)
    try:
        settings = serve_settings(arguments, os.environ)
    except (ValueError, OSError) as error:
        print(f"slipway-runtime: {error}", file=sys.stderr)
        return 2
    from slipway_runtime import serve

    return serve.run(settings)


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


if __name__ == "__main__":
    main()
