"""The frozen structs of routing: services, endpoints and routes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica that may be sent requests: its pod is Ready, serving and not being deleted."""

    name: str  # <namespace>/<pod>
    service: str  # <namespace>/<name>
    revision: str
    url: str  # http://10.0.0.7:8000
    owner_uid: str = ""  # of the InferenceService that controls the pod; an impostor's pod has another
    served_name: str = ""  # the served name of its runtime; empty: the service's served name
    token_digests: tuple[str, ...] = ()  # of the serving tokens that it accepts; empty: it needs none


@dataclass(frozen=True, slots=True)
class Service:
    """The fields of an InferenceService that the gateway uses."""

    key: str  # <namespace>/<name>
    served_name: str  # the `model` that clients send
    uid: str = ""
    created: datetime | None = None
    weights: Mapping[str, int] = field(default_factory=dict)  # share of each revision; empty: no split is known
    request_seconds: float | None = None  # for a whole request; None: the gateway's own setting
    handover: bool = True  # streams of a lost replica continue on another one


@dataclass(frozen=True, slots=True)
class Route:
    """One service with the endpoints that can answer for it now."""

    service: Service
    endpoints: tuple[Endpoint, ...] = ()

    @property
    def revisions(self) -> set[str]:
        """Every revision that the service's status or one of its endpoints names."""
        return {*self.service.weights, *(endpoint.revision for endpoint in self.endpoints)}
