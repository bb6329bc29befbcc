"""What a launch hands to a kernel: which variant, which arguments, which compile-time values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl

import flashgen as fg
from flashgen import FlashgenError, emit, launch, masks
from flashgen.geometry import MAX_POSITION, Geometry
from flashgen.launch import arguments
from flashgen.lower.widths import scalar_is_wide
from flashgen.schedule import Schedule
from flashgen.spec import Bound
from flashgen.tiling import Tiling, inside

CPU = torch.device("cpu")


def geometry(
    q_len: int = 8,
    kv_len: int = 12,
    q_offset: int | torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
) -> Geometry:
    return Geometry(2, 4, 2, q_len, kv_len, CPU, q_offset, kv_lens)


def bound(mask: fg.Mask, **data: Any) -> Bound:
    q = torch.zeros(2, 4, 16, 8)
    return fg.Attention(mask)._check_look(q, q, q, data).bound


DOC = {"doc": torch.zeros(2, 16, dtype=torch.int32)}


def variant(data: Bound, found: Geometry) -> emit.Variant:
    return launch.variant_of(data, found, 64, 32)


def test_a_variant_of_plain_lengths_is_the_default():
    assert variant(bound(masks.causal), geometry()) == emit.Variant(64, 32)
    assert variant(bound(masks.causal), geometry(q_offset=7)) == emit.Variant(64, 32)


def test_a_variant_says_where_positions_come_from():
    offset, lens = torch.zeros(2), torch.full((2,), 5, dtype=torch.int32)
    data = bound(masks.causal)
    assert variant(data, geometry(q_offset=offset)) == emit.Variant(64, 32, "tensor")
    assert variant(data, geometry(kv_lens=lens)) == emit.Variant(64, 32, "lens", True)
    assert variant(data, geometry(kv_lens=lens, q_offset=3)) == emit.Variant(64, 32, "scalar", True)
    both = geometry(kv_lens=lens, q_offset=offset)
    assert variant(data, both) == emit.Variant(64, 32, "tensor", True)


@pytest.mark.parametrize(
    ("value", "wide"),
    [
        (0, False),
        (MAX_POSITION, False),
        (-MAX_POSITION, False),
        (MAX_POSITION + 1, True),
        (-MAX_POSITION - 1, True),
        (2**62, True),
    ],
)
def test_scalars_are_wide_where_positions_plus_them_leave_32_bits(value, wide):
    assert scalar_is_wide(value) == wide

    @fg.mask
    def shifted(q_idx, kv_idx, by: int, other: int):
        return kv_idx <= q_idx + by - other

    found = variant(bound(shifted, by=value, other=3), geometry())
    assert found.wide == (frozenset({"by"}) if wide else frozenset())


def test_a_long_dimension_of_data_is_wide():
    long = torch.zeros(1, dtype=torch.int32).expand(2, 2**31)
    data = bound(masks.causal_document, **DOC)
    stretched = Bound(data.spec, data.scalars, {"doc": long})
    assert variant(stretched, geometry()).wide == {"doc_size_1"}


def test_numbers_that_are_no_integers_are_never_wide():
    @fg.mask
    def some(q_idx, kv_idx, limit: float, on: bool):
        return (kv_idx * 1.0 < limit) & on

    assert not variant(bound(some, limit=1e30, on=True), geometry()).wide


def test_data_values_are_scalars_pointers_sizes_and_strides():
    doc = torch.zeros(16, 2, dtype=torch.int32).T
    values = arguments.data_values(
        bound(masks.causal_document & masks.sliding_window, doc=doc, window=5)
    )
    assert values.pop("doc_ptr").data_ptr() == doc.data_ptr()
    assert values == {
        "window": 5,
        "doc_size_0": 2,
        "doc_stride_0": 1,
        "doc_size_1": 16,
        "doc_stride_1": 2,
    }


def test_booleans_are_handed_over_as_numbers():
    @fg.mask
    def some(q_idx, kv_idx, on: bool, table: fg.Tensor):
        return table[kv_idx] | on

    table = torch.tensor([True, False] * 8)
    values = arguments.data_values(bound(some, on=True, table=table))
    assert type(values["on"]) is int
    assert values["on"] == 1
    assert values["table_ptr"].dtype == torch.uint8
    assert values["table_ptr"].data_ptr() == table.data_ptr()


def test_a_number_without_dimensions_has_only_a_pointer():
    @fg.mask
    def some(q_idx, kv_idx, size: fg.Tensor):
        return kv_idx < size

    assert list(arguments.data_values(bound(some, size=torch.tensor(3)))) == ["size_ptr"]


def test_queries_are_the_last_positions_unless_told_otherwise():
    assert arguments.position_values(geometry()) == {"q_len": 8, "kv_len": 12, "q_offset": 4}
    assert arguments.position_values(geometry(12, 8))["q_offset"] == -4
    assert arguments.position_values(geometry(q_offset=-3))["q_offset"] == -3


def test_lengths_on_the_device_are_pointers():
    lens = torch.full((2,), 5, dtype=torch.int32)
    assert arguments.position_values(geometry(kv_lens=lens))["kv_lens_ptr"] is lens


@pytest.mark.parametrize(
    ("offset", "stride"),
    [
        (torch.tensor([5]), 0),
        (torch.tensor([5, 6]), 1),
        (torch.tensor([5]).expand(2), 0),
        (torch.tensor([[5, 0, 0], [6, 0, 0]])[:, 0], 3),
    ],
)
def test_offsets_on_the_device_are_read_by_their_stride(offset, stride):
    values = arguments.position_values(geometry(q_offset=offset))
    assert values["q_offset_ptr"].data_ptr() == offset.data_ptr()
    assert values["q_offset_stride"] == stride


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("tensors", "elements"),
    [
        ([rows(2, 3, 5, 64)], 8),
        ([rows(2, 3, 5, 64, dtype=torch.float32)], 4),
        ([rows(2, 5, 3, 64).transpose(1, 2)], 8),
        ([rows(2, 3, 5, 80)[..., 8:72]], 8),
        ([rows(1, 1, 1, 64).expand(2, 3, 5, 64)], 8),
        ([rows(2, 3, 5, 65)[..., :64]], 1),
        ([rows(2, 3, 5, 72)[..., 1:65]], 1),
        ([rows(2, 3, 5, 36)], 1),
        ([rows(2, 3, 5, 64), rows(2, 3, 5, 36)], 1),
    ],
)
def test_alignment_is_that_of_every_row_of_every_tensor(tensors, elements):
    assert arguments.alignment(tensors) == elements


@pytest.fixture
def tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_fp32_is_true_fp32():
    assert arguments.precision_of(torch.float32) == "ieee"


def test_fp32_is_tf32_where_pytorch_was_asked_for_it(tf32):
    assert arguments.precision_of(torch.float32) == "tf32"
    assert arguments.precision_of(torch.float64) == "ieee"
    assert arguments.precision_of(torch.bfloat16) == "ieee"


def test_compile_time_values():
    q = rows(2, 3, 5, 64)
    constants = arguments.constants_of(q, [q], Tiling(128, 64, 8, 2), (256, 128))
    assert constants == {
        "BLOCK_M": 128,
        "BLOCK_N": 64,
        "TILE_M": 256,
        "TILE_N": 128,
        "ALIGN": 8,
        "OFFSET": tl.int32,
        "FLOAT": tl.float32,
        "PRECISION": "ieee",
    }
    double = q.double()
    assert (
        arguments.constants_of(double, [double], Tiling(64, 64, 4, 1), (64, 64))["FLOAT"]
        == tl.float64
    )


@pytest.mark.parametrize(
    ("strides", "kind"),
    [
        ((2**30, 2**24, 64, 1), tl.int32),
        ((64, 64, 2**23 - 8, 1), tl.int32),
        ((64, 64, 2**23, 1), tl.int64),
        ((64, 64, 2**40, 1), tl.int64),
    ],
)
def test_offsets_in_a_tile_are_64_bits_where_rows_are_far_apart(strides, kind, monkeypatch):
    # Of the strides alone: a tensor without memory has no alignment.
    monkeypatch.setattr(arguments, "alignment", lambda tensors: 8)
    far = torch.zeros(1, dtype=torch.bfloat16, device="meta").as_strided((2, 3, 300, 64), strides)
    constants = arguments.constants_of(far, [far], Tiling(128, 64, 8, 2), (128, 64))
    assert constants["OFFSET"] == kind


class Recorder:
    """A kernel that keeps what it was launched with."""

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*arguments: Any, **options: Any) -> None:
            self.grid, self.arguments, self.options = grid, arguments, options

        return run


def test_arguments_go_by_the_kernel_s_order():
    kernel, q = Recorder(), rows(1, 1, 1, 8)
    values = {"kv_len": 3, "q_ptr": q, "unused": 9, "q_len": 2}
    launch.launch(kernel, ("q_ptr", "q_len", "kv_len"), values, {"A": 1}, Tiling(64, 32, 4, 2), 7)
    assert kernel.grid == (7,)
    assert kernel.arguments == (q, 2, 3)
    assert kernel.options == {"A": 1, "num_warps": 4, "num_stages": 2}


def test_a_grid_that_is_too_large_is_an_error():
    values = {"q_ptr": rows(1, 1, 1, 8)}
    with pytest.raises(FlashgenError, match=r"2147483648 programs .* \(2\^31 - 1\)"):
        launch.launch(Recorder(), ("q_ptr",), values, {}, Tiling(64, 32, 4, 2), 2**31)


def test_a_schedule_of_one_head_and_batch_is_shared_by_all():
    schedule = make_schedule(masks.causal)
    values = arguments.schedule_values(schedule)
    assert (values["schedule_stride_b"], values["schedule_stride_h"]) == (0, 0)
    assert values["masked_width"] == values["masked_runs"].shape[-2]
    assert values["full_width"] == values["full_runs"].shape[-2]


def test_a_schedule_that_varies_has_strides_in_rows_of_tiles():
    by_batch = arguments.schedule_values(make_schedule(masks.causal_document, **DOC))
    assert (by_batch["schedule_stride_b"], by_batch["schedule_stride_h"]) == (1, 0)

    @fg.mask
    def by_head(h, q_idx, kv_idx):
        return kv_idx <= q_idx + h

    values = arguments.schedule_values(make_schedule(by_head, length=80))
    rows_of_tiles = values["counts"].shape[2]
    assert (values["schedule_stride_b"], values["schedule_stride_h"]) == (0, rows_of_tiles)


def make_schedule(mask: fg.Mask, *, length: int = 16, **data: Any) -> Schedule:
    q = torch.zeros(2, 4, length, 8)
    return fg.Attention(mask).schedule(q, q, block_size=16 if length > 16 else 64, **data)


def test_a_tiling_stays_inside_a_schedule_s_tiles():
    assert inside(Tiling(128, 64, 8, 2), (128, 64)) == Tiling(128, 64, 8, 2)
    assert inside(Tiling(128, 64, 8, 2), (256, 256)) == Tiling(128, 64, 8, 2)
    assert inside(Tiling(128, 64, 8, 2), (48, 80)) == Tiling(16, 16, 8, 2)


@pytest.fixture
def launched(monkeypatch) -> list[dict[str, Any]]:
    """The values that `launch.forward` hands over."""
    found: list[dict[str, Any]] = []

    def record(kernel, names, values, constants, tiling, programs):
        found.append({name: values[name] for name in names} | {"programs": programs} | constants)

    monkeypatch.setattr(launch, "launch", record)
    return found


def attend(attention: fg.Attention, q: torch.Tensor, v: torch.Tensor | None = None, **more: Any):
    v = q if v is None else v
    call = attention._check_look(q, q, v, more)
    return launch.forward(
        *(q, q, v),
        bound=call.bound,
        geometry=call.geometry,
        schedule=attention.schedule(q, q, block_size=64),
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
    )


def test_forward_returns_what_the_kernel_writes(launched):
    q, v = torch.zeros(2, 4, 70, 40), torch.zeros(2, 4, 70, 24)
    out, lse = attend(fg.Attention(masks.causal), q, v)
    assert out.shape == (2, 4, 70, 24)
    assert lse.shape == (2, 4, 70)
    assert lse.dtype == torch.float32
    (values,) = launched
    assert values["out_ptr"] is out
    assert values["lse_ptr"] is lse
    assert values["programs"] == 2 * 2 * 4


def test_scale_goes_where_the_kernel_applies_it(launched):
    q = torch.zeros(2, 4, 70, 40)
    attend(fg.Attention(masks.causal), q, scale=0.5)
    attend(fg.Attention(masks.causal, softcap=30.0), q, scale=0.5)
    plain, capped = launched
    assert plain["scale_log2"] == 0.5 * arguments.LOG2E
    assert "scale" not in plain
    assert (capped["to_cap"], capped["scale_log2"]) == (0.5 / 30.0, 30.0 * arguments.LOG2E)


def test_a_negative_scale_moves_into_the_queries(launched):
    q = torch.ones(2, 4, 70, 40)
    attend(fg.Attention(masks.causal), q, scale=-0.5)
    attend(fg.Attention(masks.causal), q, scale=0.0)
    negative, zero = launched
    assert negative["scale_log2"] == 0.5 * arguments.LOG2E
    assert (negative["q_ptr"] == -1).all()
    assert zero["scale_log2"] > 0
    assert (zero["q_ptr"] == 0).all()
    assert (q == 1).all()


def test_rows_without_a_unit_stride_are_copied(launched):
    q = torch.zeros(2, 4, 40, 70).transpose(2, 3)
    attend(fg.Attention(masks.causal), q)
    assert launched[0]["q_ptr"].stride(-1) == 1
    assert [launched[0][f"stride_q{d}"] for d in "bhs"] == [4 * 70 * 40, 70 * 40, 40]


@pytest.mark.parametrize("shape", [(0, 4, 8, 16), (2, 4, 0, 16), (2, 0, 8, 16)])
def test_nothing_is_launched_for_no_queries(launched, shape):
    out, lse = attend(fg.Attention(), torch.zeros(shape))
    assert out.shape == shape
    assert lse.shape == shape[:3]
    assert not launched
