"""kubectl delete --cascade=orphan (review/operator-users.md 9)."""

from datetime import UTC, datetime
from typing import Any

import pytest

from slipway_api import names
from slipway_operator.core.actions import CreateRevision, DrainPod, RemoveFinalizer
from slipway_operator.core.service.plan import plan
from tests.builders import T0, a_pod, a_service, promised, revision_of, seen

pytestmark = pytest.mark.capability("OP-17")


@pytest.mark.parametrize(
    ("others", "expected"), [((), DrainPod), (("foregroundDeletion",), DrainPod), (("orphan",), RemoveFinalizer)]
)
def test_only_an_orphaned_service_leaves_its_replicas_serving(others, expected):
    service = promised(a_service(replicas=1), 1)
    metadata = service.metadata.model_copy(
        update={"deletion_timestamp": datetime(2026, 1, 1, tzinfo=UTC), "finalizers": (names.FINALIZER, *others)}
    )
    service = service.model_copy(update={"metadata": metadata})
    observed = seen(service, a_pod(revision_of(service)).ready())

    actions = plan(observed, T0).actions

    assert [type(action) for action in actions] == [expected]


def test_the_keys_of_a_stored_revision_are_sorted():
    """The API server sorts them at a strategic merge patch, and `data` is immutable: else no such patch succeeds."""

    def is_sorted(value: Any) -> bool:
        if isinstance(value, dict):
            return list(value) == sorted(value) and all(is_sorted(one) for one in value.values())
        return not isinstance(value, list) or all(is_sorted(one) for one in value)

    actions = plan(seen(a_service(replicas=1), revisions=()), T0).actions

    (create,) = [action for action in actions if isinstance(action, CreateRevision)]
    assert len(create.manifest["data"]["spec"]) > 1
    assert is_sorted(create.manifest["data"])
