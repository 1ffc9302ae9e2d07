"""Who wrote which token, from ids and a key alone: `python examples/recompute_authorship.py runs/NAME`.

A run keeps after which ids its turns end (`boundaries.json`). With the seed that is all there is to know: the author of turn k
of a sample is drawn from a hash of (seed, rollout id, sample index, k).
"""

import sys

import slime_tandem

run = slime_tandem.open_run(sys.argv[1])
ends = sorted(run.boundaries.ids)
response = [ends[0], 1, 2, ends[-1], 3, ends[0], 4, ends[-1]]  # any response of this run's senior, in its ids
for index in range(3):
    key = slime_tandem.SampleKey(run.config.seed, rollout_id=0, sample_index=index)
    mask = slime_tandem.authorship(response, run.boundaries, run.config, key)
    print(f"sample {index}:", "".join("S" if author else "j" for author in mask))
