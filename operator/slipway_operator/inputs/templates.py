"""The ServiceTemplates of the cluster: what services name in spec.baseRefs."""

import time
from collections.abc import Callable

import msgspec

from slipway_kube.client import Client
from slipway_kube.resources import SERVICE_TEMPLATES
from slipway_operator.core.templates import StoredTemplate, TemplatesSeen
from slipway_operator.inputs.cluster_objects import ClusterObjects


class Templates(ClusterObjects):
    """The ServiceTemplates by name. If they cannot be listed, services that name one are told so."""

    def __init__(self, client: Client, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__(client, SERVICE_TEMPLATES, monotonic=monotonic)
        self._seen: TemplatesSeen | None = None
        self.on_change(lambda _name: self._forget())

    def seen(self) -> TemplatesSeen:
        """All of them as they are now."""
        if self._seen is None:
            by_name = {
                one.name: StoredTemplate(msgspec.json.decode(one.spec), one.metadata.generation)
                for one in self.objects()
            }
            self._seen = TemplatesSeen(by_name=by_name, refused=self.refused)
        return self._seen

    def _forget(self) -> None:
        self._seen = None
