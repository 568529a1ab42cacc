"""kv_layout against hand-worked values and, where vLLM is installed, against vLLM's own code."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvlab import kv_layout
from kvlab.errors import BadInput

KIB = 1024
LLAMA = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "torch_dtype": "bfloat16"}
SLIDING_ONLY = {**LLAMA, "model_type": "mistral", "sliding_window": 4096}


def config(tmp_path, **keys):
    path = tmp_path / "some-model" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({k: v for k, v in keys.items() if v is not ...}))
    return path


def parts(layout, tokens):
    return [(g.name, g.descriptors, g.descriptor_bytes) for g in layout.pull(tokens).groups]


# The published case.  A page of 32 tokens in a sliding layer at TP4: 32 x 2 (K, V) x 16/4 heads x 256 x 2 B
# = 128 KiB; of 64 tokens in a global one: 64 x 2 x 4/4 x 512 x 2 B = 128 KiB.
# 10 x ceil(L / 64) + 50 x (1024 / 32 + 2): 10 x 64 + 1,700; 10 x 128 + 1,700; 10 x 256 + 1,700.
@pytest.mark.parametrize(
    ("tokens", "descriptors", "gigabytes", "published"),
    [(4096, 2340, 0.31, 2350), (8192, 2980, 0.39, None), (16384, 4260, 0.56, 4250)],
)
@pytest.mark.parametrize("other_reading", [{}, {"block_size": 64, "kv_apart": True, "extra_window_blocks": 1}])
def test_gemma_4_31b_as_published(tokens, descriptors, gigabytes, published, other_reading):
    pull = kv_layout.load("gemma-4-31b", tp=4, dtype="bfloat16", **other_reading).pull(tokens)
    assert pull.descriptors == descriptors
    assert {g.descriptor_bytes for g in pull.groups} == {128 * KIB}
    assert pull.bytes == descriptors * 128 * KIB
    assert round(pull.bytes / 1e9, 2) == gigabytes
    assert [g.descriptors for g in pull.groups] == [descriptors - 1700, 1700]
    assert published is None or abs(descriptors / published - 1) < 0.01


def test_gemma_4_31b_says_what_is_inferred():
    notes = "\n".join(kv_layout.load("gemma-4-31b", tp=4).notes())
    assert "1,700 descriptors do not depend on the prompt" in notes
    assert notes.count("inferred:") == 3
    assert "FLASH_ATTN on an H200 had them apart" in notes
    own = kv_layout.load("gemma-4-31b", tp=4, block_size=16).notes()
    assert not any("blocks of 32 tokens" in n for n in own) and any("two blocks beyond" in n for n in own)
    assert not any("inferred" in n for n in kv_layout.load("llama-3.1-8b").notes())


# A page half (K or V) is 16 tokens x 8 heads x 128 x 2 B = 32 KiB; 2 x 32 layers x L / 16 of them.
# Seen on an H200 with vLLM 0.23: 16,384 / 32,768 / 65,536 descriptors.
@pytest.mark.parametrize(("tokens", "descriptors"), [(4096, 16384), (8192, 32768), (16384, 65536), (1, 64), (17, 128)])
def test_llama_8b_as_measured(tokens, descriptors):
    layout = kv_layout.load("llama-3.1-8b")
    assert parts(layout, tokens) == [("global", descriptors, 32 * KIB)]
    # 128 tokens a block: an eighth of the descriptors, eight times the size
    assert parts(kv_layout.load("llama-3.1-8b", block_size=128), 4096) == [("global", 2048, 256 * KIB)]


@pytest.mark.parametrize(
    ("name", "options", "bytes_per_token", "window_bytes"),
    [
        # The published curve's own figures (its model is 26B): 20,480 B a token and 209.7 MB of windows:
        # 5 global layers x 2 (K, V) x 2 heads x 512 x 2 B; 25 x 1,024 tokens x 2 x 8 heads x 256 x 2 B
        ("gemma-4-26b-a4b", {}, 20480, 209_715_200),
        ("llama-3.1-70b", {"tp": 8}, 80 * 2 * 1 * 128 * 2, 0),
        # more ranks than KV heads: each keeps a whole head
        ("llama-3.1-70b", {"tp": 16}, 80 * 2 * 1 * 128 * 2, 0),
        ("llama-3.1-8b", {"dtype": "fp8"}, 32 * 2 * 8 * 128, 0),
        ("qwen3-8b", {}, 36 * 2 * 8 * 128 * 2, 0),
        ("qwen3-32b", {}, 64 * 2 * 8 * 128 * 2, 0),
        ("mistral-7b", {}, 131072, 0),  # v0.3 has no window
        # 62 layers, every sixth global: 10 and 52
        ("gemma-3-27b", {}, 10 * 2 * 16 * 128 * 2, 52 * 2 * 16 * 128 * 2 * 1024),
        ("gpt-oss-20b", {}, 12 * 2 * 8 * 64 * 2, 12 * 2 * 8 * 64 * 2 * 128),
        ("gpt-oss-120b", {"tp": 2}, 18 * 2 * 4 * 64 * 2, 18 * 2 * 4 * 64 * 2 * 128),
        # MLA: 512 + 64 elements a token and layer, the same on every rank
        ("deepseek-v3", {}, 61 * 576 * 2, 0),
        ("deepseek-v3", {"tp": 8}, 61 * 576 * 2, 0),
        # 48 layers, every fourth with attention: 12 x 2 x 2 heads x 256 x 2 B
        ("qwen3-next-80b-a3b", {}, 24576, 0),
    ],
)
def test_bytes_per_token_and_windows(name, options, bytes_per_token, window_bytes):
    layout = kv_layout.load(name, **options)
    assert (layout.bytes_per_token, layout.window_bytes) == (bytes_per_token, window_bytes)
    assert layout.window_tokens == ({"gpt": 128, "gem": 1024}[name[:3]] if window_bytes else None)


def test_mla_is_one_descriptor_a_page():
    # 64 tokens x 576 x 2 B = 73,728 B; 61 layers x ceil(4,097 / 64) = 61 x 65
    assert parts(kv_layout.load("deepseek-v3", tp=8), 4097) == [("MLA", 3965, 73728)]


def test_state_layers_are_read_once_and_raise_the_block():
    # Convolution: 3 columns x 2 B of q and k (16 x 128 each) and v (32 x 128): 12,288, 12,288 and 24,576 B; state
    # 32 x 128 x 128 x 2 B = 1 MiB; together 1,097,728 B, so 34 x 16 = 544 tokens of 2 x 2 x 256 x 2 B hold one.
    layout = kv_layout.load("qwen3-next-80b-a3b", engine="vllm-0.30")
    assert [g.block_size for g in layout.groups] == [544, 544]
    state = [("state", 72, 12288), ("state", 36, 24576), ("state", 36, 1 << 20)]
    assert parts(layout, 545) == [("global", 24, 544 * 2048), *state]
    assert parts(layout, 100_000)[1:] == state
    assert layout.state_bytes == 36 * 1_097_728
    # TP4: a quarter of each state, and of the KV only half (2 heads, never less than one a rank)
    quarter = kv_layout.load("qwen3-next-80b-a3b", engine="vllm-0.30", tp=4)
    assert parts(quarter, 100_000)[1:] == [(name, n, size // 4) for name, n, size in state]
    # Qwen3.5 keeps the state in float32: 48 x 128 x 128 x 4 B, block 784 as vLLM logs it
    assert kv_layout.load("qwen3.5-27b", engine="vllm-0.30").groups[0].block_size == 784


def test_padding_of_uneven_groups_is_pulled():
    # gemma-3-27b: 52 sliding layers in 6 groups of at most 10, so 9 9 9 9 8 8.  All regions: 6 x 10 = 60; only what
    # two groups share (of 10 9 9 9 9 8 8, the second longest, 9): 9 9 9 9 9 9 = 54.
    layouts = {e: kv_layout.load("gemma-3-27b", engine=e) for e in kv_layout.ENGINES}
    assert {e: [g.slots for g in x.groups] for e, x in layouts.items()} == {
        "vllm-0.23": [10, 60],
        "vllm-0.30": [10, 54],
    }
    assert "60 layers pulled for 52" in "\n".join(layouts["vllm-0.23"].notes())
    # 65 blocks of a window of 1,024 and one more in 16-token blocks: 54 x 65
    assert parts(layouts["vllm-0.30"], 8192) == [("global", 5120, 128 * KIB), ("sliding", 3510, 128 * KIB)]


def test_windows_larger_than_the_prompt_hold_the_prompt(tmp_path):
    layout = kv_layout.load(config(tmp_path, **SLIDING_ONLY))
    assert layout.name == "some-model"
    assert parts(layout, 160) == [("sliding", 2 * 32 * 10, 32 * KIB)]
    assert parts(layout, 10**6) == [("sliding", 2 * 32 * 257, 32 * KIB)]


def test_table_has_a_row_a_group_and_the_sums():
    table = kv_layout.load("gemma-4-31b", tp=4).table([4096, 16384])
    assert table["group"].tolist() == ["global", "sliding", "all"] * 2
    assert table["descriptors"].tolist() == [640, 1700, 2340, 2560, 1700, 4260]
    assert table["block_size"].tolist()[:2] == [64, 32]
    sums = table[table["group"] != "all"].groupby("prompt_tokens")["bytes"].sum()
    assert sums.tolist() == table.loc[table["group"] == "all", "bytes"].tolist()


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"model_type": "gemma3_text", "sliding_window": 512}, {"global": 5, "sliding": 27}),  # every sixth of 32
        ({"sliding_window": 512, "sliding_window_pattern": 4}, {"global": 8, "sliding": 24}),
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 28},
         {"global": 28, "sliding": 4}),
        ({"model_type": "qwen2", "sliding_window": 512}, {"global": 32}),
        ({"layer_types": ["full_attention"] * 32, "num_kv_shared_layers": 12}, {"global": 20}),
    ],
)  # fmt: skip
def test_which_layers_slide(tmp_path, change, kinds):
    layout = kv_layout.load(config(tmp_path, **{**LLAMA, **change}))
    assert {g.name: g.layers for g in layout.groups} == kinds


def test_gemma_4_heads_of_global_layers_are_gated(tmp_path):
    # transformers' Gemma4TextConfig: num_global_key_value_heads counts only with attention_k_eq_v, off by default
    text = {**LLAMA, "model_type": "gemma4_text", "head_dim": 256, "sliding_window": 512}
    text |= {"num_global_key_value_heads": 2}
    for gate, heads in (({}, 8), ({"attention_k_eq_v": True}, 2)):
        layout = kv_layout.load(config(tmp_path, text_config={**text, **gate}).parent)
        assert layout.groups[0].token_bytes == 2 * heads * 512 * 2


@pytest.mark.parametrize("name", kv_layout.names())
def test_every_shipped_layout_says_where_it_is_from(name):
    layout = kv_layout.load(name)
    assert layout.model.count("/") == 1 and "config.json" in layout.source
    assert kv_layout.load(layout.model.upper()) == layout
    assert sum(g.layers for g in layout.groups) == _text(name)["num_hidden_layers"]
    assert layout.pull(5000).descriptors > 0


def test_at_least_the_promised_models_are_shipped():
    families = ("gemma-3", "gemma-4", "llama-3.1-8b", "llama-3.1-70b", "qwen3", "gpt-oss", "deepseek-v3", "mistral")
    assert len(kv_layout.names()) >= 8
    assert all(any(n.startswith(f) for n in kv_layout.names()) for f in families)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name_or_path": "gemma4-31b"}, "did you mean gemma-4-31b"),
        ({"name_or_path": "meta-llama/Llama-3.1-8B-Instruct"}, "did you mean llama-3.1-8b"),
        ({"name_or_path": "zzz"}, "known: deepseek-v3, "),
        ({"name_or_path": ""}, "no layout and no config.json"),
        ({"name_or_path": "x" * 5000}, "no layout and no config.json"),
        ({"name_or_path": "a\0b"}, "no layout and no config.json"),
        ({"tp": 3}, "tp 3 and 8 KV heads do not divide one another"),
        ({"name_or_path": "qwen3-next-80b-a3b", "tp": 32}, "tp 32 does not divide the 16 and 32 heads"),
        ({"tp": 0}, "tp must be a whole number from 1 up (got 0)"),
        ({"tp": True}, "tp must be a whole number"),
        ({"block_size": 16.0}, "block_size must be a whole number from 1 up (got 16.0)"),
        ({"extra_window_blocks": -1}, "extra_window_blocks must be a whole number from 0 up"),
        ({"dtype": "fp12"}, "unknown KV dtype 'fp12'; known: bfloat16, "),
        ({"engine": "sglang"}, "unknown engine 'sglang'; known: vllm-0.23, vllm-0.30"),
    ],
)
def test_bad_arguments_in_one_clear_line(arguments, says):
    with pytest.raises(BadInput) as caught:
        kv_layout.load(**{"name_or_path": "llama-3.1-8b", **arguments})
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": ...}, "has no 'num_hidden_layers'"),
        ({"num_attention_heads": "32"}, "num_attention_heads must be a whole number from 1 up (got '32')"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 32 layers"),
        ({"layer_types": ["mamba"] * 32}, "a layer of type 'mamba'"),
        ({"layer_types": ["linear_attention"] * 32}, "without attention layers"),
        ({"num_kv_shared_layers": "x"}, "num_kv_shared_layers must be a whole number"),
        ({"v_head_dim": 64}, "v_head_dim"),
        ({"index_head_dim": 128}, "index_head_dim in config.json changes the KV cache"),
        ({"text_config": {**LLAMA, "linear_attn_config": {"a": 1}}}, "linear_attn_config in config.json"),
    ],
)
def test_bad_configs_in_one_clear_line(tmp_path, change, says):
    with pytest.raises(BadInput) as caught:
        kv_layout.load(config(tmp_path, **{**LLAMA, **change}))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"", b"null"])
def test_unreadable_config(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"config\.json"):
        kv_layout.load(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 100) | st.floats(allow_nan=False) | st.sampled_from(["full", "", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "head_dim"]), inner, max_size=2),
    max_leaves=4,
)
KEYS = [
    *LLAMA,
    "head_dim",
    "layer_types",
    "sliding_window",
    "sliding_window_pattern",
    "use_sliding_window",
    "v_head_dim",
]
KEYS += ["max_window_layers", "full_attention_interval", "kv_lora_rank", "qk_rope_head_dim", "num_kv_shared_layers"]
KEYS += ["text_config", "global_head_dim", "linear_num_key_heads"]


@settings(deadline=None)  # no test asserts a time
@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4), st.integers(1, 9))
def test_any_config_gives_a_layout_or_one_clear_line(tmp_path_factory, change, tp):
    path = config(tmp_path_factory.mktemp("any"), **{**LLAMA, **change})
    try:
        layout = kv_layout.load(path, tp=tp, dtype="auto")
    except BadInput as error:
        assert "\n" not in str(error)
    else:
        assert layout.pull(100).descriptors > 0 and all(g.page_bytes > 0 for g in layout.groups)


def test_dtype_auto_is_the_models_own(tmp_path):
    path = config(tmp_path, **{**LLAMA, "torch_dtype": "float32"})
    assert kv_layout.load(path, dtype="auto").bytes_per_token == 2 * kv_layout.load(path).bytes_per_token
    with pytest.raises(BadInput, match="prompt_tokens"):
        kv_layout.load(path).pull(0)


LAYOUTS = st.builds(
    kv_layout.load,
    st.sampled_from(kv_layout.names()),
    dtype=st.sampled_from(["bfloat16", "fp8"]),
    block_size=st.sampled_from([None, 16, 32, 64, 128]),
    tp=st.sampled_from([1, 2, 4, 8]),
    engine=st.sampled_from(sorted(kv_layout.ENGINES)),
)
TOKENS = st.integers(1, 200_000)


@settings(deadline=None)
@given(LAYOUTS, TOKENS, TOKENS)
def test_pulls_add_up_and_grow_with_the_prompt(layout, a, b):
    short, long = (layout.pull(t) for t in sorted((a, b)))
    for pull in (short, long):
        assert pull.descriptors == sum(g.descriptors for g in pull.groups)
        assert pull.bytes == sum(g.descriptors * g.descriptor_bytes for g in pull.groups)
    assert all(x.descriptors <= y.descriptors for x, y in zip(short.groups, long.groups, strict=True))


@settings(deadline=None)
@given(LAYOUTS, TOKENS, st.integers(1, 20))
def test_bytes_per_token_is_the_slope(layout, tokens, times):
    grows = [g for g in layout.groups if g.window is None and g.token_bytes]
    assume(all(g.page_bytes == g.block_size * g.token_bytes for g in grows))  # pages without padding
    start = tokens + (layout.window_tokens or 0) + 1024
    step = times * grows[0].block_size
    assert layout.pull(start + step).bytes - layout.pull(start).bytes == step * layout.bytes_per_token


@settings(deadline=None)
@given(LAYOUTS, TOKENS)
def test_k_and_v_apart_double_the_count_and_keep_the_bytes(layout, tokens):
    one, two = (
        kv_layout.load(layout.name, kv_apart=apart, tp=layout.tp, dtype=layout.dtype).pull(tokens)
        for apart in (False, True)
    )
    paged = {g.name for g in layout.groups if g.token_bytes and g.name != "MLA"}
    assert two.bytes == one.bytes
    assert two.descriptors - one.descriptors == sum(g.descriptors for g in one.groups if g.name in paged)


@settings(deadline=None)
@given(
    st.sampled_from(["llama-3.1-70b", "qwen3-32b", "gpt-oss-120b", "gemma-3-27b"]), st.sampled_from([2, 4, 8]), TOKENS
)
def test_ranks_share_the_heads(name, tp, tokens):
    whole, rank = (kv_layout.load(name, tp=n).pull(tokens) for n in (1, tp))
    assert rank.descriptors == whole.descriptors
    assert rank.bytes * tp == whole.bytes


def _text(name):
    entry = kv_layout._shipped()[name]["config"]
    return entry.get("text_config", entry)


# --- vLLM's own code -------------------------------------------------------------------------------------------


def _vllm_specs(c, block, tp, dtype):
    """One KVCacheSpec a layer, as vLLM's model code makes them (written here from the config, not from kv_layout)."""
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

    n, heads = c["num_hidden_layers"], c["num_key_value_heads"]
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    every = c.get("sliding_window_pattern") or c.get("full_attention_interval") or 1
    other = "sliding_attention" if c.get("sliding_window") else "linear_attention"
    kinds = c.get("layer_types") or [other if (i + 1) % every else "full_attention" for i in range(n)]

    def attention(cls, heads, dim, **more):
        return cls(block_size=block, num_kv_heads=max(1, heads // tp), head_size=dim, dtype=dtype, **more)

    if c.get("kv_lora_rank"):
        return [MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=576, dtype=dtype)] * n
    made = {"sliding_attention": lambda: attention(SlidingWindowSpec, heads, dim, sliding_window=c["sliding_window"])}
    global_heads, global_dim = c.get("num_global_key_value_heads", heads), c.get("global_head_dim", dim)
    made["full_attention"] = lambda: attention(FullAttentionSpec, global_heads, global_dim)
    state_dtype = getattr(torch, c.get("mamba_ssm_dtype", ""), dtype)
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")

    def state():
        shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
            tp, *(c[k] for k in names), c["linear_conv_kernel_dim"]
        )
        page = attention(FullAttentionSpec, heads, dim).page_size_bytes
        return MambaSpec(block_size=block, shapes=shapes, dtypes=(dtype, state_dtype), page_size_padded=page)

    made["linear_attention"] = state
    return [made[k]() for k in kinds]


def _vllm_descriptors(specs, tokens):
    """Descriptors that vLLM's grouping, block tables and NixlConnector make of one prompt."""
    import numpy as np
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    by_layer = {f"layer.{i}": s for i, s in enumerate(specs)}
    if kv_cache_utils.is_kv_cache_spec_uniform(by_layer):
        groups = kv_cache_utils.create_kv_cache_group_specs(by_layer, [list(by_layer)])
    else:
        by_layer = kv_cache_utils.unify_kv_cache_spec_page_size(by_layer)
        groups = kv_cache_utils._get_kv_cache_groups_uniform_page_size(by_layer)
    config = KVCacheConfig(num_blocks=20_000, kv_cache_tensors=[], kv_cache_groups=groups)
    largest = max(g.kv_cache_spec.block_size for g in groups)
    manager = KVCacheManager(config, 1 << 20, largest, largest, enable_caching=False)
    request = Request("r", [0] * tokens, SamplingParams(max_tokens=1), None)
    blocks = manager.allocate_slots(request, tokens).get_block_ids()

    nothing = SimpleNamespace(get_from_extra_config=lambda key, default: default, kv_buffer_device="cpu")
    parallel = SimpleNamespace(tensor_parallel_size=1, decode_context_parallel_size=1, data_parallel_index=0)
    vllm_config = SimpleNamespace(
        parallel_config=parallel,
        cache_config=SimpleNamespace(block_size=largest, mamba_cache_mode="none"),
        kv_transfer_config=nothing,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    )
    clipped = NixlBaseConnectorScheduler(vllm_config, "e", config).get_exchange_clipped_blocks(blocks)

    # Regions as register_kv_caches makes them: layer i of every group lies at the same address.
    sizes = [len(g.layer_names) for g in groups]
    owners = [[j for j, n in enumerate(sizes) if i < n] for i in range(max(sizes))]
    region_groups = [o[0] if len(o) == 1 else -1 for o in owners]
    has_state = any(type(g.kv_cache_spec).__name__ == "MambaSpec" for g in groups)
    worker = SimpleNamespace(
        _has_mamba=has_state,
        _conv_decomp=SimpleNamespace(local_conv_offsets=[0, 0, 0]),
        _ssm_region_indices=list(range(len(owners))),
        block_len_per_layer=[1] * len(owners),
        num_regions=len(owners),
        region_group_ids=region_groups,
        _uses_region_group_mapping=len(set(region_groups)) > 1,
        _group_spec_types=[type(g.kv_cache_spec) for g in groups],
        _scratch_region_indices=[],
        _ple_group_index=None,
    )
    ids = NixlBaseConnectorWorker._compute_desc_ids(worker, clipped, config.num_blocks, None, 1)
    assert len(np.unique(ids)) == len(ids)
    return len(ids), {type(g.kv_cache_spec).__name__: g.kv_cache_spec for g in groups}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("name", kv_layout.names())
def test_against_vllms_own_grouping_block_tables_and_connector(name, tp):
    pytest.importorskip("vllm")
    torch = pytest.importorskip("torch")
    c = _text(name)
    layout = kv_layout.load(name, tp=tp, engine="vllm-0.30", block_size=16, kv_apart=False, extra_window_blocks=1)
    # The block that holds a state is set by vLLM's platform before the specs are made.
    block = layout.groups[0].block_size if layout.state_bytes else 16
    specs = _vllm_specs(c, block, tp, torch.bfloat16)
    for tokens in (1000, 4096, 9001):
        descriptors, by_kind = _vllm_descriptors(specs, tokens)
        assert layout.pull(tokens).descriptors == descriptors
    mine = {(g.block_size, g.page_bytes) for g in layout.groups if g.token_bytes}
    theirs = {(s.block_size, s.page_size_bytes) for k, s in by_kind.items() if k != "MambaSpec"}
    assert mine == theirs
    if layout.state_bytes:
        state = by_kind["MambaSpec"]
        assert layout.state_bytes == state.state_content_size_bytes * sum(g.layers for g in layout.groups[1:])
        assert state.state_content_size_bytes > (block - 16) * layout.groups[0].token_bytes  # no smaller block holds it


@pytest.mark.filterwarnings("ignore")
def test_the_published_block_sizes_are_what_vllm_evens_out():
    pytest.importorskip("vllm")
    torch = pytest.importorskip("torch")
    _, kinds = _vllm_descriptors(_vllm_specs(_text("gemma-4-31b"), 32, 4, torch.bfloat16), 4096)
    assert {k: (s.block_size, s.page_size_bytes) for k, s in kinds.items()} == {
        "FullAttentionSpec": (64, 128 * KIB),
        "SlidingWindowSpec": (32, 128 * KIB),
    }
