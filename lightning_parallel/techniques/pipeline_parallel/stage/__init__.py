"""What one call of a step does to the model on a stage: hooks of other stages called again, changes put back."""
