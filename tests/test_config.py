"""Settings: argument, override, environment, default, in this order. Logs go where asked."""

from __future__ import annotations

import contextvars
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import flashgen
from flashgen import FlashgenError
from flashgen.config import LOGGERS, config, log, warn_once


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for setting in config.settings():
        monkeypatch.delenv(setting.variable, raising=False)


def run(code, **environment):
    """The stderr of a fresh process: logs are set up once per process."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stderr


def test_defaults():
    assert config.debug is False
    assert config.print_code is False
    assert config.tune == "off"
    assert config.logs == ""
    assert config.cache_dir.name == "flashgen"
    assert config.cache_dir.is_absolute()


def test_the_environment_is_read_at_each_access(monkeypatch):
    monkeypatch.setenv("FLASHGEN_DEBUG", "1")
    assert config.debug is True
    monkeypatch.setenv("FLASHGEN_DEBUG", "off")
    assert config.debug is False


def test_cache_dir_expands_the_home_and_is_absolute(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "~/kernels")
    assert config.cache_dir == tmp_path / "kernels"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "here")
    assert config.cache_dir == tmp_path / "here"
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "")
    assert config.cache_dir.name == "flashgen"


def test_an_override_beats_the_environment_and_ends(monkeypatch):
    monkeypatch.setenv("FLASHGEN_TUNE", "quick")
    with config.override(tune="full", debug=True):
        assert (config.tune, config.debug) == ("full", True)
        with config.override(tune="off"):
            assert (config.tune, config.debug) == ("off", True)
        assert config.tune == "full"
    assert (config.tune, config.debug) == ("quick", False)


def test_an_override_ends_with_an_error():
    with pytest.raises(KeyError), config.override(debug=True):
        raise KeyError
    assert config.debug is False


def test_none_overrides_nothing_and_false_does(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHGEN_DEBUG", "1")
    with config.override(debug=None, cache_dir=tmp_path):
        assert config.debug is True
        assert config.cache_dir == tmp_path
    with config.override(debug=False):
        assert config.debug is False


def test_an_override_is_this_threads_own():
    seen = {}
    with config.override(debug=True):
        thread = threading.Thread(target=lambda: seen.update(plain=config.debug))
        context = contextvars.copy_context()
        carried = threading.Thread(
            target=context.run, args=(lambda: seen.update(carried=config.debug),)
        )
        for each in (thread, carried):
            each.start()
            each.join()
    assert seen == {"plain": False, "carried": True}


@pytest.mark.parametrize(
    ("variable", "text", "known"),
    [("FLASHGEN_TUNE", "fast", "off, quick, full"), ("FLASHGEN_DEBUG", "2", "1, true")],
)
def test_a_wrong_value_is_named(monkeypatch, variable, text, known):
    monkeypatch.setenv(variable, text)
    with pytest.raises(FlashgenError, match=f"{variable}={text}: not one of {known}"):
        getattr(config, variable.removeprefix("FLASHGEN_").lower())


def test_a_wrong_override_is_refused():
    with pytest.raises(FlashgenError, match="fast"), config.override(tune="fast"):
        pass


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"debug": "x"}, "debug is 'x'"),
        ({"print_code": 2}, "print_code is 2"),
        ({"cache_dir": 3}, "cache_dir is 3"),
        ({"tune": True}, "tune is True"),
    ],
)
def test_an_override_of_another_kind_is_refused(given, problem):
    name = next(iter(given))
    message = rf"override\({name}=.*\): {problem}\n  instead: "
    with pytest.raises(FlashgenError, match=message), config.override(**given):
        pass


def test_settings_are_not_assigned():
    with pytest.raises(FlashgenError, match=r"config.debg = True: there is no .*\n.*`debug`"):
        config.debg = True
    with pytest.raises(FlashgenError, match=r"override\(debug=True\):, or FLASHGEN_DEBUG"):
        config.debug = True
    assert config.debug is False


def test_unknown_loggers_are_refused(monkeypatch):
    for text in ("+flashgen.cache,plan", "bogus", "flashgen.cach"):
        monkeypatch.setenv("FLASHGEN_LOGS", text)
        with pytest.raises(FlashgenError, match=rf"FLASHGEN_LOGS={re.escape(text)}: there is no"):
            _ = config.logs
    monkeypatch.setenv("FLASHGEN_LOGS", "+cache, flashgen.debug,all, flashgen")
    assert config.logs


def test_the_known_loggers_are_those_that_log():
    texts = (path.read_text() for path in Path(flashgen.__file__).parent.rglob("*.py"))
    assert {name for text in texts for name in re.findall(r'\blog\("(\w+)"\)', text)} == {*LOGGERS}


def test_a_setting_knows_its_source(monkeypatch):
    setting = next(setting for setting in config.settings() if setting.name == "debug")
    assert (setting.variable, setting.source()) == ("FLASHGEN_DEBUG", "default")
    monkeypatch.setenv("FLASHGEN_DEBUG", "0")
    assert setting.source() == "environment"
    with config.override(debug=True):
        assert setting.source() == "override"
        assert "debug=True" in repr(config)


def test_every_setting_is_listed():
    names = [setting.name for setting in config.settings()]
    assert names == ["cache_dir", "print_code", "logs", "debug", "tune"]
    assert all(setting.meaning for setting in config.settings())


def test_every_setting_is_documented():
    text = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
    assert [s.variable for s in config.settings() if f"`{s.variable}`" not in text] == []


def test_fg_config_is_the_object_in_any_order_of_imports():
    assert flashgen.config is config
    code = "import flashgen.config; from flashgen.config import config; import flashgen as f; "
    assert run(code + "assert f.config is config and config.debug is False") == ""


SPEAK = """
from flashgen.config import log
for name in ("cache", "launch"):
    log(name).debug("quiet"); log(name).info("normal"); log(name).warning("loud")
"""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("flashgen.cache", "cache normal, cache loud, launch loud"),
        ("+flashgen.cache", "cache quiet, cache normal, cache loud, launch loud"),
        (
            "+cache, flashgen.launch",
            "cache quiet, cache normal, cache loud, launch normal, launch loud",
        ),
        ("all", "cache normal, cache loud, launch normal, launch loud"),
        ("", "loud, loud"),
    ],
)
def test_logs_are_shown_as_asked(text, shown):
    lines = run(SPEAK, FLASHGEN_LOGS=text).splitlines()
    for mark in ("[flashgen.", "]", "DEBUG: ", "INFO: ", "WARNING: "):
        lines = [line.replace(mark, "") for line in lines]
    assert ", ".join(lines) == shown


def test_an_application_with_handlers_sees_each_record_once():
    code = "import logging; logging.basicConfig(format='app %(message)s')\n" + SPEAK
    assert run(code, FLASHGEN_LOGS="flashgen.launch").splitlines() == [
        "app loud",
        "app normal",
        "app loud",
    ]


def test_importing_and_asking_for_a_logger_add_no_handler():
    code = """
import logging, flashgen.config
assert "flashgen" not in logging.root.manager.loggerDict
from flashgen.config import log
assert not log("cache").handlers and not logging.getLogger("flashgen").handlers
"""
    assert run(code) == ""


def test_a_warning_is_given_once(caplog):
    logger = log("test")
    for message in ("first", "first", "second"):
        warn_once(logger, message)
    warn_once(log("other"), "first")
    assert [record.getMessage() for record in caplog.records] == ["first", "second", "first"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_threads_give_a_warning_once(caplog):
    barrier = threading.Barrier(8)

    def warn():
        barrier.wait()
        warn_once(log("threads"), "once")

    threads = [threading.Thread(target=warn) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.records) == 1


def test_import_is_light_and_leaves_no_trace(tmp_path):
    code = """
import sys, flashgen
heavy = {"torch", "triton", "sympy", "jinja2", "rich", "numpy", "platformdirs"} & set(sys.modules)
assert not heavy, heavy
"""
    assert run(code, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache")) == ""
    assert list(Path(tmp_path).iterdir()) == []
