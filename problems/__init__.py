"""The problem files that come with the package: one YAML file each, named like the problem it holds.

The form of a file is described in docs/adding-a-problem.md; ``dispatcher.loader`` reads it.
"""
