"""Orders objects that claim the same name: the oldest gets it.

The operator reports the conflict and the gateway routes by it, so both must sort with this one function.
"""

from datetime import UTC, datetime


def older_first(created_at: datetime | None, namespace: str, name: str) -> tuple[datetime, str, str]:
    """The sort key of one object; the object with the smallest key has the name.

    The API server counts creation in whole seconds, so two objects of the same second are ordered by namespace and then
    by name: `a/x` before `a-b/x`, which the joined strings would sort the other way round. An object without a creation
    time counts as the oldest; the API server always sets one.
    """
    moment = created_at or datetime.min.replace(tzinfo=UTC)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment, namespace, name
