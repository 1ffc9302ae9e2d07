"""How two tokenizers cut one text: `python examples/align_two_texts.py STUDENT TEACHER ["a text"]`. No weights are read."""

import sys

import slime_tandem

student, teacher, *more = sys.argv[1:]
text = more[0] if more else "The answer is 12 + 34 = 46."

found = slime_tandem.align(text, student, teacher)
for piece, partner, reason in zip(found.pieces, found.partners, found.reasons, strict=True):
    print(f"{piece!r:20} {'-> teacher token ' + str(partner) if partner is not None else reason}")
print(f"{found.coverage:.0%} of {len(found.pieces)} tokens have a partner")
