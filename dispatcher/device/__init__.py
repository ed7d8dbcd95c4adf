"""Devices and the machine: which there are, which work, how much they hold, several as one."""
