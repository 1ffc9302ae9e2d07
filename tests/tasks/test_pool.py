"""Calls in processes that can be killed: limits, deaths, order, and nothing that outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_tandem.errors import ConfigError, DataError, EngineUnavailableError
from slime_tandem.tasks.pool import Call, Limits, Pool, Reply, recipe

from ..waiting import wait_until

LENGTH = recipe("functools", "partial", len)
POWER = recipe("functools", "partial", pow)
ENDLESS = Call(POWER, (9, 9**9))
TOO_MUCH = Call(recipe("functools", "partial", bytes), (3 * 2**30,))
EXIT = recipe("functools", "partial", os._exit)


def lengths(texts: list[str]) -> list[Call]:
    return [Call(LENGTH, (text,)) for text in texts]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    sys.path.append(str(Path(__file__).parent))  # pool_functions
    made = Pool(Limits(timeout_s=1.0))
    yield made
    made.close()
    sys.path.pop()


def test_replies_come_in_order(pool: Pool) -> None:
    texts = ["x" * (i % 7) for i in range(300)]
    assert [reply.value for reply in pool.ask(lengths(texts))] == [len(text) for text in texts]
    assert len(pool.pids) <= 2
    assert pool.ask([]) == []


def test_what_passes_a_limit_has_no_value_and_the_others_theirs(pool: Pool) -> None:
    replies = pool.ask([*lengths(["a"]), ENDLESS, *lengths(["ab"]), TOO_MUCH, *lengths(["abc"])])
    assert replies == [Reply(1), Reply(problem="timeout"), Reply(2), Reply(problem="error"), Reply(3)]


@pytest.mark.parametrize("text", ["\x00", "\ud800", "\ud800\udc00", "<|im_end|>", "x" * 2_000_000])
def test_any_text_can_be_handed_over(pool: Pool, text: str) -> None:
    assert pool.ask(lengths([text])) == [Reply(len(text))]


def test_a_call_that_ends_its_process_is_made_again_once(pool: Pool) -> None:
    replies = pool.ask([*lengths(["a"]), Call(EXIT, (3,)), *lengths(["ab"])])
    assert replies == [Reply(1), Reply(problem="error"), Reply(2)]


def test_what_a_call_raises_is_handed_on(pool: Pool) -> None:
    (reply,) = pool.ask([Call(LENGTH, (3,))])
    assert reply.problem == "raised"
    assert "TypeError" in str(reply.error)


CODE = {
    "eval": ("builtins", "eval", "1 + 1"),
    "exec": ("builtins", "exec", "x = 1"),
    "compile": ("sympy", "sympify", "x + 1"),
    "system": ("os", "system", "true"),
    "popen": ("subprocess", "getoutput", "true"),
    "fork": ("os", "fork", None),
    "unpickled": ("pickle", "loads", b"cos\nsystem\n(S'true'\ntR."),
    "connection": ("socket", "create_connection", ("127.0.0.1", 9)),
}


@pytest.mark.parametrize("what", CODE)
def test_a_guarded_process_evaluates_starts_and_reaches_nothing(pool: Pool, what: str) -> None:
    module, name, given = CODE[what]
    make = recipe("pool_functions", "function", module, name)
    (reply,) = pool.ask([Call(make, () if given is None else (given,))])
    assert reply == Reply(problem="error")


def test_a_guarded_process_writes_no_file(pool: Pool, tmp_path: Path) -> None:
    for name, flags in (("a", "w"), ("b", "x")):
        (reply,) = pool.ask([Call(recipe("functools", "partial", open), (str(tmp_path / name), flags))])
        assert reply == Reply(problem="error")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_made_says_why(pool: Pool) -> None:
    make = recipe("pool_functions", "refuses")
    with pytest.raises(ConfigError, match=r"tasks\.0=3: expected another") as caught:
        pool.ask([Call(make, ())])
    assert (caught.value.field, caught.value.value) == ("tasks.0", 3)
    with pytest.raises(EngineUnavailableError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        pool.ask([Call(recipe("no_such_module", "f"), ())])
    with pytest.raises(EngineUnavailableError, match="scoring process='ended'"):
        pool.ask([Call(recipe("os", "_exit", 3), ())])
    (reply,) = pool.ask([Call(recipe("pool_functions", "raiser"), ())])
    assert isinstance(reply.error, DataError)


def test_a_process_without_memory_to_start_is_an_error() -> None:
    small = Pool(Limits(memory_mib=16))
    with pytest.raises(EngineUnavailableError, match=r"scoring process=.*reward\.memory_mib"):
        small.ask([Call(recipe("numpy", "array", [1]), ())])
    small.close()


def test_kills_lose_nothing_and_change_no_order(pool: Pool) -> None:
    texts = ["x" * (i % 11) for i in range(4000)]
    done = threading.Event()

    def kill() -> None:
        for _ in range(3):
            for pid in pool.pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if done.wait(0.02):
                return

    killer = threading.Thread(target=kill)
    killer.start()
    replies = pool.ask(lengths(texts))
    done.set()
    killer.join()
    # A call that two kills in a row met is counted; none is lost, and none has another's value.
    assert all(reply in (Reply(len(text)), Reply(problem="error")) for reply, text in zip(replies, texts, strict=True))
    assert sum(reply.problem is not None for reply in replies) <= 3
    assert pool.ask(lengths(["ab"])) == [Reply(2)]


def test_threads_share_the_processes(pool: Pool) -> None:
    found: dict[int, list[object]] = {}

    def ask(n: int) -> None:
        found[n] = [reply.value for reply in pool.ask(lengths(["x" * n] * 50))]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [n] * 50 for n in range(6)}
    assert len(pool.pids) <= 2


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return b"Z" not in Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1]


PARENT = """
import sys
from slime_tandem.tasks.pool import Call, Limits, Pool, recipe
sys.path.insert(0, sys.argv[2])
pool = Pool(Limits(timeout_s=1000.0 if sys.argv[1] == "computing" else 2.0, processes=1))
pool.ask([Call(recipe("functools", "partial", len), ("a",))])
print(*pool.pids, flush=True)
if sys.argv[1] == "busy":
    pool.ask([Call(recipe("functools", "partial", pow), (9, 9**9))])
if sys.argv[1] == "computing":
    pool.ask([Call(recipe("pool_functions", "endless"), ())])
sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["idle", "busy", "computing"])
def test_no_process_outlives_a_parent_that_was_killed(state: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, state, str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert alive(worker)
        assert os.getpgid(worker) == worker, "Ctrl-C in the terminal does not reach it"
        parent.kill()
    wait_until(lambda: not alive(worker))


def test_a_worker_imports_nothing_heavy(pool: Pool) -> None:
    from ..test_imports import HEAVY

    (reply,) = pool.ask([Call(recipe("pool_functions", "loaded"), ())])
    assert "slime_tandem" in reply.value
    assert set(reply.value).isdisjoint(HEAVY)
