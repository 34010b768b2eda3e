"""What every body of a client has in common: a field is honoured or refused with a sentence, never ignored."""

from pydantic import BaseModel, ConfigDict


class Wire(BaseModel):
    """Anything that comes from a client: unknown fields are errors, and so are numbers that are none."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Unsupported(ValueError):  # noqa: N818  reads as a sentence where it is raised
    """A field of OpenAI's that this server does not honour, so it refuses it."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} is not supported by this server with this value; leave it out")
        self.field = field


class Misused(ValueError):  # noqa: N818  the same
    """A field that makes no sense with its value, or beside the others."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field} {why}")
        self.field = field
