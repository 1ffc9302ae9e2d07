"""slime_tandem: several language models share one trajectory."""

__version__ = "0.1.0"
