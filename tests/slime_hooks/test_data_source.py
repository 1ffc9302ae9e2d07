"""The data source notices another prompt file when a job goes on: the place that it saves is a number of rows of one file."""

from __future__ import annotations

import importlib
import json
import sys
import types
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime_tandem.config import RunConfig
from slime_tandem.errors import DataError
from slime_tandem.slime_hooks import runtime, settings


@pytest.fixture
def source(sample_class: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our class over a stand-in with slime's saving: a file a rollout that holds the place and `metadata`."""

    class Theirs:
        def __init__(self, args: Any) -> None:
            self.args, self.sample_offset, self.epoch_id, self.metadata = args, 0, 0, {}
            self.dataset = types.SimpleNamespace(origin_samples=[sample_class(prompt="1+1=")])

        def _path(self, folder: str, rollout_id: int | None) -> Path:
            return Path(folder) / f"global_dataset_state_dict_{rollout_id}.json"

        def save(self, rollout_id: int) -> None:
            state = {"sample_offset": self.sample_offset, "metadata": self.metadata}
            self._path(self.args.save, rollout_id).write_text(json.dumps(state))

        def load(self, rollout_id: int | None = None) -> None:
            path = self._path(self.args.load, rollout_id)
            if path.exists():
                vars(self).update(json.loads(path.read_text()))

    made = {
        "slime.rollout.data_source": {"RolloutDataSourceWithBuffer": Theirs},
        "slime.utils.data": {"filter_long_prompt": None},
        "slime.utils.processing_utils": {"load_tokenizer": lambda _, **__: None},
    }
    for name in ("slime", "slime.rollout", "slime.utils", *made):
        module = types.ModuleType(name)
        vars(module).update(made.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(runtime, "prepare", lambda args: None)
    return importlib.import_module("slime_tandem.slime_hooks.data_source").MessagesDataSource


def arguments(folder: Path, named: str = "prompts.jsonl", **changes: Any) -> Namespace:
    args = Namespace(
        hf_checkpoint="x", apply_chat_template=False, apply_chat_template_kwargs=None, rollout_max_prompt_len=None,
        input_key="prompt", prompt_data=str(folder / named), save=str(folder), load=str(folder), rollout_shuffle=False,
    )  # fmt: skip
    vars(args).update(changes)
    settings.use(args, RunConfig())
    return args


OLD = '{"prompt": "a"}\n{"prompt": "b"}\n'


def saved(source: Any, folder: Path, **changes: Any) -> None:
    """A checkpoint of rollout 3, after five prompts of the file as it is."""
    before = source(arguments(folder, **changes))
    before.sample_offset  # noqa: B018 - slime's attributes are ours
    before._source.sample_offset = 5
    before.save(3)


def test_the_same_file_goes_on(source: Any, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(OLD)
    saved(source, tmp_path)
    again = source(arguments(tmp_path))
    again.load(3)
    assert again.sample_offset == 5
    again.save(4)
    once_more = source(arguments(tmp_path))
    once_more.load(4)
    (tmp_path / "moved.jsonl").write_text(OLD)
    moved = source(arguments(tmp_path, "moved.jsonl"))
    moved.load(3)
    assert moved.sample_offset == 5, "the name is no matter, the rows are"


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "new", ['{"prompt": "a"}\n{"prompt": "B"}\n', '{"prompt": "a"}\n', "", OLD.replace("a", "c") + OLD]
)
def test_another_file_is_refused_with_a_remedy(source: Any, tmp_path: Path, new: str, shuffle: bool) -> None:
    (tmp_path / "prompts.jsonl").write_text(OLD)
    saved(source, tmp_path, rollout_shuffle=shuffle)
    (tmp_path / "prompts.jsonl").write_text(new)
    again = source(arguments(tmp_path, rollout_shuffle=shuffle))
    with pytest.raises(
        DataError, match=rf"^--prompt-data='{tmp_path}/prompts.jsonl': .*32 bytes with SHA-256"
    ) as refused:
        again.load(3)
    assert refused.value.remedy.startswith("restore the file, or start anew in another --save")


def test_a_file_may_grow_where_rows_keep_their_places(source: Any, tmp_path: Path) -> None:
    """More steps of a generated data set are more rows at the end; shuffled, every row has another place."""
    (tmp_path / "prompts.jsonl").write_text(OLD)
    saved(source, tmp_path)
    (tmp_path / "prompts.jsonl").write_text(OLD + '{"prompt": "c"}\n')
    longer = source(arguments(tmp_path))
    longer.load(3)
    longer.save(4)
    with pytest.raises(DataError, match="rows may be added at the end only without --rollout-shuffle"):
        source(arguments(tmp_path, rollout_shuffle=True)).load(3)
    (tmp_path / "prompts.jsonl").write_text(OLD)
    with pytest.raises(DataError, match="48 bytes"):  # what was counted in the longer one
        source(arguments(tmp_path)).load(4)


def test_other_rows_of_the_same_file_are_other_data(source: Any, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(OLD)
    part = str(tmp_path / "prompts.jsonl@[0:1]")
    saved(source, tmp_path, prompt_data=part)
    source(arguments(tmp_path, prompt_data=part)).load(3)
    with pytest.raises(DataError, match=r"those of .*prompts\.jsonl@\[0:1\]"):
        source(arguments(tmp_path)).load(3)


def test_a_checkpoint_of_an_earlier_version_goes_on(source: Any, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(OLD)
    (tmp_path / "global_dataset_state_dict_3.json").write_text('{"sample_offset": 2, "metadata": {}}')
    again = source(arguments(tmp_path))
    again.load(3)
    assert again.sample_offset == 2
    source(arguments(tmp_path)).load(None)  # nothing is loaded
