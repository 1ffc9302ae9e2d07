"""Which servers are started, restarted and stopped, and which weights one gets after a crash; real ones: tests/local."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError, ModelError
from slime_tandem.team import servers as module
from slime_tandem.team.roster import Member
from slime_tandem.team.servers import Servers
from slime_tandem.team.team import Team

EVENTS: list[str] = []


class Process:
    """Notes what is asked of it."""

    def __init__(self, *folders: Any, log_file: Path, **options: Any) -> None:
        self.name, self.folders, self.alive, self.url = log_file.stem, folders, False, f"http://own-{log_file.stem}"

    def launch(self) -> None:
        EVENTS.append(f"launch {self.name}")
        self.alive = True

    def wait_ready(self) -> None:
        EVENTS.append(f"wait {self.name}")

    def is_alive(self) -> bool:
        return self.alive

    def stop(self) -> None:
        EVENTS.append(f"stop {self.name}")


class Client:
    """An engine's client whose server answers everything."""

    fails = False

    def __init__(self, url: str, *, role: str, retries: int = 2, **options: Any) -> None:
        self.url, self.role, self.retries = url, role, retries

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        EVENTS.append(f"close {self.role}")

    async def wait_ready(self, timeout_s: float) -> None:
        if self.fails:
            raise ConnectionError(self.role)

    async def update_weights_from_disk(self, folder: str, version: str) -> None:
        EVENTS.append(f"weights {version} to {self.role}")


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, fake in (
        ("ServerProcess", Process), ("FusedServer", Process), ("EngineClient", Client), ("FusedJunior", Client),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, fake)
    read = module.require_whole_weights
    monkeypatch.setattr(module, "require_whole_weights", lambda folder: read(folder) if folder.is_dir() else None)
    monkeypatch.setattr(module, "_DYING_S", 0.0)
    EVENTS.clear()
    yield
    EVENTS.clear()


def roster(**urls: str) -> Any:
    mode, serving = urls.pop("mode", "two_servers"), urls.pop("serving", "")
    overrides = ["opd.enabled=false", f"engine.mode={mode}", *filter(None, [serving])]
    if mode == "fused":
        overrides.append("engine.fused_attention=every_step")  # auto would read the senior's config.json
    config = RunConfig.load(overrides=overrides)
    return SimpleNamespace(
        config=config,
        serving=lambda role: getattr(config.serving, role),
        members={role: Member(role, urls.get(role)) for role in ("senior", "junior")},
        folders={"senior": Path("s"), "junior": Path("j")},
        teacher_specs={},
        fused=mode == "fused",
        fused_tables=list,
        api_key=lambda: None,
    )


def test_what_has_no_url_is_started_side_by_side_and_all_are_closed(tmp_path: Path) -> None:
    servers = Servers(roster(), tmp_path)
    servers.start()
    assert EVENTS == ["launch senior", "launch junior", "wait senior", "wait junior"]
    assert {role: c.url for role, c in servers.clients.items()} == {
        "senior": "http://own-senior",
        "junior": "http://own-junior",
    }
    assert servers.retries == 4
    servers.stop()
    assert EVENTS[4:] == ["close junior", "close senior", "stop senior", "stop junior"]
    assert not servers.clients
    assert not servers.processes


def test_a_given_url_is_used_and_its_server_is_not_ours(tmp_path: Path) -> None:
    servers = Servers(roster(junior="http://theirs"), tmp_path)
    servers.start()
    assert list(servers.processes) == ["senior"]
    assert servers.clients["junior"].url == "http://theirs"
    servers.stop()


def test_each_model_is_served_in_its_own_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def process(folder: Path, options: Any, **kwargs: Any) -> Process:
        seen[str(folder)] = options.dtype
        return Process(folder, **kwargs)

    monkeypatch.setattr(module, "ServerProcess", process)
    servers = Servers(roster(serving="serving.junior.dtype=bfloat16"), tmp_path)
    servers.start()
    servers.stop()
    assert seen == {"s": "float32", "j": "bfloat16"}


@pytest.mark.parametrize("setting", ["quantization=fp8", "context_length=64", "mem_fraction=0.5", "dtype=float16"])
def test_what_a_server_here_does_not_do_is_refused_before_any_starts(tmp_path: Path, setting: str) -> None:
    name, _, value = setting.partition("=")
    with pytest.raises(ConfigError, match=rf"serving of junior: {name}='?{value}"):
        Servers(roster(serving=f"serving.junior.{setting}"), tmp_path).start()
    assert not EVENTS


def test_quantized_weights_are_refused_by_name_where_no_sglang_serves_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    teams = {mode: roster(mode=mode) for mode in ("two_servers", "fused")}
    for team in teams.values():
        team.folders["junior"] = tmp_path
    with pytest.raises(
        ModelError, match=r"quantization_config\.quant_method='mxfp4': expected none.*engine\.junior_url"
    ):
        Servers(teams["two_servers"], tmp_path).start()
    assert not EVENTS
    servers = Servers(teams["fused"], tmp_path)
    servers.start()
    servers.stop()


@pytest.mark.parametrize("given", [{}, {"senior": "http://theirs"}])
def test_a_fused_junior_is_asked_where_the_senior_is(tmp_path: Path, given: dict[str, str]) -> None:
    servers = Servers(roster(mode="fused", **given), tmp_path)
    servers.start()
    assert list(servers.processes) == ([] if given else ["senior"])
    assert servers.clients["junior"].url == servers.clients["senior"].url == given.get("senior", "http://own-fused")
    servers.stop()


def test_only_the_dead_are_restarted_and_only_the_senior_gets_weights_again(tmp_path: Path) -> None:
    with Team(roster(), tmp_path) as team:
        assert team.revive() == []
        team.servers.processes["senior"].alive = False  # type: ignore[union-attr]
        EVENTS.clear()
        assert team.revive() == ["senior"]
        assert EVENTS == ["launch senior", "wait senior"], "no weights were sent yet: those of its folder are right"
        team.send_weights(tmp_path, "v1")
        for process in team.servers.processes.values():
            process.alive = False  # type: ignore[union-attr]
        EVENTS.clear()
        assert team.revive() == ["senior", "junior"]
        assert EVENTS[:4] == ["launch senior", "launch junior", "wait senior", "wait junior"], "side by side"
        assert EVENTS[4:] == ["weights v1 to senior"]
        team.servers.processes["junior"].alive = False  # type: ignore[union-attr]
        EVENTS.clear()
        assert team.revive() == ["junior"]
        assert EVENTS == ["launch junior", "wait junior"]


def test_a_start_that_fails_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "fails", True)
    with pytest.raises(ConnectionError), Team(roster(), tmp_path):
        pass
    assert EVENTS[-2:] == ["stop senior", "stop junior"]
