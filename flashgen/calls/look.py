"""Calls that are looked at, by `explain` and `source`, and not done."""

from __future__ import annotations

from typing import Any

from ..call import Call, check
from ..check_kinds import refuse_meta
from ..check_storage import Storage
from ..errors import CallText
from ..spec import Program


def looked_at(program: Program, q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> Call:
    """The checked call; `arguments`: its others, and data by name. Raises FlashgenError."""
    for name in ("return_lse", "deterministic", "schedule", "backend"):
        arguments.pop(name, None)
    known = {n: arguments.pop(n, None) for n in ("scale", "q_offset", "sinks", "seed")}
    known["dropout_p"] = arguments.pop("dropout_p", 0.0)
    storage = Storage.take(arguments)
    given = {"q": q, "k": k, "v": v, **known, **storage.given(), **arguments}
    text = CallText(program.name, given)
    call = check(program, text, q, k, v, storage=storage, data=arguments, **known)
    refuse_meta(call.q, text)
    return call
