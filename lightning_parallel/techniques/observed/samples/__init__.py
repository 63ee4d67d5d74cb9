"""What a step does with the samples of its batch: whether each counts by itself."""
