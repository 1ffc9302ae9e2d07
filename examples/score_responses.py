"""A teacher's log-probs at the student's own tokens: `python examples/score_responses.py STUDENT TEACHER`."""

import sys

import slime_tandem

student, teacher = sys.argv[1:]
responses = [
    {"id": "right", "prompt": "12 + 34 =", "response": "<answer>46</answer>"},
    {"id": "wrong", "prompt": "12 + 34 =", "response": "<answer>47</answer>"},
]
for scored in slime_tandem.score(responses, student, teacher):
    known = [value for value in scored["teacher_log_probs"] if value is not None]
    print(f"{scored['id']}: {sum(known):.2f} nats over {len(known)} tokens, coverage {scored['coverage']:.0%}")
