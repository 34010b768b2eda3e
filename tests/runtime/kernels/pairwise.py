"""Few cases that hold every pair of values of every two axes."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Greedy and without chance: each case begins with a pair that is missing and takes what adds the most pairs."""
    names = list(axes)
    missing = {
        (a, i, b, j) for a, b in combinations(names, 2) for i, j in product(range(len(axes[a])), range(len(axes[b])))
    }

    def added(chosen: dict[str, int], name: str, index: int) -> int:
        pairs = (
            (other, value, name, index) if names.index(other) < names.index(name) else (name, index, other, value)
            for other, value in chosen.items()
        )
        return sum(pair in missing for pair in pairs)

    cases = []
    while missing:
        a, i, b, j = min(missing, key=lambda pair: (names.index(pair[0]), pair[1], names.index(pair[2]), pair[3]))
        chosen = {a: i, b: j}
        for name in names:
            if name not in chosen:
                chosen[name] = max(range(len(axes[name])), key=lambda index: added(chosen, name, index))
        missing -= {(x, chosen[x], y, chosen[y]) for x, y in combinations(names, 2)}
        cases.append({name: axes[name][chosen[name]] for name in names})
    return cases
