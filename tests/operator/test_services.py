"""The store of InferenceServices: two racing sources, one truth."""

from hypothesis import given
from hypothesis import strategies as st

from slipway_api.types import ServiceKey
from slipway_operator.services import ServiceStore

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
