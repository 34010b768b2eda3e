"""Decides whether an installation allows the ServiceAccount, images and PriorityClass that a spec names. Pure.

Images of an Engine and of the chart are the administrator's, and are not checked.
"""

from slipway_api.inference_service import InferenceServiceSpec
from slipway_api.overlay import PodOverlay
from slipway_api.warm_pool import WarmPoolSpec
from slipway_operator.core.installation import Defaults
from slipway_operator.core.service.model import model_access

RESERVED = "system-"
"""Prefix of Kubernetes' own PriorityClasses: a pod with one of them may evict the pods of nodes and networks."""


def find_service_fault(spec: InferenceServiceSpec, allowed: Defaults) -> str:
    """Why the installation allows no pod of this service; empty if it allows them."""
    overlay, own = spec.template.spec, spec.availability.priority_class_name
    images = {"spec.runtime.image": spec.runtime.image, "spec.model.uri": model_access.image(spec.model) or ""}
    return (
        _account_fault(overlay, allowed)
        or _image_fault(images, allowed.allowed_images)
        or _priority_fault(overlay, own, allowed.allowed_priority_classes)
    )


def find_pool_fault(spec: WarmPoolSpec, allowed: Defaults) -> str:
    """Why the installation allows no pod of this pool; empty if it allows them."""
    model = model_access.image(spec.models[0]) if spec.models else None
    images = {"spec.image": spec.image, "spec.models[0].uri": model or ""}
    return (
        _account_fault(spec.template.spec, allowed)
        or _image_fault(images, allowed.allowed_images)
        or _priority_fault(spec.template.spec, "", allowed.allowed_priority_classes)
    )


def is_below(image: str, prefix: str) -> bool:
    """Whether a reference, as written, is in a registry or repository: `r.io/a` admits `r.io/a/b` and not `r.io/ab`."""
    rest = image.removeprefix(prefix)
    return image.startswith(prefix) and (prefix.endswith("/") or not rest or rest[0] in "/:@")


def _account_fault(overlay: PodOverlay, allowed: Defaults) -> str:
    account, accounts = overlay.service_account_name, allowed.service_accounts
    if account is None or account in accounts:
        return ""
    fact = f"spec.template.spec.serviceAccountName {account} is not allowed; allowed: {', '.join(accounts) or 'none'}"
    remedy = "Name an allowed account" if accounts else "Remove the field"
    return f"{fact}. {remedy}, or add {account} to allowedServiceAccountNames of the chart"


def _image_fault(images: dict[str, str], prefixes: tuple[str, ...]) -> str:
    for field, image in images.items():
        if image and prefixes and not any(is_below(image, prefix) for prefix in prefixes):
            return (
                f"{field} names the image {image}, which is not allowed; allowed: {', '.join(prefixes)}. "
                "Use an image below one of these, or add its registry or repository to allowedImages of the chart"
            )
    return ""


def _priority_fault(overlay: PodOverlay, own: str, allowed: tuple[str, ...]) -> str:
    name = overlay.priority_class_name or own
    if not name or (name in allowed if allowed else not name.startswith(RESERVED)):
        return ""
    field = "spec.template.spec" if overlay.priority_class_name else "spec.availability"
    names = ", ".join(allowed) or f"all but {RESERVED}*"
    return (
        f"{field}.priorityClassName {name} is not allowed; allowed: {names}. "
        f"Name an allowed class, or add {name} to allowedPriorityClassNames of the chart"
    )
