"""Generated kernels that aren't imported before Triton needs them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .. import cache


class Kernels:
    """The kernels of a generated module, by their names: `Kernels(...).attention_forward`."""

    def __init__(self, name: str, text: str, parts: tuple[str, ...]) -> None:
        self._made = (name, text, parts)
        self._kernels: dict[str, Kernel] = {}
        self.key = cache.key_of(text, parts)
        self.size = len(text)

    @property
    def module(self) -> ModuleType:
        """The module itself, imported now."""
        return cache.module(*self._made)

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._kernels.setdefault(name, Kernel(self, name))


class Kernel:
    """One of a module's kernels. Whatever else is asked of it, Triton's function answers."""

    def __init__(self, kernels: Kernels, name: str) -> None:
        self._kernels = kernels
        self.name = name
        self.key = (kernels.key, name)
        # Of the module's text.
        self.size = kernels.size
        # By what a launch asks for: what was found, or None of what only Triton launches.
        self.known: dict[Any, Any] = {}

    @property
    def jit(self) -> Any:
        """Triton's function, whose module is imported now."""
        return getattr(self._kernels.module, self.name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.jit, name)

    def __getitem__(self, grid: Any) -> Any:
        return self.jit[grid]
