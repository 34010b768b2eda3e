"""Indexes pods by the WarmPool that made them, or had none for them; and replicas that no node has room for."""

from collections import defaultdict

from slipway_kube.objects import Pod
from slipway_operator.inputs.observer import PoolKey, pool_of, service_of


class PoolIndex:
    """Pods by pool, and unschedulable replicas by namespace, kept by changes so that nothing walks over all pods."""

    def __init__(self) -> None:
        self._pods: defaultdict[PoolKey, dict[str, Pod]] = defaultdict(dict)
        self._hungry: defaultdict[str, dict[str, Pod]] = defaultdict(dict)

    def saw(self, old: Pod | None, new: Pod | None) -> tuple[set[PoolKey], set[str]]:
        """Apply one change of a pod; returns its pools, and the namespaces whose unschedulable replicas changed.

        `new` None: it is deleted.
        """
        pools: set[PoolKey] = set()
        namespaces: set[str] = set()
        if old is not None:
            if (key := pool_of(old)) is not None:
                pools.add(key)
                self._pods[key].pop(old.name, None)
                if not self._pods[key]:
                    del self._pods[key]
            if self._hungry.get(old.namespace, {}).pop(old.name, None) is not None and not is_hungry(new):
                namespaces.add(old.namespace)
        if new is not None:
            if (key := pool_of(new)) is not None:
                pools.add(key)
                self._pods[key][new.name] = new
            if is_hungry(new):
                if not is_hungry(old):
                    namespaces.add(new.namespace)
                self._hungry[new.namespace][new.name] = new
        return pools, namespaces

    def of(self, key: PoolKey) -> list[Pod]:
        """The pods of one pool, by name."""
        pods = self._pods.get(key, {})
        return [pods[name] for name in sorted(pods)]

    def hungry(self, namespace: str) -> list[Pod]:
        """The replicas of a namespace that no node has room for, by name."""
        pods = self._hungry.get(namespace, {})
        return [pods[name] for name in sorted(pods)]

    def pools(self) -> list[PoolKey]:
        """Every pool that has a pod."""
        return list(self._pods)


def is_hungry(pod: Pod | None) -> bool:
    """Whether it is a service's replica that the scheduler finds no node for."""
    if pod is None or service_of(pod) is None or pod.is_terminating:
        return False
    scheduled = pod.condition("PodScheduled")
    return scheduled is not None and scheduled.status == "False" and scheduled.reason == "Unschedulable"
