"""Derives the tables of the proxies and the DNS server from Services and EndpointSlices. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

ZONE = ".svc.cluster.local"
SERVICE_NAME = "kubernetes.io/service-name"

Key = tuple[str, str]  # namespace, name
Address = tuple[str, int]  # IP, port
Objects = Mapping[Key, Mapping[str, Any]]


class ServiceTable:
    """Questions to the Services and EndpointSlices as they are now."""

    def __init__(self, services: Objects, slices: Objects) -> None:
        self._services, self._slices = services, slices

    def listeners(self) -> dict[Address, tuple[Key, str]]:
        """(ClusterIP, port) -> ((namespace, service), port name), for TCP ports."""
        return {
            (ip, port["port"]): (key, port.get("name", ""))
            for key, service in list(self._services.items())
            for ip in service["spec"].get("clusterIPs", [])
            for port in _tcp_ports(service)
            if ip != "None"
        }

    def endpoints_of(self, service: Key, port: int) -> list[Address]:
        """Addresses of the endpoints of a Service's port; none where there is no such Service, port or endpoint yet."""
        found = self._services.get(service)
        names = [p.get("name", "") for p in _tcp_ports(found) if p["port"] == port] if found else []
        return self.endpoints(service, names[0]) if names else []

    def endpoints(self, service: Key, port_name: str) -> list[Address]:
        """Ready endpoints or, when there are none, those that still serve while they end."""
        ready, ending = [], []
        for endpoint, ports in self._endpoints(service):
            address = endpoint["addresses"][0]
            numbers = [port["port"] for port in ports if (port.get("name") or "") == port_name]
            conditions = endpoint.get("conditions", {})
            if conditions.get("ready", True):
                ready += [(address, number) for number in numbers]
            elif conditions.get("serving") and conditions.get("terminating"):
                ending += [(address, number) for number in numbers]
        return ready or ending

    def addresses(self, name: str) -> list[str] | None:
        """IPv4 addresses of a DNS name in the zone; None when there is no such name."""
        if not name.endswith(ZONE) or name.count(".") - ZONE.count(".") not in (1, 2):
            return None
        *hostname, service, namespace = name.removesuffix(ZONE).split(".")
        found = self._services.get((namespace, service))
        if found is None:
            return None
        if found["spec"].get("clusterIP") not in ("None", "", None):
            return None if hostname else [found["spec"]["clusterIP"]]
        endpoints = [endpoint for endpoint, _ in self._endpoints((namespace, service))]
        if hostname:
            endpoints = [endpoint for endpoint in endpoints if endpoint.get("hostname") == hostname[0]]
        unready_too = found["spec"].get("publishNotReadyAddresses", False)
        usable = [e for e in endpoints if unready_too or e.get("conditions", {}).get("ready", True)]
        return [endpoint["addresses"][0] for endpoint in usable] or (None if hostname else [])

    def _endpoints(self, service: Key) -> Iterator[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
        for (namespace, _), piece in list(self._slices.items()):
            if (namespace, piece["metadata"].get("labels", {}).get(SERVICE_NAME)) == service:
                for endpoint in piece.get("endpoints") or []:
                    yield endpoint, piece.get("ports") or []


def _tcp_ports(service: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [port for port in service["spec"].get("ports", []) if port.get("protocol", "TCP") == "TCP"]
