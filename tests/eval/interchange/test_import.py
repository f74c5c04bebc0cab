"""A checkpoint of transformers, imported as a run, computes what it computed, and can be trained further."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

transformers = pytest.importorskip("transformers")

from data.corpus import Corpus  # noqa: E402
from data.errors import DataError  # noqa: E402
from data.prepare import prepare  # noqa: E402
from eval import export as command  # noqa: E402
from eval.interchange import from_hf  # noqa: E402
from eval.interchange.from_hf import import_checkpoint  # noqa: E402
from eval.interchange.served import InterchangeError  # noqa: E402
from eval.interchange.to_hf import export  # noqa: E402
from moe.config import ConfigError  # noqa: E402
from tests.eval.interchange.compare import assert_same_function, load, ours, stored, tokens  # noqa: E402
from train import train  # noqa: E402
from training.job import Job  # noqa: E402
from training.load_config import load_config  # noqa: E402
from training.run import Run  # noqa: E402

VOCABULARY = 61
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 40,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.3,
}
QWEN = {"num_experts": 7, "moe_intermediate_size": 9, "intermediate_size": 13, "head_dim": 10}
# name: family, keys of its configuration
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("Olmoe", {"num_experts": 5, "intermediate_size": 9, "num_experts_per_tok": 3}),
    "olmoe tied": (
        "Olmoe",
        {"num_experts": 6, "intermediate_size": 9, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "intermediate_size": 9, "head_dim": 10, "rms_norm_eps": 1e-3}),
    "mixtral of one kv head": (
        "Mixtral",
        {
            "num_local_experts": 3,
            "intermediate_size": 9,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 321.0},
        },
    ),
    "qwen3_moe": ("Qwen3Moe", QWEN | {"norm_topk_prob": True}),
    "qwen3_moe, dense layers listed": (
        "Qwen3Moe",
        QWEN | {"num_hidden_layers": 5, "mlp_only_layers": [0, 1], "tie_word_embeddings": True},
    ),
    "qwen3_moe, every second layer": ("Qwen3Moe", QWEN | {"num_hidden_layers": 5, "decoder_sparse_step": 2}),
}
every_model = pytest.mark.parametrize("name", MODELS)


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A random model of transformers, written by it; norms are random too."""
    family, values = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SHAPE | values)
    config._experts_implementation = "eager"
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder, **options)
    return model.eval()


def edited(folder: Path, **values: Any) -> None:
    """Change keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@every_model
def test_logits_and_experts_are_the_checkpoints(name: str, tmp_path: Path) -> None:
    other = saved(name, tmp_path / "hf")
    run = import_checkpoint(tmp_path / "hf", tmp_path / "run")
    assert run.checkpoint().step == 0
    model = Run.open(tmp_path / "run").model("cpu")
    assert_same_function(model, other, VOCABULARY)
    if "every second" in name:
        assert [layer.index for layer in model.moe_layers()] == [1, 3]


@every_model
def test_out_again_is_bit_for_bit_what_came_in(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "hf")
    run = import_checkpoint(tmp_path / "hf", tmp_path / "run")
    family = export(run, tmp_path / "again", tokenizer=False)
    assert family == json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"]
    before, after = stored(tmp_path / "hf"), stored(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_run_that_goes_out_and_comes_back_has_the_same_weights(make_run: Any, tmp_path: Path) -> None:
    """Through transformers' own save_pretrained."""
    run = make_run(
        {"qk_norm": "head", "head_dim": 14, "layers": 5, "dense_layers": 2, "feed_forward_width": 13},
        {"router": "token_choice", "renormalize": True, "balance_coefficient": 0.02},
    )
    export(run, tmp_path / "hf")
    load(tmp_path / "hf").save_pretrained(tmp_path / "again")
    back = import_checkpoint(tmp_path / "again", tmp_path / "back")
    before, after = run.model("cpu").state_dict(), back.model("cpu").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert back.config.moe.balance_coefficient == pytest.approx(0.02)
    assert back.config.model.dense_layers == 2 and back.config.model.feed_forward_width == 13


def test_several_files_in_bf16(tmp_path: Path) -> None:
    saved("mixtral", tmp_path / "hf", torch.bfloat16, max_shard_size="8KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file()
    run = import_checkpoint(tmp_path / "hf", tmp_path / "run")
    assert_same_function(run.model("cpu"), load(tmp_path / "hf", dtype=torch.float32), VOCABULARY)


def test_the_rope_base_of_an_old_configuration_is_read(tmp_path: Path) -> None:
    """Before transformers 5, `rope_theta` stood by itself; without it each family has a default of its own."""
    saved("olmoe", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    values = json.loads(path.read_text())
    del values["rope_parameters"]
    path.write_text(json.dumps(values | {"rope_theta": 777.0, "rope_scaling": None}))
    assert import_checkpoint(tmp_path / "hf", tmp_path / "run").config.model.rope_base == 777.0
    saved("mixtral", tmp_path / "mixtral")
    path = tmp_path / "mixtral" / "config.json"
    values = json.loads(path.read_text())
    del values["rope_parameters"]
    path.write_text(json.dumps(values))
    assert import_checkpoint(tmp_path / "mixtral", tmp_path / "run2").config.model.rope_base == 1_000_000.0


@pytest.mark.parametrize(
    ("name", "values", "named"),
    [
        ("mixtral", {"sliding_window": 16}, "sliding_window = 16"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act = 'gelu' (only 'silu')"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("olmoe", {"attention_bias": True}, "attention_bias = True"),
        ("olmoe", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("olmoe", {"head_dim": 10}, "head_dim = 10 (only hidden_size / num_attention_heads)"),
        (
            "olmoe",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_parameters = {'rope_type': 'linear'",
        ),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window = True"),
        (
            "qwen3_moe",
            {"attention_bias": True, "hidden_act": "relu"},
            "hidden_act = 'relu' (only 'silu'); attention_bi",
        ),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "the layers with experts are [0, 2, 3] of 4"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, "the layers with experts are none of 4"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("qwen3_moe", {"model_type": "llama"}, "model_type = 'llama': must be one of olmoe, mixtral, qwen3_moe"),
        ("qwen3_moe", {"model_type": "choir"}, "continue the run that was exported instead"),
        ("qwen3_moe", {"num_hidden_layers": "three"}, "transformers refuses it"),
    ],
)
def test_what_choir_does_not_compute_is_named_with_its_value(
    name: str, values: dict[str, Any], named: str, tmp_path: Path
) -> None:
    saved(name, tmp_path / "hf")
    edited(tmp_path / "hf", **({"num_hidden_layers": 4} if "mlp_only_layers" in values else {}) | values)
    with pytest.raises(InterchangeError) as caught:
        import_checkpoint(tmp_path / "hf", tmp_path / "run")
    assert named in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def renamed(tensors: dict[str, Any], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


GATE, DOWN = "model.layers.1.mlp.gate.weight", "model.layers.2.mlp.experts.4.down_proj.weight"
FILES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda t: t.pop(DOWN), f"1 tensors missing, 0 unexpected: missing {DOWN}"),
    "a bias too many": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(24)}),
        "0 tensors missing, 1 unexpected: unexpected model.layers.0.self_attn.q_proj.bias",
    ),
    "another name": (lambda t: renamed(t, GATE, "x"), f"missing {GATE}; unexpected x"),
    "stacked experts": (
        lambda t: t.update({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(5, 18, 24)}),
        "its experts are stacked: transformers' save_pretrained writes them apart",
    ),
    "another shape": (
        lambda t: t.update({GATE: t[GATE][:4].clone()}),
        f"{GATE} has shape (4, 24), its config.json wants (5, 24)",
    ),
    "quantised": (lambda t: t.update({GATE: t[GATE].to(torch.int8)}), f"{GATE} is torch.int8; allowed are"),
}


@pytest.mark.parametrize("fault", FILES)
def test_tensors_must_be_exactly_those_of_the_model(fault: str, tmp_path: Path) -> None:
    saved("olmoe", tmp_path / "hf")
    tensors = stored(tmp_path / "hf")
    change, message = FILES[fault]
    change(tensors)
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(InterchangeError) as caught:
        import_checkpoint(tmp_path / "hf", tmp_path / "run")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_tables_that_every_model_computes_are_ignored_and_a_tied_head_must_be_the_embedding(tmp_path: Path) -> None:
    saved("olmoe tied", tmp_path / "hf")
    tensors = stored(tmp_path / "hf")
    assert "lm_head.weight" not in tensors
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    import_checkpoint(tmp_path / "hf", tmp_path / "run")
    tensors["lm_head.weight"][3] += 1
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(InterchangeError, match=r"tie_word_embeddings = true, but lm_head\.weight is not the embedding"):
        import_checkpoint(tmp_path / "hf", tmp_path / "other")


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    saved("olmoe", tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(InterchangeError, match=r"pytorch_model\.bin is a pickle, which can run code when it is read"):
        import_checkpoint(tmp_path / "hf", tmp_path / "run")


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(InterchangeError, match=r"not a checkpoint of transformers \(no config.json\)"):
        import_checkpoint(tmp_path, tmp_path / "run")
    saved("olmoe", tmp_path / "hf")
    weights, index = tmp_path / "hf" / "model.safetensors", tmp_path / "hf" / "model.safetensors.index.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:999])
    with pytest.raises(InterchangeError, match="not a safetensors file"):
        import_checkpoint(tmp_path / "hf", tmp_path / "run")
    weights.write_bytes(whole)
    shutil.copy(weights, tmp_path / "outside.safetensors")
    for text, message in (
        ("{}", "not an index of safetensors files"),
        ('{"weight_map": {"a": "../outside.safetensors"}}', "is no safetensors file of"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "is no safetensors file of"),
        ('{"weight_map": {"a": "model.safetensors"}}', "a is not in it; the checkpoint is incomplete"),
    ):
        index.write_text(text)
        with pytest.raises(InterchangeError, match=message):
            import_checkpoint(tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def quiet(config: Any) -> int:
    return train(config, Job(), Console(file=io.StringIO()))


def test_an_imported_run_is_trained_further_from_its_weights(
    make_run: Any, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python train.py RUN/config.toml --run.resume auto`, with settings given at the import."""
    export(make_run({"qk_norm": "width", "vocabulary_size": 272}, {"router": "token_choice"}), tmp_path / "hf")
    flags = "--training.steps 3 --training.warmup-steps 0"
    flags += " --training.batch-sequences 4 --training.learning-rate 1e-9 --training.sequence-length 16"
    flags += " --eval.final-tokens 64 --eval.every 0 --log.no-tensorboard --log.every 1"
    arguments = [
        "--from",
        "hf",
        str(tmp_path / "hf"),
        "--to-run",
        str(tmp_path / "more"),
        "--corpus",
        str(corpus.folder),
    ]
    command.main([*arguments, *flags.split()])
    told = f"train it further: python train.py {tmp_path}/more/config.toml --run.resume auto"
    assert told in capsys.readouterr().out
    run = Run.open(tmp_path / "more")
    start = run.model("cpu").state_dict()
    assert quiet(load_config([str(tmp_path / "more" / "config.toml"), "--run.resume", "auto"])) == 0
    run = Run.open(tmp_path / "more")
    assert run.checkpoint().step == 3
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 3]
    assert len(run.routing_records()) == 3
    # The learning rate is next to nothing, so these are the imported weights, moved.
    end = run.model("cpu").state_dict()
    moved = max(float((end[key] - start[key]).abs().max()) for key in start)
    assert 0 < moved < 1e-6


def test_an_imported_run_without_a_corpus_is_fed_with_token_ids(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "hf")
    run = import_checkpoint(tmp_path / "hf", tmp_path / "run")
    _, chosen = ours(run.model("cpu"), tokens(2, 9, VOCABULARY))
    assert [int(mask_TE.sum()) for mask_TE in chosen] == [2 * 9 * 2] * 3
    with pytest.raises(DataError, match="run/corpus is not a corpus"):
        run.corpus()


def test_a_corpus_of_another_tokenizer_is_refused(make_run: Any, corpus: Corpus, tmp_path: Path) -> None:
    export(make_run({"qk_norm": "width"}, {"router": "token_choice"}), tmp_path / "hf")
    (tmp_path / "other.txt").write_text("sphinx of black quartz, judge my vow! " * 300)
    other = prepare(tmp_path / "corpus", corpus.vocabulary_size, {"text": [tmp_path / "other.txt"]})
    assert other.vocabulary_size == corpus.vocabulary_size
    with pytest.raises(InterchangeError, match="in its vocabulary: ids of one tokenizer mean other text"):
        import_checkpoint(tmp_path / "hf", tmp_path / "back", other.folder)
    assert not (tmp_path / "back").exists()
    lines: list[str] = []
    (tmp_path / "hf" / "tokenizer.json").unlink()
    import_checkpoint(tmp_path / "hf", tmp_path / "back", other.folder, log=lines.append)
    assert any("only the size of the vocabulary was compared" in line for line in lines)
    saved("olmoe", tmp_path / "small")
    with pytest.raises(DataError, match="the model's vocabulary size is 61, but the corpus"):
        import_checkpoint(tmp_path / "small", tmp_path / "small-run", corpus.folder)


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        ("--model.width 48", InterchangeError, "--model.width 48: it belongs to the checkpoint; here it is 24"),
        ("--moe.renormalize", InterchangeError, "--moe.renormalize True: it belongs to the checkpoint"),
        ("--run.name other", InterchangeError, "--run.name other: it belongs to the checkpoint"),
        ("--data.corpus x", InterchangeError, "--data.corpus x: give --corpus"),
        ("--training.steps 0", ConfigError, "training.steps = 0"),
    ],
)
def test_flags_cannot_change_what_the_weights_compute(
    flags: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    saved("olmoe", tmp_path / "hf")
    with pytest.raises(error) as caught:
        import_checkpoint(tmp_path / "hf", tmp_path / "run", flags=flags.split())
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_taken_folder_and_a_failure_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("olmoe", tmp_path / "hf")
    with pytest.raises(InterchangeError, match="exists; choose another --to-run, or remove the folder"):
        import_checkpoint(tmp_path / "hf", tmp_path / "hf")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers", None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install -c constraints.txt transformers"):
            import_checkpoint(tmp_path / "hf", tmp_path / "run")

    def full(*arguments: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(from_hf, "save_checkpoint", full)
    with pytest.raises(OSError, match="No space left"):
        import_checkpoint(tmp_path / "hf", tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
