"""Error responses of the admin port, in the same format as those of our own runtime."""

import json
from typing import Final

from slipway_agent.engine import EngineError, EngineRefused

_TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class Refusal(Exception):  # noqa: N818  reads as a fact where it is raised
    """An error response: its status and its sentence; `reason` is the cause in one word, for programs."""

    def __init__(self, status: int, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason

    def body(self) -> bytes:
        """The JSON of the response."""
        error = {"message": str(self), "type": _TYPES.get(self.status, "Error"), "param": None, "code": self.status}
        return json.dumps({"error": error | ({"reason": self.reason} if self.reason else {})}).encode()


def unavailable(error: EngineError) -> Refusal:
    """The response if the engine does not answer: 503, never a number."""
    return Refusal(503, str(error))


def refused_by_engine(error: EngineRefused, otherwise: str) -> str:
    """The engine's own sentence, or `otherwise` if it sent none."""
    return error.detail or otherwise
