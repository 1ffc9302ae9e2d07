"""What slime calls: thin functions named in its flags (docs/slime.md). slime, ray and Megatron are imported when called."""
