"""Schedules as data: which rank computes which stage on which microbatch, and in which order."""
