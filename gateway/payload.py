"""A request body: bytes in, a checked ChatRequest, and the bytes that are forwarded.

Parses once, decides on the parsed object and forwards that object serialised again, so price,
limits, stream mode and backend can never see different values. Only what the gateway reads itself
or what real model servers answer with 200 or 500 is checked here; the rest is for the model
server to judge. Never rewrites a message.
"""

import ipaddress
import json
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from urllib.parse import urlsplit

import orjson

from gateway import policy
from gateway.errors import EmptyArray, InvalidRequest

# Seven million empty arrays took 2.3 s to parse and 588 MB (rulings.md 9).
STRUCTURE_MAX = 200_000

ROLES = ("system", "developer", "user", "assistant", "tool")

_STREAM = {"true": True, "false": False}
# orjson turns integers beyond 64 bits into floats; 19 digits are where that begins.
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat request as far as it can be checked without knowing its model.

    `fields` is the whole parsed body. `output_tokens_max` is the largest limit that it names for
    one choice, None when it names none. `prompt_tokens` is an estimate: a quarter of the UTF-8
    bytes of the message texts, rounded up (rulings.md 17).
    """

    model: str
    stream: bool
    include_usage: bool
    fields: dict[str, Any]
    prompt_tokens: int
    output_tokens_max: int | None
    choices: int


def parse(body: bytes, *, depth_max: int) -> ChatRequest:
    """Read a body. Raises InvalidRequest or EmptyArray (beyond-the-page.md section 3)."""
    fields = _load(body, depth_max)
    model = fields.get("model")
    if not isinstance(model, str):
        raise InvalidRequest("Invalid 'model': send the ID of a model.", param="model")
    stream = _stream(fields.get("stream"))
    include_usage = _include_usage(fields.get("stream_options"), stream)
    messages = fields.get("messages")
    if messages is None or messages == []:
        raise EmptyArray
    if not isinstance(messages, list):
        raise InvalidRequest("Invalid 'messages': send an array of messages.", param="messages")
    return ChatRequest(
        model=model,
        stream=stream,
        include_usage=include_usage,
        fields=fields,
        prompt_tokens=-(-sum(map(_utf8_length, _texts(messages))) // 4),
        output_tokens_max=_output_tokens_max(fields),
        choices=_positive(fields.get("n")) or 1,
    )


def check(request: ChatRequest, *, image_input: bool) -> None:
    """Refuse messages and tools that no model server may see. Raises InvalidRequest.

    Real servers answer some of these with 500, or with 200 and nonsense.
    """
    for index, message in enumerate(request.fields["messages"]):
        _check_message(message, f"messages[{index}]", image_input)
    tools = request.fields.get("tools")
    if tools is None:
        return
    if not isinstance(tools, list):
        raise InvalidRequest("Invalid 'tools': send an array of function tools.", param="tools")
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")


def apply_policy(request: ChatRequest, cells: Mapping[str, policy.Cell]) -> ChatRequest:
    """Return the request without what the model's policy drops. Raises UnsupportedParameter."""
    return replace(request, fields=policy.apply(request.fields, cells))


def forward(request: ChatRequest, *, served_model_name: str, continuous_usage: bool) -> bytes:
    """Return the body for a backend."""
    fields = dict(request.fields)
    fields["model"] = served_model_name
    if request.stream:
        fields["stream"] = True
        # Whatever the client said: without the usage chunk nothing can be metered.
        options = dict(fields.get("stream_options") or {})
        options["include_usage"] = True
        options.pop("continuous_usage_stats", None)
        if continuous_usage:
            options["continuous_usage_stats"] = True
        fields["stream_options"] = options
    else:
        fields.pop("stream_options", None)  # null: vLLM refuses the key without a stream
        if "stream" in fields:
            fields["stream"] = False
    return orjson.dumps(fields)


def _load(body: bytes, depth_max: int) -> dict[str, Any]:
    if body.count(b"[") + body.count(b"{") + body.count(b",") > STRUCTURE_MAX:
        raise InvalidRequest(f"The body has more than {STRUCTURE_MAX} elements.")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    if _is_deeper(value, depth_max):
        raise InvalidRequest(f"The body is nested deeper than {depth_max} levels.")
    # orjson keeps the last of two equal keys; the body then has more colons than its object.
    if body.count(b":") != orjson.dumps(value).count(b":") or _LONG_NUMBER.search(body):
        _check_slowly(body)
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    children: Iterable[Any]
    if type(value) is dict:
        children = value.values()
    elif type(value) is list:
        children = value
    else:
        return False
    return levels == 0 or any(
        _is_deeper(child, levels - 1) for child in children if type(child) in (dict, list)
    )


def _check_slowly(body: bytes) -> None:
    """Refuse duplicate keys and integers that would not be forwarded as they were sent."""

    def pairs(items: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in items:
            if name in seen:
                raise InvalidRequest(f"The body has the key '{name[:64]}' twice in one object.")
            seen.add(name)

    def integer(digits: str) -> int:
        if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
            raise InvalidRequest("The body has an integer beyond 64 bits.")
        return 0

    json.loads(body, object_pairs_hook=pairs, parse_int=integer, parse_float=lambda _: 0.0)


def _stream(value: Any) -> bool:
    """Read `stream` as the page does: also "true" and 1; nothing by Python's truthiness."""
    if value is None or value is False or value is True:
        return bool(value)
    if isinstance(value, str) and value in _STREAM:
        return _STREAM[value]
    if type(value) is int and value in (0, 1):
        return value == 1
    raise InvalidRequest("Invalid 'stream': send true or false.", param="stream")


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise InvalidRequest("Invalid 'stream_options': send an object.", param="stream_options")
    if not stream:
        raise InvalidRequest(
            "'stream_options' may only be sent together with stream: true.", param="stream_options"
        )
    include = options.get("include_usage")
    if include is not None and not isinstance(include, bool):
        raise InvalidRequest(
            "Invalid 'stream_options.include_usage': send true or false.", param="stream_options"
        )
    return include is True


def _texts(messages: Iterable[Any]) -> Iterable[str]:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else [{"text": content}]:
            text = part.get("text") if isinstance(part, dict) else None
            if isinstance(text, str):
                yield text


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _output_tokens_max(fields: Mapping[str, Any]) -> int | None:
    named = [
        _positive(fields.get(name)) for name in ("max_tokens", "max_completion_tokens", "n_predict")
    ]
    return max((number for number in named if number is not None), default=None)


def _positive(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _check_message(message: Any, where: str, image_input: bool) -> None:
    def refuse(what: str) -> NoReturn:
        raise InvalidRequest(f"Invalid '{where}': {what}", param=where)

    if not isinstance(message, dict):
        refuse("a message must be an object.")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        refuse(f"'role' must be one of {', '.join(ROLES)}.")
    if role != "assistant" and not isinstance(content, str | list):
        refuse(f"a {role} message needs a 'content' string or array of parts.")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        refuse("a tool message needs the 'tool_call_id' that it answers.")
    if not isinstance(content, list):
        return
    for part in content:
        if not isinstance(part, dict):
            refuse("a content part must be an object.")
        if part.get("type") == "image_url" or "image_url" in part:
            if not image_input:
                refuse("this model takes no images.")
            _check_image(part.get("image_url"), refuse)


def _check_image(image: Any, refuse: Callable[[str], NoReturn]) -> None:
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str):
        refuse("'image_url' needs a 'url'.")
    if url[:5].lower() == "data:":
        return
    if url[:8].lower() != "https://":
        refuse("an image URL must begin with https: or data:.")
    if _names_a_private_host(url):
        refuse("the image URL must name a public host.")


def _names_a_private_host(url: str) -> bool:
    """Tell whether an https URL names a host inside, or could be read to name one.

    What a name resolves to is not known here; operators restrict that on the model server.
    """
    if "\\" in url or any(ord(character) <= 32 or ord(character) == 127 for character in url):
        return True  # parsers disagree about where the host of such a URL ends
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
        parts.port  # noqa: B018 raises ValueError for a port that is no number
    except ValueError:
        return True
    if "@" in parts.netloc or not host or host == "localhost" or host.endswith(_PRIVATE_SUFFIXES):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            # The forms that resolvers take for IPv4: 127.1, 0x7f000001, 2130706433, 017700000001.
            address = ipaddress.ip_address(socket.inet_aton(host))
        except OSError:
            return "." not in host  # a bare name is a host of the local network
    mapped = getattr(address, "ipv4_mapped", None)
    return not (mapped or address).is_global


def _check_tool(tool: Any, where: str) -> None:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"Invalid '{where}': a tool must be an object.", param=where)
    function = tool.get("function")
    if tool.get("type") != "function" and function is None:
        return
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"Invalid '{where}': a function needs a 'name'.", param=where)
    description = function.get("description")
    if not isinstance(description, str) or not description.strip():
        raise InvalidRequest(
            f"Invalid '{where}.function': a function needs a 'description'.",
            param=f"{where}.function.description",
        )
