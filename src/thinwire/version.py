"""The version of thinwire."""

__version__ = "0.1.0"
