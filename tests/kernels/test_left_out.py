"""Launches that could not be compiled are replaced; decoders launch only what is compiled ahead for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from bass_core import SamplingParams, generate
from bass_core.model.llama_cuda import LlamaCuda, ProductPlan
from bass_core.model.select import shape_of
from bass_core.sample import distribution, draw, draw_triton
from bass_core.sample.noise import NoiseKeys
from bass_core.verify import rejection, tree, tree_triton
from bass_core.verify.rejection_triton import verify_on_device
from bass_core.verify.rules import VERIFICATIONS
from bass_core.verify.tree import verify_tree
from bass_core.verify.tree_shape import JudgedTree
from kernels.shapes import Card, Shape
from kernels.support import CompileFailed
from kernels.triton import accept, attention, block, cache_write, launch, linear, nucleus, pointwise, walk
from kernels.triton.needed import launches
from tests.kernels.launching.launches import LAUNCHES
from tests.support.models import prompts, slow_but, tiny, tiny_pair

MODULES = (accept, attention, block, cache_write, linear, nucleus, pointwise, walk)
# The values that kernels/support.py returns for a CPU.
CARD = Card(80, 99 * 1024, 4)


class AllNames(set[str]):
    """A set that contains every name except those that match the pattern `but`."""

    def __init__(self, but: str = "$.") -> None:
        self.but = but

    def __bool__(self) -> bool:
        return True

    def __contains__(self, name: object) -> bool:
        return not re.search(self.but, str(name))


# Launches that the kernels package replaces with torch. The launches of verification are replaced in bass_core.
_PREFIXES = ("attend", "gemv", "skinny", "norm", "gate", "put", "rotate")
REPLACED = [name for name in LAUNCHES if name.startswith(_PREFIXES)]


@pytest.mark.parametrize("group", [1, 16, 64])
def test_the_launches_of_large_groups_are_listed_too(group: int) -> None:
    listed = launches(Shape("bfloat16", 8 * group, 8, 128, 96, 96, 1024 * group, 256), CARD)
    assert {"attend", "rotate", "norm"} <= {launch.name.split()[0] for launch in listed}
    assert any("ROTATE=True" in launch.name for launch in listed)


@pytest.mark.parametrize("name", slow_but(["attend, whole", "skinny", "put"], REPLACED))
def test_torch_replaces_a_launch_that_is_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "attend, a window":
        pytest.skip("in bfloat16")
    wanted = LAUNCHES[name](lambda tensor: tensor)
    monkeypatch.setattr(launch, "left_out", AllNames())
    for mine, theirs in zip(LAUNCHES[name](lambda tensor: tensor), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_attention_tries_its_other_tile_sizes_before_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the tile sizes for 16 bits, since float32 has only one size."""
    sizes = attention.tiles(64, 64, 2, 227 * 1024)
    assert [tile["BLOCK_N"] for tile in sizes] == [64, 64, 32, 16] and len({str(tile) for tile in sizes}) == 4
    tried: list[int] = []
    monkeypatch.setattr(attention, "tiles", lambda *_: [{**tile, "BLOCK_D": 32, "BLOCK_M": 16} for tile in sizes])
    original: Callable[..., None] = attention.launch

    def recording(kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
        tried.append(options.get("BLOCK_N", 0))
        original(kernel, grid, *arguments, **options)

    monkeypatch.setattr(attention, "launch", recording)
    monkeypatch.setattr(launch, "left_out", AllNames(but="BLOCK_N=16"))
    wanted = LAUNCHES["attend, whole"](lambda tensor: tensor)
    assert tried == [64, 64, 32, 16]
    monkeypatch.setattr(launch, "left_out", set())
    torch.testing.assert_close(LAUNCHES["attend, whole"](lambda tensor: tensor), wanted)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make verification and draws use the kernels, here interpreted."""
    for module in (rejection, tree, draw, distribution):
        monkeypatch.setattr(module, "is_accelerator", lambda device: True)
        monkeypatch.setattr(module, "available", lambda device: True)


def decide_and_draw(params: SamplingParams, rule: str) -> list[Any]:
    torch.manual_seed(0)
    logits, drafts = torch.randn(3, 3, 40) * 3, torch.randint(0, 40, (3, 2))
    q = torch.rand(3, 2, 40).softmax(-1)
    keys = NoiseKeys(3, torch.arange(3), torch.tensor([4, 5, 6]))
    rules = {"verification": VERIFICATIONS[rule]}
    outcome = rejection.verify(logits, drafts, q, torch.tensor([2, 1, 2]), keys, params, **rules)
    draft_tree = JudgedTree([[1, 2]] * 3, [[-1, -1]] * 3, [[-1, r] for r in range(3)], q[:, 0])
    trees = verify_tree(logits, draft_tree, keys, params, VERIFICATIONS["rejection"])
    drawn = [(row.accepted, row.next_token) for row in [*outcome.host(), *trees]]
    return [*drawn, rejection.first_tokens(logits[:, 0], keys, params).tolist()]


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        (SamplingParams(), "rejection"), (SamplingParams(0.9), "rejection"), (SamplingParams(0.9), "coupled"),
        (SamplingParams(0.9, top_p=0.8), "block"),
    ],
    ids=str,
)  # fmt: skip
def test_decisions_are_the_same_without_their_kernels(
    params: SamplingParams, rule: str, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = decide_and_draw(params, rule)
    monkeypatch.setattr(launch, "left_out", AllNames())
    with pytest.raises(CompileFailed):
        draw_triton.threshold_on_device(torch.rand(2, 40), 0.5)
    assert decide_and_draw(params, rule) == wanted


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Collect the names of all launches, as on a GPU."""
    names: set[str] = set()
    run = launch.launch

    def recording(kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
        names.add(on_gpu(launch.Launch(kernel, arguments, options).name))
        run(kernel, grid, *arguments, **options)

    for module in MODULES:
        monkeypatch.setattr(module, "launch", recording)
    yield names


def on_gpu(name: str) -> str:
    """Return the name without its number of rows, which is larger for interpreted programs."""
    return re.sub(r" ROWS=\d+", "", name)


def listed(shape: Any) -> set[str]:
    return {on_gpu(entry.name) for entry in launches(shape, CARD)}


def test_products_that_torch_computes_are_not_on_the_list() -> None:
    """All weights of an 8B model have more bytes than our kernel takes with several rows; SmolLM2's output too."""
    small = Shape("bfloat16", 9, 3, 64, 49152, 49152, hidden=576, mlp=1536)
    large = Shape("bfloat16", 32, 8, 128, 128256, 128256, hidden=4096, mlp=14336)
    kernels = {shape: [name.split()[0] for name in sorted(listed(shape))] for shape in (small, large)}
    # Four products, each with two tile sizes.
    assert kernels[small].count("skinny") == 8 and not kernels[large].count("skinny")
    # One row's products: with a norm, with a norm and a gate, and with a residual.
    assert kernels[large].count("gemv") == 3


@pytest.mark.slow
@pytest.mark.parametrize(("options", "product_rows"), [({"draft_length": 3}, 64), ({"tree": (2,)}, 0)], ids=str)
def test_launches_of_decoders_are_on_the_list(
    options: dict[str, Any], product_rows: int, launched: set[str]
) -> None:
    """Our kernel computes products of at most `product_rows` rows, torch the others."""
    model = tiny("llama")
    pair = tiny_pair(0.03, target=model)
    pair.target_step, pair.draft_step = LlamaCuda(model), LlamaCuda(pair.draft)
    for step in (pair.target_step, pair.draft_step):
        step.has_kernels, step.plan = True, ProductPlan(product_rows)
    generate(pair, prompts(2, longest=12), max_new_tokens=3, attention="fused", **options)
    shape = replace(shape_of(model, pair.vocab, verifies=True), hidden=model.config.hidden_size)
    shape = replace(shape, mlp=model.config.intermediate_size)
    names = set(launched)
    assert {"norm", "gate"} <= {name.split()[0] for name in names} or product_rows
    assert len(names) > 4 and names <= listed(shape), names - listed(shape)


@pytest.mark.parametrize("vocab", [40, 96])
def test_walks_are_tried_with_the_launch_of_the_rounds(vocab: int, launched: set[str]) -> None:
    """Launches differ by whether 16 divides the vocabulary."""
    tree_triton.can_walk.cache_clear()
    assert tree_triton.can_walk(torch.device("cpu"), vocab)
    tried = set(launched)
    launched.clear()
    drafts = JudgedTree([[1, 2]], [[-1, 0]], [[0, 1]], torch.rand(2, vocab).softmax(-1))
    keys = NoiseKeys(3, torch.arange(1), torch.tensor([4]))
    tree_triton.walk_on_device(torch.randn(1, 3, vocab), drafts, keys, SamplingParams(0.8))
    assert tried == {name for name in launched if name.startswith("walk")} != set()


@pytest.mark.slow
def test_launches_of_every_rule_and_batch_size_are_on_the_list(launched: set[str]) -> None:
    shape = shape_of(tiny("llama"), 40, verifies=True)
    for params in (SamplingParams(), SamplingParams(0.9, top_p=0.8)):
        for rule, batch, width, soft in [
            (rule, *sizes) for rule in ("rejection", "block", "coupled")
            for sizes in ((1, 1, True), (3, 3, False), (4, 8, True), (2, 20, False))
        ]:  # fmt: skip
            keys = NoiseKeys(3, torch.arange(batch), torch.arange(batch))
            q = torch.rand(batch, width, 40).softmax(-1) if soft else None
            drafts, counts = torch.randint(0, 40, (batch, width)), torch.full((batch,), width)
            for synthetic in (None, 0.5):
                verify_on_device(
                    torch.randn(batch, width + 1, 40), drafts, q, counts, keys, params,
                    verification=VERIFICATIONS[rule], synthetic=synthetic,
                )  # fmt: skip
            draw_triton.threshold_on_device(torch.rand(batch, 40), 0.5)
    names = set(launched)
    assert names <= listed(shape), names - listed(shape)
    assert {name.split()[0] for name in names} == {"decide", "weigh", "gumbel", "least_kept"}
