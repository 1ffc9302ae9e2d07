"""What a token id writes, in bytes. Pure: no file, no model, no network."""
