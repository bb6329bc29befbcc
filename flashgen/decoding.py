"""Whether the kernel for few queries runs a call, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from . import transforms
from .call import Call
from .errors import FlashgenError
from .geometry import Geometry
from .kernel_names import spell
from .launch import decode as launch_decode
from .launch import hopper_latent as launch_hopper_latent
from .launch import precision_of
from .records.tape import Tapes
from .schedule import Schedule
from .tiling.decode import MOST_QUERIES

# Up to here splitting the keys still pays, where the ordinary kernel leaves most of a GPU idle.
_MOST_SPLIT_QUERIES, _LONG_KEYS = 64, 4096
# The largest latent rows that fit a multiprocessor's registers and shared memory.
MOST_RANK, MOST_ROPE = 512, 64


@dataclass(frozen=True)
class Kernel:
    """The kernel of a call: `decode` or `forward`, and the reason for it.

    `dealt`: its tiles are dealt over the ends of sequences."""

    name: str
    why: str
    dealt: bool = False

    @property
    def decodes(self) -> bool:
        return self.name == "decode"

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def choose_kernel(
    call: Call, backend: str, *, asked: str = "auto", invariant: bool = False
) -> Kernel:
    """The kernel that runs a call. Raises FlashgenError where none can.

    `backend`: what runs the call, `asked` what the caller said; `invariant`: the choice must not
    depend on the batch."""
    found = _choose(call, backend, asked, invariant)
    bound, geometry = call.bound, call.geometry
    dealt = launch_decode.is_dealt(bound, geometry, batch_invariant=invariant)
    return replace(found, dealt=found.decodes and dealt)


def _choose(call: Call, backend: str, asked: str, invariant: bool) -> Kernel:
    geometry, latent = call.geometry, call.bound.spec.heads is not None
    if backend == "cpu":
        return Kernel("forward", "the cpu backend has one way for all lengths")
    if wants_gradient(call):
        if latent:
            raise _training("gradient", call)
        return Kernel("forward", "gradients are asked for")
    if call.dropout is not None:
        if latent:
            raise _training("dropout", call)
        return Kernel("forward", "dropout is asked for")
    if geometry.packing is not None:
        return _choose_packed(call, asked, latent, invariant)
    if latent:
        _check_latent(call)
        return Kernel("decode", "latent heads share their keys")
    if asked == "hopper":
        return Kernel("forward", "Hopper's kernel is asked for")
    if geometry.q_len <= MOST_QUERIES:
        return Kernel("decode", f"Sq = {geometry.q_len}, at most {MOST_QUERIES}")
    return _choose_by_room(geometry, invariant)


def decode(
    call: Call,
    schedule: Schedule | None,
    batch_invariant: bool,
    backend: str,
    tapes: Tapes | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel for few queries: out and LSE, without gradients.

    `tapes`: the records of calls like this one."""
    bound, layout, read = spell(call.bound), "", ()
    if schedule is not None and bound.spec.mask is not None:
        schedule = schedule.for_call()
        read, layout = schedule.read_by_decoding(call.geometry.group)

    hopper = on_hopper(call, backend)
    forward = launch_hopper_latent.forward if hopper else launch_decode.forward

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return forward(
            *(call.q, call.k, call.v),
            bound=bound,
            geometry=call.geometry,
            schedule=schedule,
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
            batch_invariant=batch_invariant,
        )

    key = ("decode", hopper, bool(batch_invariant), precision_of(call.q.dtype), layout)
    given = (call.q, call.k, call.v, call.sinks, *bound.tensors.values())
    tensors = (*given, call.geometry.given_lens, *call.geometry.places, *read)
    out, lse = (tapes or Tapes()).run(key, tensors, run)
    return out, lse


def on_hopper(call: Call, backend: str) -> bool:
    """Whether a call that decodes runs on Hopper's own kernel; latent heads have one there."""
    return backend == "hopper" and call.bound.spec.heads is not None


def _choose_packed(call: Call, asked: str, latent: bool, invariant: bool) -> Kernel:
    """The kernel of packed queries, by what the host knows of their lengths."""
    most = call.geometry.q_len
    if latent:
        raise _training("packed queries", call)
    if asked == "hopper":
        return Kernel("forward", "Hopper's kernel is asked for")
    if invariant:
        return Kernel("forward", "the queries are packed, and splits would depend on the batch")
    if most > MOST_QUERIES:
        return Kernel("forward", f"the queries are packed, up to {most} of a sequence")
    return Kernel("decode", f"packed queries, at most {MOST_QUERIES} of a sequence")


def _choose_by_room(geometry: Geometry, invariant: bool) -> Kernel:
    """Some more queries: the keys are split where a GPU would be idle otherwise."""
    q_len, programs = geometry.q_len, geometry.batch * geometry.heads
    if invariant or q_len > _MOST_SPLIT_QUERIES or geometry.kv_len < _LONG_KEYS:
        return Kernel("forward", f"Sq = {q_len}, Skv = {geometry.kv_len}")
    room = launch_decode.processors(geometry.device)
    if 2 * programs > room:
        return Kernel("forward", f"{programs} programs for {room} multiprocessors")
    return Kernel("decode", f"{programs} programs would leave most of {room} multiprocessors idle")


def wants_gradient(call: Call) -> bool:
    """Whether autograd will ask for a gradient of this call, or a function transform may."""
    if transforms.are_active():
        return True
    if not torch.is_grad_enabled():
        return False
    inputs = (call.q, call.k, call.v, call.sinks, *call.bound.tensors.values())
    return any(x is not None and x.requires_grad for x in inputs)


def _check_latent(call: Call) -> None:
    heads = call.bound.spec.heads
    assert heads is not None
    if heads.rank % 16 or heads.rank > MOST_RANK or heads.rope > MOST_ROPE:
        raise FlashgenError(
            f"there are no kernels for {heads}",
            call=call.text,
            write=f"a rank that is a multiple of 16, up to {MOST_RANK}, and up to {MOST_ROPE} for "
            "rope; the cpu backend takes any",
        )


def _training(what: str, call: Call) -> FlashgenError:
    return FlashgenError(
        f"latent heads have no {what} on a GPU",
        call=call.text,
        write="torch.no_grad() for decoding; to train, keys and values expanded from the latent "
        "rows (flashgen.latent.expand_cache), in an fg.Attention without heads=",
    )


def describe(call: Call, schedule: Schedule, backend: str) -> str:
    """The blocks and splits of a call that decodes, for `explain`."""
    tile = launch_decode.tile_of(call.bound, schedule)
    dealt = launch_decode.is_dealt(call.bound, call.geometry, batch_invariant=False)
    if on_hopper(call, backend):
        blocks = launch_hopper_latent.blocks_of(call.geometry.q_len, call.geometry.heads, tile)
    else:
        given = (call.q, call.v, call.bound, call.geometry, tile)
        blocks = launch_decode.tuned_blocks(*given, dealt=dealt)
    splits = launch_decode.splits_of(blocks, call.geometry, batch_invariant=False, dealt=dealt)
    return f"{blocks}\n{splits}"
