"""Base class of request bodies, and their errors: a field is supported or refused, never silently ignored."""

from pydantic import BaseModel, ConfigDict


class Wire(BaseModel):
    """Base class of request bodies: unknown fields are errors, and so are NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Unsupported(ValueError):  # noqa: N818  reads as a sentence where it is raised
    """A known field that this server does not support, and therefore refuses."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} is not supported by this server with this value; leave it out")
        self.field = field


class Misused(ValueError):  # noqa: N818  reads as a sentence where it is raised
    """A field with an invalid value, or in conflict with other fields."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field} {why}")
        self.field = field
