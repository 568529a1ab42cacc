"""One real pair on the CPU behind the router: the pull really happened, and nothing is left."""

import os
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from kvlab.capture import nixl, ucx, vllm
from kvlab.engines import answers, launch, pd
from kvlab.engines.model import StandIn
from kvlab.engines.router import Router
from kvlab.engines.vllm import Engine
from kvlab.errors import RunFailed


@pytest.mark.live
@pytest.mark.skipif(find_spec("vllm") is None, reason="python -m kvlab.engines.install brings the engines")
def test_pair_behind_the_router(tmp_path):
    shape = StandIn(layers=2)
    model = str(shape.path(tmp_path / "model"))
    shm = set(os.listdir("/dev/shm"))
    specs = [Engine(role=role, model=model, max_model_len=2048) for role in ("prefill", "decode")]
    with launch.up(specs, folder=tmp_path, router=Router()) as cluster:
        (decode,) = cluster.decode
        began = decode.metrics_text()
        prompts = [" ".join(f"t{(i * 37 + k) % 4000}" for i in range(tokens)) for k, tokens in enumerate((64, 320))]
        body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        pulled = [cluster.complete({**body, "prompt": p})["choices"][0]["text"] for p in prompts]
        direct = pd.complete(cluster.prefill[0].url, decode.url, {**body, "model": cluster.model, "prompt": prompts[1]})
        own = [pd.post(f"{decode.url}/v1/completions", {**body, "model": cluster.model, "prompt": p}) for p in prompts]
        deadline = time.monotonic() + 30  # the counters are moved by a later engine step
        while (counted := vllm.summary(vllm.difference(began, decode.metrics_text(), "x")))["pulls"] < 3:
            assert time.monotonic() < deadline, counted
            time.sleep(0.2)
        pids = [pid for one in cluster.all for pid in one.pids()]
        assert decode.telemetry_dir is not None
        rings = [nixl.read_ring(path)[0] for path in decode.telemetry_dir.iterdir()]
        # The answer check passes on this pair, and catches blocks that were pulled in the wrong order.
        asked = answers.prompts(1, 320, 7, 1000)
        assert answers.check(cluster, asked)["tokens"].tolist() == [16]
        with pytest.raises(RunFailed, match="the pulled KV cache"):
            answers.check(cluster, asked, alter=answers.shuffled_blocks)
    # what came through the pull is what the engine computes by itself, and depends on the prompt
    assert pulled == [answer["choices"][0]["text"] for answer in own]
    assert direct["choices"][0]["text"] == pulled[1] != pulled[0]
    # 64 and 2 x 320 tokens of KV: block size 32, every block of the prompt but what decode computes itself
    assert counted["pulls"] == 3 and counted["failed_transfers"] == 0
    assert counted["bytes"] == (64 + 320 + 320) * shape.kv_bytes_per_token
    reads = rings[0][rings[0]["operation"] == "READ"]
    assert reads["bytes"].tolist()[-3:] == [n * shape.kv_bytes_per_token for n in (64, 320, 320)]
    # it closed by itself, so UCX said what it used, and the counts are the descriptors
    table = ucx.read([Path(decode.log)])
    assert table.pull.transport is not None, table.pull.verdict
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    assert set(os.listdir("/dev/shm")) <= shm
