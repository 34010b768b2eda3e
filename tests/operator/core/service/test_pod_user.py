"""The user and the group of pods: of the installation, of the user's template, or of the platform."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from slipway_operator.core.actions import CreatePod
from slipway_operator.core.observed import NONROOT, PodUser
from slipway_operator.core.service.plan import plan
from slipway_operator.settings import OperatorSettings
from tests.builders import DEFAULTS, T0, a_service, promised, seen

STRICTER = {"spec": {"securityContext": {"runAsUser": 2000}}}


def context_of(user, **spec):
    service = promised(a_service(**spec), 1)
    observed = replace(seen(service), defaults=replace(DEFAULTS, pod_user=user))
    (create,) = [one for one in plan(observed, T0).actions if isinstance(one, CreatePod)]
    return create.manifest["spec"]["securityContext"]


@pytest.mark.capability("PL-3")
@pytest.mark.parametrize(
    ("user", "spec", "expected"),
    [
        (NONROOT, {}, {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532}),
        (PodUser(1000720000, 0), {}, {"runAsUser": 1000720000, "runAsGroup": 0, "fsGroup": 0}),
        (None, {}, {}),
        (None, {"template": STRICTER}, {"runAsUser": 2000}),
        (NONROOT, {"template": STRICTER}, {"runAsUser": 2000, "runAsGroup": 65532, "fsGroup": 65532}),
    ],
    ids=["the default", "numbers of the installation", "the platform's", "the platform's and the user's", "the user's"],
)
def test_pods_of_replicas_run_as(user, spec, expected):
    always = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}

    assert context_of(user, **spec) == always | expected


@pytest.mark.parametrize("text", ["root", "0:0", "1000", "1000:", "1000:x", ":1000"])
def test_a_user_that_is_none_is_refused_at_the_start(text):
    with pytest.raises(ValidationError):
        OperatorSettings(pod_user=text)
