"""Every file that a person, a run or a stranger wrote: what is wrong in it ends in one sentence of ours, or changes no meaning.

Of each kind a good file is taken, and a field dropped, repeated, or replaced by another type or an extreme; or bytes are
changed. No reader may end in an error of Python's, and a repeated key is never read. Which values are right is tested
beside each reader.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_tandem.config import RunConfig, TandemConfig, TaskSpec
from slime_tandem.config.migrate import migrate_file
from slime_tandem.diagnostics.bank import BANK, Bank
from slime_tandem.errors import TandemError
from slime_tandem.files import parse_json, read_text
from slime_tandem.local import run as local_run
from slime_tandem.megatron.architecture import architecture_of, load_hf_config
from slime_tandem.megatron.checkpoint import read_state
from slime_tandem.models.hf import read_model_config
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.models.weight_files import hf_weight_files
from slime_tandem.report.comparison import read_mapping
from slime_tandem.report.html import render
from slime_tandem.report.metrics import row_keys
from slime_tandem.report.run_folder import RunWriter, Transcript, TranscriptToken
from slime_tandem.report.summary import ALWAYS
from slime_tandem.rollout.boundaries import BoundaryRecord
from slime_tandem.slime_hooks.adaptive import FILE, kept_coef
from slime_tandem.tasks.jsonl import read_prompts
from slime_tandem.team.score_file import read_responses
from slime_tandem.tokens.token_bytes import TokenBytes

from .diagnostics.conftest import FACTS, rows


@dataclass(frozen=True)
class Repeated:
    """An object of JSON in which a key stands twice."""

    tree: dict[str, Any]
    key: str
    again: Any

    def text(self) -> str:
        pairs = [*self.tree.items(), (self.key, self.again)]
        return "{" + ", ".join(f"{json.dumps(k)}: {dumped(v)}" for k, v in pairs) + "}"


@dataclass(frozen=True)
class Raw:
    """A value as it stands in the text."""

    text: str


def dumped(tree: Any) -> str:
    if isinstance(tree, Repeated):
        return tree.text()
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {dumped(v)}" for k, v in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(dumped, tree)) + "]"
    return json.dumps(tree)


@dataclass
class Kind:
    """A kind of file. `write(folder)` makes what stands around it; `read(path)` is the reader; `needed`: keys of the tree that
    must be there."""

    name: str
    tree: Any
    read: Callable[[Path], object]
    needed: tuple[str, ...] = ()
    write: Callable[[Path], None] = lambda folder: None
    head: str = ""
    """Text before the mutated tree: good lines."""
    tail: str = "\n"
    twice: bool = True
    """Whether a key that stands twice is refused (foreign files are read as their own readers read them)."""


def state() -> Kind:
    folder_files = {name: name.encode() for name in ("metadata.json", "common.pt", ".metadata", "__0_0.distcp")}

    def write(folder: Path) -> None:
        for name, content in folder_files.items():
            (folder / name).write_bytes(content)

    def read(path: Path) -> object:
        return local_run.kept_state(read_state(path.parent).extra, path.parent)

    import hashlib

    digests = {name: hashlib.sha256(content).hexdigest() for name, content in folder_files.items()}
    tree = {
        "format": "slime_tandem checkpoint 1", "step": 3, "trainable": True, "architecture": {"layers": 2, "rope": {"a": 1.0}},
        "extra": {"step": 3, "kl_coef": 0.1}, "files": digests,
    }  # fmt: skip
    return Kind("state.json", tree, read, tuple(tree), write)


def boundaries() -> Kind:
    tokens = TokenBytes((None, b"a", b" ", b"\n", b" b", b" c"), frozenset({0}), frozenset({0}))
    tree = json.loads(BoundaryRecord.resolve(TandemConfig(), tokens).to_json())
    return Kind(
        "boundaries.json", tree, lambda p: BoundaryRecord.from_json(read_text(p, "record"), str(p)), tuple(tree)
    )


def index() -> Kind:
    tree = {"metadata": {"total_size": 10}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}

    def write(folder: Path) -> None:
        for name in tree["weight_map"].values():
            (folder / str(name)).write_bytes(b"")

    return Kind("model.safetensors.index.json", tree, lambda p: hf_weight_files(p.parent), ("weight_map",), write)


def prompts() -> Kind:
    tree = {
        "messages": [{"role": "user", "content": "2 + 2 ="}], "label": "4", "task": "sums", "metadata": {"a": [1, {"b": None}]},
    }  # fmt: skip
    head = '{"prompt": "1 + 1 =", "label": 2}\n'

    def read(path: Path) -> object:
        return read_prompts(TaskSpec(family="jsonl", path=str(path)))

    return Kind("prompts.jsonl", tree, read, ("messages", "label"), head=head)


def responses(student: ModelTokenizer) -> Kind:
    tree = {"id": "a", "messages": [{"role": "user", "content": "x"}], "response_ids": [1, 2, 3]}
    needed = ("messages", "response_ids")
    return Kind("responses.jsonl", tree, lambda p: list(read_responses(p, student)), needed)


def config() -> Kind:
    tree = parse_json(json.dumps(RunConfig().model_dump(mode="json")))
    tree["tasks"] = [{"family": "chain_sum", "weight": 2.0, "config": {"min_terms": 2}}]
    tree["opd"]["template_kwargs"] = {"enable_thinking": False}
    return Kind("config.yaml", tree, lambda p: RunConfig.load(p))


def migrated() -> Kind:
    tree = {"tandem": {"prob_primary": 0.5, "list": [{"frozen_model": "x"}]}, "model_mask": None}
    return Kind("old.json", tree, lambda p: migrate_file(p, write=False))


def coefficients() -> Kind:
    head = '{"rollout_id": 0, "kl_coef": 0.5}\n'
    tree = {"rollout_id": 1, "kl_coef": 0.25}
    return Kind(FILE, tree, lambda p: kept_coef(p.parent, 1), tuple(tree), head=head)


def run_folder(name: str) -> Kind:
    """One row of a file of a run folder; the reader is the whole report."""
    made: dict[str, bytes] = {}

    def write(folder: Path) -> None:
        if not made:
            with RunWriter(folder, resume_step=None) as writer:
                writer.write_config(RunConfig())
                writer.write_eval(0, "before", dict.fromkeys(row_keys("eval"), 0.5))
                writer.write_step(0, dict.fromkeys(row_keys("step"), 0.5))
                writer.write_rewards(0, [{"task": t, "samples": 2, "mean": 0.5, "min": 0, "max": 1, "edges": [0, 1],
                                          "counts": [2]} for t in ("a", "b")])  # fmt: skip
                writer.write_transcripts(0, "train", [Transcript("p", "7", "t", 1.0, "stop", (TOKEN,))])
            shutil.rmtree(folder / "tb")
            made.update({p.name: p.read_bytes() for p in folder.iterdir()})
        for file, content in made.items():
            (folder / file).write_bytes(content)

    tree: dict[str, Any] = {
        "metrics.jsonl": {"step": 1, **dict.fromkeys(row_keys("step"), 0.5)},
        "eval.jsonl": {"step": 1, "phase": "after", **dict.fromkeys(row_keys("eval"), 0.5)},
        "rewards.jsonl": {"step": 1, "task": "a", "samples": 2, "mean": 0.5},
        "transcripts.jsonl": {
            "step": 1, "phase": "eval", "prompt": "p", "label": "7", "task": "t", "reward": 1.0, "finish_reason": "stop",
            "tokens": [{"text": " 2", "author": 1, "log_prob": -0.5, "teacher_log_prob": None}],
        },
    }[name]  # fmt: skip
    needed = {
        "metrics.jsonl": ("step", *(ALWAYS & set(row_keys("step")))),  # a metric that came later is null
        "eval.jsonl": ("step", "phase", *(ALWAYS & set(row_keys("eval")))),
        "rewards.jsonl": ("step", "task", "samples", "mean"),
    }.get(name, tuple(tree))
    return Kind(name, tree, lambda p: render(p.parent), needed, write, head="FROM FILE")


TOKEN = TranscriptToken(" 2", 1, -0.5, -0.25)


def bank() -> Kind:
    tree = {"format": BANK.name, "version": 1, "banks": ["0" * 16], **FACTS}

    def read(path: Path) -> object:
        table = pa.table(rows(), schema=BANK.schema)
        pq.write_table(
            table.replace_schema_metadata({b"slime_tandem": path.read_bytes()}), path.with_suffix(".parquet")
        )
        with Bank(path.with_suffix(".parquet"), BANK) as opened:
            return opened.read()

    return Kind("bank.json", tree, read, tuple(tree))


def model_config() -> Kind:
    tree = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "layer_types": ["full_attention"] * 2,
        "attention_bias": False, "use_sliding_window": False, "sliding_window": None, "eos_token_id": 0,
    }  # fmt: skip

    def read(path: Path) -> object:
        read_model_config(path.parent)
        return architecture_of(load_hf_config(path.parent)).as_json()

    return Kind("config.json", tree, read, twice=False)


KINDS: dict[str, Callable[[], Kind]] = {
    "state": state, "boundaries": boundaries, "index": index, "prompts": prompts, "config": config, "migrated": migrated,
    "coefficients": coefficients, "metrics": lambda: run_folder("metrics.jsonl"), "eval": lambda: run_folder("eval.jsonl"),
    "rewards": lambda: run_folder("rewards.jsonl"), "transcripts": lambda: run_folder("transcripts.jsonl"), "bank": bank,
    "model config": model_config,
}  # fmt: skip
EXTREMES: list[Any] = [
    None, True, False, "", "x", "../x", "/etc/passwd", "a\0b", "x" * 5000, [], [None], {}, {"a": []}, 0, -1, -5, 1.5, 1e308,
    -1e308,
    2**31, 2**63 - 1, 2**63, 2**64, Raw("1" + "0" * 400), Raw("1" + "0" * 5000), Raw("1e999"), Raw("NaN"), Raw("-Infinity"),
    Raw('"\\ud800"'), Raw("[" * 100 + "]" * 100), Raw("[" * 50_000 + "]" * 50_000), Raw('{"a":' * 100 + "1" + "}" * 100),
    Raw("'"), Raw(""),
]  # fmt: skip


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value below the root."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def changed(tree: Any, path: tuple[Any, ...], how: str, value: Any) -> Any:
    """A copy with one value dropped, replaced or repeated."""
    out = copy.deepcopy(tree)
    above, node = [out], out
    for key in path[:-1]:
        node = node[key]
        above.append(node)
    if how == "drop":
        del node[path[-1]]
    elif how == "replace":
        node[path[-1]] = value
    elif isinstance(node, list):
        node.insert(path[-1], copy.deepcopy(node[path[-1]]))
    else:
        twice = Repeated(node, path[-1], value)
        if len(path) == 1:
            return twice
        above[-2][path[-2]] = twice
    return out


def outcome(kind: Kind, root: Path, text: str | bytes) -> TandemError | None:
    """The error of ours that reading the file ends in, one sentence each; None where it is read."""
    folder = root / "step-000003"  # what a checkpoint must be called
    path = folder / kind.name
    folder.mkdir(exist_ok=True)
    kind.write(folder)
    head = path.read_bytes() if kind.head == "FROM FILE" else kind.head.encode()
    path.write_bytes(
        head + (text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass") + kind.tail.encode())
    )
    try:
        kind.read(path)
    except TandemError as error:
        for problem in error.problems:
            assert "\n" not in str(problem)
            assert len(str(problem)) < 3000
        return error
    return None


@pytest.fixture(params=[*KINDS, "responses"])
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "responses":
        return responses(ModelTokenizer.load(request.getfixturevalue("trio").senior))
    return KINDS[request.param]()


def test_the_good_file_is_read_and_a_key_without_which_it_says_nothing_is_missed(kind: Kind, tmp_path: Path) -> None:
    assert outcome(kind, tmp_path, dumped(kind.tree)) is None
    for key in kind.needed:
        error = outcome(kind, tmp_path, dumped(changed(kind.tree, (key,), "drop", None)))
        assert error is not None, key
        assert key in str(error) or kind.name.endswith("jsonl"), (key, str(error))


def test_a_key_that_stands_twice_is_refused_everywhere(kind: Kind, tmp_path: Path) -> None:
    for path in places(kind.tree):
        if kind.twice and isinstance(path[-1], str):
            error = outcome(kind, tmp_path, dumped(changed(kind.tree, path, "repeat", 1)))
            assert error is not None, path
            assert "twice" in str(error), (path, str(error))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_changed_field_is_refused_in_a_sentence_or_read(kind: Kind, tmp_path: Path, data: st.DataObject) -> None:
    tree, all_places = kind.tree, list(places(kind.tree))
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(all_places))
        how = data.draw(st.sampled_from(["drop", "replace", "replace", "replace"]))
        try:
            tree = changed(tree, path, how, data.draw(st.sampled_from(EXTREMES)))
        except (KeyError, TypeError, IndexError):  # the first change took it away
            break
    outcome(kind, tmp_path, dumped(tree))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_changed_byte_is_refused_in_a_sentence_or_read(kind: Kind, tmp_path: Path, data: st.DataObject) -> None:
    good = dumped(kind.tree).encode() + kind.tail.encode()
    at = data.draw(st.integers(0, len(good) - 1))
    new = data.draw(
        st.binary(max_size=3) | st.sampled_from([b"\0", b"\xff", b"\n", b"{", b"[" * 1000, b'"', b"*a", b"&a"])
    )
    outcome(
        kind,
        tmp_path,
        good[:at] + new + (good[at + data.draw(st.integers(0, 3)) :] if data.draw(st.booleans()) else b""),
    )


def test_whatever_stands_in_method_mapping_csv(tmp_path: Path) -> None:
    good = "idx,method,mask,ratio,seed,run\n1,tip,tip,0.1,0,001-tip\n"
    for old, new in (("1,tip", "-1,tip"), ("1,tip", "1" * 5000 + ",tip"), ("0,001", ",001"), ("001-tip", "../x"),
                     ("001-tip", '"'), ("idx", "idx,idx"), ("0.1", "0.1,0.1"), ("tip,tip", "tip\0,tip"), ("1,tip", "²,tip"),
                     ("001-tip", "x" * 200_000), ("\n1", "\n1" * 2), ("idx", "")):  # fmt: skip
        (tmp_path / "method_mapping.csv").write_text(good.replace(old, new, 1))
        with pytest.raises(TandemError, match=r"method_mapping\.csv"):
            read_mapping(tmp_path)
