"""`--data-source-path`: slime's data source, whose samples also keep the raw chat messages of their prompt, and which notices
another prompt file.

slime renders a prompt with the senior's template and forgets the messages; teachers and juniors with another tokenizer render
them with their own. They are kept in `sample.metadata["messages"]`. The place in the data that slime saves beside a checkpoint
is a number of rows: with it goes a fingerprint of the file that they were counted in. Everything else (buffer, epochs,
checkpoints) is slime's.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_tandem.errors import DataError
from slime_tandem.files import fingerprint
from slime_tandem.slime_hooks import runtime, wire
from slime_tandem.slime_hooks.settings import settings

_KEPT = "slime_tandem_data"
"""The key of the saved metadata under which the prompt file's fingerprint stands."""
_SLICE = re.compile(r"@\[-?\d*:-?\d*\]$")
"""What slime lets stand behind a file's name: rows of it."""


class MessagesDataSource:
    """slime's `RolloutDataSourceWithBuffer` with raw messages; takes slime's arguments.

    Raises DataError for prompts that are neither text nor a chat, and for rendered text where messages are needed.
    """

    def __init__(self, args: Any) -> None:
        from slime.rollout.data_source import RolloutDataSourceWithBuffer

        unrendered = copy.copy(args)
        unrendered.apply_chat_template = False
        self._source = RolloutDataSourceWithBuffer(unrendered)
        self._args = args
        self._fingerprint: Mapping[str, Any] | None = None
        dataset = getattr(self._source, "dataset", None)
        if dataset is not None:
            self._keep_messages(args, dataset)
        # slime starts its engines next; where they write, the roster is made.
        if not runtime.client_processes(settings(args), getattr(args, "rollout_num_gpus", None)):
            runtime.prepare(args)

    def _keep_messages(self, args: Any, dataset: Any) -> None:
        from slime.utils.data import filter_long_prompt
        from slime.utils.processing_utils import load_tokenizer

        tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=settings(args).models.trust_remote_code)
        kwargs = args.apply_chat_template_kwargs or {}
        for sample in dataset.origin_samples:
            raw = sample.metadata.get(wire.MESSAGES, sample.prompt)
            if not args.apply_chat_template:
                if isinstance(sample.prompt, list):
                    sample.metadata[wire.MESSAGES] = raw
                continue
            if isinstance(raw, str):
                raw = [{"role": "user", "content": raw}]
            if not isinstance(raw, list):
                expected = "text, or a list of chat messages"
                raise DataError(f"{args.input_key} of {args.prompt_data}", raw, expected, "correct this row")
            sample.metadata[wire.MESSAGES] = raw
            sample.prompt = tokenizer.apply_chat_template(
                raw, tools=sample.metadata.get("tools"), tokenize=False, add_generation_prompt=True, **kwargs
            )
        if args.rollout_max_prompt_len is not None and args.apply_chat_template:
            # slime did not know the length of what was not rendered yet.
            dataset.origin_samples = filter_long_prompt(
                dataset.origin_samples, tokenizer, None, args.rollout_max_prompt_len
            )
            dataset.samples, dataset.epoch_id = dataset.origin_samples, -1
            if args.rollout_shuffle:
                dataset.shuffle(self._source.epoch_id)

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Groups of samples, from the buffer first."""
        return list(self._source.get_samples(num_samples))

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Give aborted groups back, to be resumed."""
        self._source.add_samples(samples)

    def save(self, rollout_id: int) -> None:
        """Write the place in the data, and what the data are, beside a checkpoint."""
        if (path := self._file()) is not None:
            if self._fingerprint is None:
                size, digest = fingerprint(path)
                self._fingerprint = {"name": str(self._args.prompt_data), "size": size, "sha256": digest}
            self._source.metadata = {**(self._source.metadata or {}), _KEPT: self._fingerprint}
        self._source.save(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        """Go on from a checkpoint's place. Raises DataError where it was counted in other data than these.

        A file that has only grown at its end has the same rows at the same places, unless they are shuffled.
        """
        self._source.load(rollout_id)
        kept, path = (self._source.metadata or {}).get(_KEPT), self._file()
        if kept is None or path is None:  # a checkpoint of an earlier version; no file
            return
        same_rows = _rows_of(kept["name"]) == _rows_of(str(self._args.prompt_data))
        whole = getattr(self._args, "rollout_shuffle", False)
        found = fingerprint(path, None if whole else kept["size"])
        if not same_rows or found != (kept["size"], kept["sha256"]):
            raise DataError(
                "--prompt-data",
                str(self._args.prompt_data),
                f"the rows that the checkpoint's place was counted in: those of {kept['name']}, {kept['size']} bytes with "
                f"SHA-256 {kept['sha256'][:12]}...",
                "restore the file, or start anew in another --save"
                + ("; rows may be added at the end only without --rollout-shuffle" if whole else ""),
            )

    def _file(self) -> Path | None:
        """The prompt file, where there is one that this process reads."""
        named = getattr(self._args, "prompt_data", None)
        if getattr(self._source, "dataset", None) is None or named is None:
            return None
        path = Path(_SLICE.sub("", str(named)))
        return path if path.is_file() else None

    def __len__(self) -> int:
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_source":
            raise AttributeError(name)
        return getattr(self._source, name)


def _rows_of(name: str) -> str:
    """Which rows of its file a name means, as slime writes it; empty for all.

    >>> _rows_of("/data/train.jsonl@[0:100]"), _rows_of("/data/train.jsonl")
    ('@[0:100]', '')
    """
    found = _SLICE.search(name)
    return "" if found is None else found[0]
