"""How one model is served: the options of every server that this package starts, their defaults, bounds and flags.

It knows no server: `embedded.server.serve` obeys the options in this process, `processes.ServerProcess` hands them to a child
as flags, and the servers of real SGLang take some of them, too. The key never stands among the flags, which every user of a
machine can read; a child gets it in its environment.
"""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeVar

from slime_tandem.config import EngineConfig, ModelsConfig
from slime_tandem.engines.sglang_child import API_KEY_ENV
from slime_tandem.errors import ConfigError, DataError

T = TypeVar("T")
PORT = 30000
"""Where a server listens that a person starts, as SGLang's; one that a program starts takes any free port."""
_ENGINE, _MODELS = EngineConfig(), ModelsConfig()


def _option(default: T, text: str, **facts: Any) -> T:
    """A field whose line of documentation is its flag's help, too. `facts`: `within` (low, high), `choices`, `metavar`."""
    option: T = field(default=default, metadata={"help": text, **facts})
    return option


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How a model folder is served; the line of each field is what `--help` says of its flag.

    >>> options = ServeOptions(threads=2, api_key="secret")
    >>> options.argv()[-3:]
    ['--threads=2', '--api-key-env=SLIME_TANDEM_API_KEY', '--weight-version=default']
    >>> options
    ServeOptions(host='127.0.0.1', port=0, dtype='float32', max_batch=256, cache_tokens=65536, threads=2, \
allowed_hosts=None, served_name=None, weight_version='default', trust_remote_code=False, port_file=None)
    """

    host: str = _option(_ENGINE.host, "address to bind to")
    port: int = _option(0, "port; 0: any free one", within=(0, 65535))
    dtype: str = _option(_MODELS.dtype, "weights and computation", choices=("float32", "bfloat16"))
    max_batch: int = _option(_ENGINE.max_batch, "sequences decoded at once", within=(1, 2**20))
    cache_tokens: int = _option(
        _ENGINE.cache_tokens, "KV cache, in tokens: running sequences and kept prefixes", within=(64, 2**31)
    )
    threads: int = _option(_ENGINE.threads, "torch threads", within=(1, 1024))
    api_key: str | None = field(
        default=None,
        repr=False,
        metadata={"help": "environment variable with the key that clients must send", "metavar": "NAME"},
    )
    allowed_hosts: str | None = _option(
        None, "further names by which clients call the server, separated by commas", metavar="NAMES"
    )
    served_name: str | None = _option(None, "name shown in /model_info")
    weight_version: str = _option("default", "version of the first weights")
    trust_remote_code: bool = _option(_MODELS.trust_remote_code, "run Python code that the model folder brings")
    port_file: str | None = _option(None, "write the port's number to this file as soon as it is taken")

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names in `allowed_hosts`."""
        return tuple(filter(None, map(str.strip, (self.allowed_hosts or "").split(","))))

    def check(self) -> None:
        """Raise DataError for a number out of its bounds, and for an address beyond this machine without a key."""
        for option in fields(self):
            if "within" in option.metadata:
                value, (low, high) = getattr(self, option.name), option.metadata["within"]
                if not low <= value <= high:
                    raise DataError(option.name, value, f"at least {low} and at most {high}", "choose another value")
        self.require_key()

    def require_key(self) -> None:
        """Raise DataError for a server without a key that other machines could reach."""
        if self.api_key is None and not is_loopback(self.host):
            expected = "a loopback address (127.0.0.1, ::1, localhost), or a key that clients must send"
            raise DataError("host", self.host, expected, "set a key with --api-key-env, or bind to 127.0.0.1")

    def only(self, *names: str, server: str) -> None:
        """Raise ConfigError for an option that is set though `server` takes none but `names`."""
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name not in names and value != option.default:
                shown = value if option.repr else "(not shown)"
                remedy = "leave it out, or give the server's own flag for it"
                raise ConfigError(option.name, shown, f"its default, {server} does not take it", remedy)

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser, *names: str) -> None:
        """Add the flags of these options to `parser`, of all of them without `names`; a person's default port is `PORT`."""
        for option in fields(cls):
            if names and option.name not in names:
                continue
            how: dict[str, Any] = {k: v for k, v in option.metadata.items() if k in ("help", "choices", "metavar")}
            how["default"] = PORT if option.name == "port" else option.default
            if isinstance(option.default, bool):
                how["action"] = "store_true"
            elif isinstance(option.default, int):
                how["type"] = int
            parser.add_argument(_flag(option.name), **how)

    @classmethod
    def from_args(cls, args: argparse.Namespace, api_key: str | None) -> Self:
        """The options that flags of `add_flags` gave, and the key that the caller read from `args.api_key_env`."""
        given = {o.name: getattr(args, o.name) for o in fields(cls) if hasattr(args, o.name)}
        return cls(**{**given, "api_key": api_key})

    def argv(self) -> list[str]:
        """The flags from which `from_args` makes these options again, in a process that has `environment`."""
        told = []
        for option in fields(self):
            value = API_KEY_ENV if option.name == "api_key" and self.api_key is not None else getattr(self, option.name)
            if value is True:
                told.append(_flag(option.name))
            elif value is not None and value is not False:
                told.append(f"{_flag(option.name)}={value}")
        return told

    def environment(self) -> Mapping[str, str]:
        """The environment variable that goes with `argv`."""
        return {} if self.api_key is None else {API_KEY_ENV: self.api_key}


def is_loopback(host: str) -> bool:
    """Whether a server bound to `host` can be reached from its own machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _flag(name: str) -> str:
    return "--api-key-env" if name == "api_key" else f"--{name.replace('_', '-')}"


DEFAULT = ServeOptions()
