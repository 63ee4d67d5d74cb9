"""Pipeline parallel: the layers of a model on different ranks, run on one microbatch after another."""
