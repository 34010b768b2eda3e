"""What a service does for its adapters: the boot list of its replicas, and their count in its status."""

import json
from dataclasses import replace
from typing import Any

import pytest

from slipway_api import names
from slipway_api.conditions import find_condition
from slipway_api.lora_adapter import PlacementMode
from slipway_api.runtime_api import BootList
from slipway_operator.core.observed import Capacity, FailedAdapter
from slipway_operator.core.service.children import children
from slipway_operator.core.service.plan import Plan, plan
from slipway_operator.core.service.rollout.revision import inputs
from tests.builders import T0, a_pod, a_service, an_attached_adapter, promised, seen

ROOM = {"lora": {"maxAdapters": 2}}


def boot_list(*adapters: Any) -> list[str]:
    """The names in the ConfigMap."""
    service = a_service(runtime=ROOM)
    (child,) = [
        one for one in children(service, desired=1, applied={}, adapters=adapters) if one.key.startswith("ConfigMap/")
    ]
    assert child.key == "ConfigMap/chat-adapters"
    text = child.manifest["data"][names.ADAPTERS_FILE]
    assert "credentials" not in text
    return [one.name for one in BootList.model_validate_json(text).adapters]


@pytest.mark.capability("ML-2")
def test_the_boot_list_has_what_every_new_replica_can_load_by_itself():
    a = an_attached_adapter
    some = a("some", mode=PlacementMode.REPLICAS)

    assert boot_list(a("all"), some, a("secret", has_credentials=True), a("clash", is_refused=True)) == ["all"]
    assert boot_list() == []


def test_a_service_without_room_for_adapters_has_no_boot_list():
    keys = [child.key for child in children(a_service(), desired=1, applied={})]

    assert not any(key.startswith("ConfigMap/") for key in keys)


@pytest.mark.capability("ML-2")
def test_pods_mount_the_boot_list_and_start_without_it():
    service = promised(a_service(runtime=ROOM, replicas=1), 1)
    made = plan(seen(service), T0)
    (pod,) = [action.manifest for action in made.actions if type(action).__name__ == "CreatePod"]
    volume = next(one for one in pod["spec"]["volumes"] if "configMap" in one)
    mount = next(one for one in pod["spec"]["containers"][0]["volumeMounts"] if one["name"] == volume["name"])

    assert volume["configMap"] == {"name": "chat-adapters", "optional": True}
    assert mount == {"name": volume["name"], "mountPath": names.ADAPTERS_DIRECTORY, "readOnly": True}
    assert "adapters" not in json.loads(inputs(service.spec)), "the list is no part of a revision"


def test_the_status_counts_adapters_and_names_those_that_do_not_answer():
    service = promised(a_service(runtime=ROOM, replicas=1), 1)
    adapters = (an_attached_adapter("a"), an_attached_adapter("b", is_ready=False))
    status = plan(replace(seen(service, a_pod(service=service).ready()), adapters=adapters), T0).status

    assert status is not None
    assert status.adapters is not None
    assert (status.adapters.desired, status.adapters.ready) == (2, 1)
    (condition,) = [one for one in status.conditions if one.type == "AdaptersReady"]
    assert (condition.status, condition.message) == ("False", "1 of 2 adapters do not answer: b")


BROKEN = FailedAdapter("sql", "SourceNotFound", "file:///models/sql does not exist")


def serving_without(*failed: FailedAdapter, arguments: tuple[str, ...], replicas: int = 1, **facts: Any) -> Plan:
    """The plan of a service whose replicas are ready, and have reported these failed loads."""
    service = promised(a_service(runtime={"args": list(arguments)}, replicas=replicas), replicas)
    capacity = Capacity(max_sequences=3, kv_blocks=100, bytes_per_token=64, failed_adapters=failed)
    pods = [a_pod(service=service).slot(slot).ready().says() for slot in range(replicas)]
    told = [
        one.but(sample=replace(one.replica.sample, capacity=capacity)) for one in pods if one.replica.sample is not None
    ]
    return plan(replace(seen(service, *told), **facts), T0)


@pytest.mark.capability("OP-18")
@pytest.mark.parametrize(
    "arguments", [("--adapter", "sql=file:///models/sql"), ("--x", "--adapter=sql=file:///models/sql")]
)
def test_a_static_adapter_that_does_not_load_is_reported_with_the_reason_of_the_runtime(arguments):
    """issue 26, 5: the replica gets ready without it, and no LoRAAdapter has a status that could report it."""
    first = serving_without(BROKEN, arguments=arguments, replicas=2)
    condition = find_condition(first.status.conditions, "AdaptersReady")
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", "AdaptersFailed")
    expected = "chat-{0}-0-0, chat-{0}-1-0 could not load sql: SourceNotFound: file:///models/sql does not exist"
    short = first.status.update_revision[:5]
    assert condition.message.startswith(expected.format(short))
    assert "correct --adapter in spec.runtime.args, or create a LoRAAdapter" in condition.message
    assert [one.message for one in first.notes if one.reason == "AdaptersFailed"] == [condition.message]

    ready = find_condition(first.status.conditions, "Ready")
    assert ready is not None
    assert ready.reason == "Available", "the replicas serve the base"


@pytest.mark.capability("OP-18")
def test_a_failed_load_of_other_adapters_is_no_condition_of_the_service():
    """That of a LoRAAdapter is in its own status, and that of a client in the answer."""
    by_client = serving_without(BROKEN, arguments=("--adapter", "chess=file:///models/chess"))
    assert find_condition(by_client.status.conditions, "AdaptersReady") is None

    missing = serving_without(arguments=("--adapter", "sql=x"), adapters=(an_attached_adapter("sailor"),))
    condition = find_condition(missing.status.conditions, "AdaptersReady")
    assert condition is not None
    assert condition.reason == "AdaptersLoaded"
