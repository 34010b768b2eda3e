"""Headless Chromium, driven over its DevTools protocol. Debian's package `chromium` has the program."""

import asyncio
import base64
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed (Debian package chromium).")


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._socket.receive()).data)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    async def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until the expression is true; the test's own limit of time ends the wait."""
        while not (value := await self.run(script)):  # noqa: ASYNC110  the page is another process
            await asyncio.sleep(0.1)
        return value

    async def screenshot(self, path: Path, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        taken = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(taken["data"]))

    def problems(self) -> list[str]:
        """Errors of scripts, refused loads, and what the policy of the page blocked."""
        return [
            json.dumps(event["params"])[:500]
            for event in self.events
            if event.get("method") == "Runtime.exceptionThrown"
            or (event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error")
        ]

    def requested(self) -> list[str]:
        """The addresses that the page has requested."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]


@asynccontextmanager
async def a_page(url: str, *, width: int = 1280, height: int = 1500) -> AsyncIterator[Page]:
    """A tab that has opened this address, in a browser of its own."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(prefix="slipway-chromium-", ignore_cleanup_errors=True) as profile:
        browser = await asyncio.create_subprocess_exec(
            PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--remote-debugging-port=0", f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            while not (port := await asyncio.to_thread(_port_of, Path(profile))):
                assert browser.returncode is None, "Chromium ended"
                await asyncio.sleep(0.1)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    targets = await answer.json()
                (target,) = [one for one in targets if one["type"] == "page"]
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.call(f"{domain}.enable")
                    await page.call("Page.navigate", url=url)
                    await page.until("location.protocol === 'http:' && document.readyState === 'complete'")
                    yield page
        finally:
            browser.terminate()
            await browser.wait()


def _port_of(profile: Path) -> str:
    """The port of the DevTools protocol; empty until the browser has written it."""
    file = profile / "DevToolsActivePort"
    first, end, _ = file.read_text().partition("\n") if file.exists() else ("", "", "")
    return first if end else ""
