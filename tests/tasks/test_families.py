"""Tasks: train and held-out prompts never overlap, streams are pure functions, scorers, bad configs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slime_tandem.config import TaskSpec
from slime_tandem.errors import ConfigError, DataError
from slime_tandem.tasks.families import EVALUATED_AS_CODE, LINEAR_SCORERS, TaskSet
from slime_tandem.tasks.family import INSTRUCTION, is_held_out
from slime_tandem.tasks.formulas import formulas_equal, text_is_numbers
from slime_tandem.tasks.own_scorers import FOOLED, OWN_SCORERS
from slime_tandem.types import Prompt

from .reached import reached

SUMS = TaskSpec(family="chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2})
LETTERS = TaskSpec(family="letter_counting", config={"min_words": 2, "max_words": 4})
GSM = TaskSpec(family="gsm_symbolic")


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


@pytest.mark.parametrize("spec", [SUMS, LETTERS, GSM], ids=lambda spec: spec.family)
def test_prompts_have_messages_label_and_task(spec: TaskSpec) -> None:
    for prompt in TaskSet([spec], seed=3).train_prompts(0, 4):
        assert prompt.task == spec.family
        assert [m.role for m in prompt.messages] == ["user"]
        assert prompt.messages[0].content == f"{INSTRUCTION}\n{prompt.metadata['entry']['question']}"
        assert prompt.label


@pytest.mark.parametrize("spec", [SUMS, LETTERS, GSM], ids=lambda spec: spec.family)
def test_right_answers_score_one_and_others_do_not(spec: TaskSpec) -> None:
    tasks = TaskSet([spec], seed=0)
    for prompt in tasks.train_prompts(1, 8):
        assert tasks.reward(prompt, f" so it is <answer> {prompt.label} </answer>") == 1.0
        assert tasks.correct(prompt, f"\\boxed{{{prompt.label}}}")
        assert not tasks.correct(prompt, f"<answer>{prompt.label}7</answer>")
        assert tasks.reward(prompt, str(prompt.label)) == 0.0, "an answer without tags is none"


def test_part_marks_are_rewarded_and_not_counted_as_correct() -> None:
    tasks = TaskSet([LETTERS], seed=0)
    prompt = tasks.train_prompts(0, 1)[0]
    text = f"<answer>{prompt.label} letters</answer>"
    assert 0.0 < tasks.reward(prompt, text) < 1.0
    assert not tasks.correct(prompt, text)


def test_train_prompts_are_a_function_of_seed_and_step() -> None:
    mixed = [SUMS, LETTERS]
    first = TaskSet(mixed, seed=5)
    first.train_prompts(0, 7)  # what was asked before does not matter
    assert ids(first.train_prompts(3, 12)) == ids(TaskSet(mixed, seed=5).train_prompts(3, 12))
    assert ids(first.train_prompts(3, 12)) != ids(first.train_prompts(4, 12))
    assert ids(first.train_prompts(3, 12)) != ids(TaskSet(mixed, seed=6).train_prompts(3, 12))


def test_heldout_prompts_are_distinct_and_the_same_for_every_seed() -> None:
    prompts = TaskSet([SUMS, LETTERS], seed=1).heldout_prompts(60)
    assert ids(prompts) == ids(TaskSet([SUMS, LETTERS], seed=2).heldout_prompts(60))
    assert len(set(ids(prompts))) == 60
    assert ids(prompts)[:20] == ids(TaskSet([SUMS, LETTERS], seed=2).heldout_prompts(20))


def test_weights_set_the_shares() -> None:
    tasks = TaskSet([SUMS.model_copy(update={"weight": 3.0}), LETTERS], seed=0)
    held_out = [p.task for p in tasks.heldout_prompts(40)]
    assert (held_out.count("chain_sum"), held_out.count("letter_counting")) == (30, 10)
    trained = [p.task for p in tasks.train_prompts(0, 400)]
    assert 260 < trained.count("chain_sum") < 340


def test_train_and_heldout_never_overlap_in_a_domain_of_two_hundred_questions() -> None:
    # One-digit sums have 200 questions: independent draws of 400 and 12 would meet with certainty.
    small = TaskSpec(family="chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    held_out = set(ids(TaskSet([small], seed=0).heldout_prompts(12)))
    for seed in range(4):
        tasks = TaskSet([small], seed=seed)
        train = {i for step in range(5) for i in ids(tasks.train_prompts(step, 80))}
        assert len(train) > 120, "nearly every question that is not held out was drawn"
        assert not held_out & train


def test_sides_are_decided_by_the_messages_alone() -> None:
    tasks = TaskSet([SUMS], seed=9)
    assert not any(is_held_out(p.messages) for p in tasks.train_prompts(0, 200))
    assert all(is_held_out(p.messages) for p in tasks.heldout_prompts(50))


def test_too_many_heldout_prompts_are_an_error() -> None:
    small = TaskSpec(family="chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    with pytest.raises(
        ConfigError, match=r"tasks\.0='chain_sum': expected more distinct held-out prompts.*eval\.prompts"
    ):
        TaskSet([small], seed=0).heldout_prompts(100)


@given(st.text())
@example("<answer>")
@example("<answer><answer>4</answer>")
@example("<answer>\x00</answer>")
@example("<answer>1e999999</answer>")
@example("<answer>NaN</answer>")
@example("<answer>" + "9" * 5000 + "</answer>")
@example("\\boxed{{{")
@settings(deadline=None)
def test_any_text_has_a_reward_between_zero_and_one(text: str) -> None:
    for prompt in ARBITRARY_PROMPTS:
        for response in (text, f"<answer>{text}</answer>"):
            reward = ARBITRARY_TASKS.reward(prompt, response)
            assert isinstance(reward, float)
            assert 0.0 <= reward <= 1.0


ARBITRARY_TASKS = TaskSet([SUMS, LETTERS, GSM], seed=0)
ARBITRARY_PROMPTS = ARBITRARY_TASKS.heldout_prompts(3)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (TaskSpec(family="chain_sums"), r"tasks\.0\.family='chain_sums'.*did you mean `chain_sum`"),
        (TaskSpec(family="json"), "did you mean `jsonl`"),
        (
            TaskSpec(family="chain_sum", config={"max_term": 3}),
            r"tasks\.0\.config\.max_term=3.*did you mean `max_terms`",
        ),
        (TaskSpec(family="chain_sum", config={"seed": 3}), r"config\.seed=3: expected no seed or size"),
        (TaskSpec(family="chain_sum", config={"min_terms": 5, "max_terms": 2}), "max_terms must be >= min_terms"),
        (TaskSpec(family="chain_sum", config={"min_digits": "two"}), "a config that chain_sum accepts"),
    ],
)
def test_bad_settings_are_config_errors(spec: TaskSpec, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TaskSet([spec], seed=0)


def test_no_tasks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one task"):
        TaskSet([], seed=0)


def test_our_own_errors_are_not_hidden_by_the_guard() -> None:
    tasks = TaskSet([SUMS], seed=0)
    prompt = tasks.train_prompts(0, 1)[0]
    broken = Prompt(prompt.prompt_id, prompt.messages, prompt.label, prompt.task, {"spec": 0, "entry": {}})
    with pytest.raises(KeyError):
        tasks.reward(broken, "<answer>4</answer>")


def test_a_scorer_that_cannot_read_its_own_label_is_an_error_in_a_worker_too() -> None:
    tasks = TaskSet([GSM], seed=0)
    prompt = tasks.train_prompts(0, 1)[0]
    broken = Prompt("p", prompt.messages, prompt.label, prompt.task, {"spec": 0})
    with pytest.raises(DataError, match=r"scorer of tasks\.0 at prompt p=\"KeyError: 'entry'\""):
        tasks.reward(broken, "<answer>4</answer>")


BUILTINS = """abs all any bool bytes chr complex dict dir enumerate float int isinstance KeyError len list map max min next
ord print range set slice sorted str sum super tuple ValueError zip"""
METHODS = """add adjusted append choices decode end endswith extend findall format get group groups index intersection
is_zero isdigit isnumeric items join keys lower match pop quantize remove replace rindex rstrip sort split
splitlines startswith strip title tobytes tolist update upper values"""
HARMLESS = {
    *(f"builtins.{name}" for name in BUILTINS.split()),
    *(f".{name}" for name in METHODS.split()),  # of texts, lists, dicts, sets, matches, Decimals
    *("copy.deepcopy", "decimal.Decimal", "fractions.Fraction", "json.dumps", "json.loads", "math.exp", "math.prod"),
    *("re.findall", "re.fullmatch", "re.match", "re.search", "re.split", "re.sub"),
    *(
        "numpy.absolute",
        "numpy.allclose",
        "numpy.array",
        "numpy.empty",
        "numpy.isclose",
        "numpy.loadtxt",
        "numpy.round",
    ),  # a list of lines
    *("magiccube.cube.Cube", "zss.compare.simple_distance", "zss.simple_tree.Node"),
    *(".addkid", ".is_done", ".rotate"),  # of zss and magiccube
    # Methods of reasoning-gym's own classes, whose bodies are walked.
    *("._Game", "._is_solved", ".evaluate", ".get_curr_state", ".load_puzzle_matrix", ".move", ".perform_moves"),
    *(".can_move", ".reverse_move", ".simplify"),
}
"""All that the scorers of the families on offer call outside of reasoning-gym: nothing that runs a text, starts a process or
opens a file. What is new is looked at before it is added; a family that calls more gets our own scorer or is refused."""


def reached_by(name: str) -> set[str]:
    import reasoning_gym.factory
    import reasoning_gym.games.contrib.sokoban.src.game

    if name in OWN_SCORERS:
        return reached(OWN_SCORERS[name], ("slime_tandem",))
    cls = reasoning_gym.factory.DATASETS[name][0]
    return reached(cls.score_answer, ("reasoning_gym",), cls, ".".join(cls.__module__.split(".")[:2]))


def test_no_scorer_on_offer_calls_anything_that_runs_text() -> None:
    import reasoning_gym.factory

    offered = set(reasoning_gym.factory.DATASETS) - set(EVALUATED_AS_CODE)
    assert len(offered) > 95
    assert {name: found for name in sorted(offered) if (found := reached_by(name) - HARMLESS)} == {}


def test_the_refused_families_do() -> None:
    for name in EVALUATED_AS_CODE:
        assert reached_by(name) & {"sympy.parsing.sympy_parser.parse_expr", ".score_answer"}, name
    for name in OWN_SCORERS.keys() - FOOLED:
        cls = __import__("reasoning_gym.factory").factory.DATASETS[name][0]
        found = reached(cls.score_answer, ("reasoning_gym",), cls)
        assert found & {"builtins.eval", "sympy.parsing.sympy_parser.parse_expr"}, f"{name} needs no scorer of ours"


EVALUATES = {
    "eval",
    "exec",
    "compile",
    "parse_expr",
    "sympify",
    "lambdify",
    "literal_eval",
    "__import__",
    "loads",
    "system",
}


def test_the_one_door_of_formulas_to_an_evaluation_is_known() -> None:
    """math-verify and latex2sympy call sympy's `parse_expr` on text; `formulas` puts a reader of numbers in its place.

    math-verify's own call is in its reader of plain expressions, which is not asked. `compile` is of regular expressions.
    """
    found = reached(
        formulas_equal, ("slime_tandem", "math_verify", "latex2sympy2_extended"), near="latex2sympy2_extended"
    )
    assert {name for name in found if name.rpartition(".")[2] in EVALUATES} == {
        "re.compile",
        "sympy.core.sympify.sympify",
        "sympy.parsing.sympy_parser.parse_expr",
    }


@pytest.mark.parametrize("text", ["__import__('os').system('true')", "x", "2**9", "(1)", "1e99999", "1_0", "\uff11"])
def test_sympy_reads_no_text_but_numbers_while_formulas_are_compared(text: str) -> None:
    import sympy

    with text_is_numbers():
        assert sympy.Number("0.1") == sympy.Rational(1, 10)
        with pytest.raises((sympy.SympifyError, SyntaxError)):
            sympy.sympify(text)
    assert sympy.sympify("x + 1 - 1") == sympy.Symbol("x")


def test_the_scorers_that_are_called_in_this_process_compare_decimals_and_texts() -> None:
    linear = {"abs", "isinstance", "len", "Decimal", "strip", "replace"}
    for name in LINEAR_SCORERS:
        assert {called.rpartition(".")[2] for called in reached_by(name)} <= linear, name


@pytest.mark.parametrize("family", sorted(OWN_SCORERS))
def test_our_own_scorers_give_the_right_answer_all_marks(family: str) -> None:
    tasks = TaskSet([TaskSpec(family=family)], 0)
    prompts = tasks.train_prompts(0, 6)
    verdicts = tasks.verdicts([(p, f"<answer>{p.label}</answer>") for p in prompts])
    assert [v.reward for v in verdicts] == [1.0] * 6
    pairs = [(p, q) for p, q in itertools.pairwise(prompts) if p.label != q.label]
    assert pairs
    others = tasks.verdicts([(p, f"<answer>{q.label}</answer>") for p, q in pairs])
    assert all(v.reward < 1.0 for v in others)


@pytest.mark.parametrize("family", sorted(FOOLED))
def test_what_fools_the_librarys_scorer_does_not_fool_ours(family: str) -> None:
    import reasoning_gym

    library = reasoning_gym.create_dataset(family, seed=0, size=1).score_answer
    tasks = TaskSet([TaskSpec(family=family)], 0)
    prompts = tasks.train_prompts(0, 6)
    none = {"complex_arithmetic": ("nan", "NaN", "nanj"), "coin_flip": ("0",), "game_of_life_halting": ("zzz", "0")}[
        family
    ]
    for answer in none:
        assert sum(library(answer, p.metadata["entry"]) for p in prompts) >= 5, "the library takes it for right"
        verdicts = tasks.verdicts([(p, f"<answer>{answer}</answer>") for p in prompts])
        assert all(v.reward is not None and v.reward < 0.5 for v in verdicts)


@pytest.mark.parametrize(
    ("family", "answer", "right", "reward"),
    [
        *(("complex_arithmetic", a, (-6, 4), 1.0) for a in ("-6.0 + 4.0i", "(-6+4j)", "-6+4i", "-.6e1 + 40e-1j")),
        *(("complex_arithmetic", a, (0, 1), 1.0) for a in ("i", "+i", "1j", "0+i", "0.0 + 1.0i")),
        *(("complex_arithmetic", a, (0, -7), 1.0) for a in ("-7i", "0 - 7j")),
        ("complex_arithmetic", "5", (5, 0), 1.0),
        ("complex_arithmetic", "6", (5, 0), 0.36787944117144233),
        *(("complex_arithmetic", a, (5, 0), 0.0) for a in ("nan", "inf", "1e999", "", "()", "5+", "5i5", "1_0", "٥", "6*i")),
        *(("coin_flip", a, "0.25", 1.0) for a in ("0.25", "1/4", "25%", "0.2501", "2.5e-1")),
        ("coin_flip", "0.2", "0.25", 0.6),
        ("coin_flip", "0.24999", "0.25", 1.0),
        *(("coin_flip", a, "0.25", 0.0) for a in ("nan", "1", "", "one in four")),
        ("coin_flip", "0", "0.0000305", 0.0),
        *(("game_of_life_halting", a, "False", 1.0) for a in ("False", "false.", "'False'")),
        *(("game_of_life_halting", a, "False", 0.0) for a in ("True", "", "True False", "zzz")),
    ],
)  # fmt: skip
def test_our_scorers_of_numbers_by_hand(family: str, answer: str, right: Any, reward: float) -> None:
    entry = {"answer": right, "metadata": {"result": right}}
    assert OWN_SCORERS[family](answer, entry) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("family", "answer", "about", "reward"),
    [
        ("countdown", "(5 + 1) * 4", {"numbers": [1, 4, 5], "target": 24}, 1.0),
        ("countdown", "(5 + 1) * 4 + 0 * 9", {"numbers": [1, 4, 5], "target": 24}, 0.05),
        ("countdown", "8 / 3 * 9", {"numbers": [3, 8, 9], "target": 24}, 1.0),
        ("countdown", "5 - 1 * 4", {"numbers": [1, 4, 5], "target": 24}, 0.05),
        ("countdown", "9 ** 9", {"numbers": [9, 9], "target": 24}, 0.01),
        ("countdown", "24", {"numbers": [1, 4, 5], "target": 24}, 0.05),
        ("countdown", "1 / 0", {"numbers": [0, 1], "target": 24}, 0.01),
        ("puzzle24", "8 / (3 - 8 / 3)", {"numbers": [3, 3, 8, 8]}, 1.0),
        ("puzzle24", "49 / 2 + 0 * 1", {"numbers": [49, 2, 0, 1]}, 0.01),
        ("puzzle24", "6 * 4 + 0 * 0", {"numbers": [1, 2, 3, 4]}, 0.01),
        ("n_queens", "_ Q\nQ _", {"valid_answers": ["_ Q\nQ _"]}, 1.0),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]", {"valid_answers": ["_ Q\nQ _"]}, 0.5),
        ("n_queens", "[__import__('os').system('touch x')]", {"valid_answers": ["_ Q\nQ _"]}, 0.0),
    ],
)
def test_our_own_scorers_by_hand(family: str, answer: str, about: dict[str, object], reward: float) -> None:
    assert OWN_SCORERS[family](answer, {"metadata": about, "answer": ""}) == reward


def test_our_own_scorers_of_lists_by_hand() -> None:
    for family, right, almost, wrong in (
        ("binary_matrix", "0 1\n1 0", "[[0, 1], [1, 0]]", "[[0, 1], [1, 1]]"),
        ("spiral_matrix", "1 2 3", "[1, 2, 3]", "[1, 3, 2]"),
        ("string_insertion", "ABA", "['A', 'B', 'A']", "['A', 'B']"),
    ):
        entry = {"answer": right}
        assert [OWN_SCORERS[family](a, entry) for a in (right, almost, wrong, "[1", "{}")] == [1.0, 0.1, 0.0, 0.0, 0.0]
    entry = {"answer": "['1.5', '2.0']", "metadata": {"direction": "ascending"}}
    assert [OWN_SCORERS["number_sorting"](a, entry) for a in ("[1.5, 2]", "[2, 1.5]", "[1.5]", "no")] == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]
    entry = {"answer": "0x10"}
    assert [OWN_SCORERS["bitwise_arithmetic"](a, entry) for a in ("0x10", "16", "0x11")] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("family", sorted(EVALUATED_AS_CODE))
def test_a_family_whose_scorer_runs_text_is_refused_by_name(family: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"tasks\.0\.family='{family}': expected a data set whose scorer does not run"
    ):
        TaskSet([TaskSpec(family=family)], seed=0)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Writes a module of the user's; gives the name of its `f`."""

    def make(name: str, text: str) -> str:
        head = "from slime_tandem.types import Message, Prompt\nfrom slime_tandem.tasks.family import make_prompt\n"
        (tmp_path / f"{name}.py").write_text(f"{head}{text}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        return f"{name}:f"

    return make


COUNT = """
class f:
    def __init__(self, spec, where):
        self.spec, self.where = spec, where
    def stream(self, key):
        n = len(key)
        while True:
            yield make_prompt("count", [Message("user", str(n))], metadata={"n": n})
            n += 1
    def reward(self, prompt, text):
        return float(text == str(prompt.metadata["n"]))
"""


def test_a_family_of_ones_own_beside_a_built_in_one(own: Callable[[str, str], str]) -> None:
    tasks = TaskSet([SUMS, TaskSpec(family=own("fam_count", COUNT), config={"a": 1})], seed=0)
    prompts = tasks.train_prompts(0, 20)
    assert {p.task for p in prompts} == {"chain_sum", "count"}
    for prompt in prompts:
        right = prompt.messages[0].content if prompt.task == "count" else f"<answer>{prompt.label}</answer>"
        assert prompt.metadata["spec"] == (prompt.task == "count")
        assert tasks.correct(prompt, right)
        assert tasks.reward(prompt, "no") == 0.0
    assert not {p.prompt_id for p in prompts} & {p.prompt_id for p in tasks.heldout_prompts(6)}
    assert tasks.train_prompts(3, 5) == tasks.train_prompts(3, 5)
    assert list(tasks.listed_prompts) == []


def test_a_family_may_list_its_prompts(own: Callable[[str, str], str]) -> None:
    name = own("fam_listed", COUNT + "    prompts = (make_prompt('count', [Message('user', '1')], metadata={'n': 1}),)")
    assert [p.metadata["spec"] for p in TaskSet([SUMS, TaskSpec(family=name)], 0).listed_prompts] == [1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("f = 3", "it is a int"),
        ("class f: pass", r"one that can be made \(TypeError"),
        ("def f(spec, where): raise SystemExit(0)", r"one that can be made \(SystemExit: 0\)"),
        ("def f(spec, where): return spec", r"something that makes a task family \(`stream` and `reward`\)"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_family_that_is_none_is_refused(own: Callable[[str, str], str], text: str, says: str) -> None:
    name = own(f"fam_bad_{abs(hash(text))}", text)
    with pytest.raises(ConfigError, match=says) as caught:
        TaskSet([TaskSpec(family=name)], 0)
    assert (caught.value.field, caught.value.value) == ("tasks.0.family", name)


def test_what_a_family_streams_must_be_prompts(own: Callable[[str, str], str]) -> None:
    name = own("fam_text", "class f:\n  def __init__(self, *a): pass\n  def reward(self, p, t): return 0\n"
                           "  def stream(self, key):\n    while True: yield 'text'")  # fmt: skip
    with pytest.raises(DataError, match=r"tasks\.0\.family: stream='text': expected prompts"):
        TaskSet([TaskSpec(family=name)], 0).train_prompts(0, 1)
    half = "from slime_tandem.tasks.family import make_prompt\nfrom slime_tandem.types import Message\n"
    half += "class f:\n  def __init__(self, *a): pass\n  def reward(self, p, t): return 0\n"
    half += "  def stream(self, key):\n    while True: yield make_prompt('t', [Message('user', 'x\\ud800')])"
    with pytest.raises(DataError, match=r"tasks\.0\.family: stream=.*whole characters"):
        TaskSet([TaskSpec(family=own("fam_half", half))], 0).train_prompts(0, 1)


def test_a_reward_stands_in_the_familys_place(own: Callable[[str, str], str], tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "say a"}\n{"prompt": "say b", "label": "b"}\n')
    reward = own("rew_letter", "def f(prompt, text): return int(prompt.messages[0].content[-1] in text)")
    tasks = TaskSet(
        [TaskSpec(family="jsonl", path=str(file), reward=reward), SUMS.model_copy(update={"reward": "label"})], 0
    )
    a, b = tasks.listed_prompts
    assert (a.label, b.label) == (None, "b")
    assert tasks.reward(a, "a!") == 1.0
    assert tasks.reward(a, "no") == 0.0
    (total,) = [p for p in tasks.train_prompts(0, 30) if p.task == "chain_sum"][:1]
    assert tasks.correct(total, f"\\boxed{{{total.label}.0}}"), "by math-verify"
    with pytest.raises(DataError, match=r"label=None: expected a non-empty string or a number"):
        TaskSet([TaskSpec(family="jsonl", path=str(file), reward="label")], 0)


@pytest.mark.parametrize("body", ["return None", "return '0.5'", "raise KeyError('x')", "return float('nan')"])
def test_a_reward_that_answers_anything_else_is_no_reward(own: Callable[[str, str], str], body: str) -> None:
    reward = own(f"rew_bad_{abs(hash(body))}", f"def f(prompt, text):\n    {body}")
    tasks = TaskSet([SUMS.model_copy(update={"reward": reward})], 0)
    prompt = tasks.train_prompts(0, 1)[0]
    assert tasks.verdicts([(prompt, "x")])[0].reward is None
    with pytest.raises(DataError, match=r"a number, or named parts.* Remedy: mend the function") as caught:
        tasks.reward(prompt, "x")
    assert caught.value.field == f"reward of tasks.0 at prompt {prompt.prompt_id}"
