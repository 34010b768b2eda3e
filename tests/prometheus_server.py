"""A real Prometheus for tests: the installed one, or Debian's package, unpacked into the cache and not installed."""

import asyncio
import os
import shutil
import socket
import subprocess
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "slipway" / "prometheus"


def find_binary(name: str = "prometheus") -> Path:
    """`prometheus` or `promtool`; skips the test where there is none, and none can be downloaded."""
    if (installed := shutil.which(name)) is not None:
        return Path(installed)
    binary = CACHE / "usr" / "bin" / name
    if not binary.exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            pytest.skip("no prometheus, and no apt-get to download one")
        CACHE.mkdir(parents=True, exist_ok=True)
        got = subprocess.run(["apt-get", "download", "prometheus"], cwd=CACHE, capture_output=True, check=False)
        packages = sorted(CACHE.glob("prometheus_*.deb"))
        if got.returncode or not packages:
            pytest.skip(f"no prometheus, and apt-get cannot download one: {got.stderr.decode()[-200:]}")
        subprocess.run(["dpkg-deb", "-x", packages[-1], CACHE], check=True)
    return binary


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def promtool(*arguments: object) -> None:
    """Run promtool; fails the test with its output."""
    done = subprocess.run([find_binary("promtool"), *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True)
class Target:
    """A page that Prometheus scrapes, and the labels that the chart's PodMonitors give its series."""

    address: str  # host:port/path
    labels: Mapping[str, str]


class Prometheus:
    """A running Prometheus that scrapes these targets every two seconds."""

    def __init__(self, url: str, targets: int, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._targets = targets
        self._session = session

    async def ask(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression, evaluated now."""
        query = urllib.parse.urlencode({"query": expression})
        async with self._session.get(f"{self.url}/api/v1/query?{query}") as response:
            body = await response.json()
        assert body["status"] == "success", f"{expression}: {body}"
        return list(body["data"]["result"])

    async def rules(self) -> list[dict[str, Any]]:
        """The groups of rules that it has loaded."""
        async with self._session.get(f"{self.url}/api/v1/rules") as response:
            return list((await response.json())["data"]["groups"])

    async def until_scraped(self) -> None:
        """Four scrapes of each target; generous, because a machine may be busy."""
        found: list[dict[str, Any]] = []
        for _ in range(900):
            try:
                found = await self.ask("sum_over_time(up[5m]) >= 4")
                if len(found) == self._targets:
                    return
            except (aiohttp.ClientError, AssertionError):
                pass
            await asyncio.sleep(0.2)
        raise AssertionError(f"not within three minutes; scraped four times: {found}")


@asynccontextmanager
async def a_prometheus(
    folder: Path, targets: Mapping[str, Target], *, rules: Path | None = None
) -> AsyncIterator[Prometheus]:
    """targets: job -> target. `folder`/data may hold blocks of earlier samples."""
    jobs = []
    for job, target in targets.items():
        address, _, path = target.address.partition("/")
        static = [{"targets": [address], "labels": dict(target.labels)}]
        jobs.append({"job_name": job, "metrics_path": f"/{path}", "honor_labels": True, "static_configs": static})
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s"},
        "rule_files": [str(rules)] if rules is not None else [],
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    flags = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            find_binary(), *flags, f"--web.listen-address={address}", stdout=log, stderr=log
        )
    try:
        async with aiohttp.ClientSession() as session:
            yield Prometheus(f"http://{address}", len(targets), session)
    finally:
        process.kill()
        await process.wait()
