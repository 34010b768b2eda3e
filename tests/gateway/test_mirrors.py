"""The gateway's own structs of the kinds have the fields and defaults of the kinds."""

import msgspec
import pytest
from pydantic_core import PydanticUndefined

from slipway_api import autoscaling, inference_service, inference_status, lora_adapter
from slipway_api.rollout_spec import Rollout
from slipway_api.runtime_spec import Runtime as RuntimeKind
from slipway_api.slo import SLO
from slipway_gateway import kinds as mirrors

# A field that is absent means "as the kind says" in these: the gateway has a word of its own for it.
ABSENT = {("RoutingSpec", "strategy"), ("RoutingSpec", "request_timeout_seconds"), ("RoutingSpec", "fallback")}
# Blocks that may come from a template instead.
ABSENT |= {("ServiceSpec", block) for block in ("drain", "rollout", "slo")}
ABSENT |= {("Alias", "weight"), ("AdapterSpec", "alias"), ("AdapterSpec", "placement")}
MIRRORS = {
    mirrors.Activation: autoscaling.Activation,
    mirrors.ScaleToZero: autoscaling.ScaleToZero,
    mirrors.Autoscaling: autoscaling.Autoscaling,
    mirrors.RuntimeSpec: RuntimeKind,
    mirrors.RolloutSpec: Rollout,
    mirrors.DrainSpec: inference_service.Drain,
    mirrors.FallbackSpec: inference_service.Fallback,
    mirrors.HedgingSpec: inference_service.Hedging,
    mirrors.RoutingSpec: inference_service.Routing,
    mirrors.SLOSpec: SLO,
    mirrors.ServiceSpec: inference_service.InferenceServiceSpec,
    mirrors.ServiceStatus: inference_status.InferenceServiceStatus,
    mirrors.RevisionStatus: inference_status.RevisionStatus,
    mirrors.CanaryStatus: inference_status.CanaryStatus,
    mirrors.Alias: lora_adapter.Alias,
    mirrors.Placement: lora_adapter.Placement,
    mirrors.AdapterSpec: lora_adapter.LoRAAdapterSpec,
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
