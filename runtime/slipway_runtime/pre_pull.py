"""`slipway-runtime pull` in a pod that pre-pulls a model to its node; the result is the termination message.

The operator reads it: `{"bytes": 16060522496, "path": "..."}`, or on failure the message that a replica would write.
"""

import json
import sys
from pathlib import Path

from slipway_runtime.storage.fetch import FetchError, fetch, shown
from slipway_runtime.termination import termination_message, write_termination_message


def pre_pull(uri: str, tokenizer_uri: str, cache: Path) -> int:
    """Fetch the model, and its tokenizer where that has another address, into the cache; returns the exit code."""
    try:
        directory = fetch(uri, cache=cache)
        if tokenizer_uri:
            fetch(tokenizer_uri, cache=cache, weights=False)
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
