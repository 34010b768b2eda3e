"""What the Service proxy and the DNS server answer, from objects as the API server gives them."""

import struct
from typing import Any

from e2e.cluster.dns import answer
from e2e.cluster.service_table import ServiceTable


def a_service(ip: str = "10.96.0.7", **spec: Any) -> dict[str, Any]:
    return {"spec": {"clusterIP": ip, "clusterIPs": [ip], "ports": [{"name": "http", "port": 80}], **spec}}


def a_slice(*endpoints: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"kubernetes.io/service-name": "chat"}},
        "endpoints": list(endpoints),
        "ports": [{"name": "http", "port": 8000}],
    }


def an_endpoint(ip: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [ip], "conditions": conditions}


def table(service: dict[str, Any], *endpoints: dict[str, Any]) -> ServiceTable:
    return ServiceTable({("shop", "chat"): service}, {("shop", "chat-x"): a_slice(*endpoints)})


def test_a_connection_goes_to_ready_endpoints_only() -> None:
    services = table(a_service(), an_endpoint("10.244.1.2", ready=True), an_endpoint("10.244.1.3", ready=False))

    assert services.endpoints(("shop", "chat"), "http") == [("10.244.1.2", 8000)]


def test_ending_endpoints_serve_when_no_other_is_left() -> None:
    ending = {"ready": False, "serving": True, "terminating": True}
    services = table(a_service(), an_endpoint("10.244.1.2", **ending), an_endpoint("10.244.1.3", ready=False))

    assert services.endpoints(("shop", "chat"), "http") == [("10.244.1.2", 8000)]


def test_a_published_port_finds_its_endpoints_by_the_services_port_number() -> None:
    services = table(a_service(), an_endpoint("10.244.1.2", ready=True))

    assert services.endpoints_of(("shop", "chat"), 80) == [("10.244.1.2", 8000)]
    assert services.endpoints_of(("shop", "chat"), 81) == []
    assert services.endpoints_of(("shop", "later"), 80) == []


def test_only_cluster_ips_and_tcp_are_listened_on() -> None:
    ports = [{"name": "http", "port": 80}, {"name": "dns", "port": 53, "protocol": "UDP"}]

    assert table(a_service(ports=ports)).listeners() == {("10.96.0.7", 80): (("shop", "chat"), "http")}
    assert table(a_service("None")).listeners() == {}


def test_names_of_services_resolve_to_their_cluster_ip() -> None:
    services = table(a_service())

    assert services.addresses("chat.shop.svc.cluster.local") == ["10.96.0.7"]
    assert services.addresses("other.shop.svc.cluster.local") is None
    assert services.addresses("chat.shop.example.org") is None


def test_names_of_headless_services_resolve_to_ready_pods() -> None:
    services = table(a_service("None"), an_endpoint("10.244.1.2", ready=True), an_endpoint("10.244.1.3", ready=False))

    assert services.addresses("chat.shop.svc.cluster.local") == ["10.244.1.2"]


def query(name: str, kind: int) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return b"\x12\x34" + struct.pack("!HHHHH", 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)


def lookup(name: str) -> list[str] | None:
    return ["10.96.0.7"] if name == "chat.shop.svc.cluster.local" else None


def test_a_question_for_an_address_is_answered() -> None:
    reply = answer(query("Chat.shop.svc.cluster.local", 1), lookup)

    assert struct.unpack_from("!HHHH", reply) == (0x1234, 0x8580, 1, 1)
    assert reply.endswith(bytes([10, 96, 0, 7]))


def test_ipv6_has_no_data_and_unknown_names_do_not_exist() -> None:
    assert struct.unpack_from("!HHHH", answer(query("chat.shop.svc.cluster.local", 28), lookup))[1:] == (0x8580, 1, 0)
    assert struct.unpack_from("!HHHH", answer(query("example.org", 1), lookup))[1:] == (0x8583, 1, 0)
