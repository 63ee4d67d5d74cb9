"""What acts on the trainer for the time of one run: patches, a callback, loggers of full tensors."""
