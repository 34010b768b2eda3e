"""The store of our objects: two racing sources, one truth."""

from hypothesis import given
from hypothesis import strategies as st

from slipway_operator.controller.kinds import Key
from slipway_operator.controller.store import ObjectStore

CHAT = Key("InferenceService", "team", "chat")


def a_body(version: int, uid: str = "uid-1", name: str = "chat", **more) -> dict:
    metadata = {"namespace": "team", "name": name, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {"model": {"uri": "file:///models/tiny"}}, **more}


def version_of(store: ObjectStore, key: Key = CHAT) -> int | None:
    stored = store.get(key)
    return None if stored is None else stored.version


def test_an_older_version_never_replaces_a_newer_one():
    store = ObjectStore(CHAT.kind)

    assert store.put(a_body(10))
    assert not store.put(a_body(9))
    assert not store.put(a_body(10))
    assert version_of(store) == 10


def test_a_reply_to_a_write_of_ours_does_not_bring_back_what_was_deleted_meanwhile():
    store = ObjectStore(CHAT.kind)
    store.put(a_body(10))
    store.remove(a_body(12))

    assert not store.update(a_body(11))
    assert store.get(CHAT) is None


def test_a_reply_to_a_write_of_ours_is_newer_than_the_watch_and_the_watch_may_follow_late():
    store = ObjectStore(CHAT.kind)
    store.put(a_body(10))

    assert store.update(a_body(12))
    assert not store.put(a_body(11))
    assert version_of(store) == 12


def test_after_etcd_was_restored_the_older_versions_are_the_truth():
    """Finding 19: the store ignored every older resourceVersion until the process was restarted."""
    store = ObjectStore(CHAT.kind)
    store.put(a_body(100))
    store.put(a_body(101, uid="uid-2", name="code"))
    store.remove(a_body(102, uid="uid-2", name="code"))
    store.correct([a_body(100)], 110)

    assert store.correct([a_body(40), a_body(41, uid="uid-2", name="code")], 50) == {
        CHAT,
        Key(CHAT.kind, "team", "code"),
    }
    assert version_of(store) == 40
    assert store.put(a_body(51))
    assert store.correct([a_body(51)], 52) == {Key(CHAT.kind, "team", "code")}


def test_the_late_deletion_of_a_predecessor_leaves_the_successor_alone():
    store = ObjectStore(CHAT.kind)
    store.put(a_body(20, uid="uid-2"))

    assert not store.remove(a_body(19))
    assert version_of(store) == 20


def test_a_list_finds_the_ghost_that_no_watch_reported():
    store = ObjectStore(CHAT.kind)
    store.put(a_body(10))
    store.put(a_body(11, uid="uid-2", name="code"))

    assert store.correct([a_body(11, uid="uid-2", name="code")], 30) == {CHAT}
    assert store.keys() == [Key(CHAT.kind, "team", "code")]


def test_an_object_younger_than_the_list_is_no_ghost():
    store = ObjectStore(CHAT.kind)
    store.put(a_body(40))

    assert store.correct([], 30) == set()
    assert version_of(store) == 40


def test_a_list_brings_what_the_watch_missed():
    store = ObjectStore(CHAT.kind)
    store.put(a_body(10))

    assert store.correct([a_body(12)], 30) == {CHAT}
    assert version_of(store) == 12


def test_a_list_that_was_made_before_a_deletion_does_not_undo_it():
    store = ObjectStore(CHAT.kind)
    store.put(a_body(10))
    store.remove(a_body(12))

    assert store.correct([a_body(10)], 11) == set()
    assert store.get(CHAT) is None


def test_a_name_that_was_deleted_and_created_anew_is_seen_as_another_object():
    store = ObjectStore(CHAT.kind)
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
    store, late = ObjectStore(CHAT.kind), []
    server: dict | None = a_body(1)
    version, generation = 1, 1
    store.put(server)
    for kind, is_lost, is_late in history:
        version += 1
        if kind == "delete":
            if server is None:
                continue
            event = ("remove", a_body(version, uid=server["metadata"]["uid"]))
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


def _deliver(store: ObjectStore, event: tuple) -> None:
    kind, what = event
    if kind == "put":
        store.put(what)
    else:
        store.remove(what)
