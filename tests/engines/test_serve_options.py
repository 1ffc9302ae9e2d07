"""The options of a server: what a child is told is what it obeys, and its key is in no flag."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.config import EngineConfig, ModelsConfig
from slime_tandem.engines.processes import ServerProcess
from slime_tandem.engines.serve_options import API_KEY_ENV, DEFAULT, PORT, ServeOptions
from slime_tandem.engines.sglang import SglangProcess
from slime_tandem.errors import ConfigError, DataError

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
OPTIONS = st.builds(
    ServeOptions,
    host=TEXT,
    port=st.integers(0, 65535),
    dtype=st.sampled_from(("float32", "bfloat16")),
    max_batch=st.integers(1, 2**20),
    cache_tokens=st.integers(64, 2**31),
    threads=st.integers(1, 1024),
    api_key=st.none() | st.text(min_size=1),
    allowed_hosts=st.none() | TEXT,
    served_name=st.none() | TEXT,
    weight_version=TEXT,
    trust_remote_code=st.booleans(),
    port_file=st.none() | TEXT,
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    ServeOptions.add_flags(made)
    return made


@given(options=OPTIONS)
def test_a_child_makes_the_same_options_of_the_flags_and_the_environment(options: ServeOptions) -> None:
    args = parser().parse_args(options.argv())
    key = None if args.api_key_env is None else options.environment()[args.api_key_env]
    assert ServeOptions.from_args(args, key) == options
    replace(options, api_key="any").check()
    if options.api_key is not None:
        other = replace(options, api_key="another")
        assert (other.argv(), repr(other)) == (options.argv(), repr(options)), "neither tells anything of the key"


def test_a_person_gets_one_port_and_a_program_any() -> None:
    assert DEFAULT.port == 0
    assert ServeOptions.from_args(parser().parse_args([]), None) == ServeOptions(port=PORT)


def test_some_flags_alone_leave_the_rest_at_its_defaults() -> None:
    made = argparse.ArgumentParser()
    ServeOptions.add_flags(made, "threads")
    assert ServeOptions.from_args(made.parse_args(["--threads", "3"]), None) == ServeOptions(threads=3)
    with pytest.raises(SystemExit):
        made.parse_args(["--port", "1"])


def test_the_defaults_are_those_of_the_settings() -> None:
    engine, models = EngineConfig(), ModelsConfig()
    for name in ("host", "max_batch", "cache_tokens", "threads"):
        assert getattr(DEFAULT, name) == getattr(engine, name)
    assert (DEFAULT.dtype, DEFAULT.trust_remote_code) == (models.dtype, models.trust_remote_code)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("port", 0, 65535), ("max_batch", 1, 2**20), ("cache_tokens", 64, 2**31), ("threads", 1, 1024)],
)
def test_numbers_have_bounds(name: str, least: int, most: int) -> None:
    for value in (least, most):
        ServeOptions(**{name: value}).check()
    for value in (least - 1, most + 1):
        with pytest.raises(DataError, match=rf"{name}={value}: expected at least {least} and at most {most}"):
            ServeOptions(**{name: value}).check()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", ""])
def test_an_address_beyond_this_machine_needs_a_key(host: str) -> None:
    with pytest.raises(DataError, match=r"host=.*loopback.*--api-key-env"):
        ServeOptions(host=host).check()
    ServeOptions(host=host, api_key="k").check()
    for own in ("127.0.0.1", "127.1.2.3", "::1", "localhost", "LOCALHOST"):
        ServeOptions(host=own).check()


def test_what_a_server_cannot_take_is_told(tmp_path: Path) -> None:
    for options, told in (
        (ServeOptions(max_batch=8), "max_batch=8: .*SglangProcess"),
        (ServeOptions(dtype="bfloat16"), "dtype='bfloat16': .*SglangProcess"),
    ):
        with pytest.raises(ConfigError, match=told):
            SglangProcess("m", options, python=sys.executable, log_file=tmp_path / "log")
    with pytest.raises(ConfigError, match=r"api_key='\(not shown\)'"):
        ServeOptions(api_key="secret").only("port", server="it")
    SglangProcess("m", ServeOptions(port=7, weight_version="3"), python=sys.executable, log_file=tmp_path / "log")


def test_the_key_of_a_child_is_in_its_environment_and_not_in_its_command(tmp_path: Path) -> None:
    server = ServerProcess("m", ServeOptions(api_key="open sesame"), log_file=tmp_path / "log")
    try:
        command = server._command()
        assert f"--api-key-env={API_KEY_ENV}" in command
        assert not [part for part in command if "sesame" in part]
        assert server._environment() == {API_KEY_ENV: "open sesame"}
    finally:
        server.stop()
