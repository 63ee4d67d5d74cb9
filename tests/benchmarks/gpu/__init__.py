"""What one GPU shows: the recipe beside a loop by hand and Lightning's own.

`python -m tests.benchmarks.gpu` prints tables and writes them as JSON; `--device cpu --size nano` runs the same on the
CPU.
"""
