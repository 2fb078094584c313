"""Traces → answers. Works on a `RunSource`; never on a live model, never with torch."""
