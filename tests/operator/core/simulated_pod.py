"""A pod of the simulated cluster, with what its kubelet and its runtime know beyond the API."""

from dataclasses import dataclass, field
from typing import Any

from slipway_api import names
from slipway_operator.core.observed import Replica, Sample
from tests.builders import UID


@dataclass
class SimulatedPod:
    """A pod, and what its kubelet and its runtime know beyond the API."""

    replica: Replica  # without its sample, which is new at each second
    loads_for: float
    sample: Sample | None = None
    running: int = 0
    kv: float = 0.0
    waiting: int = 0
    drains: bool = False  # the runtime was told
    answers: bool = True
    ends_at: Any = None  # when its kubelet is done with it
    hangs: bool = False  # its kubelet is gone: a deletion never ends
    late_by: int = 0  # seconds that its admin port takes to answer
    flaps_until: Any = None  # its readiness probe fails until then
    disturbed_until: Any = None  # when the last fault of its own began, or ends
    is_hung: bool = False  # its engine stands still
    hung_since: Any = None
    is_ending: bool = False  # it drains for good, whatever it is asked
    drain_arrives_at: Any = None
    outdated_certificate_ends: Any = None  # as slipway-agent reports it
    said: list[Sample] = field(default_factory=list)  # the answers on their way

    @property
    def is_live(self) -> bool:
        return (
            self.replica.owner_uid == UID
            and self.replica.deleted_at is None
            and self.replica.phase not in ("Failed", "Succeeded")
            and self.replica.state != names.STATE_DRAINING
        )
