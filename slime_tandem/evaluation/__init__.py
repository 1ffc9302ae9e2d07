"""The paper's evaluation of a senior: solo accuracy, handoff robustness, drift from the junior, legibility to it."""
