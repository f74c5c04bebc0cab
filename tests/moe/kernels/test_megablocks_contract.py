"""The MegaBlocks backend, held to the calls and limits of its packages by a stand-in that runs on a CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from moe.config import ConfigError, MoEConfig
from moe.kernels import BACKENDS, grouped_mlp, megablocks_backend
from moe.routing import Routing, RoutingContext
from tests.moe import oracle
from tests.moe.helpers import make_layer, relative_error, routing_from_mask
from tests.moe.kernels import megablocks_stand_in

ROOT = Path(__file__).parents[3]
T, D, E, F = 12, 24, 5, 16
TOLERANCE = 2e-2  # of bf16 inputs, hidden rows and sums


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    megablocks_stand_in.install(monkeypatch)
    monkeypatch.setattr(megablocks_backend, "DEVICE", "cpu")


def ragged() -> Tensor:
    """Any number of experts a token, with experts that nobody wants first, last and in between."""
    mask_TE = torch.rand(T, E) > 0.3
    mask_TE[:, [0, 2, 4]] = False
    mask_TE[5] = False
    return mask_TE


def top_k(k: int) -> Tensor:
    return torch.zeros(T, E, dtype=torch.bool).scatter_(1, torch.rand(T, E).topk(k).indices, True)


def one_expert() -> Tensor:
    mask_TE = torch.zeros(T, E, dtype=torch.bool)
    mask_TE[:, 3] = True
    return mask_TE


def two_of_three_experts() -> Tensor:
    mask_TE = torch.zeros(T, E, dtype=torch.bool)
    mask_TE[:, 1] = True
    mask_TE[::2, 0] = mask_TE[1::2, 3] = True
    return mask_TE


def two_on_average() -> Tensor:
    """2 T assignments, as if every token had two, but some have one or three."""
    mask_TE = top_k(2)
    giver, taker = mask_TE[0].nonzero()[0], (~mask_TE[1]).nonzero()[0]
    mask_TE[0, giver], mask_TE[1, taker] = False, True
    return mask_TE


def equal_groups(capacity: int = 4) -> Tensor:
    """Expert choice among all tokens but two."""
    mask_TE = torch.zeros(T, E, dtype=torch.bool)
    for e in range(E):
        mask_TE[torch.randperm(T - 2)[:capacity], e] = True
    return mask_TE


# (who goes where, capacity, the calls expected in the forward pass)
OWN, THEIRS = ["gmm", "gmm"], ["gather", "gmm", "gmm", "scatter"]
MASKS = {
    "ragged": (ragged, None, OWN),
    "top-1": (lambda: top_k(1), None, OWN),
    "top-2": (lambda: top_k(2), None, THEIRS),
    "top-2 of three experts": (two_of_three_experts, None, THEIRS),
    "all experts": (lambda: torch.ones(T, E, dtype=torch.bool), None, THEIRS),
    "all experts, known capacity": (lambda: torch.ones(T, E, dtype=torch.bool), T, OWN),
    "all in one expert": (one_expert, None, OWN),
    "two experts on average": (two_on_average, None, OWN),
    "expert choice": (equal_groups, 4, OWN),
}


def operands(device: str = "cpu") -> list[Tensor]:
    """x, w13, w2."""
    shapes = [(T, D), (E, 2, F, D), (E, D, F)]
    return [(0.5 * torch.randn(shape)).to(device, torch.bfloat16).requires_grad_() for shape in shapes]


def compare(routing: Routing, inputs: list[Tensor], pairs: list[tuple[int, int]], weighted: bool) -> None:
    """Output and every gradient against a float64 loop; `pairs` in the order of the assignments."""
    inputs = inputs + ([routing.weight_A] if weighted else [])
    y_TD = grouped_mlp(*inputs[:3], routing, "megablocks")
    upstream_TD = torch.randn(y_TD.shape).to(y_TD)
    found = torch.autograd.grad((y_TD * upstream_TD).sum(), inputs)

    copies = [t.detach().cpu().double().requires_grad_() for t in inputs]
    weight_A = copies[3] if weighted else torch.ones(len(pairs), dtype=torch.float64)
    rows = [0.0 * x_D for x_D in copies[0]]
    for weight, (t, e) in zip(weight_A, pairs, strict=True):
        gate_FD, up_FD = copies[1][e]
        rows[t] = rows[t] + weight * oracle.swiglu(copies[0][t], gate_FD, up_FD, copies[2][e])
    loop_TD = torch.stack(rows)
    expected = torch.autograd.grad((loop_TD * upstream_TD.cpu().double()).sum(), copies)
    assert y_TD.dtype == torch.bfloat16 and not y_TD._is_view()
    assert all(a.dtype == b.dtype for a, b in zip(found, inputs, strict=True))
    for actual, wanted in zip((y_TD, *found), (loop_TD, *expected), strict=True):
        assert relative_error(actual.cpu(), wanted) < TOLERANCE
    taken = {t for t, _ in pairs}
    free = [t for t in range(len(rows)) if t not in taken]
    assert y_TD[free].eq(0).all() and found[0][free].eq(0).all()


def routed(mask_TE: Tensor, capacity: int | None, weighted: bool, device: str = "cpu") -> Routing:
    scores_TE = torch.rand(mask_TE.shape).to(device)
    routing = routing_from_mask(mask_TE.to(device), scores_TE, scores_TE)
    routing.capacity = capacity
    routing.weight_A = routing.weight_A.clone().requires_grad_() if weighted else None
    return routing


def in_order(mask_TE: Tensor) -> list[tuple[int, int]]:
    return [(t, e) for e, t in mask_TE.T.nonzero().tolist()]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("case", sorted(MASKS))
def test_every_routing_is_the_loop(case: str, weighted: bool) -> None:
    """Forward and backward; MegaBlocks' gather and scatter only where they can express the routing."""
    make, capacity, calls = MASKS[case]
    mask_TE = make()
    compare(routed(mask_TE, capacity, weighted), operands(), in_order(mask_TE), weighted)
    assert calls == megablocks_stand_in.CALLS


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("counts", [[3, 0, 8, 1, 0], [0, 0, 0, 0, 12], [2, 2, 8, 0, 0]])
def test_rows_in_expert_order_keep_their_order(counts: list[int], weighted: bool) -> None:
    weight_A = torch.rand(T, requires_grad=True) if weighted else None
    routing = Routing(None, torch.tensor(counts).cumsum(0).to(torch.int32), weight_A, T)
    compare(routing, operands(), list(enumerate(e for e, n in enumerate(counts) for _ in range(n))), weighted)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("gathered", [True, False])
def test_a_known_capacity_is_not_read_from_the_device(gathered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert choice waits for nothing: the ends of its runs hold no data here, and are not missed."""
    monkeypatch.setattr("moe.kernels.check_operands", lambda *operands: None)  # it refuses them for being elsewhere
    mask_TE = equal_groups()
    routing = routed(mask_TE, 4, weighted=True)
    pairs, inputs = in_order(mask_TE), operands()
    if not gathered:
        routing.token_A, pairs = None, list(enumerate(e for e in range(E) for _ in range(4)))
        inputs[0] = torch.randn(4 * E, D).to(torch.bfloat16).requires_grad_()
    routing.offsets_E = routing.offsets_E.to("meta")
    compare(routing, inputs, pairs, weighted=True)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("gathered", [True, False])
def test_no_assignment_at_all_gives_zeros_and_zero_gradients(gathered: bool) -> None:
    """A starved process: nothing may be missing, and a NaN that nobody takes stays where it is."""
    inputs = operands()
    x_TD = torch.full((T if gathered else 0, D), torch.nan, dtype=torch.bfloat16, requires_grad=True)
    weight_A = torch.zeros(0, requires_grad=True)
    token_A = torch.zeros(0, dtype=torch.int64) if gathered else None
    routing = Routing(token_A, torch.zeros(E, dtype=torch.int32), weight_A, x_TD.shape[0])
    y_TD = grouped_mlp(x_TD, *inputs[1:], routing, "megablocks")
    y_TD.sum().backward()
    assert y_TD.shape == x_TD.shape and y_TD.dtype == torch.bfloat16
    for tensor in (y_TD, x_TD.grad, inputs[1].grad, inputs[2].grad, weight_A.grad):
        assert tensor is not None and tensor.eq(0).all()


@pytest.mark.usefixtures("stand_in")
def test_non_contiguous_inputs_are_packed() -> None:
    """The packages read memory, not strides."""
    mask_TE = top_k(2)
    inputs = [t.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_() for t in operands()]
    assert not any(t.is_contiguous() for t in inputs)
    compare(routed(mask_TE, None, True), inputs, in_order(mask_TE), True)


@pytest.mark.usefixtures("stand_in")
def test_beyond_int32_our_own_gather_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    mask_TE = top_k(2)
    for limit, calls in ((2 * T * D + 1, THEIRS), (2 * T * D, OWN)):
        monkeypatch.setattr(megablocks_backend, "INT32_ELEMENTS", limit)
        megablocks_stand_in.CALLS.clear()
        compare(routed(mask_TE, None, True), operands(), in_order(mask_TE), True)
        assert calls == megablocks_stand_in.CALLS


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("router", ["token_choice", "threshold", "expert_choice"])
def test_a_layer_runs_on_it(router: str) -> None:
    """The key is read: the same layer with the other backend gives the same numbers."""
    sizes = {"router": router, "num_experts": 4, "expert_width": 16, "group_sequences": 2, "allow_leak": True}
    layer = make_layer(D, **sizes, backend="megablocks").to(torch.bfloat16)
    other = make_layer(D, **sizes, backend="torch").to(torch.bfloat16)
    other.load_state_dict(layer.state_dict())
    x_BSD = torch.randn(2, 8, D).to(torch.bfloat16)
    outputs = [module(x_BSD, RoutingContext(2, 8, mode="train")) for module in (layer, other)]
    assert relative_error(*outputs) < TOLERANCE
    assert "gmm" in megablocks_stand_in.CALLS


def test_the_package_is_imported_only_when_called() -> None:
    script = (
        "import sys, moe.layer, moe.kernels\n"
        "print([m for m in sys.modules if 'megablocks' in m or 'grouped_gemm' in m])\n"
        "from moe.kernels.megablocks_backend import grouped_mlp_megablocks\n"
        "print([m for m in sys.modules if m.startswith(('megablocks', 'grouped_gemm'))])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n[]\n", done.stderr


def test_the_configuration_offers_every_backend() -> None:
    assert set(get_args(get_type_hints(MoEConfig)["backend"])) == {"auto", *BACKENDS}


def refused(inputs: list[Tensor]) -> str:
    """The message, which starts with the key and names the backend that works."""
    with pytest.raises(ConfigError) as caught:
        grouped_mlp(*inputs, routed(top_k(2), None, True), "megablocks")
    message = str(caught.value)
    assert message.startswith('moe.backend = "megablocks" ') and 'moe.backend = "torch" works' in message
    return message


def test_cpu_tensors_are_refused() -> None:
    assert 'runs on cuda only, and was given cpu: moe.backend = "torch" works there' in refused(operands())


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("dtypes", "given"),
    [
        ([torch.float32] * 3, "float32"),
        ([torch.float16] * 3, "float16"),
    ],
)
def test_other_dtypes_are_refused(dtypes: list[torch.dtype], given: str) -> None:
    message = refused([t.to(dtype) for t, dtype in zip(operands(), dtypes, strict=True)])
    assert f"bfloat16 only, and was given {given}: set training.precision" in message


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("width", "hidden"), [(20, 16), (24, 12)])
def test_widths_that_16_bytes_do_not_divide_are_refused(width: int, hidden: int) -> None:
    shapes = [(T, width), (E, 2, hidden, width), (E, width, hidden)]
    message = refused([torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes])
    assert f"model.width = {width} and moe.expert_width = {hidden}" in message


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("imported", "missing"), [("megablocks", "megablocks"), ("megablocks", "stk"), ("grouped_gemm", "grouped_gemm")]
)
def test_a_missing_package_is_named_with_how_to_install_it(
    imported: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stk` is one that MegaBlocks imports itself."""

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == imported:
                raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, imported)
    monkeypatch.delitem(sys.modules, f"{imported}.ops")
    message = refused(operands())
    assert f"needs the package {missing}, which is not installed: pip install" in message
    (requirements,) = re.findall(r"-r (\S+\.txt)", message)
    text = (ROOT / requirements).read_text()
    command = re.search(r"pip install .*?\.txt", message)[0]
    assert command in text and command in (ROOT / "docs/kernels.md").read_text()
    assert re.findall(r"^(\w[\w-]*)==", text, flags=re.MULTILINE) == ["megablocks", "stanford-stk", "grouped_gemm"]


@pytest.mark.usefixtures("stand_in")
def test_a_package_built_for_another_torch_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setitem(sys.modules, "grouped_gemm.ops", Broken("grouped_gemm.ops"))
    message = refused(operands())
    assert "undefined symbol: _ZN3c10" in message and f"another torch than {torch.__version__}" in message
    assert "declares torch 2.7.0" in message


@pytest.mark.gpu
@pytest.mark.parametrize("case", sorted(MASKS))
def test_the_packages_themselves_agree_with_the_loop(case: str) -> None:
    """What the stand-in stands for."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for package in ("megablocks.ops", "grouped_gemm.ops"):
        pytest.importorskip(package, reason=f"needs {megablocks_backend.INSTALL}", exc_type=ImportError)
    make, capacity, _ = MASKS[case]
    mask_TE = make()
    compare(routed(mask_TE, capacity, True, "cuda"), operands("cuda"), in_order(mask_TE), True)
