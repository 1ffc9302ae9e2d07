"""Where prompts come from, and what an answer is worth."""
