"""The servers of a roster on this machine: started, restarted after a crash, stopped; and one client for each role.

A role whose `engine.<role>_url` is set uses that running server (SGLang or `slime-tandem serve`); the others get an
embedded server of their own as a child process, with a key that is made for this run and written nowhere. This module knows
no prompt, no sample and no score, and none of the weights that a server was given since it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from slime_tandem.config import ServedModel
from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.fused.junior import FusedJunior
from slime_tandem.engines.fused.launch import FusedServer, Sglang, catch_up_of
from slime_tandem.engines.processes import ServerProcess
from slime_tandem.engines.serve_options import ServeOptions
from slime_tandem.errors import ConfigError
from slime_tandem.models.hf import require_whole_weights
from slime_tandem.team.roster import Role, Roster

T = TypeVar("T")
_SGLANG_START_S = 600.0
"""SGLang imports and compiles for longer than an embedded server takes to start."""
_DYING_S = 5.0


def _check_served_here(role: Role, how: ServedModel) -> None:
    """Raise ConfigError for what a server that is started here does not do."""
    here = ServedModel(dtype=how.dtype, revision=how.revision)
    for name in ServedModel.model_fields:
        if (value := getattr(how, name)) != getattr(here, name):
            expected = "its default on this machine, whose servers take dtype and revision alone"
            remedy = f"remove it, or start SGLang yourself and name its URL (engine.{role.split()[0]}_url)"
            raise ConfigError(f"serving of {role}: {name}", value, expected, remedy)
    if how.dtype == "float16":
        raise ConfigError(f"serving of {role}: dtype", how.dtype, "float32 or bfloat16 on this machine", "change it")


class Servers:
    """Processes and clients of a roster; `start`, then `stop` on every path. Logs go to `log_dir`.

    `processes` are the servers that were started here, by role: none for a role with a URL of its own, nor for a junior inside
    the senior's server. `clients` has every role. The clients live in one event loop, which `run` enters.
    """

    def __init__(self, roster: Roster, log_dir: Path) -> None:
        self.roster, self.log_dir = roster, log_dir
        self.processes: dict[Role, ServerProcess | FusedServer] = {}
        self.clients: dict[Role, EngineClient] = {}
        self._own_key = secrets.token_urlsafe(32)
        self._runner = asyncio.Runner()
        self._connections = contextlib.AsyncExitStack()

    def run(self, question: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the clients' event loop, and wait for it."""
        return self._runner.run(question)

    def start(self, ready: Callable[[Role], None] = lambda role: None) -> None:
        """Start what has no URL, side by side, and connect to all; `ready` hears of each role that answers.

        Raises ConfigError for a key that cannot be, before any process starts, then EngineUnavailableError for a server that
        does not come up, ModelError and PortInUseError.
        """
        key = self.roster.api_key()  # a user's own server knows no other
        own_key = key or self._own_key
        for role, member in self.roster.members.items():
            if member.url is None:
                _check_served_here(role, self.roster.serving(role))
                if not (self.roster.fused and role in ("senior", "junior")):  # SGLang itself serves these two
                    require_whole_weights(self.roster.folders[role])
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for role, member in self.roster.members.items():
            if member.url is None and not (self.roster.fused and role == "junior"):
                self.processes[role] = self._process(role, own_key)
                self.processes[role].launch()
        for process in self.processes.values():
            process.wait_ready()
        for role in self.roster.members:
            client = self.run(self._connections.enter_async_context(self._client(role, key, own_key)))
            self.clients[role] = client
            self.run(client.wait_ready(self.roster.config.engine.start_timeout_s))
            ready(role)

    def _process(self, role: Role, key: str) -> ServerProcess | FusedServer:
        e, models, folders = self.roster.config.engine, self.roster.config.models, self.roster.folders
        dtype = self.roster.serving(role).dtype or models.dtype
        common = ServeOptions(host=e.host, dtype=dtype, api_key=key, trust_remote_code=models.trust_remote_code)
        if self.roster.fused and role == "senior":
            return FusedServer(
                folders["senior"],
                folders["junior"],
                common,
                tables=self.roster.fused_tables(),
                sglang=Sglang(
                    e.sglang_python,
                    args=e.sglang_args,
                    catch_up=catch_up_of(e.fused_attention, folders["senior"]),
                    prefill=e.fused_prefill,
                ),
                log_file=self.log_dir / "fused.log",
                start_timeout_s=max(e.start_timeout_s, _SGLANG_START_S),
            )
        options = replace(common, max_batch=e.max_batch, cache_tokens=e.cache_tokens, threads=e.threads)
        log_file = self.log_dir / f"{role.replace(' ', '-')}.log"
        return ServerProcess(folders[role], options, log_file=log_file, start_timeout_s=e.start_timeout_s)

    def _client(self, role: Role, key: str | None, own_key: str) -> EngineClient:
        e = self.roster.config.engine
        inside = self.roster.fused and role == "junior"
        where = "senior" if inside else role
        given = self.roster.members[where].url
        url = given or self.processes[where].url
        return (FusedJunior if inside else EngineClient)(
            url,
            role=role,
            api_key=own_key if given is None else key,
            timeout_s=e.request_timeout_s,
            max_retries=e.max_retries,
            backoff_s=e.backoff_s,
            gone=lambda: where in self.processes and not self.processes[where].is_alive(),
        )

    @property
    def retries(self) -> int:
        """HTTP requests repeated so far."""
        return sum(client.retries for client in self.clients.values())

    def restart_dead(self) -> list[Role]:
        """Restart own servers that have died, with the weights of their folders; returns the roles restarted.

        To be called when a server did not answer. One that is dying closes its connections before it counts as dead, so a
        few seconds are given to it. Raises EngineUnavailableError for one that does not come up again.
        """
        end = time.monotonic() + _DYING_S
        while True:
            dead = [role for role, process in self.processes.items() if not process.is_alive()]
            if dead or not self.processes or time.monotonic() > end:
                break
            time.sleep(0.05)
        for role in dead:
            self.processes[role].launch()
        for role in dead:
            self.processes[role].wait_ready()
        return dead

    def stop(self) -> None:
        """Close the clients and stop the processes that were started here."""
        try:
            self.run(self._connections.aclose())
        finally:
            self.clients.clear()
            self._runner.close()
            for process in self.processes.values():
                process.stop()
            self.processes.clear()
