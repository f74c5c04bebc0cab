"""A configuration is a TOML file and flags; nothing in either is ever ignored (known failure G01)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moe.config import ConfigError
from training.config import Config
from training.load_config import config_from_dict, config_to_toml, load_config, read_toml


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return str(path)


def test_flags_override_the_file_and_the_file_overrides_the_defaults(tmp_path):
    path = write(tmp_path, "[moe]\nnum_experts = 8\nexpert_width = 40\n")
    config = load_config([path, "--moe.num-experts", "4"])
    assert (config.moe.num_experts, config.moe.expert_width) == (4, 40)
    assert config.model == Config().model


def test_the_resolved_configuration_written_as_toml_is_read_back_equal(tmp_path):
    config = load_config([write(tmp_path, "[model]\nkv_heads = 2\n[training]\nlearning_rate = 1e-4\n")])
    path = write(tmp_path, config_to_toml(config))
    assert config_from_dict(read_toml(Path(path))) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[moe]\nnum_expert = 8\n", "unknown key moe.num_expert; did you mean moe.num_experts?"),
        ("[moe]\nlearning_rate = 1e-3\n", "unknown key moe.learning_rate; did you mean training.learning_rate?"),
        ("learning_rate = 1e-3\n", "unknown key learning_rate; did you mean training.learning_rate?"),
        ("[optimizer]\nlr = 1\n", "unknown key optimizer; known: run, data, model, moe, training"),
        ("[train]\nsteps = 1\n", "unknown key train; did you mean training?"),
        ("[moe]\nnum_experts = '8'\n", "moe.num_experts = '8': must be a whole number"),
        ("[moe]\nnum_experts = 8.0\n", "moe.num_experts = 8.0: must be a whole number"),
        ("[moe]\nnum_experts = true\n", "moe.num_experts = True: must be a whole number"),
        ("[moe]\nnum_experts = [8]\n", "moe.num_experts = [8]: must be a whole number"),
        ("[moe]\nallow_leak = 'yes'\n", "moe.allow_leak = 'yes': must be true or false"),
        ("[moe]\nrouter = 'top2'\n", "moe.router = 'top2': must be one of 'expert_choice', 'threshold'"),
        ("[training]\nlearning_rate = '3e-4x'\n", "training.learning_rate = '3e-4x': must be a number"),
        ("moe = 3\n", "moe = 3: must be a section, written [moe]"),
        ("[moe]\nnum_experts = 4\nnum_experts = 8\n", "not valid TOML"),
        ("[moe\n", "line 1"),
        ("[model]\nwidth = 100\nheads = 3\n", "model.heads = 3 does not divide model.width = 100"),
        ("[training]\nsteps = 0\n", "training.steps = 0: must be at least 1"),
        ("[training]\nlearning_rate = -1\n", "training.learning_rate = -1.0: must be greater than 0"),
        ("[parallel]\nzero = 4\n", "parallel.zero = 4: must be 0, 1, 2 or 3"),
        ("[parallel]\nstage_layers = [1.5]\n", "parallel.stage_layers = [1.5]: must be a list of whole numbers"),
        ('[parallel]\nrecompute_modules = ["norm"]\n', "recompute_modules = ['norm']: must name some of"),
        (
            "[training]\nbatch_sequences = 6\nmicro_batch_sequences = 4\n",
            "training.micro_batch_sequences = 4 does not divide training.batch_sequences = 6",
        ),
        (
            "[training]\nmicro_batch_sequences = 2\n",
            "moe.group_sequences = 4 does not divide training.micro_batch_sequences = 2",
        ),
        ("[training]\nsequence_length = 64\n", "lets earlier tokens see their future"),
        ("[model]\nfeed_forward_width = 100\n", "model.feed_forward_width = 100 has no effect: no layer is dense"),
        ("[model]\nlayers = 2\ndense_layers = 2\n", "model.dense_layers = 2 leaves no layer with experts"),
        ("[training]\nlearning_rate = inf\n", "training.learning_rate = inf: must be a finite number"),
        ("[model]\nnorm_epsilon = inf\n", "model.norm_epsilon = inf: must be a finite number"),
        ("[training]\nschedule = 'cosine'\ndecay_fraction = 0.1\n", "training.decay_fraction = 0.1 has no effect"),
        ("[moe]\nnum_experts = 7\n", "make training.micro_batch_sequences a multiple of 7"),
        (
            "[moe]\nnum_experts = 6\nexperts_per_token = 3\ngroup_sequences = 1\n[training]\nsequence_length = 1025\n",
            "the nearest moe.group_sequences that works is 2 (given 1)",
        ),
        ("[run]\nname = '../x'\n", "run.name = '../x': must be a folder name"),
    ],
)
def test_what_is_wrong_in_the_file_is_one_message_that_says_what_to_do(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load_config([write(tmp_path, text)])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--moe.num-expert", "8"], "--moe.num-experts"),
        (["--moe.num-experts", "3e-4x"], "--moe.num-experts"),
        (["--learning-rate", "1"], "--training.learning-rate"),
        (["stray"], "stray"),
    ],
)
def test_a_bad_flag_exits_with_status_2_and_a_suggestion(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as caught:
        load_config([write(tmp_path, ""), *flags])
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert message in output.err + output.out


def test_a_misspelt_router_is_answered_with_the_nearest_name(tmp_path):
    with pytest.raises(ConfigError, match=r"moe.router = 'expert_choise': .*did you mean 'expert_choice'\?"):
        load_config([write(tmp_path, ""), "--moe.router", "expert_choise"])


def test_a_flag_can_mend_what_the_file_alone_gets_wrong(tmp_path):
    path = write(tmp_path, "[model]\nwidth = 100\nheads = 3\n")
    assert load_config([path, "--model.heads", "5"]).model.heads == 5


def test_a_flag_can_break_a_file_that_was_right(tmp_path):
    with pytest.raises(ConfigError, match=r"moe.experts_per_token = 20: must be at most moe.num_experts = 16"):
        load_config([write(tmp_path, ""), "--moe.experts-per-token", "20"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("missing.toml", None, "no such file"), ("binary.toml", b"\xff\xfe\x00", "not UTF-8 text (byte 0)")],
)
def test_an_unreadable_file_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config([str(path)])
    assert message in str(caught.value)
    assert name in str(caught.value)


def test_every_key_has_a_description():
    """--help is the reference: a key without a docstring would be a key that nobody can look up."""
    import ast
    import inspect

    import moe.config
    import training.config

    for module in (moe.config, training.config):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config") and node.name != "Config":
                for field, following in zip(node.body, [*node.body[1:], None], strict=True):
                    if isinstance(field, ast.AnnAssign):
                        described = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                        assert described, f"{node.name}.{ast.unparse(field.target)} has no description"


def test_the_sections_are_those_of_the_documentation():
    assert [f.name for f in dataclasses.fields(Config)] == [
        *("run", "data", "model", "moe", "training", "parallel", "eval", "log")
    ]
