"""What was asked: the body of a chat request as values, or the refusal a model server would send.

It is as strict as real servers are and answers like them: `code` is an integer. This module never
does I/O and keeps nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kiln_site.demo import faults
from kiln_site.demo.faults import Faults
from kiln_site.demo.tokens import text_of

JsonObject = dict[str, Any]

NUMBERS: Final = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
INTEGERS: Final = {
    "max_tokens": (1, 2**31),
    "max_completion_tokens": (1, 2**31),
    "n": (1, 128),
    "seed": (-(2**63), 2**64),
}


class Refusal(Exception):
    """An answer other than 200, with the words of the error."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, type_: str = ""
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param = message, status, param
        self.type = type_ or ("BadRequestError" if status == 400 else "InternalServerError")


@dataclass(frozen=True, slots=True)
class Ask:
    """A chat request that will be answered."""

    model: str
    messages: Sequence[JsonObject]
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    output_max: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    tools: Sequence[JsonObject] = ()
    tool_choice: str = "auto"  # "auto", "none", or the name of a function; "" is any function
    faults: Faults = field(default_factory=Faults)

    @property
    def last_user_text(self) -> str:
        return last_user_text(self.messages)


def last_user_text(messages: object) -> str:
    """The text of the last user message, "" in anything that is not a conversation."""
    if isinstance(messages, list):
        for message in reversed(messages):
            if isinstance(message, dict) and message.get("role") == "user":
                return text_of(message)
    return ""


def read_faults(body: JsonObject, always: str = "") -> Faults:
    try:
        return faults.read(always, last_user_text(body.get("messages")))
    except faults.UnknownFault as unknown:
        raise Refusal(str(unknown), param="messages") from None


def read(body: JsonObject, found: Faults, models: Sequence[str]) -> Ask:
    """Check every field that the demo model reads, in the order in which vLLM would complain."""
    body = {name: value for name, value in body.items() if value is not None}
    for name, (least, most) in NUMBERS.items():
        _check_number(body, name, least, most)
    for name, (least, most) in INTEGERS.items():
        _check_integer(body, name, least, most)
    stream = _boolean(body, "stream")
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise Refusal("Input should be a valid dictionary", param="stream_options")
    if options and not stream:
        raise Refusal(
            "Stream options can only be defined when `stream=True`.", param="stream_options"
        )
    model = body.get("model", models[0])
    if model not in models:
        raise Refusal(
            f"The model `{model}` does not exist.", status=404, param="model", type_="NotFoundError"
        )
    tools = _tools(body)
    limits = (body.get("max_tokens"), body.get("max_completion_tokens"))
    return Ask(
        model=model,
        messages=_messages(body),
        stream=stream,
        include_usage=_boolean(options, "include_usage", "stream_options"),
        continuous_usage=_boolean(options, "continuous_usage_stats", "stream_options"),
        output_max=min((limit for limit in limits if limit is not None), default=None),
        n=body.get("n", 1),
        stop=_stop(body),
        seed=body.get("seed"),
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        faults=found,
    )


def _check_number(body: JsonObject, name: str, least: float, most: float) -> None:
    value = body.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refusal(f"Input should be a valid number, not {value!r}", param=f"body.{name}")
    if not least <= value <= most:
        raise Refusal(f"{name} must be in [{least}, {most}], got {value}.", param=name)


def _check_integer(body: JsonObject, name: str, least: int, most: int) -> None:
    value = body.get(name, 1)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refusal(f"Input should be a valid integer, not {value!r}", param=f"body.{name}")
    if not least <= value <= most:
        raise Refusal(f"{name} must be between {least} and {most}, got {value}.", param=name)


def _boolean(holder: Mapping[str, Any], name: str, param: str = "") -> bool:
    value = holder.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refusal(f"Input should be a valid boolean, not {value!r}", param=param or name)
    return bool(value)


def _messages(body: JsonObject) -> Sequence[JsonObject]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise Refusal("Input should be a valid list", param="body.messages")
    if not messages:
        raise Refusal("messages must not be empty", param="messages")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refusal("A message is an object with a role", param=f"messages[{number}]")
        if not isinstance(message.get("content"), str | list | None):
            raise Refusal("Content is text or a list of parts", param=f"messages[{number}].content")
    return messages


def _stop(body: JsonObject) -> tuple[str, ...]:
    stop = body.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise Refusal("stop is a string or a list of strings", param="stop")
    return tuple(one for one in stops if one)


def _tools(body: JsonObject) -> Sequence[JsonObject]:
    tools = body.get("tools", [])
    if not isinstance(tools, list):
        raise Refusal("Input should be a valid list", param="body.tools")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal("A tool is a function with a name", param=f"tools[{number}]")
    return tools


def _tool_choice(body: JsonObject, tools: Sequence[JsonObject]) -> str:
    choice = body.get("tool_choice", "auto")
    if choice in ("auto", "none"):
        return str(choice)
    if not tools:
        raise Refusal("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if choice == "required":
        return ""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in [tool["function"]["name"] for tool in tools]:
        raise Refusal("tool_choice names no function of tools", param="tool_choice")
    return str(name)
