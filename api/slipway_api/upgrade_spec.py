"""The fields `spec.runtime.upgradePolicy` and `upgradeWindow`: when a service takes a newer runtime image."""

from enum import StrEnum

from pydantic import Field, field_validator

from slipway_api.schedules import CRON_PATTERN, TIME_ZONE_PATTERN, checked_expression, checked_time_zone
from slipway_api.types import Rule, Struct


class UpgradePolicy(StrEnum):
    """When a service whose `runtime.image` is empty takes the runtime image of a newer installation."""

    ON_SPEC_CHANGE = "OnSpecChange"
    AUTO = "Auto"
    WINDOW = "Window"


class UpgradeWindow(Struct):
    """A time that returns, in which an upgrade may begin."""

    schedule: str = Field(pattern=CRON_PATTERN, max_length=64)
    """Cron expression of five fields for the start of the window. "0 2 * * 6" is 2:00 on Saturdays."""
    time_zone: str = Field(default="UTC", pattern=TIME_ZONE_PATTERN, max_length=64)
    """Time zone of the schedule, such as Europe/Berlin; changes of daylight saving time are followed."""
    duration_seconds: int = Field(default=3600, ge=60, le=604_800)
    """How long the window stays open after each start. A rollout that starts in it continues after it."""

    @field_validator("time_zone")
    @classmethod
    def _exists(cls, name: str) -> str:
        return checked_time_zone(name)

    @field_validator("schedule")
    @classmethod
    def _occurs(cls, expression: str) -> str:
        return checked_expression(expression)


# Rules of `spec.runtime`.
UPGRADE_RULES = (
    Rule(
        "(self.upgradePolicy == 'Window') == has(self.upgradeWindow)",
        "upgradePolicy Window needs upgradeWindow with its schedule, and no other policy has it",
        ".upgradeWindow",
    ),
    Rule(
        "self.upgradePolicy == 'OnSpecChange' || !has(self.image) || self.image == ''",
        "upgradePolicy Auto and Window upgrade to the image of the installation; runtime.image must be empty",
        ".upgradePolicy",
    ),
)
