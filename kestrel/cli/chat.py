"""kestrel chat: a conversation in the terminal, answers streamed.

Ctrl-C ends an answer, and what was said of it stays in the conversation; Ctrl-D or /exit ends the program. Where stdin
is no terminal, every line of it is a message.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kestrel.cli.config_flags import with_flags
from kestrel.cli.console import note, print_error, run_to_end, write
from kestrel.cli.loading import check_model, note_default_model, open_engine, require_skill
from kestrel.cli.options import (
    TextOutputOptions,
    TextSettings,
    check_adapter,
    check_pictures,
    check_settings,
    read_picture,
)
from kestrel.cli.printing import TextPrinter, note_limit, note_metrics
from kestrel.config import RuntimeConfig
from kestrel.errors import CapacityError, RequestCancelled, RequestError

if TYPE_CHECKING:
    from kestrel.engine import EngineResult, EngineStream, InferenceEngine
    from kestrel.skills.base import ModelProfile

HELP = {
    "/clear": "forget the conversation",
    "/system TEXT": "set the system prompt; without a text: show it",
    "/image FILE": "show a picture with the next message",
    "/exit": "leave; Ctrl-D does too",
}
PROMPT = "> "


@with_flags
def chat(
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="A system prompt. /system changes it.")
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", metavar="FILE", help="A picture for the first message.")
    ] = None,
    *,
    settings: TextSettings,
    config: RuntimeConfig,
) -> None:
    """Talk with a model in the terminal.

    kestrel chat --model-path /models/SmolLM2-135M-Instruct

    Ctrl-C ends an answer, Ctrl-D the conversation; /help lists the commands.
    """
    check_settings("chat", settings, TextOutputOptions())
    check_pictures([] if image is None else [image])
    check_adapter(settings.given().get("adapter"), config)
    check_model(config)
    run_to_end(_converse(Conversation(system=system), image, settings, config))


async def _converse(
    conversation: Conversation, image: str | None, settings: TextSettings, config: RuntimeConfig
) -> None:
    if image is not None:
        conversation.picture = await read_picture(image, config)
    async with open_engine(config) as engine:
        _require_chat(engine.profile, image)
        note_default_model(config)
        keyboard = Keyboard()
        with keyboard:
            while (line := await keyboard.line()) is not None:
                if line.startswith("/"):
                    if await _obey(line, conversation, engine):
                        return
                elif line:
                    await _answer(engine, conversation, line, settings, keyboard)


def _require_chat(profile: ModelProfile, image: str | None) -> None:
    """Refuse at the start what every message would be refused for."""
    require_skill(profile, "chat")
    if image is not None:
        _require_eyes("--image", profile)


def _require_eyes(given: str, profile: ModelProfile) -> None:
    from kestrel.skills.builtin import reads_no_pictures  # noqa: PLC0415

    if not profile.has_vision:
        raise reads_no_pictures(given, profile)


# ---------------------------------------------------------------------- what has been said


@dataclass
class Conversation:
    system: str | None = None
    said: list[dict[str, Any]] = field(default_factory=list)
    picture: Any = None
    """For the next message."""

    def asked(self, text: str) -> list[dict[str, Any]]:
        """All messages, the last of them this text."""
        parts = [] if self.picture is None else [{"type": "image", "image": self.picture}]
        content = [*parts, {"type": "text", "text": text}] if parts else text
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*opening, *self.said, {"role": "user", "content": content}]

    def keep(self, messages: list[dict[str, Any]], answer: str) -> None:
        """Once something was answered: a question without an answer is not part of a conversation."""
        if answer:
            self.said += [messages[-1], {"role": "assistant", "content": answer}]
            self.picture = None


async def _obey(line: str, conversation: Conversation, engine: InferenceEngine) -> bool:
    """Whether the program ends."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    match command:
        case "/exit" | "/quit" | "/bye":
            return True
        case "/clear":
            conversation.said.clear()
            conversation.picture = None
            note("the conversation is forgotten")
        case "/system" if rest:
            conversation.system = rest
            note("the system message is set, from the next answer on")
        case "/system":
            note(conversation.system or "no system message; /system TEXT sets one")
        case "/image":
            try:
                _require_eyes("/image", engine.profile)
                conversation.picture = await read_picture(rest, engine.config)
            except RequestError as error:
                print_error(str(error))
        case "/help":
            known = HELP if engine.profile.has_vision else {key: HELP[key] for key in HELP if key != "/image FILE"}
            note("\n".join(f"{usage:16}{meaning}" for usage, meaning in known.items()))
        case _:
            print_error(f"{command} is not a command; /help lists them")
    return False


async def _answer(
    engine: InferenceEngine, conversation: Conversation, text: str, settings: TextSettings, keyboard: Keyboard
) -> None:
    messages = conversation.asked(text)
    pieces: list[str] = []
    result: EngineResult | None = None
    try:
        stream: EngineStream = await engine.run(
            "chat", stream=True, messages=messages, settings=settings.given(), read_along=True
        )
        with keyboard.interrupting(stream):
            printer = TextPrinter(streamed=True)
            async for chunk in stream:
                printer.chunk(chunk)
                if chunk.kind != "reasoning":
                    pieces.append(chunk.text)
            result = await stream.result()
            printer.result(result)
    except RequestCancelled:
        write("\n")
        note("the answer was ended")
    except (RequestError, CapacityError) as error:
        print_error(str(error))
    conversation.keep(messages, "".join(pieces).strip())
    if result is not None:
        note_limit(result, "--max-tokens")
        note_metrics(result.metrics)


# ---------------------------------------------------------------------- lines and Ctrl-C


class Keyboard:
    """Lines of stdin, and what Ctrl-C means meanwhile: it ends the answer that runs."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdin.isatty()
        self._answering: EngineStream | None = None

    def __enter__(self) -> Keyboard:
        if self._is_terminal:
            _edit_lines()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    async def line(self) -> str | None:
        """The next one without the blanks around it; None at the end."""
        if self._is_terminal:
            return self._typed_line()
        read = await asyncio.to_thread(sys.stdin.readline)
        return read.strip() if read else None

    def _typed_line(self) -> str | None:
        """On this thread, although it holds up the event loop: only here Ctrl-C makes `input` forget what was typed."""
        loop = asyncio.get_running_loop()
        try:
            loop.remove_signal_handler(signal.SIGINT)
            return input(PROMPT).strip()
        except KeyboardInterrupt:
            self._interrupt()
            return ""
        except EOFError:
            write("\n")
            return None
        finally:
            loop.add_signal_handler(signal.SIGINT, self._interrupt)

    @contextmanager
    def interrupting(self, stream: EngineStream) -> Iterator[None]:
        self._answering = stream
        try:
            yield
        finally:
            self._answering = None

    def _interrupt(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
        else:
            write("\n")
            note("/exit or Ctrl-D leaves")


def _edit_lines() -> None:
    """Arrow keys and earlier lines, where Python was built with them."""
    with suppress(ImportError):
        import readline  # noqa: F401, PLC0415
