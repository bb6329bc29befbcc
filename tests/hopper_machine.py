"""Hopper's generated kernels on a CPU: Gluon's names as plain Python over PyTorch tensors.

Threads stand for the two warpgroups and the warps beside them. They meet at barriers that count
as the GPU's do, so a wrong phase or a missing arrival is an error here too. What is asynchronous on
the GPU happens at once, in the thread that starts it; shared memory is NaN at first."""

from __future__ import annotations

import contextvars
import functools
import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

PATIENCE = 20.0


class Barrier:
    """An mbarrier: a phase ends with `count` arrivals and all expected bytes."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.count = self.left = self.phase = self.bytes = 0

    def init(self, count: int) -> None:
        self.count = self.left = count

    def change(self, arrivals: int, size: int) -> None:
        with self.condition:
            self.left -= arrivals
            self.bytes += size
            assert self.left >= 0, "too many arrivals"
            if self.left == 0 and self.bytes == 0:
                self.phase, self.left = self.phase ^ 1, self.count
                self.condition.notify_all()

    def wait(self, parity: Any) -> None:
        with self.condition:
            done = self.condition.wait_for(lambda: self.phase != int(parity), PATIENCE)
        assert done, "deadlock at an mbarrier"


class Named:
    """A named barrier: it is passed when as many warpgroups have arrived as it is for."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.here: set[int] = set()
        self.passed = 0

    def arrive(self, threads: int = 256) -> int:
        with self.condition:
            turn, me = self.passed, threading.get_ident()
            assert me not in self.here, "one warpgroup arrives twice"
            self.here.add(me)
            if len(self.here) == threads // 128:
                self.here, self.passed = set(), turn + 1
                self.condition.notify_all()
            return turn

    def sync(self, threads: int = 256) -> None:
        turn = self.arrive(threads)
        with self.condition:
            done = self.condition.wait_for(lambda: self.passed > turn, PATIENCE)
        assert done, "deadlock at a named barrier"


class Shared:
    """Tiles of shared memory, or barriers."""

    def __init__(self, data: Any) -> None:
        self.data = data

    @property
    def shape(self) -> Any:
        return self.data.shape

    @property
    def dtype(self) -> Any:
        return self.data.dtype

    def index(self, i: Any) -> Any:
        part = self.data[int(i)]
        return part if isinstance(part, Barrier) else Shared(part)

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.data.view(shape))

    def reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        rows, columns = shape[-2:]
        if columns == self.data.shape[-1] or shape[0] == 1:
            return self.reshape(shape)
        # Columns of 128 bytes lie one after the other, each for all rows.
        slots = self.data.flatten(0, -3)
        parts = (
            part for slot in slots for half in slot.split(columns, 1) for part in half.split(rows)
        )
        return Shared([part[None, None] for part in parts])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def load(self, layout: Any) -> torch.Tensor:
        return self.data.clone()  # type: ignore[no-any-return]

    def store(self, value: torch.Tensor) -> None:
        assert value.shape == self.data.shape
        self.data.copy_(value)


class Pointer:
    """A tensor's memory, and offsets into it."""

    def __init__(self, memory: torch.Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)

    def flat(self) -> torch.Tensor:
        size = 1 + sum(
            (n - 1) * s for n, s in zip(self.memory.shape, self.memory.stride(), strict=True)
        )
        return self.memory.as_strided((size,), (1,))


class Tiles:
    """A TMA descriptor: what lies outside is read as 0 and not written."""

    def __init__(self, tensor: torch.Tensor, block: tuple[int, ...]) -> None:
        shape = [*[1] * (tensor.ndim - len(block)), *block]
        size = math.prod(shape) * tensor.element_size()
        self.tensor, self.dtype, self.layout = tensor, tensor.dtype, None
        self.block_type = SimpleNamespace(shape=shape, nbytes=size)

    def inside(self, place: list[Any]) -> tuple[Any, Any]:
        """The part of the tensor below a tile, and of the tile above it."""
        pairs = list(zip(map(int, place), self.block_type.shape, self.tensor.shape, strict=True))
        ends = [min(first + size, most) for first, size, most in pairs]
        here = tuple(slice(first, end) for (first, _, _), end in zip(pairs, ends, strict=True))
        there = tuple(
            slice(0, max(end - first, 0)) for (first, _, _), end in zip(pairs, ends, strict=True)
        )
        return here, there


_LOCK = threading.Lock()
_ADDING = threading.Lock()


def _checked(pointer: Pointer, mask: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory, and places in it with whether they count: those must lie inside."""
    flat = pointer.flat()
    offset, mask = torch.broadcast_tensors(torch.as_tensor(pointer.offset), torch.as_tensor(mask))
    outside = mask & ((offset < 0) | (offset >= flat.numel()))
    assert not outside.any(), "a pointer outside of its tensor"
    return flat, offset, mask


def _load(pointer: Pointer, mask: Any = True, other: Any = 0) -> torch.Tensor:
    flat, offset, mask = _checked(pointer, mask)
    values = flat[torch.where(mask, offset, 0)]
    return torch.where(mask, values, torch.as_tensor(other, dtype=values.dtype))


def _store(pointer: Pointer, value: Any, mask: Any = True, add: bool = False) -> None:
    flat, offset, mask = _checked(pointer, mask)
    value = torch.as_tensor(value).to(pointer.memory.dtype)
    offset, value, mask = torch.broadcast_tensors(offset, value, mask)
    with _LOCK:
        flat.index_put_((offset[mask],), value[mask], accumulate=add)


_POINTERS: list[Pointer] = []


def _note_pointer(place: Shared, pointer: Pointer) -> None:
    with _LOCK:
        _POINTERS.append(pointer)
        place.data.fill_(len(_POINTERS) - 1)


def _read_pointer(place: Shared, layout: Any) -> Pointer:
    number = int(place.data[0])
    # What nobody has written is read ahead of a branch that doesn't use it.
    return _POINTERS[number] if number < len(_POINTERS) else Pointer(torch.empty(0))


def _halves(x: Any) -> Any:
    if isinstance(x, Pointer):
        return [Pointer(x.memory, half) for half in x.offset.chunk(2, 1)]
    return x.chunk(2, 1)


def _where(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(yes, Pointer):
        return yes if condition else no
    return torch.where(torch.as_tensor(condition), yes, no)


def _full(shape: list[int], value: float, dtype: Any, layout: Any = None) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype)


def _load_tile(
    tiles: Tiles, place: list[Any], barrier: Barrier, into: Shared, pred: Any = True
) -> None:
    if not pred:
        return
    here, there = tiles.inside(place)
    into.data.zero_()
    into.data[there].copy_(tiles.tensor[here])
    barrier.change(0, -tiles.block_type.nbytes)


def _atomic_add(pointer: Pointer, value: Any, mask: Any = True, sem: Any = None) -> torch.Tensor:
    with _ADDING:
        before = _load(pointer, mask)
        _store(pointer, value, mask=mask, add=True)
    return before


def _await_turn(place: Pointer, number: Any) -> None:
    until = time.monotonic() + PATIENCE
    while (turn := int(_load(place))) != int(number):
        assert turn < number, "a turn has passed"
        assert time.monotonic() < until, "deadlock in the order of sums"
        time.sleep(1e-4)


def _store_tile(tiles: Tiles, place: list[Any], source: Shared) -> None:
    here, there = tiles.inside(place)
    tiles.tensor[here] = source.data[there]


def _add_quads(places: Pointer, values: torch.Tensor) -> None:
    """Rows 8 apart and columns in pairs: what a thread holds of 8 columns, side by side."""
    rows, columns = (torch.arange(n) for n in values.shape)
    inner = rows[:, None] // 8 % 2 * 2 + columns % 2
    _store(places + inner, values, add=True)


def _store_rows(
    pointer: Pointer, x: torch.Tensor, rows: Any, inside: Any, dtype: Any, first: int, width: int
) -> None:
    columns = first + torch.arange(x.shape[1])
    kept = inside[:, None] & (columns < width)
    _store(pointer + (rows[:, None] * width + columns), x.to(dtype), mask=kept)


def _store_parted_rows(
    pointer: Pointer, x: torch.Tensor, starts: Any, inside: Any, dtype: Any, width: int
) -> None:
    columns = torch.arange(x.shape[1])
    assert (starts % 8 == 0).all()
    kept = inside[:, None] & (columns < width)
    _store(pointer + (starts[:, None] + columns), x.to(dtype), mask=kept)


def _store_part(
    pointer: Pointer, x: torch.Tensor, rows: Any, inside: Any, first: int, width: int
) -> None:
    _store_rows(pointer, x, rows, inside, torch.float32, first, width)


def _product(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    a = a.data if isinstance(a, Shared) else a
    product = a.float() @ b.data.float()
    assert product.shape == acc.shape
    return acc + product if use_acc else product


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    if layout == "barriers":
        return Barrier() if shape == [1] else Shared([Barrier() for _ in range(shape[0])])
    poison = math.nan if dtype.is_floating_point else torch.iinfo(dtype).max
    return Shared(torch.full(shape, poison, dtype=dtype))


def _specialize(parts: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
    errors: list[BaseException] = []

    def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            # Numbers are each partition's own; what is shared is memory.
            function(*(x.clone() if isinstance(x, torch.Tensor) else x for x in arguments))
        except BaseException as error:
            errors.append(error)

    _together([functools.partial(contextvars.copy_context().run, run, *part) for part in parts])
    if errors:
        raise errors[0]


def _together(works: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# The number of the program that runs, and its named barriers.
_PROGRAM: contextvars.ContextVar[tuple[int, dict[int, Named]]] = contextvars.ContextVar("program")


def _keys_before(s: torch.Tensor, place: Any, first_key: Any, including: int) -> torch.Tensor:
    keys = first_key + torch.arange(s.shape[1])[None]
    return (keys < place + including).expand(s.shape)


def _named(number: Any) -> Named:
    with _LOCK:
        return _PROGRAM.get()[1][int(number)]


def _assembly(text: str, constraints: str, given: list[Any], *_: Any) -> Any:
    """What instructions of generated text do."""
    return {"tanh.approx.f32 $0, $1;": torch.tanh}[text](torch.as_tensor(given[0]))


def _decorator(function: Any = None, **_: Any) -> Any:
    return function or (lambda f: f)


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer(value)
    return torch.tensor(value) if isinstance(value, int) else value


class Machine:
    """Runs the kernels of a generated module; `launch` takes the place of flashgen's own."""

    def __init__(self, text: str) -> None:
        body = re.sub(r"^(import|from) .*\n", "", text, flags=re.MULTILINE)
        # Whether all programs of a launch run at once, or one after the other.
        self.at_once = False
        self.names = {**self._names(), "__name__": "generated"}
        exec(compile(body, "<generated>", "exec"), self.names)

    def __getattr__(self, name: str) -> Any:
        return self.names[name]

    def launch(
        self,
        kernel: Callable[..., None],
        names: tuple[str, ...],
        values: Mapping[str, Any],
        constants: Mapping[str, Any],
        tiling: Any,
        programs: int,
    ) -> None:
        given = [_argument(values[name]) for name in names]
        self.programs = programs
        errors: list[BaseException] = []

        def run(number: int) -> None:
            _PROGRAM.set((number, defaultdict(Named)))
            try:
                own = (x.clone() if isinstance(x, torch.Tensor) else x for x in given)
                kernel(*own, **constants)
                named = _PROGRAM.get()[1].values()
                assert not any(b.here for b in named), "a barrier is left half full"
            except BaseException as error:
                errors.append(error)

        works = [functools.partial(run, number) for number in range(programs)]
        for group in [works] if self.at_once else [[work] for work in works]:
            _together(group)
            if errors:
                raise errors[0]

    def _names(self) -> dict[str, Any]:
        language = SimpleNamespace(
            constexpr=lambda x: x, float32=torch.float32, int32=torch.int32, int64=torch.int64,
            program_id=lambda axis: torch.tensor(_PROGRAM.get()[0]), cdiv=lambda a, b: -(-a // b),
            arange=lambda first, end, layout=None: torch.arange(first, end),
            zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
            reshape=torch.reshape, permute=torch.permute,
            zeros_like=torch.zeros_like, where=_where, load=_load, store=_store, abs=torch.abs,
            atomic_add=_atomic_add, num_programs=lambda axis: torch.tensor(self.programs),
            float16=torch.float16, bfloat16=torch.bfloat16,
            fma=lambda a, b, c: a * b + c,
            exp=torch.exp, exp2=torch.exp2, log2=torch.log2, convert_layout=lambda x, layout: x,
            minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
            maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
            static_range=range, SliceLayout=lambda *_: None, warp_specialize=_specialize,
            broadcast=torch.broadcast_tensors,
            NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: None),
            allocate_shared_memory=_allocate, int8=torch.int8, full=_full,
            SwizzledSharedLayout=lambda *_: None, BlockedLayout=lambda *_: None,
            max=lambda x, axis: x.amax(axis), min=lambda x, axis: x.amin(axis),
            cumsum=lambda x, axis: x.cumsum(axis, dtype=x.dtype),
            inline_asm_elementwise=_assembly,
            associative_scan=lambda x, axis, add: x.cumsum(axis, dtype=x.dtype),
        )  # fmt: skip
        language.sum = lambda x, axis=None: x.sum() if axis is None else x.sum(axis)
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: "barriers",
            init=lambda barrier, count: barrier.init(count),
            expect=lambda barrier, size, pred=True: barrier.change(1, size) if pred else None,
            arrive=lambda barrier, count, pred=True: barrier.change(count, 0) if pred else None,
            wait=lambda barrier, parity, pred=True: barrier.wait(parity) if pred else None,
        )
        async_copy = SimpleNamespace(
            mbarrier_arrive=lambda barrier, increment_count: barrier.change(128, 0)
        )
        hopper = SimpleNamespace(
            accumulator=lambda n: None, operand=lambda n: None, load_tile=_load_tile,
            turn_at=lambda place: _load(place), await_turn=_await_turn,
            pass_turn=lambda place: _store(place, 1, add=True),
            store_tile=_store_tile, add_quads=_add_quads, wait_stores=lambda n: None,
            barrier=lambda: None, mbarrier=mbarrier, fence_async_shared=lambda: None,
            warpgroup_mma=_product,
            warpgroup_mma_wait=lambda n, deps: deps if len(deps) > 1 else deps[0],
            async_copy=async_copy,
            reinterpret=lambda tile, dtype, shape, layout: tile.reinterpret(dtype, shape, layout),
            sync_at=lambda n, threads=256: _named(n).sync(threads),
            arrive_at=lambda n, threads=256: _named(n).arrive(threads),
            note=lambda place, x: place.data.fill_(int(x)),
            note_pointer=_note_pointer, read_pointer=_read_pointer,
            read=lambda place: place.data[0].clone(),
            pack=lambda p, dtype: p.to(dtype), unpack=lambda p, dtype, columns: p,
            store_rows=_store_rows, store_parted_rows=_store_parted_rows,
            store_part=_store_part, PropagateNan=None,
            place_keys=lambda first, keys: first + keys,
            place_rows=lambda first, keys: first + keys,
            own_sum=lambda x: x.unflatten(1, (-1, 4, 2)).sum((1, 3)),
            sum_of_warps=lambda x, rows: x[: max(int(rows), 0)].sum().expand(4) / 4,
            lifted_max=lambda s, lift: (s + lift).amax(1),
            quads=lambda: None, quad_sums=lambda x: x.unflatten(1, (-1, 4, 2)).sum((1, 3)),
            for_quads=lambda x: x[:, None],
            name_verdict=lambda number: None,
            any_beyond=lambda x, limit, number: not bool((x <= limit).all()),
            log2=torch.log2, reciprocal=torch.reciprocal,
            moved=lambda x, zero: x, keys_before=_keys_before,
            keep_keys=lambda s, bits: torch.where(bits, s, -torch.inf),
            opaque=lambda x: x, pinned=lambda x: x, stay=lambda: None, zero_again=lambda: 0,
            cross=lambda x, layout: x, halves=_halves,
        )  # fmt: skip
        return {
            "gl": language, "tl": language, "hopper": hopper, "mbarrier": mbarrier,
            "gluon": SimpleNamespace(jit=_decorator), "triton": SimpleNamespace(jit=_decorator),
            "fence_async_shared": hopper.fence_async_shared,
            "warpgroup_mma": hopper.warpgroup_mma, "warpgroup_mma_wait": hopper.warpgroup_mma_wait,
        }  # fmt: skip
