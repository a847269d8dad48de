"""Node's own fetch as a client that follows no redirect. Needs `node`, and no package."""

import json
import subprocess

import pytest

from tests.conftest import Tenant
from tests.gateway_process import GatewayProcess
from tests.requirements import require

SCRIPT = """
const [url, key, method, body] = process.argv.slice(1);
const answer = await fetch(url, {
  method,
  redirect: "error",
  headers: { authorization: `Bearer ${key}`, "content-type": "application/json" },
  body: body || undefined,
});
const text = await answer.text();
process.stdout.write(JSON.stringify({ status: answer.status, body: JSON.parse(text) }));
"""
BODY = json.dumps({"model": "qwen3-32b", "messages": [{"role": "user", "content": "Hello!"}]})


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/chat/completions", BODY, 200),
        ("GET", "/v1/models", "", 200),
        ("GET", "/v1/credits", "", 200),
        ("POST", "/v1/chat/completions/", BODY, 404),
        ("GET", "/v1/models/", "", 404),
        ("GET", "/v1", "", 404),
        ("GET", "/v1/nothing", "", 404),
        ("POST", "/v1/nothing", BODY, 404),
        ("GET", "/v1/chat/completions", "", 405),
        ("POST", "/v1/models", BODY, 405),
    ],
)
def test_nothing_below_v1_redirects(
    served: GatewayProcess, acme: Tenant, method: str, path: str, body: str, status: int
) -> None:
    require("node")
    arguments = [f"{served.url}{path}", acme.secret, method, body]
    done = subprocess.run(
        ["node", "--input-type=module", "-e", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["status"] == status
    assert ("error" in answer["body"]) == (status != 200)
