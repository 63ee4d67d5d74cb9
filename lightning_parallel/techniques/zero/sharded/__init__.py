"""ZeRO stage 3: parameters, gradients and optimizer states sharded, on PyTorch's `fully_shard`."""
