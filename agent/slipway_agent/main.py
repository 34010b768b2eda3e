"""`slipway-agent serve | drain`: the command line.

`drain` imports next to nothing: it runs in a preStop hook, whose time is taken from the pod's grace period.
"""

import os
import sys
from collections.abc import Sequence

from slipway_api.early_sigterm import end_at_once_on_sigterm


def main() -> None:
    """The console script."""
    end_at_once_on_sigterm()
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run the verb of the command line; returns the exit code."""
    from slipway_agent.settings import SettingsError, parse_arguments, run_directory, serve_settings

    if list(argv[:1]) != ["drain"]:
        from slipway_agent import serve  # before the help is printed, which shows that an image is complete
    arguments = parse_arguments(argv)
    if arguments.verb == "drain":
        return _drain(str(run_directory(os.environ)), arguments.refuse_after)
    try:
        settings = serve_settings(arguments, os.environ)
    except SettingsError as error:
        print(f"slipway-agent: {error}", file=sys.stderr)
        return 2
    return serve.run(settings)


def _drain(directory: str, refuse_after: float) -> int:
    """Drain the replica. 0 where no agent runs: Kubernetes would report a failing preStop hook."""
    from pathlib import Path

    from slipway_agent.drain_socket import SOCKET, ask_for_drain

    path = Path(directory) / SOCKET
    try:
        ask_for_drain(path, refuse_after)
    except (FileNotFoundError, ConnectionError) as error:
        print(f"slipway-agent: nothing to drain: no agent answers at {path}: {error.strerror}", file=sys.stderr)
    except OSError as error:
        print(f"slipway-agent: cannot ask for a drain at {path}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main()
