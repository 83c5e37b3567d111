"""The version of thinwire."""

__version__ = "0.2.0"
