"""Which services ask for the same served name: they must know each other through every change."""

from slipway_operator.controller.kinds import Key
from slipway_operator.controller.store import ObjectStore
from slipway_operator.inputs.inference_services import ServedNames, served_name

KIND = "InferenceService"


class Rivals:
    """A store, the index of its served names, and the keys that were woken."""

    def __init__(self) -> None:
        self.names, self.woken = ServedNames(), list[str]()
        self.store = ObjectStore(KIND, self._saw)

    def _saw(self, key, old, new) -> None:
        self.woken += sorted(one.name for one in self.names.saw(key, old, new))

    def of(self, name: str) -> list[str]:
        key = Key(KIND, "team", name)
        stored = self.store.get(key)
        return [one.name for one in self.names.rivals(key, stored)] if stored is not None else []

    def woken_by(self, _change: object) -> list[str]:
        seen, self.woken = self.woken, []
        return seen


def a_body(version: int, uid: str = "uid-1", name: str = "chat") -> dict:
    metadata = {"namespace": "team", "name": name, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {"model": {"uri": "file:///models/tiny"}}}


def a_claim(version: int, name: str, served_name: object, uid: str = "") -> dict:
    body = a_body(version, uid=uid or f"uid-of-{name}", name=name)
    return body | {"spec": {"model": {"uri": "file:///models/tiny", "servedName": served_name}}}


def test_services_of_one_served_name_know_each_other_through_every_change():
    rivals = Rivals()
    store = rivals.store
    store.put(a_claim(1, "one", "llama"))
    store.put(a_claim(2, "two", "llama"))
    store.put(a_body(3, uid="uid-3", name="llama"))

    assert rivals.of("one") == ["llama", "two"]

    store.put(a_claim(4, "two", "qwen"))
    store.remove(a_body(5, uid="uid-3", name="llama"))

    assert rivals.of("one") == []
    assert rivals.of("two") == []
    assert rivals.of("unknown") == []


def test_one_gateway_serves_all_namespaces_so_their_names_meet():
    rivals = Rivals()
    store = rivals.store
    store.put(a_claim(1, "one", "llama"))
    elsewhere = a_claim(2, "two", "llama")
    store.put(elsewhere | {"metadata": elsewhere["metadata"] | {"namespace": "other"}})

    assert rivals.of("one") == ["two"]


def test_a_service_that_comes_goes_or_changes_its_name_wakes_the_others_of_that_name_and_nothing_else_does():
    rivals = Rivals()
    store, woken_by = rivals.store, rivals.woken_by

    assert woken_by(store.put(a_claim(1, "one", "llama"))) == []
    assert woken_by(store.put(a_claim(2, "two", "llama"))) == ["one"]
    assert woken_by(store.put(a_claim(3, "two", "llama") | {"status": {"replicas": 1}})) == []
    assert woken_by(store.put(a_claim(4, "two", "qwen"))) == ["one"]
    assert woken_by(store.put(a_claim(5, "three", "qwen"))) == ["two"]
    assert woken_by(store.correct([a_claim(6, "two", "llama"), a_claim(5, "three", "qwen")], 6)) == ["three"]
    assert woken_by(store.put(a_claim(7, "one", "llama", uid="uid-anew"))) == ["two"]
    assert woken_by(store.remove(a_body(8, uid="uid-anew", name="one"))) == ["two"]


def test_a_name_that_cannot_be_read_is_no_claim_but_its_own():
    rivals = Rivals()
    store = rivals.store
    store.put(a_claim(1, "one", 5))
    store.put(a_body(2, uid="uid-2", name="two") | {"spec": None})

    assert served_name(store.get(Key(KIND, "team", "one"))) == "one"
    assert served_name(store.get(Key(KIND, "team", "two"))) == "two"
