"""Writing programs that run without this package."""
