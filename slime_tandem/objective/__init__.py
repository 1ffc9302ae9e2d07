"""The objective as pure functions over packed tokens: advantages, KL, loss."""
