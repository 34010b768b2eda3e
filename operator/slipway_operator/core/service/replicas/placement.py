"""Fills pull secrets, nodeSelector and tolerations of a spec's template from the defaults of the installation. Pure.

| field            | key of an entry  | a default whose key the template has too |
|------------------|------------------|------------------------------------------|
| imagePullSecrets | name             | appears once                             |
| nodeSelector     | label            | is replaced by the template's            |
| tolerations      | key of the taint | is replaced by all of the template's     |
"""

from slipway_api.overlay import PodOverlay
from slipway_api.types import LocalReference
from slipway_operator.core.installation import PlacementDefaults


def fill_placement(overlay: PodOverlay, defaults: PlacementDefaults) -> PodOverlay:
    """The template with the defaults that it does not replace. Filling it again changes nothing."""
    own_secrets = {secret.name for secret in overlay.image_pull_secrets}
    secrets = [LocalReference(name=name) for name in defaults.image_pull_secrets if name not in own_secrets]
    own_keys = {toleration.get("key", "") for toleration in overlay.tolerations}
    tolerations = [dict(one) for one in defaults.tolerations if one.get("key", "") not in own_keys]
    return overlay.model_copy(
        update={
            "image_pull_secrets": (*overlay.image_pull_secrets, *secrets),
            "node_selector": {**defaults.node_selector, **overlay.node_selector},
            "tolerations": (*overlay.tolerations, *tolerations),
        }
    )
