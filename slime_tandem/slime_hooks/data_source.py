"""`--data-source-path`: slime's data source, whose samples also keep the raw chat messages of their prompt.

slime renders a prompt with the senior's template and forgets the messages; teachers and juniors with another tokenizer render
them with their own. They are kept in `sample.metadata["messages"]`. Everything else (buffer, epochs, checkpoints) is slime's.
"""

from __future__ import annotations

import copy
from typing import Any

from slime_tandem.errors import DataError
from slime_tandem.slime_hooks import wire
from slime_tandem.slime_hooks.settings import settings


class MessagesDataSource:
    """slime's `RolloutDataSourceWithBuffer` with raw messages; takes slime's arguments.

    Raises DataError for prompts that are neither text nor a chat, and for rendered text where messages are needed.
    """

    def __init__(self, args: Any) -> None:
        from slime.rollout.data_source import RolloutDataSourceWithBuffer

        unrendered = copy.copy(args)
        unrendered.apply_chat_template = False
        self._source = RolloutDataSourceWithBuffer(unrendered)
        dataset = getattr(self._source, "dataset", None)
        if dataset is not None:
            self._keep_messages(args, dataset)

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
        """Write the place in the data beside a checkpoint."""
        self._source.save(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        """Go on from a checkpoint's place."""
        self._source.load(rollout_id)

    def __len__(self) -> int:
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_source":
            raise AttributeError(name)
        return getattr(self._source, name)
