"""What happens to gradients between backward and the optimizer's step."""
