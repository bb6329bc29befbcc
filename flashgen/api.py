"""What users call: `Attention` and the decorator `attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import backends, ops
from .call import Call, autocast, check
from .calls import ready
from .calls.first import compile_ahead
from .calls.known import Known, KnownCalls, key_of
from .calls.look import looked_at
from .calls.routes import is_planned, kept_key, route_of, tile_of
from .calls.schedules import Schedules
from .check_kinds import refuse_meta
from .check_storage import PageLayout, Storage
from .config import config
from .decoding import choose_kernel, decode
from .errors import CallText, FlashgenError
from .graphs import outside_graphs
from .schedule import Planner, Schedule
from .schedule.make import check_block_size, check_fits, make_schedule
from .spec import MLA, Mask, Program, as_mask
from .spec.declared import check_declared
from .spec.leaf import Leaf
from .trace.reads import Reads

__all__ = ["MLA", "Attention", "Schedule", "attention"]


class Attention:
    """An attention: which keys a query may see, and how a score changes.

    Args:
        mask: a Mask or a function of positions (FlexAttention's included); None: every key.
        score: changes the scaled score, `score + slope[h] * (kv_idx - q_idx)`.
        heads: `fg.MLA(rank, rope)` for latent heads; MHA, GQA and MQA follow from the shapes.
        softcap: cap * tanh(score / cap), after the score function and before the mask.
        sinks: whether calls give `sinks` [Hq], one more score in each row's denominator.

    Immutable; pickles, deep-copies and sits in an `nn.Module`.
    Raises FlashgenError for a declaration that makes no sense."""

    @outside_graphs("fg.Attention is made before the compiled function, and called in it")
    def __init__(
        self,
        mask: Mask | Callable[..., Any] | None = None,
        score: Callable[..., Any] | None = None,
        heads: MLA | None = None,
        softcap: float | None = None,
        sinks: bool = False,
    ) -> None:
        check_declared(softcap, sinks, heads)
        self._program = Program(
            None if mask is None else as_mask(mask),
            None if score is None else Leaf.of(score, "score"),
            None if softcap is None else float(softcap),
            bool(sinks),
            heads,
        )
        self._mask_program = _mask_alone(self._program)
        self._kept = Schedules()
        self._calls = KnownCalls()
        # What functions read besides their arguments, in calls that were checked.
        self._read = Reads()
        # How often these meant something else than before, when calls were last known.
        self._changes = 0
        if score is not None:
            self.__wrapped__ = score
            self.__name__ = self._program.score.function.name  # type: ignore[union-attr]
            self.__module__ = getattr(score, "__module__", __name__)
            self.__qualname__ = getattr(score, "__qualname__", self.__name__)
            self.__doc__ = score.__doc__

    @property
    def mask(self) -> Mask | None:
        return self._program.mask

    @property
    def name(self) -> str:
        return self._program.name

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        *,
        scale: float | None = None,
        q_offset: int | torch.Tensor | None = None,
        return_lse: bool = False,
        schedule: Schedule | None = None,
        deterministic: bool | None = None,
        backend: backends.Backend = "auto",
        sinks: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        page_table: torch.Tensor | None = None,
        page_layout: PageLayout | None = None,
        dropout_p: float = 0.0,
        seed: int | None = None,
        batch_invariant: bool = False,
        **data: Any,
    ) -> Any:
        """Attend.

        Args:
            q, k, v: [B, Hq, Sq, D], [B, Hkv, Skv, D], [B, Hkv, Skv, Dv]; float16, bfloat16 or
                float32 (float64 on the CPU), any strides; Hq a multiple of Hkv; D, Dv up to 256.
                With `heads=fg.MLA(rank, rope)`: q [B, Hq, Sq, rank + rope] and, as k, the latent
                rows [B, 1, Skv, rank + rope]; no v. Packed and paged: see below.
            scale: factor of q·k, D^-0.5 by default; latent heads have no default.
            q_offset: position of the first query: an int, or an integer tensor of shape [], [1]
                or [B]; by default the queries are the last positions.
            return_lse: also return the natural-log LSE [B, Hq, Sq].
            schedule: one made before by `.schedule(...)` for these lengths, offset and mask, and
                of equal data, which is looked at where FLASHGEN_DEBUG is set.
            deterministic: gradients equal bit by bit from run to run.
            backend: `auto`, `cpu`, `interpret`, `portable` or `hopper`.
            sinks: [Hq], where `sinks=True` was declared; finite or -inf (the cpu backend takes inf
                for the largest number: output 0).
            kv_lens: [B] integers, how many keys of each sequence are valid.
            cu_seqlens_q, cu_seqlens_kv: int32 [B + 1], packed sequences: q [Tq, Hq, D] holds
                those of b from cu_seqlens_q[b] to cu_seqlens_q[b + 1], k, v [Tk, Hkv, D] alike.
                Masks see b as the sequence, and positions inside it.
            max_seqlen_q, max_seqlen_kv: what no sequence is longer than; saves memory and time.
            page_table: int32 [B, P], the pages of each sequence in order, of its kv_lens[b] keys;
                k, v are pages, in the layout `page_layout`: "NHD" [pages, page size, Hkv, D], the
                default, or "HND" [pages, Hkv, page size, D]. q may be packed. No gradients.
            dropout_p: the probability that a weight is set to 0; the others grow by
                1 / (1 - dropout_p). The LSE is that of all weights.
            seed: an int that says which weights are dropped: the same ones forward and backward,
                on every backend. Required where dropout_p isn't 0.
            batch_invariant: a sequence's bits don't depend on what it is batched with.
            **data: what the mask and the score function ask for, by name.

        Returns out [B, Hq, Sq, Dv], or (out, lse). A query without a key gets 0 and -inf.
        Packed queries: out [Tq, Hq, Dv], lse [Hq, Tq].
        Raises FlashgenError for anything that doesn't fit."""
        given = {
            "scale": scale, "q_offset": q_offset, "sinks": sinks, "kv_lens": kv_lens,
            "dropout_p": dropout_p, "seed": seed, "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv, "max_seqlen_q": max_seqlen_q,
            "max_seqlen_kv": max_seqlen_kv, "page_table": page_table, "page_layout": page_layout,
        }  # fmt: skip
        asked = (backend, bool(deterministic), bool(batch_invariant), bool(return_lse))
        if v is not None and ops.as_operators(q, k, v):
            return self._as_operators(autocast(q, k, v), schedule, asked, given, data)
        if v is None and torch.compiler.is_dynamo_compiling():
            how = dict(zip(ready.ASKED, asked, strict=True))
            return self._between_graphs(q, k, schedule=schedule, **how, **given, **data)
        key = key_of(q, k, v, given, data)
        self._forget_if_changed()

        def work() -> ready.Results:
            return self._attend(key, q, k, v, given, data, schedule, asked)

        known = self._calls.seen(key)
        if known is None:
            out, lse = work()
        else:
            out, lse = ready.run(known, asked, (q, k, v), given, data, schedule, work)
        return (out, lse) if return_lse else out

    @outside_graphs("attention with latent heads, whose call has no v, is no operator of a graph")
    def _between_graphs(self, *tensors: torch.Tensor, **arguments: Any) -> Any:
        return self(*tensors, **arguments)

    def _attend(
        self,
        key: Any,
        q: Any,
        k: Any,
        v: Any,
        given: dict[str, Any],
        data: dict[str, Any],
        schedule: Schedule | None,
        asked: ready.Asked,
    ) -> ready.Results:
        """A call from its check to its results. Raises FlashgenError."""
        backend, deterministic, invariant, return_lse = asked
        known, call = self._checked(self._program, key, q, k, v, given, data)
        if call.q.device.type == "meta":
            return ops.shapes(self._program, q, k, call.v if v is None else v, given, data)
        if config.debug:
            from .debug import report_clamped

            report_clamped(call.bound, call.geometry)
        if schedule is not None and not known.fits(schedule):
            check_fits(schedule, call.bound, call.geometry, call.text)
            known.found_to_fit(schedule)
        route = route_of(known, call, backend, schedule, invariant)
        tile = route.tile if schedule is None else schedule.block_size
        is_given = schedule is not None
        compile_ahead(known, call, route, tile, deterministic, invariant, is_given)
        made = schedule
        if schedule is None and is_planned(call, route.decodes):
            made = self._kept.of(call, route.tile, "auto", route.kept_by, known.tapes)
        engine = None
        if route.decodes:
            out, lse = decode(call, made, invariant, route.backend, known.tapes)
        else:
            assert made is not None
            arguments = ops.arguments_of(call, made, deterministic, invariant)
            engine = ops.engine(route.backend, call.bound, tapes=known.tapes, **arguments)
            out, lse = ops.attention(engine, call.q, call.k, call.v, call.sinks, call.data)
        ready.remember(known, asked, call, route, schedule, made, engine)
        if call.geometry.packing is not None:
            # Not [0], whose gradient is copied into zeros.
            out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
        return out, lse if return_lse else None

    def _checked(
        self, program: Program, key: Any, q: Any, k: Any, v: Any, given: Any, data: Any, **more: Any
    ) -> tuple[Known, Call]:
        text = CallText(self.name, {"q": q, "k": k, "v": v, **given, **data})

        def checked(**arguments: Any) -> Call:
            call = check(program, text, q, k, v, data=data, **more, **arguments)
            self._read = self._program.read
            return call

        return self._calls.checked(key, text, q, k, v, given, data, checked)

    def _forget_if_changed(self) -> None:
        """Know no call where functions read something else than they did, and mean something else
        by that."""
        if not self._read.are_current():
            # Whoever shares a function may have traced it since.
            if (changes := self._program.changes()) != self._changes:
                self._calls, self._changes = KnownCalls(), changes
            self._read = self._program.read

    def _as_operators(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        schedule: Schedule | None,
        asked: ready.Asked,
        arguments: dict[str, Any],
        data: dict[str, Any],
    ) -> Any:
        """The call as `torch.compile` and dispatch modes see it; operators check it."""
        from .ops import graph

        backend, deterministic, invariant, return_lse = asked
        out, lse = graph.attend(
            *(self._program, self._mask_program, *tensors),
            schedule=schedule,
            backend=backend,
            deterministic=deterministic,
            arguments={**arguments, "batch_invariant": invariant},
            data=data,
        )
        return (out, lse) if return_lse else out

    @outside_graphs(
        "a schedule isn't a graph's value; layers that need the same one share it in the graph "
        "without being given any, or it is made before and given to the compiled function"
    )
    def schedule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        *,
        q_offset: int | torch.Tensor | None = None,
        block_size: int | tuple[int, int] | None = None,
        planner: Planner = "auto",
        **data: Any,
    ) -> Schedule:
        """The block-sparse schedule of a call: make it once a step, share it between layers.

        `block_size` is (queries, keys) of a tile, multiples of 16 up to 256; by default what the
        kernel works on. `planner`: `bounds` decides by the tile rule alone, `exact` and `auto`
        look at the elements of tiles that it leaves open. Data of the score function may be left
        out; `kv_lens`, packed and paged tensors are given like to the call.
        Raises FlashgenError like the call."""
        if torch.compiler.is_compiling():
            raise FlashgenError(
                "a schedule is asked for inside torch.export, and it isn't a graph's value",
                call=CallText(f"{self.name}.schedule", {"q": q, "k": k, "v": v}),
                write="no schedule: layers that need the same one share it in the graph",
            )
        program = self._mask_program
        if program is not self._program:
            wanted = {a.name for a in program.params}
            score_only = {a.name for a in self._program.params} - wanted
            data = {name: value for name, value in data.items() if name not in score_only}
        given = {"q_offset": q_offset, **Storage.take(data).given(), "sinks": None}
        known, call = self._known_to_plan(q, k, v, given, data)
        if block_size is not None:
            block = check_block_size(block_size, call.text)
        else:
            block = route_of(known, call, "auto", planned=True).tile
        key = kept_key(call, block, planner)
        return self._kept.of(call, block, planner, key, known.tapes).shared()

    def _known_to_plan(
        self, q: Any, k: Any, v: Any, given: dict[str, Any], data: dict[str, Any]
    ) -> tuple[Known, Call]:
        """As `_known`, of what decides a schedule. Raises FlashgenError."""
        program = self._mask_program
        if program.heads is None and v is None:
            v = k
        key = key_of(q, k, v, given, data)
        key = None if key is None else ("schedule", key)
        self._forget_if_changed()
        scale = None if program.heads is None else 1.0
        known, call = self._checked(program, key, q, k, v, given, data, scale=scale)
        refuse_meta(call.q, call.text)
        return known, call

    @outside_graphs("the source of a call isn't a graph's value")
    def source(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None, **arguments: Any
    ) -> str:
        """The generated kernels of a call as text, each with the path of its file."""
        from .look import source

        backend = arguments.pop("backend", "auto")
        invariant = bool(arguments.pop("batch_invariant", False))
        call = self._check_look(q, k, v, arguments)
        kernel = choose_kernel(call, "portable", asked=backend, invariant=invariant)
        return source(call, backends.choose_for(backend, call), kernel)

    @outside_graphs("the explanation of a call isn't a graph's value")
    def explain(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None, **arguments: Any
    ) -> str:
        """Every stage of a call, in words and a picture."""
        from .look import explain

        backend = arguments.pop("backend", "auto")
        schedule = arguments.pop("schedule", None)
        invariant = bool(arguments.pop("batch_invariant", False))
        call = self._check_look(q, k, v, arguments)
        choice = backends.choose_for(backend, call, schedule)
        kernel = choose_kernel(call, choice.name, asked=backend, invariant=invariant)
        block = tile_of(call, choice.name, invariant)
        schedule = schedule or make_schedule(call.bound, call.geometry, block, "auto", call.text)
        return explain(call, schedule, choice, kernel)

    def _check_look(self, q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> Call:
        return looked_at(self._program, q, k, v, arguments)

    def __reduce__(self) -> Any:
        return _restore, (self._program,)

    def __repr__(self) -> str:
        params = "".join(f", {a}" for a in self._program.params)
        return f"Attention({self.name}{params})"


def _mask_alone(program: Program) -> Program:
    """What decides schedules."""
    plain = program.score is None and program.softcap is None and not program.sinks
    return program if plain else Program(program.mask, heads=program.heads)


def _restore(program: Program) -> Attention:
    score = None if program.score is None else program.score.function.function
    made = Attention(program.mask, score, program.heads, program.softcap, program.sinks)
    made._program, made._mask_program = program, _mask_alone(program)
    return made


def attention(
    function: Callable[..., Any] | None = None,
    /,
    *,
    mask: Mask | Callable[..., Any] | None = None,
    heads: MLA | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> Any:
    """Decorate a score function: `@fg.attention(mask=masks.causal)`; gives an `Attention`.

    The function gets the scaled `score`, index symbols and data by name, and returns the new
    score. Arguments and errors are those of `Attention`."""

    def decorate(score: Callable[..., Any]) -> Attention:
        return Attention(mask=mask, score=score, heads=heads, softcap=softcap, sinks=sinks)

    return decorate if function is None else decorate(function)
