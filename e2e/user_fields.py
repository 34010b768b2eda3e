"""An admission policy of the stories: nothing in Slipway may write what belongs to users.

The API server itself refuses any write by an account of Slipway that changes spec, labels or annotations of one of our
kinds; finalizers and status are theirs. Every story that has the session's cluster runs under it.
"""

from typing import Final

from e2e.slipway import RELEASE_NAMESPACE, Json
from slipway_api import names

NAME: Final = "users-own-spec"
REFUSAL: Final = "spec, labels and annotations belong to users"

_KINDS: Final = ("inferenceservices", "loraadapters", "warmpools")

POLICY: Final[Json] = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "ValidatingAdmissionPolicy",
    "metadata": {"name": NAME},
    "spec": {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "resourceRules": [
                {
                    "apiGroups": [names.GROUP],
                    "apiVersions": [names.VERSION],
                    "operations": ["UPDATE"],
                    "resources": list(_KINDS),
                }
            ]
        },
        "matchConditions": [
            {
                "name": "by-slipway",
                "expression": f"request.userInfo.username.startsWith('system:serviceaccount:{RELEASE_NAMESPACE}:')",
            }
        ],
        "validations": [
            {
                "expression": "object.spec == oldObject.spec "
                "&& object.metadata.?labels.orValue({}) == oldObject.metadata.?labels.orValue({}) "
                "&& object.metadata.?annotations.orValue({}) == oldObject.metadata.?annotations.orValue({})",
                "message": REFUSAL,
            }
        ],
    },
}
BINDING: Final[Json] = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "ValidatingAdmissionPolicyBinding",
    "metadata": {"name": NAME},
    "spec": {"policyName": NAME, "validationActions": ["Deny"]},
}
