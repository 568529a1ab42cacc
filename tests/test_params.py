import pytest
import yaml

from kvlab import experiments, params
from kvlab.errors import BadInput
from kvlab.paths import shared_dir

PVC = "post-vs-completion"


@pytest.mark.parametrize("name", sorted(experiments.EXPERIMENTS))
def test_every_shipped_parameter_file_is_valid(name):
    files = sorted((shared_dir("params") / name.replace("-", "_")).glob("*.yaml"))
    assert files or not experiments.get(name).default
    for path in files:
        params.validate(name, params.read_file(path), str(path))


@pytest.mark.parametrize("name", sorted(experiments.EXPERIMENTS))
def test_default_file_and_notebook_exist(name):
    e = experiments.get(name)
    assert e.notebook_path.is_file()
    assert e.question.endswith("?")
    if e.default:
        assert params.resolve_file(name, e.default).is_file()


def test_shipped_file_says_what_the_model_defaults_to():
    file = params.validate(PVC, params.read_file(params.resolve_file(PVC, "loopback")))
    model = params.validate(PVC, {})
    assert file.model_dump(exclude={"label"}) == model.model_dump(exclude={"label"})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"repetition": 3}, "unknown parameter 'repetition'; did you mean 'repetitions'"),
        ({"repetitions": 0}, "'repetitions'"),
        ({"repetitions": True}, "a number is wanted"),
        ({"repetitions": "nan"}, "'repetitions'"),
        ({"repetitions": 2.5}, "'repetitions'"),
        ({"tp": "0x10"}, "'tp'"),
        ({"shape": "diagonal"}, "'shape'"),
        ({"prompt_tokens": []}, "'prompt_tokens'"),
        ({"prompt_tokens": "4096,-1"}, "prompt_tokens"),
        ({"pull_time_limit_s": "inf"}, "pull_time_limit_s"),
        ({"arms": []}, "'arms'"),
        ({"arms": [{"label": "a"}, {"label": "a"}]}, "two arms have the label 'a'"),
        ({"arms": [{"label": "a", "enviroment": {}}]}, "enviroment"),
        ({"arms": [{"label": "a", "env": {"UCX_TLS": False}}]}, "put the value in quotes"),
        ({"arms": [{"label": "a", "env": {"BAD NAME": "x"}}]}, "BAD NAME"),
    ],
)
def test_bad_values_are_refused_in_one_line(values, says):
    with pytest.raises(BadInput) as caught:
        params.validate(PVC, values, "here")
    text = str(caught.value)
    assert text.startswith("here: ") and says in text and "\n" not in text


def test_papermill_text_forms_are_taken():
    p = params.validate(
        PVC,
        {"prompt_tokens": "[1024, 2048]", "repetitions": "1e1", "tp": 2.0, "progress_thread": False}
        | {"repetitions": 10.0, "arms": "[{label: a, env: {UCX_TLS: tcp, UCX_TCP_PORT_RANGE: 5000}}]"},
    )
    assert p.prompt_tokens == [1024, 2048]
    assert (p.repetitions, p.tp, p.progress_thread) == (10, 2, "off")
    assert p.arms[0].env == {"UCX_TLS": "tcp", "UCX_TCP_PORT_RANGE": "5000"}


def test_lists_take_commas_and_a_lone_number():
    assert params.validate(PVC, {"prompt_tokens": "4096,8192"}).prompt_tokens == [4096, 8192]
    assert params.validate(PVC, {"prompt_tokens": 512}).prompt_tokens == [512]


def test_notebook_scope_refuses_a_mistyped_injected_name():
    scope = {"replay": "", "repetitions": 3, "In": [], "_x": 1, "yaml": yaml, "repetitionz": 4}
    with pytest.raises(BadInput, match="repetitionz"):
        params.parameters(PVC, scope)
    del scope["repetitionz"]
    assert params.parameters(PVC, scope).repetitions == 3


def test_yaml_file_errors_name_the_file(tmp_path):
    bad = tmp_path / "a b.yaml"
    bad.write_text("- 1\n")
    with pytest.raises(BadInput, match=r"a b\.yaml: a mapping"):
        params.read_file(bad)
    bad.write_text("x: [1\n")
    with pytest.raises(BadInput, match="not a readable YAML"):
        params.read_file(bad)
    bad.write_text("!!python/object/apply:os.system [echo hi]\n")
    with pytest.raises(BadInput, match="not a readable YAML"):
        params.read_file(bad)
    bad.write_text("# repetitions: 3\n")
    with pytest.raises(BadInput, match=r"a b\.yaml is empty"):
        params.read_file(bad)
    with pytest.raises(BadInput, match=r"ships: .*loopback"):
        params.resolve_file(PVC, "nowhere")


def test_unknown_experiment_lists_the_known():
    with pytest.raises(BadInput, match=r"known: .*post-vs-completion"):
        experiments.get("post-vs-completino")
