"""Writes the JSON files of the dashboards; `--check` fails if one differs from its description."""

import sys

from charts.dashboards import DASHBOARDS, FOLDER, as_json


def main(arguments: list[str]) -> int:
    """The exit code: 1 if `--check` found a difference."""
    files = {FOLDER / f"{name}.json": as_json(dashboard) for name, dashboard in DASHBOARDS.items()}
    if arguments == ["--check"]:
        old = [path.name for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]
        old += [path.name for path in FOLDER.glob("*.json") if path not in files]
        if old:
            print(f"not as described: {', '.join(old)}. Run python -m charts.dashboards", file=sys.stderr)
        return int(bool(old))
    FOLDER.mkdir(exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
