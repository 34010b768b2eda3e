"""Patches as the API server understands them: JSON patch, merge patch, and server-side apply, good enough.

Apply knows fields as paths; a list is one atomic field unless its name is in `LIST_KEYS`. Who applied which paths
is kept by manager; what a manager no longer mentions, and nobody else wants, is removed. An empty map that is applied
asks for the map, and says nothing of the entries that others wrote into it.
"""

from typing import Any

Object = dict[str, Any]
Path = tuple[Any, ...]
Owners = dict[str, frozenset[Path]]

# Lists that are maps by a key (listType=map), by the name of the field that holds them.
LIST_KEYS = {
    "conditions": "type",
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "ownerReferences": "uid",
    "ports": "name",
}
# Maps that are one field (mapType=atomic, structType=atomic): the selectors of Services, budgets and policies.
ATOMIC = {"selector", "podSelector", "namespaceSelector"}
# Lists that are sets (listType=set).
SETS = {"finalizers"}
IDENTITY = {("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace"), ("metadata", "uid")}


def copied(value: Any) -> Any:
    """A deep copy of JSON, several times as fast as `copy.deepcopy`: it copies at every write."""
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    return [copied(one) for one in value] if isinstance(value, list) else value


class FailedTest(Exception):  # noqa: N818
    """A `test` of a JSON patch, or a path that is not there."""


def apply_patch(live: Object, applied: Object, owners: Owners, manager: str) -> tuple[Object, Owners, list[Path]]:
    """(merged object, new owners, paths that another manager holds with another value)."""
    wanted = {path: value for path, value in leaves(applied).items() if path not in IDENTITY}
    present = leaves(live)
    others = {name: paths for name, paths in owners.items() if name != manager}
    conflicts = [
        path
        for path, value in wanted.items()
        if any(path in paths for paths in others.values()) and present.get(path) != value and not _is_map(live, path)
    ]
    result = copied(live)
    dropped = owners.get(manager, frozenset()) - wanted.keys()
    for path in sorted(dropped, key=_removal_order):
        if not any(path in paths for paths in others.values()) and not _is_map(result, path):
            _remove(result, path)
    for path, value in wanted.items():
        if value != {} or not _is_map(result, path):
            _set(result, path, value)
    taken = frozenset(conflicts)
    new_owners = {name: paths - taken for name, paths in others.items()} | {manager: frozenset(wanted)}
    return result, new_owners, conflicts


def release_changed(owners: Owners, old: Object, new: Object) -> Owners:
    """An update takes every field it changes away from those who applied it."""
    before, after = leaves(old), leaves(new)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    return {name: paths - changed for name, paths in owners.items()}


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def json_patch(target: Object, operations: list[dict[str, Any]]) -> Object:
    """RFC 6902: add, remove, replace, test."""
    result: Any = copied(target)
    for operation in operations:
        *parents, last = [step.replace("~1", "/").replace("~0", "~") for step in operation["path"].split("/")[1:]]
        holder = result
        try:
            for step in parents:
                holder = holder[int(step) if isinstance(holder, list) else step]
            _operate(holder, last, operation)
        except (KeyError, IndexError, TypeError) as error:
            raise FailedTest(f"{operation['op']} {operation['path']}: no such path") from error
    return result  # type: ignore[no-any-return]


def _operate(holder: Any, last: str, operation: dict[str, Any]) -> None:
    match operation["op"]:
        case "add" if isinstance(holder, list):
            holder.insert(len(holder) if last == "-" else int(last), operation["value"])
        case "add":
            holder[last] = operation["value"]
        case "remove":
            del holder[int(last) if isinstance(holder, list) else last]
        case "replace":
            at = int(last) if isinstance(holder, list) else last
            holder[at]
            holder[at] = operation["value"]
        case "test":
            found = holder[int(last)] if isinstance(holder, list) else holder.get(last)
            if found != operation.get("value"):
                raise FailedTest(f"testing path {operation['path']}: {found!r} is not {operation.get('value')!r}")


def leaves(one: Any, path: Path = ()) -> dict[Path, Any]:
    """Every field that can be owned, by path."""
    if isinstance(one, dict) and not (path and path[-1] in ATOMIC):
        found: dict[Path, Any] = {} if one or not path else {path: {}}
        for key, value in one.items():
            found |= leaves(value, (*path, key))
        return found
    if isinstance(one, list) and path:
        if path[-1] in SETS:
            return {(*path, (None, value)): value for value in one}
        key = LIST_KEYS.get(path[-1])
        if key and all(isinstance(element, dict) and key in element for element in one):
            found = {}
            for element in one:
                found |= leaves(element, (*path, (key, element[key])))
            return found
    return {path: one}


def _element(holder: list[Any], step: tuple[str | None, Any], *, create: bool) -> int | None:
    key, wanted = step
    for index, element in enumerate(holder):
        if (element if key is None else element.get(key)) == wanted:
            return index
    if not create:
        return None
    holder.append(wanted if key is None else {key: wanted})
    return len(holder) - 1


def _is_map(root: Object, path: Path) -> bool:
    """Whether there is a map with entries at `path`."""
    holder: Any = root
    for step in path:
        if isinstance(step, tuple):
            index = _element(holder, step, create=False) if isinstance(holder, list) else None
            if index is None:
                return False
            holder = holder[index]
        elif isinstance(holder, dict) and step in holder:
            holder = holder[step]
        else:
            return False
    return isinstance(holder, dict) and bool(holder)


def _set(root: Object, path: Path, value: Any) -> None:
    holder: Any = root
    for step, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(step, tuple):
            index = _element(holder, step, create=True)
            assert index is not None
            if step[0] is not None:
                holder = holder[index]
        elif following is None:
            holder[step] = copied(value)
        else:
            holder = holder.setdefault(step, [] if isinstance(following, tuple) else {})


def _removal_order(path: Path) -> tuple[int, bool]:
    """Deep ones first; the key by which a list's element is found goes last."""
    is_key = len(path) > 1 and isinstance(path[-2], tuple) and path[-1] == path[-2][0]
    return -len(path), is_key


def _remove(root: Object, path: Path) -> None:
    """Remove a leaf, and what became empty above it."""
    trail: list[tuple[Any, Any]] = []
    holder: Any = root
    for step in path:
        if isinstance(step, tuple):
            index = _element(holder, step, create=False)
            if index is None:
                return
            trail.append((holder, index))
            holder = holder[index]
        elif isinstance(holder, dict) and step in holder:
            trail.append((holder, step))
            holder = holder[step]
        else:
            return
    parent, at = trail.pop()
    del parent[at]
    while trail and parent in ({}, []):
        parent, at = trail.pop()
        del parent[at]
