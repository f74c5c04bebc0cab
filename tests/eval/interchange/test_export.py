"""A run, written as a checkpoint of transformers, computes what it computed."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from eval import export as command  # noqa: E402
from eval.generate import generate, pad_left  # noqa: E402
from eval.interchange import to_hf  # noqa: E402
from eval.interchange.served import InterchangeError  # noqa: E402
from eval.interchange.to_hf import export  # noqa: E402
from eval.interchange.tokenizer import ODD_TEXTS  # noqa: E402
from tests.eval.interchange.compare import assert_same_function, load, ours, stored, tokens  # noqa: E402
from training.run import Run, RunError  # noqa: E402

TOP_K = {"router": "token_choice"}
THRESHOLDS = {"router": "expert_choice", "allow_leak": True}
# name: family, [model], [moe]
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "olmoe": ("olmoe", {"qk_norm": "width", "norm_epsilon": 1e-3}, TOP_K | {"experts_per_token": 3}),
    "olmoe renormalised, tied": (
        "olmoe",
        {"qk_norm": "width", "tie_embeddings": True},
        TOP_K | {"renormalize": True, "balance_coefficient": 0.02, "balance_scope": "global"},
    ),
    "mixtral": ("mixtral", {"head_dim": 10, "kv_heads": 1, "rope_base": 500.0}, TOP_K | {"renormalize": True}),
    "mixtral from noisy top-k": ("mixtral", {}, {"router": "noisy_top_k", "importance_coefficient": 0.1}),
    "mixtral from gshard": ("mixtral", {}, {"router": "gshard", "capacity_factor": 1.0}),
    "qwen3_moe": (
        "qwen3_moe",
        {"qk_norm": "head", "head_dim": 14, "layers": 5, "dense_layers": 1, "moe_every": 2, "feed_forward_width": 13},
        TOP_K | {"renormalize": True, "jitter": 0.1},
    ),
    "qwen3_moe tied": ("qwen3_moe", {"qk_norm": "head", "tie_embeddings": True}, TOP_K),
    "qwen3_moe from expert choice": ("qwen3_moe", {"qk_norm": "head"}, THRESHOLDS | {"inference": "token_choice"}),
    "thresholds": ("choir", {"qk_norm": "head", "head_dim": 14}, THRESHOLDS | {"shared_width": 7}),
    "thresholds tied": (
        "choir",
        {"tie_embeddings": True, "qk_norm": "width", "dense_layers": 1, "feed_forward_width": 13},
        {"router": "threshold", "score": "sigmoid", "route_scale": 1.7},
    ),
    "mixture of depths": (
        "choir",
        {"rope_base": 300.0},
        {
            "router": "mixture_of_depths",
            "num_experts": 1,
            "experts_per_token": 1,
            "depth_capacity": 0.3,
            "allow_leak": True,
        },
    ),
    "top-k that no family has": (
        "choir",
        {"qk_norm": "head"},
        TOP_K | {"score": "sigmoid", "renormalize": True, "route_scale": 2.0, "shared_width": 7},
    ),
    "dense twin": ("choir", {"qk_norm": "width"}, {"router": "dense"}),
}
every_run = pytest.mark.parametrize("name", RUNS)
one_of_each = pytest.mark.parametrize("name", ["olmoe", "mixtral", "qwen3_moe", "thresholds"])


def written(make_run: Any, name: str, output: Path) -> Run:
    family, model, moe = RUNS[name]
    run = make_run(model, moe)
    asked = None if name in ("olmoe", "mixtral", "qwen3_moe", "thresholds") else family
    assert export(run, output, asked) == family
    return run


@every_run
def test_logits_and_experts_are_the_runs(name: str, make_run: Any, tmp_path: Path) -> None:
    """fp32, within 1e-5, loaded as a user would."""
    run = written(make_run, name, tmp_path / "hf")
    other = load(tmp_path / "hf")
    assert next(other.parameters()).dtype == torch.float32
    model = run.model("cpu")
    assert_same_function(model, other)
    if model.moe_config.is_moe and not name.startswith("mixture of depths"):
        _, chosen = ours(model, tokens(3, 31))
        assert all(0 < mask_TE.float().mean() < 1 and mask_TE.any(0).sum() > 2 for mask_TE in chosen)


@one_of_each
def test_greedy_generation_of_a_left_padded_batch_is_the_runs(name: str, make_run: Any, tmp_path: Path) -> None:
    run = written(make_run, name, tmp_path / "hf")
    model, other = run.model("cpu"), load(tmp_path / "hf")
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (1, 7, 31)]
    token_BS, valid_BS = pad_left(prompts, torch.device("cpu"))
    end = run.corpus().tokenizer.end_of_text
    expected = generate(model, prompts, 20, stop_token=end)
    for cache in (True, False):
        out_BS = other.generate(
            token_BS, attention_mask=valid_BS.long(), max_new_tokens=20, do_sample=False, use_cache=cache
        )
        found = [row[token_BS.shape[1] :] for row in out_BS.tolist()]
        assert [row[: row.index(end)] if end in row else row for row in found] == expected
    assert max(map(len, expected)) == 20


@one_of_each
def test_left_padding_changes_no_logit(name: str, make_run: Any, tmp_path: Path) -> None:
    run = written(make_run, name, tmp_path / "hf")
    model, other = run.model("cpu"), load(tmp_path / "hf")
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (5, 13)]
    token_BS, valid_BS = pad_left(prompts, torch.device("cpu"))
    with torch.no_grad():
        padded_BSV = other(token_BS, attention_mask=valid_BS.long()).logits
        for row, prompt in enumerate(prompts):
            alone_SV = model(torch.tensor([prompt]))[0]
            assert (padded_BSV[row, -len(prompt) :] - alone_SV).abs().max() <= 1e-5


@every_run
def test_the_files_are_those_that_save_pretrained_writes(name: str, make_run: Any, tmp_path: Path) -> None:
    """Names, values and configuration: loading and saving again changes nothing."""
    written(make_run, name, tmp_path / "hf")
    load(tmp_path / "hf").save_pretrained(tmp_path / "again")
    before, after = stored(tmp_path / "hf"), stored(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("hf", "again")]
    assert configs[0] == configs[1]


def test_a_trained_state_of_the_router_does_not_round_in_bf16(make_run: Any, tmp_path: Path) -> None:
    run = written(make_run, "thresholds", tmp_path / "hf")
    other, state = load(tmp_path / "hf", dtype=torch.bfloat16), run.model("cpu").state_dict()
    assert other.lm_head.weight.dtype == torch.bfloat16
    router = other.model.layers[1].mlp.router
    assert torch.equal(router.weight, state["blocks.1.feed_forward.router.weight_ED"])
    assert torch.equal(router.cutoffs, state["blocks.1.feed_forward.router.cutoff_E"])
    assert other(tokens(1, 5)).logits.isfinite().all()


def test_a_threshold_model_trains_and_takes_embeddings(make_run: Any, tmp_path: Path) -> None:
    run = written(make_run, "thresholds", tmp_path / "hf")
    other, token_BS = load(tmp_path / "hf"), tokens(2, 9)
    out = other(token_BS, labels=token_BS)
    out.loss.backward()
    assert all(parameter.grad is not None for parameter in other.parameters())
    logits_BSV = run.model("cpu")(token_BS)
    expected = torch.nn.functional.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), token_BS[:, 1:].flatten())
    assert out.loss.item() == pytest.approx(expected.item(), abs=1e-5)
    embedded = other(inputs_embeds=other.model.embed_tokens(token_BS)).logits
    assert torch.equal(embedded, out.logits)


def test_the_modelling_files_need_torch_and_transformers_only() -> None:
    for name in to_hf.SOURCES:
        tree = ast.parse((Path(to_hf.__file__).parent / name).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [f"{'.' * node.level}{node.module}"]
            else:
                continue
            allowed = {"torch", "transformers", "typing", "__future__", ""}
            assert {module.split(".")[0] for module in imported} <= allowed
            assert all(not module.startswith(".") or module == ".configuration_choir" for module in imported)


def test_transformers_default_experts_compute_the_same(make_run: Any, tmp_path: Path) -> None:
    """torch's grouped products, which want rows of whole 16 bytes."""
    run = make_run({"qk_norm": "head"}, TOP_K | {"expert_width": 12})
    export(run, tmp_path / "hf")
    other = load(tmp_path / "hf", experts_implementation=None)
    assert other.config._experts_implementation == "grouped_mm"
    assert_same_function(run.model("cpu"), other)


def test_several_files_and_an_index(make_run: Any, tmp_path: Path) -> None:
    run = make_run(*RUNS["olmoe"][1:])
    export(run, tmp_path / "hf", file_bytes=20_000)
    assert len(list((tmp_path / "hf").glob("model-*-of-*.safetensors"))) > 2
    assert not (tmp_path / "hf" / "model.safetensors").exists()
    assert_same_function(run.model("cpu"), load(tmp_path / "hf"))


@one_of_each
def test_the_tokenizer_gives_the_corpus_ids(name: str, make_run: Any, tmp_path: Path) -> None:
    run = written(make_run, name, tmp_path / "hf")
    tokenizer, expected = (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True),
        run.corpus(),
    )
    for text in (*ODD_TEXTS, "\n\n \n", "x" * 300, "the fox\u2019s caf\u00e9 \U0001f98a"):
        ids = expected.tokenizer.encode(text)
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == expected.tokenizer.decode(ids)
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == expected.tokenizer.end_of_text
    batch = tokenizer(["the", "the quick brown fox"], padding=True, return_tensors="pt")
    assert batch["attention_mask"][0, 0] == 0 and batch["attention_mask"][0, -1] == 1
    assert "token_type_ids" not in batch


def test_token_ids_of_the_model(make_run: Any, tmp_path: Path) -> None:
    """No padding_idx: transformers would keep the end-of-text row of the embedding from learning."""
    run = written(make_run, "olmoe", tmp_path / "hf")
    other, end = load(tmp_path / "hf"), run.corpus().tokenizer.end_of_text
    assert other.config.eos_token_id == other.generation_config.eos_token_id == end
    assert other.generation_config.pad_token_id == end
    assert other.config.pad_token_id is None and other.model.embed_tokens.padding_idx is None


def test_padded_ids_are_never_generated(make_run: Any, tmp_path: Path) -> None:
    run = make_run({"vocabulary_size": 384, "qk_norm": "head"}, TOP_K)
    export(run, tmp_path / "hf")
    other, prompt = load(tmp_path / "hf"), tokens(1, 6)
    out_S = other.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False)[0, 6:]
    end = run.corpus().tokenizer.end_of_text
    (expected,) = generate(run.model("cpu"), prompt.tolist(), 30, stop_token=end, vocabulary_size=270)
    assert [token for token in out_S.tolist() if token != end] == expected
    (free,) = generate(run.model("cpu"), prompt.tolist(), 30)
    assert max(free) >= 270 > max(expected)


@pytest.mark.parametrize(
    ("family", "model", "moe", "named"),
    [
        ("olmoe", {"qk_norm": "head"}, TOP_K, 'model.qk_norm = "head" (only "width"); --family qwen3_moe can'),
        ("olmoe", {"qk_norm": "width", "head_dim": 10}, TOP_K, "model.head_dim = 10 (only width / heads = 24/4)"),
        ("olmoe", {"qk_norm": "width", "dense_layers": 1}, TOP_K, "model.dense_layers = 1, model.moe_every = 1"),
        ("mixtral", {}, TOP_K, "moe.renormalize = false (always renormalises); --family choir can"),
        ("mixtral", {"moe_every": 2}, TOP_K | {"renormalize": True}, "model.moe_every = 2 (no dense layers)"),
        ("qwen3_moe", {"qk_norm": "head"}, TOP_K | {"shared_width": 7}, "moe.shared_width = 7 (no shared expert)"),
        ("qwen3_moe", {"qk_norm": "head"}, TOP_K | {"score": "sigmoid"}, 'moe.score = "sigmoid" (only a softmax)'),
        ("qwen3_moe", {"qk_norm": "head"}, TOP_K | {"route_scale": 2.5}, "moe.route_scale = 2.5 (only 1)"),
        ("qwen3_moe", {"qk_norm": "head"}, THRESHOLDS, 'moe.router = "expert_choice" served by thresholds'),
        ("qwen3_moe", {"qk_norm": "head"}, {"router": "dense"}, 'moe.router = "dense" (no experts)'),
        ("choir", {}, {"router": "loss_free"}, 'moe.router = "loss_free": can be exported where'),
        (None, {}, TOP_K, "no family of transformers expresses this run (olmoe: model.qk_norm"),
        (
            None,
            {},
            THRESHOLDS | {"inference": "predictor", "predictor_coefficient": 0.1},
            'moe.inference = "predictor": a predictor cannot be exported',
        ),
        (
            "choir",
            {"dense_layers": 1, "feed_forward_width": 13},
            {"router": "dense"},
            "model.feed_forward_width = 13: the dense twin's other layers are 20 wide",
        ),
    ],
)
def test_what_a_family_cannot_express_is_named(
    family: str | None, model: dict[str, Any], moe: dict[str, Any], named: str, make_run: Any, tmp_path: Path
) -> None:
    with pytest.raises(InterchangeError) as caught:
        export(make_run(model, moe), tmp_path / "hf", family)
    assert named in str(caught.value)
    assert not (tmp_path / "hf").exists()


def test_what_is_there_is_replaced_only_if_asked_and_only_if_it_is_an_export(make_run: Any, tmp_path: Path) -> None:
    run = written(make_run, "olmoe", tmp_path / "hf")
    (tmp_path / "hf" / "old").touch()
    with pytest.raises(InterchangeError, match="exists; choose another --output, or --overwrite"):
        export(run, tmp_path / "hf")
    export(run, tmp_path / "hf", overwrite=True)
    assert not (tmp_path / "hf" / "old").exists()
    (tmp_path / "mine").mkdir()
    for taken in (tmp_path / "mine", run.folder):
        with pytest.raises(InterchangeError, match="is not a checkpoint of transformers; it is left alone"):
            export(run, taken, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mine", "run"]


def test_nothing_half_written_is_left(make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written(make_run, "olmoe", tmp_path / "hf")
    before = stored(tmp_path / "hf")

    def full(*arguments: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(to_hf, "write_tensors", full)
    for output in (tmp_path / "hf", tmp_path / "new"):
        with pytest.raises(OSError, match="No space left"):
            export(run, output, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]
    assert stored(tmp_path / "hf").keys() == before.keys()


def test_weights_in_the_wrong_place_are_noticed(make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(*RUNS["olmoe"][1:])
    right = to_hf.tensors_of

    def swapped(*arguments: Any) -> list[tuple[str, torch.Tensor]]:
        swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        return [(".".join(swap.get(part, part) for part in name.split(".")), t) for name, t in right(*arguments)]

    monkeypatch.setattr(to_hf, "tensors_of", swapped)
    with pytest.raises(InterchangeError, match="transformers computes other logits"):
        export(run, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    export(run, tmp_path / "hf", check=False)


def test_the_command(make_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(*RUNS["thresholds"][1:])
    command.main([str(run.folder), "--to", "hf"])
    out = capsys.readouterr().out
    assert "loading step 2 (of 4)" in out and "logits differ by at most" in out
    assert f'from_pretrained("{run.folder}/hf", trust_remote_code=True)' in out
    command.main([str(run.folder), "--to", "hf", "--output", str(tmp_path / "bare"), "--no-tokenizer", "--no-check"])
    assert not (tmp_path / "bare" / "tokenizer.json").exists()
    assert load(tmp_path / "bare").config.eos_token_id is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["X"], "one of the arguments --to --from is required"),
        (["X", "--to", "gguf"], "invalid choice: 'gguf'"),
        (["X", "--to", "hf", "--family", "llama"], "invalid choice: 'llama'"),
        (["X", "--to", "hf", "--corpus", "Y"], "--corpus: no flag of --to hf"),
        (["X", "--to", "hf", "--training.steps", "4"], "--training.steps 4: no flag of --to hf"),
        (["X", "--from", "hf"], "--from hf needs --to-run RUN"),
        (["X", "--from", "hf", "--to-run", "Y", "--no-check"], "--no-check: no flag of --from hf"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


def test_runs_that_cannot_be_read(make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="not a run folder"):
        command.main([str(tmp_path), "--to", "hf"])
    run = make_run(*RUNS["olmoe"][1:])
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers", None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install -c constraints.txt transformers"):
            export(run, tmp_path / "hf")
    (run.checkpoints / "step_2").rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="no checkpoint yet"):
        export(run, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
