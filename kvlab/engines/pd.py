"""1P1D without a proxy: the prefill request, then the decode request with what the prefill engine answered.

The prefill engine computes the prompt's KV, one token, and answers with the ``kv_transfer_params`` that name its
blocks; the decode engine gets them with the same prompt and pulls.  This is what vllm-router does; here the client
does it, which needs no router on a bare GPU machine and tells the two times apart.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from kvlab.errors import RunFailed

_REMOTE = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")


def prefill_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body for the prefill engine: one token, not streamed, its KV kept for a remote decode."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(_REMOTE)}
    new = {k: v for k, v in body.items() if k not in ("stream", "stream_options", "min_tokens")}
    return {**new, "max_tokens": 1, "kv_transfer_params": params}


def decode_request(body: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body for the decode engine; RunFailed when the prefill engine's ``answer`` offers no blocks."""
    params = answer.get("kv_transfer_params")
    if not params or not params.get("remote_block_ids"):
        said = json.dumps(answer.get("error") or answer)[:200]
        raise RunFailed(f"the prefill engine offered no KV blocks (is kv_role right, the prompt not empty?): {said}")
    return {**body, "kv_transfer_params": params}


def post(url: str, body: Mapping[str, Any], timeout_s: float = 120) -> dict[str, Any]:
    """POST ``body`` as JSON, through no proxy, and return the answer; RunFailed with the server's own words."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout_s) as answer:
            document = json.load(answer)
    except urllib.error.HTTPError as error:
        raise RunFailed(f"{url} answered {error.code}: {error.read(500).decode('utf-8', 'replace')}") from None
    except (OSError, ValueError) as error:
        raise RunFailed(f"{url}: no answer: {error}") from None
    if not isinstance(document, dict):
        raise RunFailed(f"{url} answered no JSON object")
    return document


def complete(
    prefill_url: str,
    decode_url: str,
    body: Mapping[str, Any],
    *,
    path: str = "/v1/completions",
    timeout_s: float = 120,
) -> dict[str, Any]:
    """Do both requests of ``body`` (not streamed) one after the other and return the decode engine's answer."""
    answer = post(prefill_url + path, prefill_request(body), timeout_s)
    return post(decode_url + path, decode_request(body, answer), timeout_s)


async def prefill(session: Any, prefill_url: str, body: Mapping[str, Any], path: str = "/v1/completions") -> Any:
    """Do the prefill request over an aiohttp session; return the decode engine's body, which the caller streams."""
    async with session.post(prefill_url + path, json=prefill_request(body)) as answer:
        if answer.status != 200:
            raise RunFailed(f"{prefill_url}{path} answered {answer.status}: {(await answer.text())[:500]}")
        return decode_request(body, await answer.json())
