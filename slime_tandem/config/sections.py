"""All sections of a run, each checked by itself: tasks, train and eval here, the others from their own modules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from slime_tandem.config.cluster import ClusterConfig
from slime_tandem.config.engine import EngineConfig, ModelsConfig
from slime_tandem.config.objective import ObjectiveConfig, OptimizerConfig
from slime_tandem.config.opd import OpdConfig
from slime_tandem.config.section import Named, Section
from slime_tandem.config.serving import ServingConfig
from slime_tandem.config.tandem import SamplingConfig, StrategyName, TandemConfig
from slime_tandem.config.tracking import Reporter, TrackingConfig
from slime_tandem.extensions import is_own, is_url

AnswerKind = Literal["number", "math", "text", "choice"]
"""What a task's labels are; docs/extending.md says when an answer is one."""


ANSWER_FORMATS = ("tags", "boxed", "hash", "last_number", "last_line", "choice")
"""Built-in values of `tasks[].answer_format`."""

_OF_FILES = (
    "hub", "subset", "split", "revision", "instruction", "input_key", "label_key", "metadata_key", "bad_lines",
)  # fmt: skip


class TaskSpec(Section):
    """One task family and its share of the prompts."""

    family: str = Field(description="a reasoning-gym data set, `jsonl`, or one of your own as module:attribute")
    weight: float = Field(1.0, gt=0.0, description="share of the prompts, relative to the other tasks")
    config: dict[str, Any] = Field(
        default_factory=dict, description="passed to the reasoning-gym data set, or to a family of your own"
    )
    path: str | None = Field(
        None,
        description="prompt file of family jsonl: JSON lines, .json, .csv, .tsv, .parquet, or .gz of these, or a folder "
        "that `datasets` saved; a family of your own may have one, too",
    )
    hub: str | None = Field(
        None,
        pattern=r"^[\w.-]+/[\w.-]+$",
        description="in the place of a path: a dataset of the Hugging Face hub, owner/name; needs the network, or its cache",
    )
    subset: str | None = Field(
        None, min_length=1, description="subset (configuration) of a dataset of the hub, as main"
    )
    split: str | None = Field(
        None,
        min_length=1,
        description="which split of a dataset of the hub, or of a folder that holds several; null: the only one",
    )
    revision: str | None = Field(
        None, min_length=1, description="commit, tag or branch of a dataset of the hub; null: the newest"
    )
    input_key: str | None = Field(
        None,
        min_length=1,
        description="column of the prompt in a prompt file; null: prompt, messages, question or problem",
    )
    label_key: str | None = Field(
        None,
        min_length=1,
        description="column of the label in a prompt file, a dot leads into an object; null: label, answer, "
        "reward_model.ground_truth, ground_truth or solution",
    )
    metadata_key: str | None = Field(
        None,
        min_length=1,
        description="column of the metadata object in a prompt file; null: metadata, if there is one",
    )
    bad_lines: Literal["refuse", "skip"] = Field(
        "refuse",
        description="bad rows of a prompt file: the first is refused with line and reason, or all are skipped and counted",
    )
    reward: Annotated[str, Named(("label",), urls=True)] | None = Field(
        None,
        description="what scores a response: label (its answer is the prompt's label), a function of your own as "
        "module:attribute, or a server of your own by its URL (prompts then need no label); null: the family's own scorer "
        "(docs/extending.md)",
    )
    reward_weights: dict[str, float] | None = Field(
        None,
        min_length=1,
        description="with a reward of named parts: what each counts in the sum, 0: measured alone; names all of them; null: 1 "
        "each",
    )
    answer: AnswerKind | None = Field(
        None,
        description="what the labels are, where the reward is label: number (compared by value), math (by math-verify), text, "
        "choice (a letter); null: each label is what it looks like (docs/extending.md)",
    )
    answer_format: str | None = Field(
        None,
        description="where the answer of a response stands, where the reward is label: tags (`<answer>`), boxed "
        "(`\\boxed{}`), hash (behind `####`), last_number, last_line, choice (the last letter alone), regex:PATTERN "
        "(RE2: its last match, or the group in it); null: the last `<answer>`, else the last box",
    )
    instruction: str | None = Field(
        None,
        min_length=1,
        description="text appended to each prompt of a prompt file, e.g. what form the answer has; null: none",
    )
    environment: Annotated[str, Named(("calculator",))] | None = Field(
        None,
        description="what answers between the models' turns: calculator, or a function of your own as module:attribute "
        "(docs/extending.md); null: one turn",
    )
    max_turns: int = Field(2, ge=2, description="with an environment: most turns of the models in one response")

    @model_validator(mode="after")
    def _turns_go_with_an_environment(self) -> TaskSpec:
        if self.environment is None and self.max_turns != TaskSpec.model_fields["max_turns"].default:
            raise ValueError("`max_turns` needs an `environment`; without one a response is one turn")
        return self

    @model_validator(mode="after")
    def _path_goes_with_jsonl(self) -> TaskSpec:
        if self.family == "jsonl":
            if (self.path is None) == (self.hub is None):
                raise ValueError("family `jsonl` needs either `path` (on this machine) or `hub` (owner/name)")
        elif self.path is not None and not is_own(self.family):
            raise ValueError("`path` is for family `jsonl` and families of your own; leave it out")
        return self

    @model_validator(mode="after")
    def _columns_go_with_a_file(self) -> TaskSpec:
        for name in _OF_FILES:
            if self.family != "jsonl" and getattr(self, name) != TaskSpec.model_fields[name].default:
                raise ValueError(f"`{name}` is for the rows of family `jsonl`; leave it out")
        return self

    @model_validator(mode="after")
    def _names_go_with_the_hub(self) -> TaskSpec:
        for name in ("subset", "revision"):
            if self.hub is None and self.family == "jsonl" and getattr(self, name) is not None:
                raise ValueError(
                    f"`{name}` is of a dataset of the hub; set `hub` in the place of `path`, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _answer_goes_with_labels(self) -> TaskSpec:
        if self.answer is not None and not self.by_label:
            raise ValueError("`answer` says what labels are, and this task's reward reads none; leave it out")
        if self.answer_format is not None and not self.by_label:
            raise ValueError("`answer_format` is of the reward `label`, and this task's is another; leave it out")
        return self

    @model_validator(mode="after")
    def _weights_go_with_parts(self) -> TaskSpec:
        if self.reward_weights is not None and not self.scored_by_own:
            raise ValueError("`reward_weights` is for a reward of your own with named parts; leave it out")
        return self

    @field_validator("answer_format")
    @classmethod
    def _format_is_known(cls, value: str | None) -> str | None:
        if value is None or value in ANSWER_FORMATS:
            return value
        if not value.startswith("regex:"):
            raise ValueError(f"expected one of {', '.join(ANSWER_FORMATS)}, or regex:PATTERN")
        import re2

        options = re2.Options()
        options.log_errors = False
        try:
            groups = re2.compile(value.removeprefix("regex:"), options).groups
        except re2.error as error:
            why = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else str(error)
            raise ValueError(f"a regular expression of RE2 behind `regex:` ({why})") from None
        except UnicodeEncodeError:
            raise ValueError("a regular expression of whole characters") from None
        if groups > 1:
            raise ValueError(f"a regular expression with one group at most, not {groups}; write the others as (?:...)")
        return value

    @property
    def by_label(self) -> bool:
        """Whether an answer is compared with the prompt's label by the built-in reward."""
        return self.reward == "label" or (self.reward is None and self.family == "jsonl")

    @property
    def scored_by_own(self) -> bool:
        """Whether code or a server of the user's says what a response is worth."""
        return is_own(self.family) if self.reward is None else is_own(self.reward) or is_url(self.reward)

    @property
    def tags_its_prompts(self) -> bool:
        """Whether `Prompt.task` is the prompts' own affair, and not the family's name."""
        return self.family == "jsonl" or is_own(self.family)


class RewardConfig(Section):
    """What scoring a response may take, and what becomes of one that takes more.

    A built-in scorer then gives 0: a model's own text went past the limit. A reward of the user's has failed: nobody knows what
    the response is worth, and `on_failed_sample` says what to do. Both are counted.
    """

    timeout_s: float = Field(
        5.0, gt=0.0, le=3600.0, description="seconds of computing that a built-in scorer may take for one answer"
    )
    memory_mib: int = Field(
        2048, ge=512, le=2**24, description="address space of a scoring process, in MiB; code of your own has no limit"
    )
    processes: int = Field(2, ge=1, le=256, description="most scoring processes; `own_processes` for code of your own")
    own_timeout_s: float = Field(
        60.0,
        gt=0.0,
        le=86400.0,
        description="seconds on the wall that a call of your own function may take (of a batch: the whole call), or an answer "
        "of your server with all repeats",
    )
    own_processes: int = Field(
        1, ge=1, le=256, description="processes that call your own functions; each loads what they load"
    )
    own_concurrency: int = Field(
        64, ge=1, le=4096, description="calls of an async function, or requests to your server, at once"
    )
    own_retries: int = Field(
        3, ge=0, le=100, description="repeats of a request that your server has not answered, or by 429 or 5xx"
    )
    api_key_env: str | None = Field(
        None, min_length=1, description="variable with the key that your server is sent (Authorization: Bearer)"
    )
    on_failed_sample: Literal["mask", "stop"] = Field(
        "mask",
        description="a response whose own reward failed (raised, too late, no number, no answer): mask takes it out of its "
        "group and of the task reward, and counts it; stop ends the run; a rollout of which all failed ends it always",
    )


class TrainConfig(Section):
    """How much is rolled out and learnt."""

    steps: int = Field(20, ge=0, description="rollout + update rounds")
    prompts_per_step: int = Field(32, ge=1, description="groups per rollout")
    samples_per_prompt: int = Field(8, ge=1, description="group size K")
    updates_per_step: int = Field(1, ge=1, description="optimizer steps per rollout (mini-batches of whole groups)")
    epochs_per_step: int = Field(
        1,
        ge=1,
        le=4,
        description="passes over each rollout, with the old and reference log-probs of the first; 1 or 2 is usual, the policy "
        "drifts from its rollout with each",
    )
    micro_batch_tokens: int = Field(8192, ge=1, description="padded tokens per forward pass of the trainer")
    gradient_checkpointing: bool = Field(
        False,
        description="local runs: a layer computes its activations again in the backward pass instead of keeping them "
        "(under slime: cluster.recompute)",
    )
    save_every: int = Field(10, ge=1, description="steps between checkpoints")
    threads: int | None = Field(None, ge=1, le=1024, description="torch threads of the trainer; null: all cores")


class EvalConfig(Section):
    """Held-out evaluation, never on training prompts."""

    prompts: int = Field(128, ge=1, description="held-out prompts")
    samples_per_prompt: int = Field(1, ge=1, description="responses per held-out prompt")
    every: int | None = Field(None, ge=1, description="steps between evaluations; null: only before and after")
    tandem: bool = Field(
        False,
        description="co-written responses also where the senior trains alone (tandem.enabled=false): starts the junior",
    )
    whole_files: bool = Field(
        False,
        description="`slime-tandem eval`: every prompt of the prompt files, as of evaluation sets, never trained on; "
        "false: `prompts` of the held-out tenth",
    )
    chains: int = Field(8, ge=1, description="`slime-tandem eval`: responses per prompt, alone and with handoffs each")
    temperature: float = Field(0.7, ge=0.0, description="`slime-tandem eval`: sampling of these; 0 is greedy")
    top_p: float = Field(0.8, gt=0.0, le=1.0, description="`slime-tandem eval`: nucleus mass")
    top_k: int = Field(20, ge=-1, description="`slime-tandem eval`: -1: whole vocabulary")
    handoff_strategy: StrategyName = Field(
        "sentence",
        description="`slime-tandem eval`: where the author changes, senior first (sentence: at blank lines, the paper's; "
        "choose word where answers have none); or a strategy of your own as module:attribute",
    )
    drift_samples: int = Field(
        4,
        ge=1,
        description="`slime-tandem eval`: solo responses per prompt at temperature 1 without truncation, for the drift",
    )
    start: str | None = Field(
        None,
        min_length=1,
        description="`slime-tandem eval`: the weights that the senior's training started from, as a folder or builtin:<name>; "
        "measures the drift from them; null: not measured",
    )
    resamples: int = Field(2000, ge=100, description="`slime-tandem eval`: bootstrap resamples of the prompts")

    @field_validator("top_k")
    @classmethod
    def _top_k_is_not_zero(cls, value: int) -> int:
        if value == 0:
            raise ValueError("-1 (whole vocabulary) or at least 1, SGLang refuses 0")
        return value


class Sections(Section):
    """The tree of all settings, not yet held against each other (`RunConfig` does that)."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="folder under runs_dir")
    runs_dir: str = Field("runs", description="where runs are kept")
    seed: int = Field(0, ge=0, lt=2**63, description="keys every random draw of the run")
    report_to: tuple[Reporter, ...] = Field(
        ("tensorboard",),
        description="who gets the metrics, beside the run's folder: a name or a list; none: nobody (docs/tutorial.md)",
    )
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    models: ModelsConfig = Field(default_factory=ModelsConfig)
    tasks: tuple[TaskSpec, ...] = Field(
        (TaskSpec(family="chain_sum", config={"min_terms": 2, "max_terms": 2}),),
        min_length=1,
        description="training and evaluation tasks",
    )
    reward: RewardConfig = Field(default_factory=RewardConfig)
    tandem: TandemConfig = Field(default_factory=TandemConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    opd: OpdConfig = Field(default_factory=OpdConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    serving: ServingConfig = Field(default_factory=ServingConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    control: bool = Field(
        False, description="also run solo GRPO (no junior, no teacher) from the same start with the same budget"
    )

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_name_is_a_list(cls, value: object) -> object:
        """As transformers and TRL take it: a name, `none`, or several names, each once."""
        if isinstance(value, str):
            value = () if value == "none" else (value,)
        if isinstance(value, list | tuple) and len(set(map(str, value))) < len(value):
            raise ValueError("each name once")
        return value
