"""The cost model: what a call must do at least, counted from its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from .call import Call
from .schedule import Schedule


@dataclass(frozen=True)
class Cost:
    """Work of one forward call. FLOPs count every element of a visited tile, as kernels do."""

    tiles: int
    partial_tiles: int
    flops: int
    bytes: int

    @staticmethod
    def of(call: Call, schedule: Schedule) -> Cost:
        """Count the visited tiles; waits for the device."""
        geometry, states = call.geometry, schedule.states
        grids = states.shape[0] * states.shape[1]
        if schedule.packing is not None:
            grids *= geometry.batch
        repeat = geometry.batch * geometry.heads // max(1, grids)
        visited, partial = int((states != 0).sum()), int((states == 1).sum())
        area = schedule.block_size[0] * schedule.block_size[1]
        dims = call.q.shape[-1] + call.v.shape[-1]
        moved = sum(t.numel() * t.element_size() for t in (call.q, call.k, call.v))
        out = call.q.numel() // max(1, call.q.shape[-1]) * call.v.shape[-1]
        return Cost(
            visited * repeat,
            partial * repeat,
            2 * visited * repeat * area * dims,
            moved + out * call.q.element_size(),
        )

    def __str__(self) -> str:
        return (
            f"tiles visited: {self.tiles:,}, masked element by element: {self.partial_tiles:,}\n"
            f"{self.flops / 1e9:,.3f} GFLOP in matrix products, "
            f"at least {self.bytes / 2**20:.2f} MiB moved"
        )
