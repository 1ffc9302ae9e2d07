"""Questions put to a senior at work: accuracy alone, handoff robustness, drift from the junior, legibility to it."""
