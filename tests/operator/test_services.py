"""The store of InferenceServices: two racing sources, one truth."""

from hypothesis import given
from hypothesis import strategies as st

from slipway_api.types import ServiceKey
from slipway_operator.controller.store import ServiceStore

CHAT = ServiceKey("team", "chat")


def a_body(version: int, uid: str = "uid-1", name: str = "chat", **more) -> dict:
    metadata = {"namespace": "team", "name": name, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {"model": {"uri": "file:///models/tiny"}}, **more}


def version_of(store: ServiceStore, key: ServiceKey = CHAT) -> int | None:
    stored = store.get(key)
    return None if stored is None else stored.version


def test_an_older_version_never_replaces_a_newer_one():
    store = ServiceStore()

    assert store.put(a_body(10))
    assert not store.put(a_body(9))
    assert not store.put(a_body(10))
    assert version_of(store) == 10


def test_a_deleted_object_does_not_come_back_with_a_late_event():
    store = ServiceStore()
    store.put(a_body(10))
    store.remove(CHAT, "uid-1")

    assert not store.put(a_body(11))
    assert store.get(CHAT) is None


def test_the_late_deletion_of_a_predecessor_leaves_the_successor_alone():
    store = ServiceStore()
    store.put(a_body(20, uid="uid-2"))

    assert not store.remove(CHAT, "uid-1")
    assert version_of(store) == 20


def test_a_list_finds_the_ghost_that_no_watch_reported():
    store = ServiceStore()
    store.put(a_body(10))
    store.put(a_body(11, uid="uid-2", name="code"))

    assert store.correct([a_body(11, uid="uid-2", name="code")], 30) == {CHAT}
    assert store.keys() == [ServiceKey("team", "code")]


def test_an_object_younger_than_the_list_is_no_ghost():
    store = ServiceStore()
    store.put(a_body(40))

    assert store.correct([], 30) == set()
    assert version_of(store) == 40


def test_a_list_brings_what_the_watch_missed():
    store = ServiceStore()
    store.put(a_body(10))

    assert store.correct([a_body(12)], 30) == {CHAT}
    assert version_of(store) == 12


def test_a_list_that_was_made_before_a_deletion_does_not_undo_it():
    store = ServiceStore()
    store.put(a_body(10))
    store.remove(CHAT, "uid-1")

    assert store.correct([a_body(10)], 10) == set()
    assert store.get(CHAT) is None


def test_a_name_that_was_deleted_and_created_anew_is_seen_as_another_object():
    store = ServiceStore()
    store.put(a_body(10))

    assert store.correct([a_body(25, uid="uid-2")], 30) == {CHAT}
    assert store.get(CHAT).uid == "uid-2"


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "delete", "recreate"]), st.booleans(), st.booleans()), min_size=1, max_size=30
    )
)
def test_after_a_list_the_store_equals_the_server_whatever_the_watch_lost_or_delayed(history):
    """Each step happens on the server; its event may be lost or come late, and a list at the end mends everything."""
    store, late = ServiceStore(), []
    server: dict | None = a_body(1)
    version, generation = 1, 1
    store.put(server)
    for kind, is_lost, is_late in history:
        version += 1
        if kind == "delete":
            if server is None:
                continue
            event = ("remove", server["metadata"]["uid"])
            server = None
        else:
            if kind == "recreate" and server is not None:
                continue
            if server is None:
                generation += 1
            server = a_body(version, uid=f"uid-{generation}")
            event = ("put", server)
        if is_late:
            late.append(event)
        elif not is_lost:
            _deliver(store, event)
    store.correct([server] if server is not None else [], version)
    for event in late:
        _deliver(store, event)

    stored = store.get(CHAT)
    assert (None if stored is None else stored.body) == server


def _deliver(store: ServiceStore, event: tuple) -> None:
    kind, what = event
    if kind == "put":
        store.put(what)
    else:
        store.remove(CHAT, what)


def a_claim(version: int, name: str, served_name: object, uid: str = "") -> dict:
    body = a_body(version, uid=uid or f"uid-of-{name}", name=name)
    return body | {"spec": {"model": {"uri": "file:///models/tiny", "servedName": served_name}}}


def rivals(store: ServiceStore, name: str) -> list[str]:
    return [str(one.body["metadata"]["name"]) for one in store.namesakes(ServiceKey("team", name))]


def test_services_of_one_served_name_know_each_other_through_every_change():
    store = ServiceStore()
    store.put(a_claim(1, "one", "llama"))
    store.put(a_claim(2, "two", "llama"))
    store.put(a_body(3, uid="uid-3", name="llama"))

    assert rivals(store, "one") == ["llama", "two"]

    store.put(a_claim(4, "two", "qwen"))
    store.remove(ServiceKey("team", "llama"), "uid-3")

    assert rivals(store, "one") == []
    assert rivals(store, "two") == []
    assert rivals(store, "unknown") == []


def test_one_gateway_serves_all_namespaces_so_their_names_meet():
    store = ServiceStore()
    store.put(a_claim(1, "one", "llama"))
    elsewhere = a_claim(2, "two", "llama")
    store.put(elsewhere | {"metadata": elsewhere["metadata"] | {"namespace": "other"}})

    assert rivals(store, "one") == ["two"]


def test_whoever_comes_goes_or_changes_its_name_wakes_the_others_of_that_name_and_nothing_else_does():
    woken: list[str] = []
    store = ServiceStore(on_contest=lambda key: woken.append(key.name))

    def woken_by(change: object) -> list[str]:
        seen = sorted(woken)
        woken.clear()
        return seen

    assert woken_by(store.put(a_claim(1, "one", "llama"))) == []
    assert woken_by(store.put(a_claim(2, "two", "llama"))) == ["one"]
    assert woken_by(store.put(a_claim(3, "two", "llama") | {"status": {"replicas": 1}})) == []
    assert woken_by(store.put(a_claim(4, "two", "qwen"))) == ["one"]
    assert woken_by(store.put(a_claim(5, "three", "qwen"))) == ["two"]
    assert woken_by(store.correct([a_claim(6, "two", "llama"), a_claim(5, "three", "qwen")], 6)) == ["three"]
    assert woken_by(store.put(a_claim(7, "one", "llama", uid="uid-anew"))) == ["two"]
    assert woken_by(store.remove(ServiceKey("team", "one"), "uid-anew")) == ["two"]


def test_a_name_that_cannot_be_read_is_no_claim_but_its_own():
    store = ServiceStore()
    store.put(a_claim(1, "one", 5))
    store.put(a_body(2, uid="uid-2", name="two") | {"spec": None})

    assert store.get(ServiceKey("team", "one")).served_name == "one"
    assert store.get(ServiceKey("team", "two")).served_name == "two"
