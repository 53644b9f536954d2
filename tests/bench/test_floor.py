"""The bench of the floor: it finds every product, its arms compute them, and its ratios and claims are right."""

from __future__ import annotations

import pytest
import torch

from bass_core import ModelPair
from bench import products
from bench.cpu import floor
from bench.cpu.floor import AGAIN, DRAFT, OURS, STEP, Floor, Turns
from bench.products import libraries, products_of
from tests.bass_core.draft.test_head import tiny_head
from tests.models import tiny

TARGET = tiny("llama").to(torch.bfloat16)
PAIR = ModelPair(TARGET, tiny_head(TARGET).to(torch.bfloat16))


def test_every_weight_of_a_linear_layer_is_in_one_product() -> None:
    found = products_of(PAIR)
    linear = [layer for layer in TARGET.modules() if isinstance(layer, torch.nn.Linear)]
    assert sum(one.outputs * one.inputs for one in found) == sum(layer.weight.numel() for layer in linear)
    assert sum(one.nbytes for one in found) == sum(layer.weight.nbytes for layer in linear)


def test_a_model_whose_products_are_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="choose a Llama"):
        products_of(ModelPair(tiny("gpt2")))


def test_the_libraries_multiply_the_same_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = products_of(PAIR)
    arms = libraries(found)
    assert set(arms) <= {"FBGEMM float16", "oneDNN bfloat16"}
    for arm in arms.values():
        arm(3)()

    def absent(weight: torch.Tensor) -> None:
        raise RuntimeError("not on this CPU")

    monkeypatch.setattr(products, "_fbgemm", absent)
    monkeypatch.setattr(products, "_onednn", absent)
    assert libraries(found) == {}


@pytest.mark.parametrize("pack", ["_fbgemm", "_onednn"])
def test_a_library_s_product_is_a_product(pack: str) -> None:
    weight, x = torch.randn(96, 64).bfloat16().float(), torch.randn(4, 64).bfloat16()
    try:
        multiply = getattr(products, pack)(weight)
        out = multiply(x.float() if pack == "_fbgemm" else x).float()
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"not on this CPU: {error}")
    torch.testing.assert_close(out, x.float() @ weight.T, rtol=0.02, atol=0.1)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Floor:
    """Passes over 1 MB of 2 and 4 ms; weights of 0.5 MB; 1 GFLOP/s in float32."""
    made: Floor = object.__new__(Floor)
    made.pair, made.repeats = PAIR, 2
    made.products, made.array = products_of(PAIR), torch.ones(250_000)
    made.flops, made.speeds = {torch.float32: 1e9}, {"a way": 5e8}
    made.turns = []
    monkeypatch.setattr(Floor, "_cost", lambda self, what: (125_000, 500_000))
    return made


def test_a_row_by_hand(scripted: Floor) -> None:
    """Passes took 4, 2, 4, 4 ms, so reading takes 1 ms, and 8 tokens' 2 MFLOP 2 ms: that is the floor.

    The times 3 and 2.4 ms came after the second and the third pass. Beside the faster neighbour reading took 1 ms
    for the first, 2 ms for the other.
    """
    case = (STEP, 4, 2)
    scripted.turns.append(Turns([4.0, 2.0, 4.0, 4.0], {case: [(3.0, 2), (2.4, 3)]}))
    (row,) = scripted.rows()
    assert row == {
        "what": STEP, "rows": 4, "tokens a row": 2, "GB/s": pytest.approx(0.5), "reading ms": 1.0, "floor ms": 2.0,
        "lowest ms": 2.4, "median ms": pytest.approx(2.7), "lowest / reading": 2.4, "lowest / floor": 1.2,
        "paired / reading": pytest.approx((3.0 + 1.2) / 2),
    }  # fmt: skip


def timed(scripted: Floor, **other: float) -> dict[str, bool | None]:
    """The verdicts where all products take their reading's 1 ms and the rest half of it, but for what is named."""
    cases = {(OURS, 1, tokens): 1.0 for tokens in floor.STEPS}
    cases |= {("library", 1, tokens): 1.0 for tokens in floor.STEPS}
    cases |= dict.fromkeys([(STEP, 1, 1), (STEP, 8, 1), (DRAFT, 1, 1), (AGAIN, 1, 1)], 0.5)
    cases |= {case: other[case[0]] for case in cases if case[0] in other}
    scripted.turns = [Turns([2.0, 2.0], {case: [(ms, 1)] for case, ms in cases.items()})]
    return {one["name"]: one["holds"] for one in scripted.claims(scripted.rows(), decide=True)}


@pytest.mark.parametrize("native", [True, False])
def test_each_claim_misses_where_its_figure_does(
    native: bool, scripted: Floor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floor, "native_bfloat16", lambda: native)
    bars = floor.NATIVE if native else floor.OTHERS
    whole = timed(scripted)
    del whole["share of the weights' bytes in these products"]  # a tiny model's norms are a larger part of it
    assert all(whole.values()) and len(whole) == len(bars) + len(floor.STEPS) + 3

    def missed(**other: float) -> list[str]:
        return [name for name, holds in timed(scripted, **other).items() if name in whole and not holds]

    assert missed(**{OURS: 1.45, "library": 1.45}) == [
        f"products / reading, tokens: {tokens}" for tokens, bar in bars.items() if bar == 1.4
    ]
    assert missed(library=0.94) == [
        f"products / fastest library's (library), tokens: {tokens}" for tokens in floor.STEPS
    ]
    assert missed(**{STEP: 1.7}) == ["step / reading, batch 1"]
    assert missed(**{STEP: 2.3}) == ["step / reading, batch 1", "step / reading, batch 8"]
    assert missed(**{DRAFT: 1.6}) == ["draft head's step / reading, batch 1"] and missed(**{AGAIN: 9.0}) == []


def test_what_is_timed_comes_by_turns_with_a_pass_before_each(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(floor, "room", lambda most: 1 << 20)
    monkeypatch.setattr(floor, "flops_of", lambda dtype: 1e9)
    bench = Floor(PAIR, 2)
    bench.read = lambda array: order.append("pass")
    arms = {("a", 1, 1): lambda: order.append("a"), ("b", 1, 1): lambda: order.append("b")}
    bench._by_turns(arms)
    assert order == ["pass", "a", "pass", "b"] * 3 + ["pass"]
    order.clear()
    bench._by_turns({("a", 1, 1): arms["a", 1, 1]}, again="again")
    assert order == ["pass", "a", "a"] * 3 + ["pass"]
    first, second = bench.turns
    assert [at for _, at in first.times["a", 1, 1]] == [3, 5] and [at for _, at in first.times["b", 1, 1]] == [
        4,
        6,
    ]
    assert {case: len(times) for case, times in second.times.items()} == {("a", 1, 1): 2, ("again", 1, 1): 2}


def test_a_machine_without_free_memory_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "room", lambda most: 0)
    with pytest.raises(ValueError, match="not enough free memory"):
        Floor(PAIR, 1)
