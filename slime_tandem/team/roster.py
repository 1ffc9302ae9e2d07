"""Who takes part in a run: the models' folders and tokenizers, the handoff rules, what is asked of the teachers.

All of it is read and checked here, before anything is started. This module knows no process, no connection and no rollout:
it is what slime's hooks and the launcher share with a run on this machine, whose servers are `team.servers`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_tandem.config import RunConfig, SamplingConfig, ServedModel, TandemConfig, TeacherSpec, TextMarkers
from slime_tandem.distill.teacher import Scoring, Teacher, check_teacher
from slime_tandem.errors import ConfigError, ModelError
from slime_tandem.models.builtin import PREFIX, found_model, resolve_model
from slime_tandem.models.chat import Chat
from slime_tandem.models.hf import (
    check_model_folder,
    check_revision,
    check_served_model,
    has_tokenizer,
    language_config,
    read_model_config,
)
from slime_tandem.models.tokenizer import ModelTokenizer, require_rows, require_same_tokenizer
from slime_tandem.protocol import Engine
from slime_tandem.rollout.boundaries import BoundaryRecord, boundary_ids, rule_of
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.junior_text import JuniorText
from slime_tandem.rollout.writer import WriterOptions
from slime_tandem.strategies import STRATEGIES
from slime_tandem.team.environments import Environments
from slime_tandem.team.own_code import check_extensions, own_teacher
from slime_tandem.types import Prompt

Role = str
"""senior, junior, teacher; each of several teachers is `teacher <name>`."""


@dataclass(frozen=True)
class Member:
    """A role as the settings give it: `model`, a folder or `builtin:<name>`; `url`, a running server of it, or None."""

    model: str
    url: str | None


def teacher_specs(config: RunConfig) -> dict[Role, TeacherSpec]:
    """Teachers by role, none without `opd.enabled`; ConfigError for a task that none of them is for.

    The tasks of a prompt file (family `jsonl`) are not known here; they are checked when the file is read.

    >>> list(teacher_specs(RunConfig.load(overrides=["opd.enabled=true"])))
    ['teacher']
    """
    opd = config.opd
    if not opd.enabled:
        return {}
    if not opd.teachers:
        alone = TeacherSpec(
            name="teacher",
            model=config.models.teacher,
            url=config.engine.teacher_url,
            thinking=opd.thinking,
            template_kwargs=opd.template_kwargs,
        )
        return {"teacher": alone}
    _check_tasks(config)
    return {f"teacher {spec.name}": spec for spec in opd.teachers}


def _check_tasks(config: RunConfig) -> None:
    """Whether each task of the run has a teacher of `opd.teachers`, each name is a task, and each signal has one teacher."""
    opd = config.opd
    if all(spec.tasks is not None for spec in opd.teachers):
        named = {task for spec in opd.teachers for task in spec.tasks or ()}
        for task in config.tasks:
            if not task.tags_its_prompts and task.family not in named:
                raise ConfigError(
                    "opd.teachers",
                    [spec.name for spec in opd.teachers],
                    f"one for task {task.family!r}",
                    "name the task in a teacher's `tasks`, or leave the `tasks` of one teacher out",
                )
    families = {task.family for task in config.tasks}
    tagged = {task.family for task in config.tasks if task.tags_its_prompts}
    for spec in opd.teachers:
        strangers = sorted(set(spec.tasks or ()) - families)
        if strangers and not tagged:  # the tags of a prompt file, and of a user's own family, are its own
            raise ConfigError(
                f"opd.teachers, {spec.name}: tasks",
                strangers,
                f"families of this run's tasks ({', '.join(sorted(families))})",
                "correct the name, or leave it out",
            )
    for family in sorted(families - tagged):
        mine = [s.name for s in opd.teachers if s.tasks and family in s.tasks]
        mine = mine or [s.name for s in opd.teachers if s.tasks is None]
        for setting, value, usual in (
            ("opd.signal", opd.signal, "sampled"),
            ("opd.selection.selector", opd.selection.selector, "pure_opd"),
            ("opd.token_bank_dir", opd.token_bank_dir, None),
        ):
            if len(mine) > 1 and value not in (usual, "full"):
                raise ConfigError(
                    setting,
                    value,
                    f"{usual or 'null'} where several teachers score one task ({family}: {', '.join(mine)})",
                    f"name each task in the `tasks` of one teacher only, or set {setting}={usual or 'null'}",
                )


def members_of(config: RunConfig) -> dict[Role, Member]:
    """Who takes part by the settings alone, the senior first; ConfigError as `teacher_specs`.

    >>> for role, member in members_of(RunConfig.load(overrides=["engine.teacher_url=http://gpu7:30000"])).items():
    ...     print(f"{role}: {member}")
    senior: Member(model='builtin:senior', url=None)
    junior: Member(model='builtin:junior', url=None)
    teacher: Member(model='builtin:teacher', url='http://gpu7:30000')
    >>> list(members_of(RunConfig.load(overrides=["tandem.enabled=false", "eval.tandem=false", "opd.enabled=false"])))
    ['senior']
    """
    models, engine = config.models, config.engine
    members: dict[Role, Member] = {"senior": Member(models.senior, engine.senior_url)}
    if _tandem(config).enabled:
        members["junior"] = Member(models.junior, engine.junior_url)
    served = {role: spec for role, spec in teacher_specs(config).items() if spec.scorer is None}
    return members | {role: Member(spec.model, spec.url) for role, spec in served.items()}


def _tandem(config: RunConfig) -> TandemConfig:
    """The tandem of the run, on also where only its evaluation has a junior."""
    return config.tandem.model_copy(update={"enabled": config.tandem.enabled or config.eval.tandem})


def one_tokenizer(config: RunConfig) -> bool:
    """Whether senior and junior must share one."""
    tandem = _tandem(config)
    return tandem.enabled and tandem.junior_tokenizer == "same"


def _serving_of(config: RunConfig, role: Role) -> ServedModel:
    """How a role's model is served, by the settings."""
    if config.opd.teachers and (spec := teacher_specs(config).get(role)) is not None:
        return spec.serving
    found: ServedModel = getattr(config.serving, role)
    return found


def read_tokenizer(config: RunConfig, role: Role, folder: Path, *, special: bool) -> ModelTokenizer:
    """A role's tokenizer with the variables of its template: each teacher's own, else those of all that write.

    `special`: its special tokens must be rows of the model, too. Raises ModelError for a folder that is another revision, and
    as `ModelTokenizer.load` and `require_rows`.
    """
    models, spec = config.models, teacher_specs(config).get(role)
    check_revision(folder, _serving_of(config, role).revision)
    kwargs = json.dumps(models.template_kwargs if spec is None else spec.template_kwargs, sort_keys=True)
    files = tuple(sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir() if file.is_file()))
    tokenizer = _loaded(folder, files, kwargs, models.trust_remote_code, models.text_markers)
    require_rows(tokenizer, special=special)
    return tokenizer


@functools.lru_cache(maxsize=8)
def _loaded(
    folder: Path, files: tuple[tuple[str, int], ...], kwargs: str, trust_remote_code: bool, text_markers: TextMarkers
) -> ModelTokenizer:
    """A tokenizer, kept while its `files` are as they were: a suite's plans read the same ones, each for some seconds."""
    return ModelTokenizer.load(
        folder, trust_remote_code=trust_remote_code, text_markers=text_markers, template_kwargs=json.loads(kwargs)
    )


def _check_list_lengths(config: RunConfig, tokenizers: Mapping[Role, ModelTokenizer]) -> None:
    vocabularies = [len(t.tokens.table) for role, t in tokenizers.items() if role != "junior"]
    if not config.opd.enabled or not vocabularies:
        return
    opd, most = config.opd, min(vocabularies)
    for setting, k in (("top_k", opd.top_k), ("selection.top_k", opd.selection.top_k)):
        if k > most:  # the defaults are within any vocabulary
            raise ConfigError(f"opd.{setting}", k, f"at most {most}, all tokens of the smallest vocabulary", "lower it")


def check_models(config: RunConfig, *, elsewhere: Callable[[str], bool] = lambda _: False) -> list[Role]:
    """Raise what a `Roster` would raise of the models, as far as folders tell; returns the roles of which they tell nothing.

    Makes no built-in model, and asks for no weights where a folder has none: a plan needs their sizes alone. `elsewhere`:
    whether a model that is no folder here may be one somewhere else. No code of the user's is looked for.
    """
    members, tokenizers = members_of(config), dict[Role, ModelTokenizer]()
    for role, member in members.items():
        with _of_role(role):
            named = not member.model.startswith(PREFIX) and not Path(member.model).is_dir()
            folder = None if named and elsewhere(member.model) else found_model(member.model, config.models.cache_dir)
            if folder is None or not has_tokenizer(folder):
                continue
            if (member.url is None or role == "senior") and any(folder.glob("*.safetensors")):
                check_model_folder(folder)
            special = role == "senior" or (role == "junior" and one_tokenizer(config))
            tokenizers[role] = read_tokenizer(config, role, folder, special=special)
    if one_tokenizer(config) and {"senior", "junior"} <= tokenizers.keys():
        require_same_tokenizer(tokenizers["senior"], tokenizers["junior"])
    _check_list_lengths(config, tokenizers)
    return [role for role in members if role not in tokenizers]


@contextlib.contextmanager
def _of_role(role: Role) -> Iterator[None]:
    """Say in a ModelError whose model it is: two roles may have folders of the same name, or the same folder."""
    try:
        yield
    except ModelError as error:
        raise error.within(f"{'models.' if ' ' not in role else 'opd.teachers, '}{role}") from error


class Roster:
    """Who takes part in a run, read from `config` and checked; starts nothing and opens no connection.

    `members` (`members_of`) and `teacher_specs` say who; `folders` and `tokenizers` have one entry for each
    member. `own_teachers` are those of the specs with a scorer of the user's own: they have no server, and no member here.
    `boundaries` are the ids after which an author may change, `tandem_rule` hands over at them, `solo_rule` is the senior's
    alone. `log` hears how built-in models that are missing are made; None: it is printed. `spellers` are the junior's and the
    senior's, None where they share a tokenizer. `environments` answer between turns.

    Raises ModelError, TokenizerMismatchError and ConfigError, all before anything is started. A run is then

        roster = Roster(config)
        with Team(roster, config.run_dir / "logs") as team:
            samples = team.write(prompts, 0, 8, tandem=True)
    """

    def __init__(self, config: RunConfig, *, log: Callable[[str], None] | None = None) -> None:
        self.config = config
        self._log = log
        self.members = members_of(config)
        self.teacher_specs = teacher_specs(config)
        self.folders: dict[Role, Path] = {}
        self.tokenizers: dict[Role, ModelTokenizer] = {}
        tandem, same = _tandem(config), one_tokenizer(config)
        for role in self.members:
            self._read(role, special=role == "senior" or (role == "junior" and same))
        check_extensions(config)
        self.own_teachers: dict[Role, Teacher] = {}
        for role, spec in self.teacher_specs.items():
            if spec.scorer is not None:
                with _of_role(role):
                    self.own_teachers[role] = own_teacher(spec, self.student, config)
        self.environments = Environments(config.tasks, self.student, timeout_s=config.engine.environment_timeout_s)
        _check_list_lengths(config, self.tokenizers)
        self.spellers = None
        if same:
            require_same_tokenizer(self.student, self.tokenizers["junior"])
        elif tandem.enabled:
            self.spellers = (self.tokenizers["junior"].speller(), self.student.speller())
        self.boundaries = BoundaryRecord.resolve(tandem, self.student.tokens)
        self.tandem_rule = rule_of(tandem, self.boundaries.ids, self.student.tokens)
        self.solo_rule = HandoffRule.from_config(tandem.model_copy(update={"enabled": False}), self.boundaries.ids)

    def _read(self, role: Role, *, special: bool) -> None:
        """Find a role's folder and load its tokenizer; `special`: its special tokens must be rows of the model, too."""
        member = self.members[role]
        with _of_role(role):
            folder = self.folders[role] = resolve_model(member.model, Path(self.config.models.cache_dir), self._log)
            if member.url is None or role == "senior":
                check_model_folder(folder)
            self.tokenizers[role] = read_tokenizer(self.config, role, folder, special=special)

    def serving(self, role: Role) -> ServedModel:
        """How a role's model is served, by the settings."""
        return _serving_of(self.config, role)

    @property
    def roles(self) -> list[Role]:
        """All roles, the senior first."""
        return list(self.members)

    @property
    def student(self) -> ModelTokenizer:
        """The senior's tokenizer: all ids of a run are its own."""
        return self.tokenizers["senior"]

    @property
    def chats(self) -> dict[Role, Chat]:
        """The chat template of each member with its variables."""
        return {role: tokenizer.chat() for role, tokenizer in self.tokenizers.items()}

    @property
    def fused(self) -> bool:
        """Whether senior and junior decode inside one server."""
        return self.config.engine.mode == "fused"

    @property
    def scoring(self) -> Scoring:
        """What the run asks of its teachers."""
        opd = self.config.opd
        return Scoring(
            opd.alignment,
            0 if opd.signal == "sampled" else opd.top_k,
            opd.support,
            opd.list_length,
            opd.selection.asks_cross,
            opd.selection.depth if opd.selection.asks_cross else 0,
        )

    def fused_tables(self) -> list[frozenset[int]]:
        """The run's own boundary ids, and those of the strategies: evaluation hands over by another one than training."""
        tokens, classes = self.student.tokens, self.config.tandem.boundary_classes
        sets = {boundary_ids(s, tokens.table, tokens.special, classes=classes) for s in STRATEGIES}
        named, field = self.config.eval.handoff_strategy, "eval.handoff_strategy"
        sets.add(boundary_ids(named, tokens.table, tokens.special, classes=classes, field=field))
        return [ids for ids in {self.tandem_rule.boundary, *sets} if ids]

    def api_key(self) -> str | None:
        """The servers' key, None: they take none; raises ConfigError for a variable that is not set or holds no key."""
        name = self.config.engine.api_key_env
        if name is None:
            return None
        value = os.environ.get(name)
        if not value:
            raise ConfigError("engine.api_key_env", name, "an environment variable that is set", f"export {name}")
        if not (value.isascii() and value.isprintable()) or " " in value:
            raise ConfigError(
                f"the variable {name} of engine.api_key_env",
                "(not shown)",
                "a key of printable ASCII without blanks",
                "export it without a line end",
            )
        return value

    def writer_options(
        self, prompt: Prompt, rule: HandoffRule, sampling: SamplingConfig, tokens_per_request: int | None = None
    ) -> WriterOptions:
        """How a response to this prompt is written."""
        t = self.config.tandem
        junior_text = None
        if self.spellers is not None and rule is not self.solo_rule:
            chat = self.tokenizers["junior"].chat()
            junior_text = JuniorText(*self.spellers, chat.render(prompt.messages, prompt.tools), chat.next_turn)
        return WriterOptions(
            rule=rule,
            sampling=sampling,
            tokens=self.student.tokens,
            score_junior=t.junior_token_loss_weight > 0 and rule is self.tandem_rule,
            junior_text=junior_text,
            refuse_fallback=t.on_unexpressible == "error",
            tokens_per_request=tokens_per_request,
            fused=self.fused and rule is not self.solo_rule,
        )

    def teacher(self, role: Role, engine: Engine, info: Mapping[str, Any]) -> Teacher:
        """The scorer of a role whose server, asked through `engine`, says `info` of itself.

        Raises ModelError for a server of another model, or a tokenizer that cannot be aligned.
        """
        spec, t, opd = self.teacher_specs[role], self.tokenizers[role], self.config.opd
        with _of_role(role):
            chat = t.chat()
        teacher = Teacher.by_template(
            engine,
            self.student.chat(),
            chat,
            spec.thinking,
            name=spec.name,
            tasks=None if spec.tasks is None else frozenset(spec.tasks),
            weight=spec.weight,
            max_batch=self.config.engine.max_batch,
            concurrency=opd.concurrency,
            max_tokens=_max_tokens(self.folders[role], info),
            temperature=self.config.sampling.temperature if opd.teacher_temperature == "rollout" else 1.0,
        )
        with _of_role(role):
            if url := self.members[role].url:
                check_served_model(info, self.folders[role], url)
            check_teacher(teacher)
        return teacher


def _max_tokens(folder: Path, info: Mapping[str, Any]) -> int | None:
    """Input tokens that a server of `folder` takes: what it reports, else what the model's config says, else None."""
    reported = info.get("max_total_tokens")
    if isinstance(reported, int):
        return reported
    # SGLang's /model_info does not tell it; it takes inputs that are shorter than the context (tokenizer_manager.py,
    # _validate_one_request).
    context = language_config(read_model_config(folder)).get("max_position_embeddings")
    return context - 1 if isinstance(context, int) else None
