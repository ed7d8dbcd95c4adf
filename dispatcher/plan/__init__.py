"""Cutting a pipeline into launches."""
