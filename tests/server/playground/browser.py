"""A real Chromium, driven through the DevTools protocol over a pipe: no driver program, no port, no package."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-features=OptimizationHints,MediaRouter",
    "--hide-scrollbars",
    "--mute-audio",
    "--use-fake-device-for-media-stream",
)
READ_BYTES = 2**20
CALL_TIMEOUT_S = 30.0
WAIT_S = 15.0
POLL_S = 0.03
BETWEEN_DOCUMENTS = ("context was destroyed", "navigated or closed", "Cannot find default execution context")


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


@asynccontextmanager
async def open_browser(executable: str, profile: Path) -> AsyncIterator[Connection]:
    """The protocol wants the program to read commands from descriptor 3 and to write to descriptor 4."""
    command_read, command_write = os.pipe()
    reply_read, reply_write = os.pipe()
    arguments = [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    shell = f'exec "$@" 3<&{command_read} 4>&{reply_write}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "browser", *arguments],
        pass_fds=(command_read, reply_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(command_read)
    os.close(reply_write)
    connection = Connection(command_write, await _reader(reply_read))
    try:
        yield connection
    finally:
        await connection.close()
        os.close(command_write)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=2**28)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb"))
    return reader


class Connection:
    """Commands with their replies; events go to the page they belong to."""

    def __init__(self, command_descriptor: int, replies: asyncio.StreamReader) -> None:
        self._out = command_descriptor
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._reading = asyncio.create_task(self._read(replies))

    async def call(self, method: str, session: str | None = None, /, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        await asyncio.to_thread(_write_all, self._out, json.dumps(message).encode() + b"\0")
        return await asyncio.wait_for(reply, CALL_TIMEOUT_S)

    async def new_page(self) -> Page:
        """A page with storage of its own, as in another browser."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = Page(self, attached["sessionId"], context)
        self._pages[attached["sessionId"]] = page
        for domain in ("Page", "Runtime", "Network", "Log"):
            await page.call(f"{domain}.enable")
        return page

    async def close(self) -> None:
        await self.call("Browser.close")
        await self._reading

    async def _read(self, replies: asyncio.StreamReader) -> None:
        while True:
            try:
                raw = await replies.readuntil(b"\0")
            except asyncio.IncompleteReadError:
                break
            message = json.loads(raw[:-1])
            if "id" in message:
                self._settle(self._waiting.pop(message["id"]), message)
            elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                page.note(message["method"], message["params"])
        for future in self._waiting.values():
            future.cancel()

    @staticmethod
    def _settle(future: asyncio.Future[dict[str, Any]], message: Mapping[str, Any]) -> None:
        if future.done():
            return
        if "error" in message:
            future.set_exception(RuntimeError(message["error"]["message"]))
        else:
            future.set_result(message["result"])


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class Page:
    """One tab. `requested` and `complaints` collect every address it asked for and every error it logged."""

    def __init__(self, connection: Connection, session: str, context: str) -> None:
        self._connection = connection
        self._session = session
        self._context = context
        self.requested: list[str] = []
        self.complaints: list[str] = []

    async def call(self, method: str, /, **parameters: Any) -> dict[str, Any]:
        return await self._connection.call(method, self._session, **parameters)

    def note(self, method: str, parameters: Mapping[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            entry = parameters["entry"]
            self.complaints.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}")

    async def open(self, address: str) -> None:
        await self.evaluate("window.isOld = true")
        await self.call("Page.navigate", url=address)
        await self.wait_for("!window.isOld && document.readyState === 'complete' && location.protocol !== 'about:'")

    async def forget(self) -> None:
        """What the page has kept, and what was noted of it: the next one opens as in another browser. A new tab would
        do too, at the price of four processes."""
        origin = await self.evaluate("sessionStorage.clear(), location.origin")
        await self.call("Storage.clearDataForOrigin", origin=origin, storageTypes="local_storage,indexeddb")
        await self.hover((0, 0))
        self.requested.clear()
        self.complaints.clear()

    async def reload(self) -> None:
        await self.evaluate("window.isOld = true")
        await self.call("Page.reload")
        await self.wait_for("!window.isOld && document.readyState === 'complete'")

    # ------------------------------------------------------------------ reading

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, which may be a promise."""
        reply = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(f"{expression}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    async def wait_for(self, condition: str, wait_s: float = WAIT_S) -> None:
        deadline = asyncio.get_running_loop().time() + wait_s
        while not await self._holds(condition):
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"it did not come to this within {wait_s:g} s: {condition}")
            await asyncio.sleep(POLL_S)

    async def _holds(self, condition: str) -> bool:
        """False also while one document gives way to the next."""
        try:
            return await self.evaluate(f"Boolean({condition})")
        except RuntimeError as error:
            if any(words in str(error) for words in BETWEEN_DOCUMENTS):
                return False
            raise

    async def text(self, selector: str) -> str:
        return await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    async def frame(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height on the screen."""
        frame = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        left, top, width, height = await self.evaluate(f"(f => [f.left, f.top, f.width, f.height])({frame})")
        return left, top, width, height

    async def screenshot(self, path: Path, whole: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        reply = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(reply["data"]))

    # ------------------------------------------------------------------ acting

    async def resize(self, width: int, height: int, touch: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)
        await self.call("Emulation.setTouchEmulationEnabled", enabled=touch)

    async def prefer(self, **features: str) -> None:
        """Media features of the system, such as prefers_color_scheme="dark"."""
        values = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=values)

    async def allow_camera(self, origin: str, setting: str) -> None:
        place = {"origin": origin, "browserContextId": self._context}
        await self._connection.call("Browser.setPermission", permission={"name": "camera"}, setting=setting, **place)

    async def download(self, selector: str, folder: Path) -> Path:
        """The one file that a click saves; the folder must be empty."""
        settings = {"behavior": "allow", "browserContextId": self._context, "downloadPath": str(folder)}
        await self._connection.call("Browser.setDownloadBehavior", **settings)
        await self.click(selector)
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while not (saved := [path for path in folder.iterdir() if path.suffix != ".crdownload"]):
            assert asyncio.get_running_loop().time() < deadline, f"{selector} saved nothing"
            await asyncio.sleep(POLL_S)
        return saved[0]

    async def click(self, selector: str) -> None:
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        left, top, width, height = await self.frame(selector)
        assert width > 0, f"{selector} is not visible"
        await self.drag((left + width / 2, top + height / 2))

    async def drag(self, start: tuple[float, float], end: tuple[float, float] | None = None) -> None:
        """Press the mouse at `start`, move to `end`, let go; without an end it is a click."""
        await self._mouse("mouseMoved", start)
        await self._mouse("mousePressed", start)
        if end is not None:
            await self._mouse("mouseMoved", ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2))
            await self._mouse("mouseMoved", end)
        await self._mouse("mouseReleased", end or start)

    async def hover(self, place: tuple[float, float]) -> None:
        await self._mouse("mouseMoved", place)

    async def _mouse(self, kind: str, place: tuple[float, float]) -> None:
        held = {"button": "none"} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        await self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], **held)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, ctrl: bool = False, shift: bool = False) -> None:
        letter = {"text": "\r" if key == "Enter" else key} if key == "Enter" or (len(key) == 1 and not ctrl) else {}
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "Delete": 46}
        common = {"key": key, "modifiers": 2 * ctrl + 8 * shift, "windowsVirtualKeyCode": codes.get(key, ord(key[0]))}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **common, **letter)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)
