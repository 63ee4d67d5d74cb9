"""Processes of a run: launching, agreement between ranks, signals, failures and hangs. Messages are on the CPU."""
