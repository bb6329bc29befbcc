"""How heads share keys, where the shapes don't say it."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import FlashgenError, show


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention in its absorbed form (DeepSeek-V2, section 2.1).

    Keys are one latent row of `rank + rope` numbers shared by all heads; the value is the row's
    first `rank` numbers. Raises FlashgenError for sizes that aren't positive integers."""

    rank: int
    rope: int

    def __post_init__(self) -> None:
        for name in ("rank", "rope"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
                raise FlashgenError(
                    f"{name} must be a positive integer, and is {show(size)}",
                    call=f"fg.MLA(rank={show(self.rank)}, rope={show(self.rope)})",
                    write="fg.MLA(rank=512, rope=64)",
                )
