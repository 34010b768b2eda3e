"""Makes the files of a release from a checkout; the workflow of a pushed tag calls it.

    python -m release notes 0.1.0                      its section of CHANGELOG.md
    python -m release files 0.1.0 --registry ghcr.io/OWNER --repository OWNER/NAME --digests digests.json --out dist

`digests.json` has the digest of each image by its part: `{"operator": "sha256:…", "gateway": …, "agent": …, "runtime": …}`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

import slipway_api
from release import changelog, chart, plugin

NAMESPACE = "slipway-system"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the commands; mistakes of the caller are one sentence."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("notes", "files"):
        command = commands.add_parser(name)
        command.add_argument("version", type=lambda text: text.removeprefix("v"))
    command.add_argument("--registry", required=True, help="registry and path, before slipway/operator")
    command.add_argument("--repository", required=True, help="OWNER/NAME on GitHub, for the addresses of downloads")
    command.add_argument("--digests", type=Path, required=True)
    command.add_argument("--out", type=Path, default=Path("dist"))
    command.add_argument("--platforms", nargs="*", default=list(plugin.PLATFORMS), choices=list(plugin.PLATFORMS))
    options = parser.parse_args(arguments)
    if options.version != slipway_api.__version__:
        sys.exit(f"this checkout is version {slipway_api.__version__}, not {options.version}: check out the tag")
    try:
        notes = changelog.notes((chart.ROOT / "CHANGELOG.md").read_text(), options.version)
        if options.command == "notes":
            print(notes, end="")
        else:
            make_files(options, notes)
    except LookupError as error:
        sys.exit(str(error))


def make_files(options: argparse.Namespace, notes: str) -> None:
    """Write everything that a release has beside its images."""
    out: Path = options.out
    out.mkdir(parents=True)
    digests = json.loads(options.digests.read_text())
    packaged = chart.package(options.version, options.registry, digests, out)
    (out / "install.yaml").write_text(chart.render(packaged, NAMESPACE))
    definitions = [path.read_text() for path in sorted((chart.ROOT / "crds").glob("*.yaml"))]
    (out / "crds.yaml").write_text("---\n".join(definitions))
    plugins = [plugin.build(platform, out / "plugins") for platform in options.platforms]
    archives = [plugin.archive(one, out) for one in plugins]
    krew = plugin.krew_manifest(options.version, options.repository, archives)
    (out / "slipway.krew.yaml").write_text(yaml.safe_dump(krew, sort_keys=False))
    (out / "notes.md").write_text(notes)


if __name__ == "__main__":
    main()
