"""Decides whether the pods of a service or pool may run under the ServiceAccount that their spec names. Pure."""

from collections.abc import Sequence

from slipway_api.overlay import PodOverlay


def find_account_fault(overlay: PodOverlay, allowed: Sequence[str]) -> str:
    """Why no pod may be created with this `spec.template.spec`; empty: it names an allowed ServiceAccount, or none."""
    account = overlay.service_account_name
    if account is None or account in allowed:
        return ""
    fact = f"spec.template.spec.serviceAccountName {account} is not allowed; allowed: {', '.join(allowed) or 'none'}"
    remedy = "Name an allowed account" if allowed else "Remove the field"
    return f"{fact}. {remedy}, or add {account} to allowedServiceAccountNames of the chart"
