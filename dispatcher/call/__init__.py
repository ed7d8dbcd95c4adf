"""Compiling and calling an operator, saying what a call does, and recording it."""
