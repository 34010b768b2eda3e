"""Configures structured logging: one JSON line per entry, as in `log.info("scaled", service=key, was=3, now=4)`.

Our own entries go from structlog straight to bytes on stderr; those of libraries come through the standard library's
loggers, a third as fast, and look the same. Never log the text of a prompt or of an answer, and never a key or a token.
"""

import json
import logging
import sys
from typing import Any

import msgspec
import structlog

_encoder = msgspec.json.Encoder(enc_hook=repr)  # what JSON does not know is written as Python shows it


def configure(part: str, level: str = "INFO") -> None:
    """Send structlog and the standard library's loggers to stderr as JSON; `part` names the process."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]

    def render(_logger: object, _method: str, event: structlog.typing.EventDict) -> bytes:
        entry = {"part": part, "message": event.pop("event"), **event}
        try:
            return _encoder.encode(entry)
        except UnicodeEncodeError:  # half of a surrogate pair, as in the name of a file that is not UTF-8
            return json.dumps(entry, default=repr).encode()

    structlog.configure(
        processors=[*shared, render],
        logger_factory=structlog.BytesLoggerFactory(sys.stderr.buffer),
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        cache_logger_on_first_use=True,
    )

    def render_text(logger: Any, method: str, event: structlog.typing.EventDict) -> str:
        return render(logger, method, event).decode()

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render_text],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
