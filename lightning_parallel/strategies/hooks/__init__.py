"""What hooks of the user's see of a model and of gradients of which ranks hold parts."""
