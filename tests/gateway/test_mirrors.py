"""The gateway's own structs of the kinds have the fields and defaults of the kinds."""

import msgspec
import pytest
from pydantic_core import PydanticUndefined

from slipway_api import autoscaling, inference_service, inference_status, lora_adapter
from slipway_api.rollout_spec import Rollout
from slipway_api.runtime_spec import Runtime as RuntimeKind
from slipway_api.slo import SLO
from slipway_gateway import watch

# A field that is absent means "as the kind says" in these: the gateway has a word of its own for it.
ABSENT = {("RoutingSpec", "strategy"), ("RoutingSpec", "request_timeout_seconds"), ("RoutingSpec", "fallback")}
ABSENT |= {("Alias", "weight"), ("AdapterSpec", "alias"), ("AdapterSpec", "placement")}
MIRRORS = {
    watch.Activation: autoscaling.Activation,
    watch.ScaleToZero: autoscaling.ScaleToZero,
    watch.Autoscaling: autoscaling.Autoscaling,
    watch.RuntimeSpec: RuntimeKind,
    watch.RolloutSpec: Rollout,
    watch.DrainSpec: inference_service.Drain,
    watch.FallbackSpec: inference_service.Fallback,
    watch.HedgingSpec: inference_service.Hedging,
    watch.RoutingSpec: inference_service.Routing,
    watch.SLOSpec: SLO,
    watch.ServiceSpec: inference_service.InferenceServiceSpec,
    watch.ServiceStatus: inference_status.InferenceServiceStatus,
    watch.RevisionStatus: inference_status.RevisionStatus,
    watch.CanaryStatus: inference_status.CanaryStatus,
    watch.Alias: lora_adapter.Alias,
    watch.Placement: lora_adapter.Placement,
    watch.AdapterSpec: lora_adapter.LoRAAdapterSpec,
}


@pytest.mark.parametrize("mirror", MIRRORS, ids=lambda mirror: mirror.__name__)
def test_the_mirrors_have_the_fields_and_defaults_of_the_kinds(mirror):
    """review/control-plane.md, section 2: two hand-written mirrors of the CRD restated defaults, and would drift."""
    kind = MIRRORS[mirror]
    for field in msgspec.structs.fields(mirror):
        assert field.name in kind.model_fields, f"{kind.__name__} has no {field.name}"
        assert field.encode_name == kind.model_fields[field.name].alias
        expected = kind.model_fields[field.name].get_default(call_default_factory=True)
        if isinstance(field.default, msgspec.Struct) or (mirror.__name__, field.name) in ABSENT:
            continue
        if field.default in ("", 0, (), None) and not isinstance(field.default, bool):
            assert expected in ("", 0, (), None, PydanticUndefined), "absent in both"
        else:
            assert field.default == expected
