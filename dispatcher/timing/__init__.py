"""Measuring: races between devices and peers, samples, charts, and the search for the fastest options."""
