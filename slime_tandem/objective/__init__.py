"""Numbers to loss: advantages, log-probs, KL, divergences. Pure torch."""
