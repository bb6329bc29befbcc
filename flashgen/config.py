"""Settings, and the package's logs.

A setting is, in this order: the argument of a call, `with config.override(...)`, the environment
variable, the default. The environment is read when a setting is, never at import.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar

from .errors import FlashgenError, did_you_mean, show

T = TypeVar("T")
Tune = Literal["off", "quick", "full"]

_FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off", ""), False),
}
_EFFORTS: dict[str, Tune] = {"off": "off", "quick": "quick", "full": "full"}

_overrides: ContextVar[Mapping[str, Any]] = ContextVar(
    "flashgen_overrides", default=MappingProxyType({})
)


class Setting(Generic[T]):
    """One setting: where its text is read from, how it is understood, and what it is for."""

    def __init__(self, parse: Callable[[str], T], default: Callable[[], T], meaning: str) -> None:
        self.parse = parse
        self.default = default
        self.meaning = meaning

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.variable = f"FLASHGEN_{name.upper()}"

    def __get__(self, instance: Config, owner: type[Config]) -> T:
        overrides = _overrides.get()
        if self.name in overrides:
            value: T = overrides[self.name]
            return value
        text = os.environ.get(self.variable)
        if text is None:
            return self.default()
        try:
            return self.parse(text)
        except FlashgenError as error:
            error.call = f"{self.variable}={text}"
            raise

    def source(self) -> str:
        """Where the value comes from now: `override`, `environment` or `default`."""
        if self.name in _overrides.get():
            return "override"
        return "environment" if self.variable in os.environ else "default"


def _one_of(choices: Mapping[str, T]) -> Callable[[str], T]:
    def parse(text: str) -> T:
        try:
            return choices[text.strip().lower()]
        except KeyError:
            known = ", ".join(filter(None, choices))
            raise FlashgenError(f"not one of {known}", call=f"{text!r}") from None

    return parse


# What `log` is asked for, and with which a name in FLASHGEN_LOGS may begin.
LOGGERS = ("cache", "debug", "launch", "tune")


def _loggers(text: str) -> str:
    for name in _names_in(text):
        bare = name.removeprefix("+").removeprefix("flashgen").lstrip(".")
        if bare not in ("", "all", *LOGGERS):
            raise FlashgenError(
                f"there is no logger {bare}", write=did_you_mean(bare, ("all", *LOGGERS))
            )
    return text


def _names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _default_cache_dir() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("flashgen", appauthor=False)


class Config:
    """Every setting, read anew at each access."""

    cache_dir = Setting(
        lambda text: Path(text).expanduser().absolute() if text else _default_cache_dir(),
        _default_cache_dir,
        "folder that generated kernels are written to",
    )
    print_code = Setting(
        _one_of(_FLAGS), lambda: False, "print each generated module to stderr when it is loaded"
    )
    logs = Setting(
        _loggers, str, "loggers to show on stderr, as in `+flashgen.cache,flashgen.tune` or `all`"
    )
    debug = Setting(_one_of(_FLAGS), lambda: False, "check data at run time, at a cost")
    tune = Setting(_one_of(_EFFORTS), lambda: "off", "search for faster tiles: off, quick or full")

    @contextmanager
    def override(
        self,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        print_code: bool | None = None,
        debug: bool | None = None,
        tune: Tune | None = None,
    ) -> Iterator[None]:
        """Change settings inside a `with` block, in this thread or task; None changes nothing.

        A function with an argument of a setting's name passes it on here, so that its argument
        wins over everything else.
        """
        given = {"cache_dir": cache_dir, "print_code": print_code, "debug": debug, "tune": tune}
        changed = {name: _checked(name, x) for name, x in given.items() if x is not None}
        token = _overrides.set(MappingProxyType({**_overrides.get(), **changed}))
        try:
            yield
        finally:
            _overrides.reset(token)

    def overrides(self) -> Mapping[str, Any]:
        """What `override` has changed here, for `under` in another thread."""
        return _overrides.get()

    @contextmanager
    def under(self, overrides: Mapping[str, Any]) -> Iterator[None]:
        """With what `override` had changed elsewhere: autograd runs a GPU's backward in a thread of
        its own."""
        token = _overrides.set(overrides)
        try:
            yield
        finally:
            _overrides.reset(token)

    def settings(self) -> list[Setting[Any]]:
        """The settings in the order of their declaration, for `doctor` and the docs."""
        return [value for value in vars(Config).values() if isinstance(value, Setting)]

    def __setattr__(self, name: str, value: Any) -> None:
        """Settings aren't assigned: an override ends, and a variable holds everywhere."""
        known = [setting.name for setting in self.settings()]
        if name not in known:
            problem, write = f"there is no setting {name}", did_you_mean(name, known)
        else:
            problem = "a setting isn't assigned"
            write = f"with fg.config.override({name}={show(value)}):, or FLASHGEN_{name.upper()} "
            write += "in the environment"
        raise FlashgenError(problem, call=f"fg.config.{name} = {show(value)}", write=write)

    def __repr__(self) -> str:
        values = (f"{setting.name}={getattr(self, setting.name)!r}" for setting in self.settings())
        return f"Config({', '.join(values)})"


def _checked(name: str, value: Any) -> Any:
    """A setting's value for an override. Raises FlashgenError."""
    kinds: Any = {"cache_dir": (str, os.PathLike), "tune": (str,)}.get(name, (bool,))
    if not isinstance(value, kinds):
        write = {"cache_dir": "a path", "tune": ", ".join(_EFFORTS)}.get(name, "True or False")
        call = f"fg.config.override({name}={show(value)})"
        raise FlashgenError(f"{name} is {show(value)}", call=call, write=write)
    if name == "cache_dir":
        return Path(value).expanduser().absolute()
    return _one_of(_EFFORTS)(value) if name == "tune" else value


config = Config()


_lock = threading.Lock()
_logs_are_set_up = False
_warned: set[tuple[str, str]] = set()


def log(name: str) -> logging.Logger:
    """The logger `flashgen.<name>`; the first call acts on FLASHGEN_LOGS.

    Warnings are not swallowed where an application has no logging of its own: the standard
    library then shows them on stderr. So no NullHandler is attached.
    """
    global _logs_are_set_up
    with _lock:
        if not _logs_are_set_up:
            _logs_are_set_up = True
            _set_up_logs(config.logs)
    return logging.getLogger(f"flashgen.{name}")


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning the first time this process has it to say."""
    with _lock:
        if (logger.name, message) in _warned:
            return
        _warned.add((logger.name, message))
    logger.warning(message)


def _set_up_logs(text: str) -> None:
    """`flashgen.cache` shows INFO and above, `+flashgen.cache` DEBUG too; `all` is `flashgen`."""
    names = _names_in(text)
    for name in names:
        bare = name.removeprefix("+")
        bare = "flashgen" if bare == "all" else bare
        if bare.partition(".")[0] != "flashgen":
            bare = f"flashgen.{bare}"
        logging.getLogger(bare).setLevel(logging.DEBUG if name[0] == "+" else logging.INFO)
    if names:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(name)s] %(levelname)s: %(message)s"))
        # An application that has handlers of its own shows these records already.
        handler.addFilter(lambda _: not logging.getLogger().handlers)
        logging.getLogger("flashgen").addHandler(handler)
