"""Schedules as data: who computes what, and when."""
