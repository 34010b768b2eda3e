"""Executes the scheduler's plans on one device."""
