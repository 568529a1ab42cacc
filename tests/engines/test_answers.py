"""The answer check on made-up engines: equal, diverging, drifting."""

from types import SimpleNamespace

import pytest

from kvlab.engines import answers
from kvlab.errors import RunFailed

CLUSTER = SimpleNamespace(
    model="m", prefill=[SimpleNamespace(url="http://prefill")], decode=[SimpleNamespace(url="http://decode")]
)


def engines(monkeypatch, pulled_tokens, pulled_logprobs, alone=(["a", "b", "c"], [-0.1, -0.2, -0.3])):
    """Put stand-ins in place of HTTP: the prefill engine alone gives ``alone``, the pair what is given."""

    def post(url, body, timeout_s=120):
        if "kv_transfer_params" in body and url.startswith("http://prefill"):
            return {"kv_transfer_params": {"remote_block_ids": [[1, 2, 3]]}}
        tokens, logprobs = (pulled_tokens, pulled_logprobs) if url.startswith("http://decode") else alone
        return {"choices": [{"logprobs": {"tokens": tokens, "token_logprobs": logprobs}}]}

    monkeypatch.setattr(answers.handover, "post", post)


def test_equal_answers_pass(monkeypatch):
    engines(monkeypatch, ["a", "b", "c"], [-0.1, -0.21, -0.3])
    frame = answers.check(CLUSTER, [[5, 6, 7]], output_tokens=3)
    assert frame["largest_logprob_difference"].iloc[0] == pytest.approx(0.01)


def test_a_diverging_token_fails_and_is_shown(monkeypatch):
    engines(monkeypatch, ["a", "x", "c"], [-0.1, -0.2, -0.3])
    with pytest.raises(RunFailed, match=r"'x' and not 'b' at token 1 of 3"):
        answers.check(CLUSTER, [[5, 6, 7]], output_tokens=3)


def test_equal_tokens_with_other_probabilities_fail(monkeypatch):
    engines(monkeypatch, ["a", "b", "c"], [-0.1, -0.9, -0.3])
    with pytest.raises(RunFailed, match=r"0\.700 apart"):
        answers.check(CLUSTER, [[5, 6, 7]], output_tokens=3)


def test_a_shorter_answer_fails(monkeypatch):
    engines(monkeypatch, ["a", "b"], [-0.1, -0.2])
    with pytest.raises(RunFailed, match="token 2"):
        answers.check(CLUSTER, [[5, 6, 7]], output_tokens=3)


def test_shuffling_reverses_blocks_in_each_group():
    request = {"kv_transfer_params": {"remote_block_ids": [[1, 2, 3], [4, 5]]}}
    assert answers.shuffled_blocks(request)["kv_transfer_params"]["remote_block_ids"] == [[3, 2, 1], [5, 4]]
    assert request["kv_transfer_params"]["remote_block_ids"] == [[1, 2, 3], [4, 5]]
