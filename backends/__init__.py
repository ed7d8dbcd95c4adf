"""The backends: one package each, reached only through the dispatcher."""
