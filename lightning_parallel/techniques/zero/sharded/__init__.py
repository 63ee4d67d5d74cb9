"""ZeRO stage 3: sharded parameters, gradients and optimizer states, by PyTorch's `fully_shard`."""
