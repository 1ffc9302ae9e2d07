"""Texts that a model, a prompt file or a folder's name may hold and that no page may obey, and a run full of them."""

from __future__ import annotations

from pathlib import Path

from slime_tandem.config import RunConfig
from slime_tandem.report.run_folder import RunWriter, Transcript, TranscriptToken

from .conftest import eval_row, step_row

SCRIPT = "</script><script>window.broken = 1</script>"
TEXTS = (
    SCRIPT,
    '"><img src=x onerror="window.broken = 2">',
    "<svg/onload=window.broken=3><style>body{display:none}</style>",
    "<!--",
    "{{ 7 * 7 }}{% raw %}",
    "\u202egnp.exe\u2066",
    "\x00\x1b[2J\x9b\x85\u2028",
    "\ud83d",
    "data: injected\n\nevent: part\ndata: {}",
    "https://example.org/?" + "y" * 400,
)
LONG = "x" * 2**20


def write_hostile_run(run_dir: Path) -> Path:
    """A run whose every text is one of TEXTS, and one response of a line of a mebibyte."""
    with RunWriter(run_dir, resume_step=None) as writer:
        writer.write_config(RunConfig(name="hostile", runs_dir=SCRIPT, train={"steps": 2}, eval={"prompts": 4}))
        writer.write_eval(0, "before", eval_row(solo_accuracy=0.5, tandem_accuracy=0.25))
        numbers = {"samples": 1, "mean": 0.5, "min": 0.0, "max": 1.0, "edges": [0.0, 1.0], "counts": [1]}
        for step in range(2):
            writer.write_step(step, step_row(rollout__reward_mean=0.5 + step / 4, time__step_s=1.0))
            # Half a surrogate pair stands for broken bytes of a model; no prompt file that is read has one.
            tasks = [text for text in TEXTS if text != "\ud83d"]
            writer.write_rewards(step, [{"task": text, **numbers} for text in tasks])
            shown = [
                Transcript(t, t, t, 0.5, t, tuple(TranscriptToken(x, i % 2, -0.5, -1.0) for i, x in enumerate(TEXTS)))
                for t in (*TEXTS, LONG)
            ]
            long = Transcript("long", None, "t", 1.0, "stop", (TranscriptToken(LONG, 1, -0.5, None),))
            writer.write_transcripts(step, "train", [long, *shown])
    return run_dir
