"""The way of a request end to end, on both ASGI servers."""

import httpx

from tests.conftest import Tenant
from tests.gateway_process import GatewayProcess


def body(text: str = "Hello!", **fields: object) -> dict[str, object]:
    return {"model": "qwen3-32b", "messages": [{"role": "user", "content": text}], **fields}


def test_it_works(served: GatewayProcess, acme: Tenant) -> None:
    answer = httpx.post(f"{served.base_url}/chat/completions", json=body(), headers=acme.headers)
    assert answer.status_code == 200
    event = acme.event(answer)
    assert event.state == "succeeded"
    assert acme.charges() == [-event.cost]
    assert f'"cost":{event.cost.normalize():f}' in answer.text
