"""Positions, by hand: rows that are added, angles that turn, and which tokens are seen."""

from __future__ import annotations

import math

import pytest
import torch

from picotron_ray.config.schema.model import ModelConfig, RopeScaling
from picotron_ray.models.layers import attention as attention_module
from picotron_ray.models.layers.attention import Attention, sdpa
from picotron_ray.models.layers.document_mask import document_numbers, document_starts, seen_in_row
from picotron_ray.models.layers.positions import Positions
from picotron_ray.models.layers.rope import Rope, attention_factor, frequencies, rope_of, rotate
from picotron_ray.models.parameters import SequenceShard

CPU = torch.device("cpu")


def test_each_part_of_a_row_has_its_own_rows_added() -> None:
    table = Positions(12, 2)
    with torch.no_grad():
        table.weight.copy_(torch.arange(24.0).view(12, 2))

    def rows(tokens: int) -> list[int]:
        found = table(torch.full((2, tokens, 2), 100.0)) - 100.0
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0][:, 1], found[0][:, 0] + 1)
        return [int(value) // 2 for value in found[0][:, 0]]

    table.shard = SequenceShard(12, 2, 1)
    assert rows(6) == [3, 4, 5, 6, 7, 8]
    table.shard = None
    assert rows(5) == [0, 1, 2, 3, 4]
    table.part = (1, 2)
    assert rows(3) == [3, 4, 5]
    table.part = (0, 2)
    assert rows(3) == [0, 1, 2]
    table.part = (2, 3)
    assert rows(4) == [8, 9, 10, 11]
    table.shard = SequenceShard(12, 3, 1)
    table.part = (0, 1)
    assert rows(4) == [2, 3, 8, 9]
    table.part = (1, 2)
    assert rows(2) == [8, 9]


def test_frequencies_by_hand() -> None:
    assert frequencies(4, Rope(100.0)).tolist() == pytest.approx([1.0, 0.1])
    same = RopeScaling(factor=1.0, original_length=1)
    assert frequencies(4, Rope(100.0, same)).tolist() == pytest.approx([1.0, 0.1])
    # turns within 20 tokens: 3.18, 1.007, 0.318 and 0.1007; below 0.5 slowed by 8, above 2.5 as they were
    scaling = RopeScaling(factor=8.0, low_frequency_factor=0.5, high_frequency_factor=2.5, original_length=20)
    plain = [10 ** (-i / 2) for i in range(4)]
    share = (20 * plain[1] / (2 * math.pi) - 0.5) / 2
    expected = [1.0, plain[1] * (share + (1 - share) / 8), plain[2] / 8, plain[3] / 8]
    assert frequencies(8, Rope(100.0, scaling)).tolist() == pytest.approx(expected)


def test_stretched_frequencies_by_hand() -> None:
    linear = RopeScaling(type="linear", factor=4.0)
    assert frequencies(4, Rope(100.0, linear), 64).tolist() == pytest.approx([0.25, 0.025])
    dynamic = RopeScaling(type="dynamic", factor=2.0, original_length=10)
    for length in (0, 9, 10):
        assert frequencies(8, Rope(100.0, dynamic), length).tolist() == frequencies(8, Rope(100.0)).tolist()
    base = 100.0 * (2 * 1.5 - 1) ** (8 / 6)  # of rows of 15
    expected = [base ** (-i / 4) for i in range(4)]
    assert frequencies(8, Rope(100.0, dynamic), 15).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_by_hand(truncate: bool) -> None:
    """Pairs that turn 4 times and once within 64 tokens are 0.81 and 2.02 of 4, on a ramp between them."""
    scaling = RopeScaling(type="yarn", factor=8.0, original_length=64, beta_fast=4.0, truncate=truncate)
    low, high = (8 * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(100.0)) for turns in (4, 1))
    assert (round(low, 2), round(high, 2)) == (0.81, 2.02)
    low, high = (0.0, 3.0) if truncate else (low, high)
    kept = [1 - min(1.0, max(0.0, (i - low) / (high - low))) for i in range(4)]
    plain = [10 ** (-i / 2) for i in range(4)]
    expected = [plain[i] * (kept[i] + (1 - kept[i]) / 8) for i in range(4)]
    assert frequencies(8, Rope(100.0, scaling)).tolist() == pytest.approx(expected)


def test_yarn_makes_attention_sharper_and_nothing_else_does() -> None:
    yarn = RopeScaling(type="yarn", factor=8.0, original_length=64)
    assert attention_factor(yarn) == pytest.approx(0.1 * math.log(8) + 1)
    assert attention_factor(yarn.model_copy(update={"attention_factor": 1.5})) == 1.5
    assert attention_factor(RopeScaling(type="linear", factor=8.0)) == 1.0
    x = torch.randn(1, 2, 6, 4, dtype=torch.float64)
    found = rotate(x, Rope(100.0, yarn))
    assert torch.allclose(found.norm(dim=-1), x.norm(dim=-1) * attention_factor(yarn))


def test_a_part_of_each_head_turns_as_a_head_of_its_width() -> None:
    x = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    found = rotate(x, Rope(100.0, part=0.5))
    assert torch.equal(found[..., 4:], x[..., 4:])
    assert torch.equal(found[..., :4], rotate(x[..., :4], Rope(100.0)))


def test_a_rope_is_one_object_in_a_process() -> None:
    scaling = RopeScaling(type="yarn", factor=8.0)
    assert rope_of(100.0, scaling) is rope_of(100.0, RopeScaling(type="yarn", factor=8.0), 1.0)
    assert rope_of(100.0, scaling) is not rope_of(100.0, scaling, 0.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_pairs_turn_by_their_positions(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype).expand(1, 2, 6, 4)
    found = rotate(x, Rope(100.0), SequenceShard(12, 2, 1))
    assert found.dtype == dtype
    for row, position in enumerate((3, 4, 5, 6, 7, 8)):
        pairs = [complex(1, 3) * complex(math.cos(position), math.sin(position))]
        pairs.append(complex(2, 4) * complex(math.cos(position / 10), math.sin(position / 10)))
        wanted = [pair.real for pair in pairs] + [pair.imag for pair in pairs]
        precision = 0.02 if dtype == torch.bfloat16 else 1e-12 if dtype == torch.float64 else 1e-6
        for head in range(2):
            assert found[0, head, row].tolist() == pytest.approx(wanted, rel=precision, abs=precision)
    assert torch.equal(rotate(x, Rope(100.0))[:, :, 0], x[:, :, 0])
    assert rotate(x, None) is x


def test_documents_by_hand() -> None:
    tokens = torch.tensor([[3, 1, 3, 3, 2], [1, 1, 1, 1, 3]])
    numbers = document_numbers(tokens, 3)
    assert numbers.tolist() == [[0, 1, 1, 2, 3], [0, 0, 0, 0, 0]]
    assert numbers.dtype == torch.int32
    starts = document_starts(numbers)
    assert starts.tolist() == [0, 1, 3, 4, 5, 10]
    assert starts.dtype == torch.int32


@pytest.mark.parametrize("window", [None, 1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_what_a_token_sees(masked: bool, window: int | None) -> None:
    numbers = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    found = seen_in_row(4, numbers if masked else None, window, CPU)
    assert found.shape == ((2 if masked else 1), 1, 4, 4)
    for row in range(len(found)):
        for query in range(4):
            for key in range(4):
                near = key <= query and (window is None or query - key < window)
                same = not masked or numbers[row, query] == numbers[row, key]
                assert bool(found[row, 0, query, key]) is bool(near and same)


def test_attention_is_the_mean_over_what_is_seen() -> None:
    """Keys of zero: every token that is seen weighs the same."""
    values = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(1, 1, 4, 1).expand(1, 1, 4, 8)
    queries, keys = torch.randn(1, 2, 4, 8), torch.zeros(1, 1, 4, 8)

    def seen(documents: torch.Tensor | None, window: int | None) -> list[float]:
        out = sdpa(queries, keys, values, documents, window)
        assert out.shape == (1, 2, 4, 8)
        assert torch.allclose(out[:, :1].expand_as(out), out)
        return [round(value) for value in out[0, 0, :, 0].tolist()]

    documents = torch.tensor([[0, 1, 1, 1]])
    assert seen(None, None) == [1, 6, 37, 278]
    assert seen(None, 2) == [1, 6, 55, 550]
    assert seen(documents, None) == [1, 10, 55, 370]
    assert seen(documents, 2) == [1, 10, 55, 550]
    as_many = sdpa(queries.repeat(1, 2, 1, 1), keys.repeat(1, 2, 1, 1), values.repeat(1, 2, 1, 1))
    assert as_many.shape == (1, 4, 4, 8), "heads of four tokens, of which two share keys"
    assert attention_module._window_mask(4, 2, CPU) is attention_module._window_mask(4, 2, CPU)
    assert not attention_module._window_mask(4, 2, CPU).is_inference()


@pytest.mark.parametrize(("tokens", "passed"), [(4, None), (5, None), (6, 5)])
def test_a_window_that_hides_nothing_is_none(tokens: int, passed: int | None) -> None:
    asked: list[int | None] = []

    def kernel(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: object, window: int | None
    ) -> torch.Tensor:
        asked.append(window)
        return q

    config = ModelConfig(hidden_size=8, heads=2, kv_heads=2, sliding_window=5)
    Attention(config, kernel)(torch.randn(1, tokens, 8))
    assert asked == [passed]


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("shared", [1, 2, 4])
def test_keys_are_shared_whatever_the_length_of_a_row(tokens: int, shared: int) -> None:
    """Also where a row is as long as there are heads of queries or of keys."""
    q, k, v = (torch.randn(1, heads, tokens, 3) for heads in (4, shared, shared))
    each = [x.repeat_interleave(4 // shared, dim=1) for x in (k, v)]
    assert torch.allclose(sdpa(q, k, v), sdpa(q, *each), atol=1e-6)
